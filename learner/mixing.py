"""How much of an expert enters: prefix schedules, CHORD's μ, ExGRPO's buckets.

Pure functions; random draws come from a generator that the caller has seeded.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

PrefixSchedule = Literal["random", "fixed", "linear", "linear_max", "reverse_linear"]
"""See :func:`prefix_ratios`."""
WINDOWS = 10
"""Steps of the staircase of ``linear_max`` and ``reverse_linear``."""


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
    """``[count]`` float64 shares of its trace that each row begins with (LUFFY's
    ``prefix_strategy``).

    ``random``: U(low, high). ``fixed``: evenly spaced from low to high (one row: high). ``linear``:
    high · (1 − min(step/steps, 1)), the same for all. With w = ⌊10 step/steps⌋, at most 9:
    ``linear_max``: U(0, (10 − w)/10 · high), so that the greatest share falls. ``reverse_linear``:
    U(0, (w + 1)/10 · high), so that it grows.

    Args:
        how: Which schedule.
        count: Rows.
        step: Now, from 0.
        steps: Over which the schedules in time run.
        low: Least share.
        high: Greatest share.
        generator: For the random ones.
    """
    if how == "fixed":
        if count == 1:
            return torch.tensor([high], dtype=torch.float64)
        return torch.linspace(low, high, count, dtype=torch.float64)
    if how == "linear":
        share = high * (1.0 - min(step / steps, 1.0))
        return torch.full((count,), share, dtype=torch.float64)
    window = min(int(WINDOWS * step / steps), WINDOWS - 1)
    if how == "linear_max":
        low, high = 0.0, (WINDOWS - window) / WINDOWS * high
    elif how == "reverse_linear":
        low, high = 0.0, (window + 1) / WINDOWS * high
    drawn = torch.rand(count, dtype=torch.float64, generator=generator)
    return low + (high - low) * drawn


def prefix_length(tokens: int, ratio: float) -> int:
    """Tokens of a trace that ``ratio`` of it is: rounded down, as in LUFFY's code."""
    return min(int(tokens * ratio), tokens)


def cosine_prefix_low(step: int, steps: int, *, start: float = 0.95, end: float = 0.0) -> float:
    """The lower end of Prefix-RFT's U(low, 0.95): from ``start`` to ``end`` on a half cosine
    (arXiv 2507.01679, section 3)."""
    share = min(max(step / steps, 0.0), 1.0)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))


def chord_mu(
    step: float,
    *,
    peak: float = 0.9,
    valley: float = 0.05,
    warmup_steps: int = 0,
    decay_steps: int = 0,
) -> float:
    """CHORD's μ: linear up to the peak, then a half cosine down to the valley (arXiv 2508.11408,
    section 4.1).

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
    """``φ = p (1 − p)``, detached: small at tokens that are certain either way (arXiv 2508.11408,
    section 4.2)."""
    probs = logprobs.detach().exp()
    return probs * (1 - probs)


def bucket_weights(group_size: int, *, mean: float | None = None, sigma: float = 1.0) -> Tensor:
    """``[group_size − 1]`` probabilities of the buckets of 1 … G − 1 successes, float64.

    Proportional to the normal density N(k; G/2, 1): replay is drawn most from problems that are
    solved half of the time (ExGRPO, arXiv 2510.02245, eq. 4). With G = 8, k = 4: 0.3990.
    """
    centre = group_size / 2 if mean is None else mean
    k = torch.arange(1, group_size, dtype=torch.float64)
    density = torch.exp(-((k - centre) ** 2) / (2 * sigma * sigma))
    return density / density.sum()
