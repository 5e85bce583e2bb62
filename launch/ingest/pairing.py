"""Which right and which wrong samples of a problem become a chosen and a rejected response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...common.config import PairsConfig


def pairs_of(
    right: Sequence[int],
    wrong: Sequence[int],
    how: PairsConfig | None,
    generator: np.random.Generator,
) -> list[tuple[int, int]]:
    """Pairs of a problem's samples, as indices into the right and into the wrong ones.

    Args:
        right: length of each right sample in tokens.
        wrong: likewise of the wrong ones.
        how: the rule; None = every default.
        generator: decides between pairs that the rule likes equally.

    >>> nearest = PairsConfig(rule="nearest_length", max_length_gap=3)
    >>> pairs_of([33, 40], [28, 39, 50], nearest, np.random.default_rng(0))
    [(1, 1)]
    """
    how = how or PairsConfig()
    every = [(r, w) for r in range(len(right)) for w in range(len(wrong))]
    if how.max_length_gap is not None:
        every = [(r, w) for r, w in every if abs(right[r] - wrong[w]) <= how.max_length_gap]
    drawn = [every[place] for place in generator.permutation(len(every))]
    if how.rule == "nearest_length":
        # A stable sort: pairs that are equally near stay in the drawn order.
        drawn.sort(key=lambda pair: abs(right[pair[0]] - wrong[pair[1]]))
    elif how.rule in ("shortest", "longest") and drawn:
        pick = min if how.rule == "shortest" else max
        best = pick(drawn, key=lambda pair: right[pair[0]])[0]
        drawn = [pair for pair in drawn if pair[0] == best]
    if how.rule in ("nearest_length", "random"):
        drawn = _each_once(drawn)
    return drawn[: how.per_problem]


def _each_once(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs in order without those of which a sample is in an earlier one."""
    kept: list[tuple[int, int]] = []
    rights: set[int] = set()
    wrongs: set[int] = set()
    for right, wrong in pairs:
        if right not in rights and wrong not in wrongs:
            kept.append((right, wrong))
            rights.add(right)
            wrongs.add(wrong)
    return kept
