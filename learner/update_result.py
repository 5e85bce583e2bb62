"""What an update gives: its result, what this rank's passes gave, and the loss of their rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .critic import CriticUpdate
from .losses.finite import NonFiniteError
from .objectives import Objective
from .rows.microbatch import MicroBatch
from .rows.rows import Rows

log = logging.getLogger("tandem.learner")


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
        """Of passes without a loss."""
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
        return objective.loss(rows, scalars)
    except NonFiniteError as error:
        log.warning(f"no loss: {error}")
        assert rows.logprobs is not None
        return rows.logprobs.sum() * math.nan, {}
