"""Names and alarm of the check that compares sampled log-probs with the learner's.

The figures are computed by :mod:`tandem.learner.metrics.ratio_check`; boards and trackers read them here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PREFIX = "ratio/"
"""Prefix of the check's metrics."""
FIGURES: Mapping[str, str] = {
    "log_ratio": "mean |log π/μ|",
    "log_ratio_p99": "99th percentile of |log π/μ|",
    "k3": "mean k3(μ‖π)",
    "k3_p99": "99th percentile of k3(μ‖π)",
}
"""Figures that have a bound, with their meaning: ``ratio/NAME`` and ``ratio/NAME_bound``."""


def alarm_of(record: Mapping[str, Any]) -> str:
    """The alarm in a step's record, without the step; empty if there is none.

    >>> alarm_of(
    ...     {
    ...         "ratio/alarm": 1.0,
    ...         "ratio/lag": 0.0,
    ...         "ratio/tokens": 812.0,
    ...         "ratio/k3": 0.25,
    ...         "ratio/k3_bound": 1e-07,
    ...         "ratio/k3_p99": 0.0,
    ...     }
    ... )
    'log-probs as sampled and as learned differ (lag 0, 812 tokens): mean k3(μ‖π) 0.25 (bound 1e-07)'
    """
    if record.get("ratio/alarm") != 1:
        return ""
    over = []
    for name, words in FIGURES.items():
        value, bound = _number(record, name), _number(record, f"{name}_bound")
        if value > bound:
            over.append(f"{words} {value:.3g} (bound {bound:.3g})")
    lag, tokens = _number(record, "lag"), _number(record, "tokens")
    return (
        f"log-probs as sampled and as learned differ (lag {lag:.0f}, {tokens:,.0f} tokens): "
        + ", ".join(over)
    )


def _number(record: Mapping[str, Any], name: str) -> float:
    """The value; NaN if the record has none."""
    value = record.get(PREFIX + name)
    return float(value) if isinstance(value, int | float) else math.nan
