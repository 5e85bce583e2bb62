"""Reward components for a response's length and end: cosine, repetition, overlong, and Kimi's within a group.

Lengths are in tokens unless a parameter, or the formula's origin, says otherwise. Each has its
formula and source.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

from ...common.records import FinishReason, Verdict
from .registry import Component, Graded, GroupComponent, register, register_variant

Unit = Literal["tokens", "characters"]


@register("cosine_length", needs_verdict=True, origin="TRL")
def cosine_length(
    max_length: int,
    min_wrong: float = -1.0,
    max_wrong: float = -0.5,
    min_correct: float = 0.5,
    max_correct: float = 1.0,
    unit: Unit = "tokens",
    clamp: bool = True,
) -> Component:
    """Short right answers and long wrong ones pay more (arXiv 2502.03373, open-r1, TRL).

    ``lo + (hi - lo) (1 + cos(pi L / max_length)) / 2``; for a right answer from ``max_correct``
    (L = 0) to ``min_correct``; for a wrong one from ``min_wrong`` to ``max_wrong``.

    Args:
        max_length: length at which the other end is reached.
        unit: ``tokens`` or ``characters`` (open-r1).
        clamp: treat longer texts as if they had ``max_length``; open-r1 lets the cosine rise again.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length} should be at least 1")

    def value(sample: Graded) -> float | None:
        if sample.verdict.leaves_baseline:
            return None
        length = sample.length if unit == "tokens" else len(sample.text)
        share = length / max_length
        if clamp:
            share = min(share, 1.0)
        if sample.verdict is Verdict.CORRECT:
            low, high = min_correct, max_correct
        else:
            low, high = max_wrong, min_wrong
        return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * share))

    return value


@register("repetition", origin="TRL")
def repetition(
    ngram: int = 3, max_penalty: float = -1.0, unit: Literal["tokens", "words"] = "tokens"
) -> Component:
    """``(1 - distinct / all) max_penalty`` over n-grams (arXiv 2502.03373, open-r1, TRL).

    Args:
        ngram: length of an n-gram; shorter texts have no penalty.
        max_penalty: the largest penalty, at most 0.
        unit: ``tokens`` or ``words`` (in lower case, split at white space).
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} should not be positive")
    if ngram < 1:
        raise ValueError(f"ngram={ngram} should be at least 1")

    def value(sample: Graded) -> float:
        items: Sequence[Hashable]
        if unit == "tokens" and sample.tokens is not None:
            items = sample.tokens.tolist()
        else:
            items = sample.text.lower().split()
        count = len(items) - ngram + 1
        if count < 1:
            return 0.0
        distinct = len(set(zip(*(items[i:] for i in range(ngram)), strict=False)))
        return (1.0 - distinct / count) * max_penalty + 0.0

    return value


@register("soft_overlong", origin="DAPO, open-r1's defaults")
def soft_overlong(max_length: int = 16_384, cache: int = 4_096) -> Component:
    """0 up to ``max_length - cache`` tokens, then linear to -1 at ``max_length``, then -1.

    DAPO, arXiv 2503.14476, eq. 13, as TRL clamps it.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache={cache} should be from 1 to max_length={max_length}")

    def value(sample: Graded) -> float:
        over = sample.length - (max_length - cache)
        if over <= 0:
            return 0.0
        return -over / cache if sample.length <= max_length else -1.0

    return value


@register("dapo_overlong", origin="verl's DAPO")
def dapo_overlong(max_length: int = 20_480, buffer: int = 4_096, factor: float = 1.0) -> Component:
    """``min(-(L - (max_length - buffer)) / buffer * factor, 0)``: without a floor (verl's DAPO)."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} should be from 1 to max_length={max_length}")

    def value(sample: Graded) -> float:
        return min(-(sample.length - (max_length - buffer)) / buffer * factor, 0.0)

    return value


@register("missing_eos", origin="TRL's missing_eos_penalty")
def missing_eos() -> Component:
    """-1 for a response that was cut before its end, 0 for any other; its weight is the penalty."""

    def value(sample: Graded) -> float:
        return 0.0 if sample.finish_reason is FinishReason.STOP else -1.0

    return value


@register("length_kimi", needs_verdict=True, scope="group", origin="Kimi k1.5")
def length_kimi(unit: Unit = "tokens") -> GroupComponent:
    """Shorter right answers pay more, longer wrong ones less, within a group (arXiv 2501.12599).

    ``lambda = 0.5 - (L - min) / (max - min)`` over the group's lengths; a right answer pays
    lambda, a wrong one ``min(0, lambda)``; 0 for all where all lengths are equal.

    Args:
        unit: ``tokens``, or ``characters`` as open-r1 counts (``length_open_r1``).
    """

    def values(group: Sequence[Graded]) -> list[float | None]:
        lengths = [s.length if unit == "tokens" else len(s.text) for s in group]
        least, most = min(lengths, default=0), max(lengths, default=0)
        found: list[float | None] = []
        for sample, length in zip(group, lengths, strict=True):
            if sample.verdict.leaves_baseline:
                found.append(None)
            elif least == most:
                found.append(0.0)
            else:
                share = 0.5 - (length - least) / (most - least)
                found.append(share if sample.verdict is Verdict.CORRECT else min(0.0, share))
        return found

    return values


register_variant(
    "cosine_open_r1", "cosine_length", "open-r1", max_length=1_000, unit="characters", clamp=False
)
# In open-r1's command line the defaults of the wrong branch are the other way round.
register_variant(
    "cosine_open_r1_cli",
    "cosine_length",
    "open-r1's command line",
    max_length=1_000,
    min_wrong=0.0,
    max_wrong=-0.5,
    unit="characters",
    clamp=False,
)
register_variant(
    "cosine_tutorial",
    "cosine_length",
    "TRL's R1-Zero tutorial",
    max_length=1_000,
    min_wrong=-0.5,
    max_wrong=-0.1,
    min_correct=0.8,
    max_correct=1.0,
    unit="characters",
    clamp=False,
)
register_variant("repetition_open_r1", "repetition", "open-r1", unit="words")
register_variant(
    "repetition_tutorial", "repetition", "TRL's R1-Zero tutorial", unit="words", max_penalty=-0.1
)
register_variant("length_open_r1", "length_kimi", "open-r1", unit="characters")
