"""Checksums of buckets: xxh3 over bytes on a CPU, a position-weighted sum on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash

from ..errors import WeightsError

CHUNK_BYTES = 1 << 20
"""xxhash holds the GIL; in pieces of 1 MB (about 0.1 ms) other threads get their turn."""
_SUM_WORDS = 1 << 24


def xxh3(data: torch.Tensor, ready: Callable[[int], None] | None = None) -> int:
    """XXH3-64 of a uint8 tensor on the CPU, ``[n]``, as an unsigned 64-bit number.

    Args:
        data: what is summed.
        ready: returns when the first so many bytes are there, of data that is being filled.
    """
    if data.device.type != "cpu":
        raise WeightsError(f"xxh3 reads CPU memory, and the bucket is on {data.device}")
    view = data.numpy().data
    if len(view) <= CHUNK_BYTES and ready is None:
        return xxhash.xxh3_64_intdigest(view)
    digest = xxhash.xxh3_64()
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        if ready is not None:
            ready(start + len(chunk))
        digest.update(chunk)
    return digest.intdigest()


def weighted_sum(data: torch.Tensor, ready: Callable[[int], None] | None = None) -> int:
    """``Σ (2i + 1) · word_i`` modulo 2^64 over the 64-bit words of a uint8 tensor ``[8n]``.

    The weights are odd, hence invertible modulo 2^64: a change of any one word changes the sum,
    and because they differ, so does a change of order. Works where the tensor lies.
    """
    if ready is not None:
        ready(data.numel())
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _SUM_WORDS):
        part = words[start : start + _SUM_WORDS]
        weights = torch.arange(start, start + part.numel(), device=data.device) * 2 + 1
        total += (part * weights).sum()
    return int(total.item()) & 0xFFFF_FFFF_FFFF_FFFF


ALGORITHMS: dict[str, Callable[[torch.Tensor, Callable[[int], None] | None], int]] = {
    "xxh3": xxh3,
    "sum64": weighted_sum,
}


def checksum(data: torch.Tensor, algorithm: str, ready: Callable[[int], None] | None = None) -> int:
    """The checksum of one bucket, a uint8 tensor.

    Args:
        data: the bucket.
        algorithm: by name.
        ready: of a bucket that is being filled, see :func:`xxh3`.

    Raises:
        WeightsError: an unknown algorithm, or one that can't read the tensor's device.
    """
    function = ALGORITHMS.get(algorithm)
    if function is None:
        raise WeightsError(f"unknown checksum {algorithm!r} (known: {', '.join(ALGORITHMS)})")
    return function(data, ready)


def algorithm_for(device: torch.device) -> str:
    """The algorithm that is cheap where the buffer lies."""
    return "xxh3" if device.type == "cpu" else "sum64"
