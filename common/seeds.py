"""Random numbers keyed by their purpose, never by worker, attempt or time."""

from __future__ import annotations

import hashlib

import numpy as np


def keyed_seed(*parts: int | str) -> int:
    """A 64-bit seed from a key such as ``(run seed, group id, sample)``.

    Parts are length-prefixed, so that ``("ab", "c")`` and ``("a", "bc")`` differ.

    >>> keyed_seed(0, "0-1", 3) == keyed_seed(0, "0-1", 3)
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = f"{type(part).__name__}:{part}".encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")


def keyed_generator(*parts: int | str) -> np.random.Generator:
    """A counter-based generator for a key; the same key gives the same numbers anywhere."""
    return np.random.Generator(np.random.Philox(key=keyed_seed(*parts)))
