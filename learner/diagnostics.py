"""What the importance ratios of an update looked like, whatever the objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .ratios import effective_sample_share, k3, log_ratio
from .rows import Rows

Reduce = Callable[[list[float]], list[float]]
"""Reduces values over ranks."""


def diagnose(
    rows: Sequence[Rows],
    logprobs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    *,
    sum_over_ranks: Reduce = list,
    max_over_ranks: Reduce = list,
) -> dict[str, float]:
    """Metrics of the tokens that were scored.

    Own tokens: mean and greatest ρ = π_θ/μ, effective sample size as a share, k3 = KL(μ‖π_θ)
    with its 99th percentile (the greatest of the ranks'), mean probability, entropy, and the
    greatest |log ρ| at lag 0, where engine and trainer have the same weights. Expert tokens:
    mean probability, log-prob and entropy. Metrics of a source without tokens are left out.

    Args:
        rows: Of this rank's micro-batches.
        logprobs: ``[N]`` of each.
        entropies: ``[N]`` of each.
        sum_over_ranks: Sums lists over ranks; the identity for one rank.
        max_over_ranks: Likewise, greatest values.
    """
    sums = torch.zeros(11, dtype=torch.float64)
    most = torch.full((3,), -torch.inf, dtype=torch.float64)
    if rows:
        expert = torch.cat([r.expert for r in rows])
        own = ~expert
        logp = torch.cat([p.detach() for p in logprobs])
        entropy = torch.cat([e.detach() for e in entropies])
        behaviour = torch.cat([r.behaviour for r in rows])
        lag = torch.cat([r.lag for r in rows])[own]
        ratio = log_ratio(logp, behaviour)[own]
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
        ]
        sums = torch.stack([part.double() for part in parts]).cpu()
        if len(ratio):
            current = ratio.abs()[lag == 0]
            none = ratio.new_full((1,), -torch.inf)
            greatest = [
                weight.max(),
                percentile(distance, 0.99),
                torch.cat([current, none]).max(),
            ]
            most = torch.stack([value.double() for value in greatest]).cpu()
    total = sum_over_ranks([float(v) for v in sums])
    highest = max_over_ranks([float(v) for v in most])
    own_tokens, expert_tokens = total[0], total[1]
    found = {"tokens_own": own_tokens, "tokens_expert": expert_tokens}
    if own_tokens:
        found |= {
            "ratio_mean": total[2] / own_tokens,
            "ratio_max": highest[0],
            "ess": effective_sample_share(total[2], total[3], own_tokens),
            "k3": total[4] / own_tokens,
            "k3_p99": highest[1],
            "prob_own": total[5] / own_tokens,
            "entropy": total[6] / own_tokens,
            "lag": total[10] / own_tokens,
        }
        if highest[2] >= 0:
            found["log_ratio_max_lag0"] = highest[2]
    if expert_tokens:
        found |= {
            "prob_expert": total[7] / expert_tokens,
            "logprob_expert": total[8] / expert_tokens,
            "entropy_expert": total[9] / expert_tokens,
        }
    return found


def percentile(values: Tensor, share: float) -> Tensor:
    """The value that ``share`` of the ``[n]`` values don't exceed; n > 0.

    torch.quantile refuses more than 16 million values.
    """
    rank = min(len(values), max(1, round(share * len(values))))
    return torch.kthvalue(values, rank).values
