"""Coefficients that follow what an update or a step measured; they are state of the run, kept in its
checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...common.objectives import ObjectiveConfig
from ...common.objectives.keys import Entropy, Kl
from ..losses.penalties import controlled_coefficient, learned_coefficient, stepped_coefficient


@dataclass(slots=True, kw_only=True)
class Coefficients:
    """The coefficients of the next update and of the next step's rewards. All ranks have the same, since metrics
    cover all ranks."""

    settings: ObjectiveConfig
    """Their initial values, and how they move."""
    entropy: float
    """c_H, coefficient of the entropy bonus."""
    kl: float
    """β of the KL in the loss."""
    kl_reward: float
    """β of the KL in the reward."""

    @classmethod
    def of(cls, settings: ObjectiveConfig) -> Coefficients:
        """The coefficients at the start of a run."""
        return cls(
            settings=settings,
            entropy=settings.entropy_coefficient if isinstance(settings, Entropy) else 0.0,
            kl=settings.kl_coefficient if isinstance(settings, Kl) else 0.0,
            kl_reward=settings.kl_reward_coefficient if isinstance(settings, Kl) else 0.0,
        )

    @property
    def scalars(self) -> dict[str, float]:
        """Scalars for the losses of an update."""
        return {"entropy_coefficient": self.entropy, "kl_coefficient": self.kl}

    @property
    def metrics(self) -> dict[str, float]:
        """The coefficients that move, by key."""
        moving = self.settings
        adaptive = {}
        if (
            isinstance(moving, Entropy)
            and moving.entropy_target is not None
            and moving.entropy_adapt != "scaled"
        ):
            adaptive["entropy_coefficient"] = self.entropy
        if isinstance(moving, Kl) and moving.kl_target is not None:
            if moving.kl_coefficient:
                adaptive["kl_coefficient"] = self.kl
            if moving.kl_reward_coefficient:
                adaptive["kl_reward_coefficient"] = self.kl_reward
        return adaptive

    def follow(self, measured: Mapping[str, float]) -> None:
        """Moves the coefficients after an update that was applied.

        Args:
            measured: the update's metrics: ``entropy``, ``entropy_expert``, ``tokens_own``,
                ``tokens_expert`` and ``k3_reference``. A coefficient whose metric is missing stays as it is.
        """
        settings = self.settings
        if isinstance(settings, Entropy) and settings.entropy_target is not None:
            entropy = _entropy(measured, settings.entropy_over == "all")
            target, step = settings.entropy_target, settings.entropy_step
            if entropy is not None and settings.entropy_adapt == "stepped":
                self.entropy = stepped_coefficient(self.entropy, target, entropy, step=step)
            elif entropy is not None and settings.entropy_adapt == "learned":
                self.entropy = learned_coefficient(self.entropy, target, entropy, step=step)
        if isinstance(settings, Kl) and settings.kl_target is not None:
            self.kl = _controlled(settings, self.kl, measured.get("k3_reference"))

    def follow_step(self, measured: Mapping[str, float]) -> None:
        """Moves β of the KL in the reward after a step of which an update was applied; however many updates it
        had, that KL was measured once.

        Args:
            measured: the step's own metrics: ``k1_reference``. Without it β stays as it is.
        """
        settings = self.settings
        if isinstance(settings, Kl) and settings.kl_target is not None:
            self.kl_reward = _controlled(settings, self.kl_reward, measured.get("k1_reference"))

    def state(self) -> dict[str, float]:
        """The values that a checkpoint keeps."""
        return {"entropy": self.entropy, "kl": self.kl, "kl_reward": self.kl_reward}

    def restore(self, state: Mapping[str, float]) -> None:
        """The inverse of :meth:`state`; values missing from a checkpoint stay at their start."""
        self.entropy = float(state.get("entropy", self.entropy))
        self.kl = float(state.get("kl", self.kl))
        self.kl_reward = float(state.get("kl_reward", self.kl_reward))


def _controlled(settings: Kl, coefficient: float, measured: float | None) -> float:
    if measured is None or settings.kl_target is None:
        return coefficient
    return controlled_coefficient(coefficient, settings.kl_target, measured, gain=settings.kl_gain)


def _entropy(measured: Mapping[str, float], everywhere: bool) -> float | None:
    """The mean over own, or own and expert tokens; None if there are none."""
    kinds = (("tokens_own", "entropy"), ("tokens_expert", "entropy_expert"))
    total = tokens = 0.0
    for count, name in kinds if everywhere else kinds[:1]:
        if name in measured:
            tokens += measured[count]
            total += measured[count] * measured[name]
    return total / tokens if tokens else None
