"""Detects steps that taught nothing: none of their tokens could move the gradient.

The steps of a critic's warm-up are left out: the policy is not to move in them. One idle step is not a fault
(the groups may all have equal rewards). Many in a row mean that the run leaves the model unchanged, and does so
without an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...common.config import Config


class Idle:
    """Counts such steps in a row, and says why once there are too many.

    Args:
        config: the run's config.
        total_steps: number of steps of the run; one that trains the policy for fewer than ``learner.max_idle``
            counts as idle only as a whole.
    """

    def __init__(self, config: Config, total_steps: int) -> None:
        self._config = config
        critic = config.learner.critic
        self._warmup = 0 if critic is None else critic.warmup_steps
        self._most = max(1, min(config.learner.max_idle, total_steps - self._warmup))
        self.steps = 0
        """Number of such steps in a row up to now."""
        self.alarm = ""
        """What is wrong while the stretch lasts, else empty."""

    def saw(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Takes in the ``train/…`` metrics of a step, from 1; returns whether the stretch has just become too long."""
        if step <= self._warmup:
            return False
        rows, active = metrics.get("train/rows", 0.0), metrics.get("train/rows_active", 0.0)
        # NaN isn't 0: values that aren't finite are handled elsewhere.
        if active and metrics.get("train/grad_norm", 0.0) != 0:
            self.steps, self.alarm = 0, ""
            return False
        self.steps += 1
        if self.steps < self._most:
            return False
        began = not self.alarm
        self.alarm = (
            f"no token of the last {self.steps} steps could move the gradient, so that the model is "
            f"as it was: {self._why(rows, active)}"
        )
        return began

    def _why(self, rows: float, active: float) -> str:
        objective = self._config.learner.objective
        offline = self._config.learner.source == "offline"
        what = "traces" if offline else "samples"
        if not rows:
            return (
                f"none of their {what} has a verdict to learn from; look at the reward pool's log"
            )
        if active:
            return (
                f"the loss of learner.objective.name={objective.name} has no gradient on their "
                f"{what}: choose another one"
            )
        if offline:
            return (
                f"learner.objective.name={objective.name} with advantage={objective.baseline} gives "
                f"each of their traces the advantage 0: choose sft, or advantage=none for traces "
                f"whose reward isn't 0"
            )
        return (
            f"in each of their groups learner.objective.advantage={objective.baseline} is 0 for every "
            f"row, as with equal rewards: choose problems that are neither always nor never solved, "
            f"or let expert traces in (expert.per_group)"
        )
