"""How much of an expert enters: prefix schedules, CHORD's μ, ExGRPO's buckets.

Pure functions; random draws come from a generator that the caller has seeded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.prefixes import PrefixSchedule, half_cosine, prefix_length, prefix_shares

__all__ = [
    "PrefixSchedule",
    "bucket_weights",
    "chord_mu",
    "chord_phi",
    "cosine_prefix_low",
    "prefix_length",
    "prefix_ratios",
]


def prefix_ratios(
    how: PrefixSchedule,
    count: int,
    *,
    step: int = 0,
    steps: int = 1,
    low: float = 0.0,
    high: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``[count]`` float64: :func:`tandem.common.prefixes.prefix_shares` with numbers of torch's."""

    def draw(size: int) -> list[float]:
        drawn: list[float] = torch.rand(size, dtype=torch.float64, generator=generator).tolist()
        return drawn

    shares = prefix_shares(how, count, draw, step=step, steps=steps, low=low, high=high)
    return torch.tensor(shares, dtype=torch.float64)


def cosine_prefix_low(step: int, steps: int, *, start: float = 0.95, end: float = 0.0) -> float:
    """The lower end of Prefix-RFT's U(low, 0.95): from ``start`` to ``end`` on a half cosine
    (arXiv 2507.01679)."""
    return half_cosine(step, steps, start=start, end=end)


def chord_mu(
    step: float,
    *,
    peak: float = 0.9,
    valley: float = 0.05,
    warmup_steps: int = 0,
    decay_steps: int = 0,
) -> float:
    """CHORD's μ: linear up to the peak, then a half cosine down to the valley (arXiv
    2508.11408).

    Args:
        step: Now, from 0.
        peak: Greatest μ.
        valley: What stays.
        warmup_steps: Until the peak.
        decay_steps: From the peak to the valley; 0 = the valley at once.
    """
    if step < warmup_steps:
        return step / warmup_steps * peak
    if step >= warmup_steps + decay_steps:
        return valley
    share = (step - warmup_steps) / decay_steps
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * share))


def chord_phi(logprobs: Tensor) -> Tensor:
    """``φ = p (1 − p)``, detached: small at tokens that are certain either way (arXiv 2508.11408)."""
    probs = logprobs.detach().exp()
    return probs * (1 - probs)


def bucket_weights(group_size: int, *, mean: float | None = None, sigma: float = 1.0) -> Tensor:
    """``[group_size − 1]`` probabilities of the buckets of 1 … G − 1 successes, float64.

    Proportional to the normal density N(k; G/2, 1): replay is drawn most from problems that are
    solved half of the time (ExGRPO, arXiv 2510.02245, ``normal`` in its code, which leaves out
    buckets that are empty). With G = 8, k = 4: 0.3990.
    """
    centre = group_size / 2 if mean is None else mean
    k = torch.arange(1, group_size, dtype=torch.float64)
    density = torch.exp(-((k - centre) ** 2) / (2 * sigma * sigma))
    return density / density.sum()
