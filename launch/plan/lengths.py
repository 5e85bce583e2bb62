"""How long responses are: a distribution with a mean, a spread and a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of responses: log-normal, cut at a limit.

    >>> drawn = Lengths(mean=100, limit=400, spread=0.75).draw(2000, 1, seed=1)
    >>> bool(95 < drawn.mean() < 105), int(drawn.max())
    (True, 400)
    """

    mean: float
    """Mean number of tokens, after the cut."""
    limit: int
    """The longest response, in tokens."""
    spread: float
    """Standard deviation of the logarithm of a length before the cut; 0: all have the same length."""

    def draw(self, groups: int, samples: int, seed: int) -> np.ndarray:
        """Draws ``[groups, samples]`` int64 lengths in tokens, each at least 1."""
        if self.spread == 0 or self.mean >= self.limit:
            return np.full((groups, samples), max(1, round(self.mean)), np.int64)
        noise = np.random.default_rng(seed).standard_normal((groups, samples))
        drawn = np.exp(self._location() + self.spread * noise)
        return np.clip(drawn.round(), 1, self.limit).astype(np.int64)

    def _location(self) -> float:
        """The mean of the logarithm that gives the lengths their mean after the cut."""
        low, high = math.log(self.mean) - self.spread**2, math.log(self.limit) + 8 * self.spread
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, location: float) -> float:
        """E[min(X, limit)] of a log-normal X."""
        normal = NormalDist()
        at = (math.log(self.limit) - location) / self.spread
        below = math.exp(location + self.spread**2 / 2) * normal.cdf(at - self.spread)
        return below + self.limit * (1 - normal.cdf(at))
