"""Draws the next token of every row from its sampling distribution, with keyed noise.

Each (sample, position) has one uniform number, and the token is the inverse of the cumulative
distribution at that number. So a sample depends only on its key and on the probabilities, not on the
rows beside it, and a repeated run repeats its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.records import SamplingParams
from ...common.seeds import keyed_seed

CHUNK = 64
"""Number of positions for which uniforms are drawn at a time; a power of two, at least 4."""


class Noise:
    """Uniform numbers for some rows: row b's number at response position t is fixed by its key.

    They are the doubles of ``keyed_generator(seed, group_id, index).random()``, number t for
    position t. Positions are counted in the whole response, prefix included, so that a sample
    that is continued from its own first tokens sees the same numbers as before.
    """

    def __init__(self) -> None:
        # A single generator, set to a row's key and counter when that row needs numbers: making a
        # generator takes 25 us, which is too expensive for every row of a small model.
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state: Any = self._bits.state
        self._keys = np.empty(0, dtype=np.uint64)
        self._position = np.empty(0, dtype=np.int64)
        self._block = np.empty((0, CHUNK))

    def put(self, rows: Sequence[int], keys: Sequence[tuple[int, str, int, int]]) -> None:
        """Sets rows, new or in use, to (seed, group id, sample index, first position)."""
        missing = max(rows, default=-1) + 1 - len(self._keys)
        if missing > 0:
            self._keys = np.pad(self._keys, (0, missing))
            self._position = np.pad(self._position, (0, missing))
            self._block = np.pad(self._block, ((0, missing), (0, 0)))
        for row, (seed, group_id, index, first) in zip(rows, keys, strict=True):
            self._keys[row], self._position[row] = keyed_seed(seed, group_id, index), first
            self._fill(row)

    def move(self, rows: np.ndarray, source: np.ndarray) -> None:
        """Copies rows over others: ``rows[i]`` becomes what ``source[i]`` was."""
        for array in (self._keys, self._position, self._block):
            array[rows] = array[source]

    def next(self, count: int) -> np.ndarray:
        """``[count]`` float64 in [0, 1): the next number for each of the first ``count`` rows."""
        place = self._position[:count] & (CHUNK - 1)
        if not place.all():
            for row in np.flatnonzero(place == 0).tolist():
                self._fill(row)
        numbers: np.ndarray = self._block[np.arange(count), place]
        self._position[:count] += 1
        return numbers

    def _fill(self, row: int) -> None:
        """Draws the chunk of numbers that contains the row's position."""
        state = self._state["state"]
        state["key"][0] = self._keys[row]
        # Each counter value makes four doubles, and Philox increments it before it draws.
        state["counter"][0] = self._position[row] // CHUNK * (CHUNK // 4)
        self._state["buffer_pos"] = 4
        self._bits.state = self._state
        self._generator.random(out=self._block[row])


def kept(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits of the sampling distribution: ``[B, V]`` float32, -inf for tokens that are left out.

    Applies temperature, then top-k, then top-p to what is left, in the order of vLLM and
    transformers. At temperature 0 they are those of temperature 1. The likeliest token always stays.
    """
    logits = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        # From the greatest down, so that no temperature makes it infinite; a lower one than that would be 0 in float32.
        logits = logits - logits.amax(-1, keepdim=True)
        logits /= max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        # A token stays if what comes before it is under top_p, which may be 0 in float32.
        outside = probs.cumsum(-1) - probs >= sampling.top_p
        outside[:, 0] = False
        left_out = torch.zeros_like(outside).scatter_(-1, order, outside)
        logits = logits.masked_fill(left_out, float("-inf"))
    return logits


def draw(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob under the sampling distribution, renormalised.

    Args:
        logits: ``[B, V]``.
        sampling: the parameters of all rows; temperature 0 takes the most likely token.
        uniforms: ``[B]`` float64 in [0, 1), not read when greedy.

    Returns:
        ``[B]`` int64 tokens and ``[B]`` float32 log-probs, in nats. Where a row's logits aren't finite, its log-prob is
        NaN and its token any.
    """
    logits = kept(logits, sampling)
    if sampling.temperature == 0.0:
        best = logits.log_softmax(-1).max(-1)
        return best.indices, best.values
    # The same sum gives the token and its log-prob. It is in float64: with 150k tokens, a float32 sum
    # is off by more than a rare token's probability.
    greatest = logits.amax(-1, keepdim=True)
    cumulative = (logits - greatest).exp_().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The first token whose cumulative probability is above the number. A token of probability 0
    # adds nothing to the sum, so it is never the first.
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * total, right=True)
    # No number is under NaN.
    tokens.clamp_(max=logits.shape[-1] - 1)
    logprobs = (logits.gather(-1, tokens) - greatest).double() - total.log()
    return tokens.squeeze(-1), logprobs.squeeze(-1).float()
