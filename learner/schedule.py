"""The learning rate of each step."""

from __future__ import annotations

import math

from ..common.config import LearnerConfig, OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total: int) -> float:
    """Learning rate of ``step`` (from 1) in a run of ``total`` steps.

    Linear from ``lr / warmup_steps`` to ``lr`` in the warm-up, which ``warmup_share`` may set as a share
    of ``total``; then constant, or down to ``lr · final_lr_share`` at the last step, linearly or along
    half a cosine.

    >>> learning_rate(OptimizerConfig(lr=1.0, warmup_steps=4), 1, 10)
    0.25
    """
    warmup = optimizer.warmup_steps
    if optimizer.warmup_share is not None:
        warmup = math.ceil(optimizer.warmup_share * total)
    if step <= warmup:
        return optimizer.lr * step / warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    if optimizer.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return optimizer.lr * (1 - (1 - optimizer.final_lr_share) * progress)


def learning_rates(learner: LearnerConfig, step: int, total: int) -> tuple[float, float]:
    """Learning rates of the policy and of the critic, which is 0 if there is none; see :func:`learning_rate`."""
    critic = learner.critic
    rate = 0.0 if critic is None else learning_rate(critic.optimizer, step, total)
    return learning_rate(learner.optimizer, step, total), rate
