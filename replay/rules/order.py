"""The order in which problems are asked: weighted sources, each in seeded permutations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...common.errors import DataError
from ...common.seeds import keyed_seed

LAST_SERIAL = 2**32 - 1
"""Final states are kept as bits of strings in Redis, which can't be longer."""
SORTED_UP_TO = 65_536
"""Problems of the largest source that is permuted by sorting: half a megabyte and a few milliseconds. A
million take 0.1 s and, in each worker, 8 MB a round."""
ROUNDS = 8
"""Rounds of a :class:`Cipher`; four would do for what statistics can tell."""
_64_BITS = 2**64 - 1
_NUMBER = re.compile("0|[1-9][0-9]{0,9}")


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """A permutation ``[size]`` that depends only on the key.

    It sorts the raw 64-bit output of Philox, which NumPy guarantees never to change (unlike
    ``Generator.permutation``), so that a run can be resumed on any machine.
    """
    raw = np.random.Philox(key=keyed_seed(*key)).random_raw(size)
    return np.argsort(raw, kind="stable")


class Cipher:
    """A permutation of ``0 … size - 1`` that depends only on the key, and of which nothing is stored.

    A Feistel network over the smallest even number of bits that holds the size; what falls outside is
    encrypted again, at most three times on average (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains"). The round function is MurmurHash3's 64-bit finaliser of the half and a round key. Only whole
    numbers are used, so that it is the same on any machine.

    >>> cipher = Cipher(5, "a", 0)
    >>> sorted(cipher[place] for place in range(5))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        raw = np.random.Philox(key=keyed_seed(*key)).random_raw(ROUNDS)
        self._keys = [int(one) for one in raw]

    def __getitem__(self, place: int) -> int:
        half = self._half
        mask = (1 << half) - 1
        while True:
            left, right = place >> half, place & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            place = left << half | right
            if place < self.size:
                return place


def _mixed(number: int) -> int:
    """MurmurHash3's finaliser of 64 bits."""
    number ^= number >> 33
    number = number * 0xFF51AFD7ED558CCD & _64_BITS
    number ^= number >> 33
    number = number * 0xC4CEB9FE1A85EC53 & _64_BITS
    return number ^ number >> 33


class Order:
    """Maps each position of each pass to its problem.

    Sources are mixed by weight in cycles of ``sum(weights)`` slots, spread evenly. Each source
    runs through its own permutation, drawn anew whenever it is used up. A *pass* is the
    shortest number of whole cycles in which every source is used up once.

    Example: 4 expert problems and 1,200 fresh ones, weights 1 and 1: a pass has 1,200 cycles of
    2 slots; the expert problems come around 300 times in it.

    >>> order = Order([("expert", 2, 1), ("fresh", 3, 1)], seed=0)
    >>> order.pass_length
    6
    >>> [order.place(0, position)[0] for position in range(6)]
    [0, 1, 0, 1, 0, 1]
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, int, int]],
        seed: int,
        sorted_up_to: int = SORTED_UP_TO,
    ) -> None:
        """An order.

        Args:
            sources: ``(name, problems, weight)`` of each.
            seed: the run's.
            sorted_up_to: sources of up to so many problems have a :func:`permutation`, larger ones a
                :class:`Cipher`.
        """
        if not sources:
            raise DataError("the order of problems needs at least one source")
        for name, size, weight in sources:
            if size < 1 or weight < 1:
                raise DataError(
                    f"source {name!r} has size {size} and weight {weight}: both must be positive"
                )
        names = [name for name, _, _ in sources]
        if len(set(names)) != len(names):
            raise DataError(f"two sources have one name: {names}; set data.train.<i>.name")
        divisor = math.gcd(*(weight for _, _, weight in sources))
        self.names = tuple(names)
        self.sizes = tuple(size for _, size, _ in sources)
        self.weights = tuple(weight // divisor for _, _, weight in sources)
        self.seed = seed
        # Slot k of a source with weight w is at (k + 1/2) / w of the cycle.
        slots = sorted(
            ((2 * k + 1) / (2 * weight), source, k)
            for source, weight in enumerate(self.weights)
            for k in range(weight)
        )
        self._slots = tuple((source, k) for _, source, k in slots)
        self._cycles = max(
            -(-size // weight) for size, weight in zip(self.sizes, self.weights, strict=True)
        )
        self.pass_length = self._cycles * len(self._slots)
        """Number of positions in one pass."""
        self._sorted_up_to = sorted_up_to
        # Sources are asked in turn, near the end of a round of each in two of them.
        self._permutation = lru_cache(maxsize=max(16, 2 * len(sources)))(self._draw)

    def place(self, pass_: int, position: int) -> tuple[int, int]:
        """Source and problem, each as an index, at a position of a pass."""
        if not 0 <= position < self.pass_length:
            raise ValueError(f"position {position} is outside a pass of {self.pass_length}")
        cycle, slot = divmod(position, len(self._slots))
        source, k = self._slots[slot]
        drawn = (pass_ * self._cycles + cycle) * self.weights[source] + k
        round_, index = divmod(drawn, self.sizes[source])
        return source, int(self._permutation(source, round_)[index])

    def group_id(self, pass_: int, position: int) -> str:
        """``<pass>-<position>``."""
        return f"{pass_}-{position}"

    @staticmethod
    def parse(group_id: str) -> tuple[int, int]:
        """Pass and position of a group id."""
        pass_, dash, position = group_id.partition("-")
        if not (dash and _NUMBER.fullmatch(pass_) and _NUMBER.fullmatch(position)):
            raise ValueError(f"{group_id[:80]!r} is not a group id: <pass>-<position>")
        return int(pass_), int(position)

    def serial(self, group_id: str) -> int:
        """Position counted over all passes, which is the ledger's sort key.

        Raises:
            ValueError: it isn't the id of a group of this run.
        """
        pass_, position = self.parse(group_id)
        serial = pass_ * self.pass_length + position
        if position >= self.pass_length or serial > LAST_SERIAL:
            raise ValueError(
                f"{group_id} isn't a group of this run: a pass has {self.pass_length} positions"
            )
        return serial

    def id_of(self, serial: int) -> str:
        """The inverse of :meth:`serial`."""
        return self.group_id(*divmod(serial, self.pass_length))

    def _draw(self, source: int, round_: int) -> NDArray[np.uint32] | Cipher:
        size, key = self.sizes[source], ("order", self.seed, self.names[source], round_)
        if size > self._sorted_up_to:
            return Cipher(size, *key)
        return permutation(size, *key).astype(np.uint32)
