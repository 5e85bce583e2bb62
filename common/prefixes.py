"""The share of an expert's trace that a response begins with: schedules over steps, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

PrefixSchedule = Literal["random", "fixed", "linear", "linear_max", "reverse_linear", "cosine"]
"""See :func:`prefix_shares`."""
WINDOWS = 10
"""Number of steps in the staircase of ``linear_max`` and ``reverse_linear``."""


def prefix_shares(
    how: PrefixSchedule,
    count: int,
    draw: Callable[[int], Sequence[float]],
    *,
    step: int = 0,
    steps: int = 1,
    low: float = 0.0,
    high: float = 1.0,
) -> list[float]:
    """The shares of their traces that ``count`` rows begin with (LUFFY's ``prefix_strategy``).

    ``random``: U(low, high). ``fixed``: evenly spaced from low to high (one row: high). ``linear``:
    high · (1 − min(step/steps, 1)), the same for all. With w = ⌊10 step/steps⌋, at most 9:
    ``linear_max``: U(0, (10 − w)/10 · high), so that the greatest share falls. ``reverse_linear``:
    U(0, (w + 1)/10 · high), so that it grows. ``cosine``: U(l, high) with l from high down to low
    on a half cosine (Prefix-RFT, arXiv 2507.01679: 0.95 down to 0).

    Args:
        how: the schedule.
        count: number of rows.
        draw: returns as many numbers from [0, 1) as asked for, for the random schedules.
        step: current step, from 0.
        steps: number of steps over which the schedules in time run.
        low: least share.
        high: greatest share.
    """
    if how == "fixed":
        if count == 1:
            return [high]
        return [low + (high - low) * number / (count - 1) for number in range(count)]
    if how == "linear":
        return [high * (1.0 - min(step / steps, 1.0))] * count
    window = min(int(WINDOWS * step / steps), WINDOWS - 1)
    if how == "linear_max":
        low, high = 0.0, (WINDOWS - window) / WINDOWS * high
    elif how == "reverse_linear":
        low, high = 0.0, (window + 1) / WINDOWS * high
    elif how == "cosine":
        low = half_cosine(step, steps, start=high, end=low)
    return [low + (high - low) * number for number in draw(count)]


def half_cosine(step: float, steps: float, *, start: float, end: float) -> float:
    """Goes from ``start`` at step 0 to ``end`` at ``steps`` and later, on half a cosine."""
    share = min(max(step / steps, 0.0), 1.0)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * share))


def prefix_length(tokens: int, ratio: float) -> int:
    """The number of tokens in ``ratio`` of a trace: rounded down, as in LUFFY's code."""
    return min(int(tokens * ratio), tokens)
