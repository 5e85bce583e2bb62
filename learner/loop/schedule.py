"""The learning rate of each step, and whether there is a step for the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ...common.config import Config, LearnerConfig, OptimizerConfig
from ...common.errors import ConfigError
from ...common.import_path import is_import_path
from . import own_schedule

CRITIC_KEY = "learner.critic.optimizer.schedule"
"""The setting of the critic's schedule."""


def warmup_of(optimizer: OptimizerConfig, total: int) -> int:
    """Number of steps of the warm-up in a run of ``total`` steps."""
    if optimizer.warmup_share is not None:
        # Of 0.07 x 100, which is a little more than 7, rounding up alone would make 8.
        return math.ceil(round(optimizer.warmup_share * total, 9))
    return optimizer.warmup_steps


def learning_rate(
    optimizer: OptimizerConfig, step: int, total: int, factors: Sequence[float] = ()
) -> float:
    """Learning rate of ``step`` (from 1) in a run of ``total`` steps.

    Linear from ``lr / warmup_steps`` to ``lr`` in the warm-up, which ``warmup_share`` may set as a share
    of ``total``; then constant, or down to ``lr · final_lr_share`` at the last step, linearly or along
    half a cosine; or ``lr`` times the factor of the user's own schedule.

    Args:
        optimizer: the settings.
        step: number of the step.
        total: number of steps of the run.
        factors: of a user's own schedule, from the first step after the warm-up on; see :func:`factors_of`.

    >>> learning_rate(OptimizerConfig(lr=1.0, warmup_steps=4), 1, 10)
    0.25
    """
    warmup = warmup_of(optimizer, total)
    if step <= warmup:
        return optimizer.lr * step / warmup
    if is_import_path(optimizer.schedule):
        return optimizer.lr * factors[step - warmup - 1]
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if optimizer.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return optimizer.lr * (1 - (1 - optimizer.final_lr_share) * progress)


def factors_of(
    optimizer: OptimizerConfig,
    total: int,
    file: Path | None = None,
    key: str = own_schedule.KEY,
) -> list[float]:
    """The factors of a user's own schedule for the steps after the warm-up; none for another schedule.

    Args:
        optimizer: the settings.
        total: number of steps of the run.
        file: where they are kept and compared with those that a resumed run began with; None = nowhere.
        key: the setting that names the schedule, for errors.

    Raises:
        ConfigError: the function fails at a step, or isn't the one that the run began with.
    """
    path = optimizer.schedule
    if not is_import_path(path):
        return []
    first = warmup_of(optimizer, total) + 1
    made = own_schedule.factors(path, first, total, key)
    if file is not None:
        own_schedule.kept(file, path, first, made, key)
    return made


def both_factors(
    learner: LearnerConfig, total: int, file: Path | None = None
) -> tuple[list[float], list[float]]:
    """The policy's and the critic's factors; see :func:`factors_of`. The critic's file has its name from the policy's."""
    own, others = factors_of(learner.optimizer, total, file), []
    if learner.critic is not None:
        critic_file = None if file is None else file.with_name(f"critic-{file.name}")
        others = factors_of(learner.critic.optimizer, total, critic_file, CRITIC_KEY)
    return own, others


def check_warmup(config: Config, total: int) -> None:
    """Refuses a critic's warm-up of all ``total`` steps, which only the data tell of a run that is set in passes.

    Raises:
        ConfigError: that.
    """
    critic = config.learner.critic
    if critic is not None and critic.warmup_steps >= total:
        raise ConfigError(
            f"learner.critic.warmup_steps={critic.warmup_steps} leaves the policy as it is in all {total:,} steps "
            f"of run.passes={config.run.passes}: lower the first or raise the second"
        )


def learning_rates(
    learner: LearnerConfig,
    step: int,
    total: int,
    factors: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> tuple[float, float]:
    """Learning rates of the policy and of the critic, which is 0 if there is none; see :func:`learning_rate`."""
    critic = learner.critic
    rate = 0.0 if critic is None else learning_rate(critic.optimizer, step, total, factors[1])
    return learning_rate(learner.optimizer, step, total, factors[0]), rate
