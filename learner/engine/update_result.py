"""What an update gives: its result, what this rank's passes gave, and the loss of their rows; and how often it is tried."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..losses.finite import NonFiniteError
from ..objectives import Objective, own
from ..rows.microbatch import MicroBatch
from ..rows.rows import Rows
from .critic import CriticUpdate
from .loss_scale import LossScale

log = logging.getLogger("tandem.learner")

MOST_ATTEMPTS = 64
"""Attempts at one update. From a scale of 2^16 to the least one it takes 17."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateResult:
    """The result of one update."""

    applied: bool
    """False if the loss or gradient wasn't finite; then no parameter has changed."""
    loss: float
    """Loss over all ranks."""
    grad_norm: float
    """Norm of the gradient before clipping, over all ranks; infinite if it wasn't finite."""
    sums: dict[str, float]
    """The objective's sums over all ranks."""
    logprobs: list[Tensor]
    """``[N]`` log-probs of each micro-batch of this rank, detached."""
    entropies: list[Tensor]
    """``[N]`` entropies of each micro-batch of this rank, detached."""
    critic: CriticUpdate | None = None
    """The critic's part; None without a critic."""
    refused: bool = False
    """Whether the caller's inspection prevented it."""
    loss_scale: float | None = None
    """The factor of a float16 model's loss; None with another dtype."""


@dataclass(slots=True)
class Found:
    """What this rank's passes over an update's micro-batches gave, without dummies but for the losses."""

    losses: list[Tensor] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)
    logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_scores(
        cls, micro_batches: Sequence[MicroBatch], scores: Sequence[tuple[Tensor, Tensor]]
    ) -> Found:
        """Collects the scores of passes without a loss."""
        kept = [one for micro, one in zip(micro_batches, scores, strict=True) if not micro.dummy]
        return cls(
            losses=[torch.zeros(())],
            logprobs=[logprobs for logprobs, _ in kept],
            entropies=[entropy for _, entropy in kept],
        )


def loss_of(
    objective: Objective, rows: Rows, scalars: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective's loss; NaN if it refuses the log-probs, so that every rank reaches the step, which
    none of them makes."""
    try:
        return own.loss_of(objective, rows, scalars)
    except NonFiniteError as error:
        log.warning(f"no loss: {error}")
        assert rows.logprobs is not None
        total = rows.logprobs.sum()
        if rows.divergence is not None:
            total = total + rows.divergence.sum()
        return total * math.nan, {}


def until_it_fits(
    scales: Sequence[LossScale], attempt: Callable[[bool], UpdateResult]
) -> UpdateResult:
    """Makes an update, and makes it again as long as only the scale of a loss was too great for it.

    An update that isn't made at any scale leaves the scales as they were: they aren't to blame.

    Args:
        scales: of all models that are updated.
        attempt: makes the update; its argument says whether it is the first time.
    """
    start = [scale.state() for scale in scales]
    for number in range(MOST_ATTEMPTS):
        before = [scale.state() for scale in scales]
        result = attempt(number == 0)
        losses = [result.loss] if result.critic is None else [result.loss, result.critic.loss]
        lowered = [scale.state() for scale in scales] != before
        if result.applied or result.refused or not lowered or not all(map(math.isfinite, losses)):
            break
    if not result.applied:
        for scale, state in zip(scales, start, strict=True):
            scale.restore(state)
    return result
