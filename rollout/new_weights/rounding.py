"""Which differences between two computations of the same log-probs count as rounding.

Rounding differs between models and kernels, so the bounds follow what earlier checks found. Those of
half precision leave room for a long tail: on the miniature in bfloat16 the greatest difference of the
given rows was 0.76 nats in the median of 850 checks and 8.9 in one of them, while their mean, without
its greatest twentieth, stayed within 1.8 times its median.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

GIVEN, SAMPLED, RAN_ON = "given rows", "samples", "samples that ran on"
MEAN = "mean of the given rows"
BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    GIVEN: {"float32": (3e-3, 3e-2), "float16": (0.1, 4.0), "bfloat16": (0.5, 32.0)},
    MEAN: {"float32": (6e-5, 1e-3), "float16": (5e-3, 0.1), "bfloat16": (0.03, 1.0)},
    SAMPLED: {"float32": (1e-3, 1e-2), "float16": (0.05, 0.5), "bfloat16": (0.1, 4.0)},
    RAN_ON: {"float32": (3e-4, 3e-3), "float16": (0.05, 0.5), "bfloat16": (0.1, 4.0)},
}
"""Differences in nats that always count as rounding; and those that do in a first check, and at most.
Given rows are random, so that their tokens have log-probs of -10 to -30: the difference of logits that
bf16 rounds to one part in 256, and of a long tail in any dtype."""
TIMES = {"float32": 10.0, "float16": 40.0, "bfloat16": 40.0}
"""Multiple of the earlier differences' median from which on a given rows' greatest difference isn't rounding."""
SAMPLE_TIMES, MEAN_TIMES = 10.0, 3.0
"""The same multiples for samples, and for the mean."""
UNCERTAIN_TIMES = {"float32": 1.0, "float16": 4.0, "bfloat16": 4.0}
"""Multiple of the given rows' usual difference that always passes for samples: those of a trained model are
nearly certain, and so without rounding, until one isn't."""
LEFT_OUT = 20
"""One in this many differences, the greatest ones, isn't in the mean."""
REMEMBERED = 64
"""Number of earlier differences of which the median is taken."""


class Noise:
    """The difference of one kind that counts as rounding.

    >>> noise = Noise(RAN_ON, "float32")
    >>> noise.bound
    0.003
    >>> noise.add(1e-4)
    >>> round(noise.bound, 6)
    0.001
    """

    def __init__(
        self, kind: str, dtype: str, first: float | None = None, given: Noise | None = None
    ) -> None:
        """Starts without earlier checks.

        Args:
            kind: kind of the difference.
            dtype: the less exact one of the learner's and the engine's.
            first: bound for given rows in a first check, from which the other kinds' bounds follow.
                None = by the dtype.
            given: the noise of the given rows, if ``kind`` is another one.
        """
        least, most = BOUNDS[kind][dtype]
        self._first = most if first is None else most * first / BOUNDS[GIVEN][dtype][1]
        self._least = min(least, self._first)
        self._times = {GIVEN: TIMES[dtype], MEAN: MEAN_TIMES}.get(kind, SAMPLE_TIMES)
        self._uncertain = UNCERTAIN_TIMES[dtype]
        self._given = given
        self._seen: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def bound(self) -> float:
        """Greatest difference, in nats, that passes the next check."""
        bound = self._first
        if self._seen:
            bound = min(bound, max(self._least, self._times * self.usual))
        return bound if self._given is None else max(bound, self._uncertain * self._given.usual)

    @property
    def usual(self) -> float:
        """Median of the earlier differences, in nats; 0 before the first check."""
        return median(self._seen) if self._seen else 0.0

    def add(self, difference: float) -> None:
        """Remembers the difference of a check that has passed."""
        self._seen.append(difference)
