"""What an update's tokens and importance ratios looked like, whatever the objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..losses.finite import widened
from ..losses.ratios import clamped, effective_sample_share, k3
from ..rows.rows import Rows

if TYPE_CHECKING:
    from ..objectives import Objective

Reduce = Callable[[list[float]], list[float]]
"""Reduces values over ranks."""
Gather = Callable[[Tensor], Tensor]
"""Concatenates the ``[n]`` values of all ranks."""


def alone(values: Tensor) -> Tensor:
    """Gathers over a single rank."""
    return values


def diagnose(
    rows: Sequence[Rows],
    logprobs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    *,
    sum_over_ranks: Reduce = list,
    max_over_ranks: Reduce = list,
    gather_over_ranks: Gather = alone,
) -> dict[str, float]:
    """Metrics of the tokens that were scored.

    For own tokens: mean and greatest ρ = π_θ/μ, effective sample size as a share, k3 = KL(μ‖π_θ)
    with its 99th percentile, mean probability, entropy, and the greatest |log ρ| at lag 0, where
    engine and trainer have the same weights; with a reference also k3 = KL(π_θ‖π_ref). For the stale
    ones among them (lag above 0), and for expert tokens: mean probability and entropy; for expert
    tokens also the mean log-prob. Metrics of a source without tokens are left out.

    Args:
        rows: rows of this rank's micro-batches.
        logprobs: ``[N]`` log-probs of each.
        entropies: ``[N]`` entropies of each.
        sum_over_ranks: sums lists over ranks; the identity for one rank.
        max_over_ranks: the same for greatest values.
        gather_over_ranks: the same for all values.
    """
    distance = torch.zeros(0)
    sums = torch.zeros(16, dtype=torch.float64)
    most = torch.full((2,), -torch.inf, dtype=torch.float64)
    if rows:
        expert = torch.cat([r.expert for r in rows])
        own = ~expert
        logp = widened(torch.cat([p.detach() for p in logprobs]))
        entropy = widened(torch.cat([e.detach() for e in entropies]))
        behaviour = torch.cat([r.behaviour for r in rows])
        every_lag = torch.cat([r.lag for r in rows])
        lag = every_lag[own]
        stale = own & (every_lag > 0)
        # Values that aren't finite are reported as they are; their loss has been refused already.
        ratio = clamped(logp - behaviour)[own]
        weight = ratio.exp()
        distance = k3(ratio)
        prob = logp.exp()
        zero = logp.new_zeros(())
        parts = [
            own.sum(),
            expert.sum(),
            weight.sum(),
            (weight * weight).sum(),
            distance.sum(),
            torch.where(own, prob, zero).sum(),
            torch.where(own, entropy, zero).sum(),
            torch.where(expert, prob, zero).sum(),
            torch.where(expert, logp, zero).sum(),
            torch.where(expert, entropy, zero).sum(),
            torch.where(lag > 0, lag, 0).sum(),
            stale.sum(),
            torch.where(stale, prob, zero).sum(),
            torch.where(stale, entropy, zero).sum(),
            *_to_reference(rows, logp, own),
        ]
        sums = torch.stack([part.double() for part in parts]).cpu()
        if len(ratio):
            current = ratio.abs()[lag == 0]
            none = ratio.new_full((1,), -torch.inf)
            greatest = [
                weight.max(),
                torch.cat([current, none]).max(),
            ]
            most = torch.stack([value.double() for value in greatest]).cpu()
    total = sum_over_ranks([float(v) for v in sums])
    highest = max_over_ranks([float(v) for v in most])
    own_tokens, expert_tokens = total[0], total[1]
    metrics = {"tokens_own": own_tokens, "tokens_expert": expert_tokens}
    if own_tokens:
        metrics |= {
            "ratio_mean": total[2] / own_tokens,
            "ratio_max": highest[0],
            "ess": effective_sample_share(total[2], total[3], own_tokens),
            "k3": total[4] / own_tokens,
            "k3_p99": percentile(distance, 0.99, int(own_tokens), gather_over_ranks),
            "prob_own": total[5] / own_tokens,
            "entropy": total[6] / own_tokens,
            "lag": total[10] / own_tokens,
        }
        if highest[1] >= 0:
            metrics["log_ratio_max_lag0"] = highest[1]
    if total[11]:
        metrics |= {"prob_stale": total[12] / total[11], "entropy_stale": total[13] / total[11]}
    if total[14]:
        metrics["k3_reference"] = total[15] / total[14]
    if expert_tokens:
        metrics |= {
            "prob_expert": total[7] / expert_tokens,
            "logprob_expert": total[8] / expert_tokens,
            "entropy_expert": total[9] / expert_tokens,
        }
    return metrics


def _to_reference(rows: Sequence[Rows], logp: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Number of own tokens that have a reference, and their sum of k3 with r = π_ref/π_θ."""
    if any(r.reference is None for r in rows):
        return own.new_zeros((), dtype=torch.int64), logp.new_zeros(())
    reference = torch.cat([r.reference for r in rows if r.reference is not None])
    distance = k3(widened(reference) - logp)
    return own.sum(), torch.where(own, distance, torch.zeros_like(distance)).sum()


def evaluate(
    objective: Objective,
    rows: Rows,
    *,
    constant: float = 1.0,
    width: float = 1.0,
    step: int = 1,
) -> tuple[Tensor, dict[str, float]]:
    """The whole loss of an update in one piece, with the objective's metrics and those of
    :func:`diagnose`.

    For scripts and tests; the trainer uses micro-batches.

    Args:
        objective: see :func:`tandem.learner.objectives.make`.
        rows: all rows of the update, with the columns that the objective needs.
        constant: denominator for ``aggregation="constant"``.
        width: denominator for ``aggregation="width"``.
        step: step for schedules, from 1.
    """
    scalars = {"constant": constant, "width": width, "step": float(step)}
    scalars |= {key: float(value) for key, value in objective.statistics(rows).items()}
    loss, sums = objective.loss(rows, scalars)
    reported = objective.report({key: float(value) for key, value in sums.items()}, scalars)
    assert rows.logprobs is not None
    entropy = torch.zeros_like(rows.logprobs) if rows.entropy is None else rows.entropy
    metrics = {
        "loss": float(loss.detach()),
        **reported,
        **diagnose([rows], [rows.logprobs], [entropy]),
    }
    return loss, metrics


def percentile(
    values: Tensor, share: float, count: int | None = None, gather: Gather = alone
) -> float:
    """The value that ``share`` of all ranks' values don't exceed, exactly.

    Each rank contributes only its greatest values: for the 99th percentile, these are at most a
    hundredth of all values.

    Args:
        values: ``[n]`` values of this rank; n may be 0 if others have some.
        share: in (0, 1].
        count: number of values over all ranks, at least 1; None = n.
        gather: gathers over ranks.
    """
    total = len(values) if count is None else count
    # This many values aren't below the one that is sought.
    kept = total - min(total, max(1, round(share * total))) + 1
    mine = torch.full((kept,), -torch.inf, dtype=torch.float64)
    here = min(kept, len(values))
    # torch.quantile refuses more than 16 million values.
    mine[:here] = torch.topk(values, here).values.double().cpu()
    return float(torch.topk(gather(mine), kept).values[-1])
