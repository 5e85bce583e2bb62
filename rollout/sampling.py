"""Draws the next token of every row from its sampling distribution, with keyed noise.

Each (sample, position) has one uniform number, and the token is the inverse of the cumulative
distribution at it. So a sample depends on its key and on the probabilities alone, not on the
rows beside it, and a repeated run repeats its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..common.records import SamplingParams
from ..common.seeds import keyed_seed

CHUNK = 64
"""Positions for which uniforms are drawn at a time; a power of two, at least 4."""


class Noise:
    """Uniform numbers of some rows: row b's number at response position t is fixed by its key.

    They are the doubles of ``keyed_generator(seed, group_id, index).random()``, number t for
    position t. Positions are those of the whole response, its prefix counted, so that a sample
    that is continued from its own first tokens sees the numbers that it would have seen.
    """

    def __init__(self) -> None:
        # One generator, set to a row's key and counter when that row needs numbers: making a
        # generator takes 25 us, which is dear for every row of a small model.
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state
        self._keys = np.empty(0, dtype=np.uint64)
        self._position = np.empty(0, dtype=np.int64)
        self._block = np.empty((0, CHUNK))

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Sequence[tuple[int, str, int, int]]) -> None:
        """Adds rows by (seed, group id, sample index, first position)."""
        self._keys = np.concatenate(
            [self._keys, np.array([keyed_seed(s, g, i) for s, g, i, _ in keys], dtype=np.uint64)]
        )
        self._position = np.concatenate([self._position, np.array([first for *_, first in keys])])
        self._block = np.concatenate([self._block, np.empty((len(keys), CHUNK))])
        for row in range(len(self) - len(keys), len(self)):
            self._fill(row)

    def keep(self, rows: np.ndarray) -> None:
        """Keeps the rows of these indices, in this order."""
        self._keys, self._position = self._keys[rows], self._position[rows]
        self._block = self._block[rows]

    def next(self) -> np.ndarray:
        """``[B]`` float64 in [0, 1): every row's number at its next position."""
        place = self._position & (CHUNK - 1)
        if not place.all():
            for row in np.flatnonzero(place == 0).tolist():
                self._fill(row)
        numbers: np.ndarray = self._block[np.arange(len(place)), place]
        self._position += 1
        return numbers

    def _fill(self, row: int) -> None:
        """Draws the chunk of positions that the row's position is in."""
        state = self._state["state"]
        state["key"][0] = self._keys[row]
        # A counter makes four doubles, and Philox raises it before it draws.
        state["counter"][0] = self._position[row] // CHUNK * (CHUNK // 4)
        self._state["buffer_pos"] = 4
        self._bits.state = self._state
        self._generator.random(out=self._block[row])


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probs of the sampling distribution: ``[B, V]`` float32, -inf for tokens left out.

    Temperature first, then top-k, then top-p over what is left, renormalised: the order of
    vLLM and transformers. At temperature 0 it is that of temperature 1.
    """
    logits = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        # A token stays while what lies before it is under top_p: the most likely always does.
        outside = probs.cumsum(-1) - probs >= sampling.top_p
        left_out = torch.zeros_like(outside).scatter_(-1, order, outside)
        logits = logits.masked_fill(left_out, float("-inf"))
    return logits.log_softmax(-1)


def draw(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row and its log-prob.

    Args:
        logits: ``[B, V]``.
        sampling: of all rows; temperature 0 takes the most likely token.
        uniforms: ``[B]`` float64 in [0, 1), not read when greedy.

    Returns:
        ``[B]`` int64 tokens and ``[B]`` float32 log-probs, nats.
    """
    logprobs = distribution(logits, sampling)
    if sampling.temperature == 0.0:
        best = logprobs.max(-1)
        return best.indices, best.values
    # float64: with 150k tokens a float32 sum is off by more than a rare token's probability.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # The first token whose cumulative probability is above the number: one of probability 0
    # adds nothing to the sum, so it is never the first.
    target = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)
