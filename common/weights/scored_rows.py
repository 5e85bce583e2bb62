"""A few fixed rows of tokens with the log-probs that a version's weights give them.

The learner scores them at each publication, a worker's engine after each commit: what differs by
more than rounding is not the version that was published. They travel in the version's manifest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..seeds import keyed_generator

ROWS = 4
LENGTH = 24
"""Tokens of a row: 96 in all, of which 92 are scored."""
MOST_TOKENS = 65_536
"""Of all rows together; more are refused when they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Rows of tokens and their log-probs, by the learner."""

    rows: tuple[tuple[int, ...], ...]
    """Token ids, at least two in each."""
    logprobs: tuple[tuple[float, ...], ...]
    """Nats, of each row's tokens but the first, at temperature 1, given the tokens before them."""

    def __post_init__(self) -> None:
        if not self.rows or sum(map(len, self.rows)) > MOST_TOKENS:
            raise ValueError(f"there can't be {sum(map(len, self.rows))} tokens of scored rows")
        lengths = [len(row) for row in self.rows]
        if min(lengths) < 2 or [n - 1 for n in lengths] != [len(some) for some in self.logprobs]:
            raise ValueError(f"rows of {lengths} tokens can't have such log-probs")
        if not all(0 <= token < 1 << 31 for row in self.rows for token in row):
            raise ValueError("a scored row has a token id that can't be one")
        if not all(math.isfinite(value) for some in self.logprobs for value in some):
            raise ValueError("a scored row has a log-prob that isn't finite")


def fixed_rows(vocabulary: int, context: int, seed: int) -> NDArray[np.int64]:
    """``[R, S]`` The rows of a run: random tokens, so that every matrix takes part.

    Args:
        vocabulary: ids are below it.
        context: most tokens of a row.
        seed: of the run.

    >>> fixed_rows(32, 256, seed=0).shape
    (4, 24)
    """
    noise = keyed_generator(seed, "rows that check new weights", vocabulary)
    return noise.integers(0, vocabulary, (ROWS, max(2, min(LENGTH, context))), dtype=np.int64)
