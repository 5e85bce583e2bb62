"""What one version of the weights consists of: names, places, buckets and checksums.

All tensors of a version are in one flat buffer, one after the other, each at an aligned offset. The
buffer is cut into buckets, each with its own checksum::

    tensors   a.weight [0, 4096)   a.bias [4096, 4160)   b.weight [4352, …)
    buckets   [0, bucket_bytes)                [bucket_bytes, 2 * bucket_bytes)  …

Only names, shapes and dtypes are sent: a tensor's offset follows from the tensors before it. This file
doesn't import torch; dtypes have torch's names (``float32``, ``bfloat16``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec

from ..errors import WeightsError
from ..plain import Record, read_record
from ..records import Version

ALIGNMENT = 256
"""Bytes; offsets of tensors and buckets are multiples of it, so that any dtype can be viewed in place
and a bucket can be summed as 64-bit words."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, for each dtype that can be sent."""

MOST_TOKENS = 65_536
"""Greatest number of tokens in all scored rows together; more are refused on reading."""

Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class TensorSpec(NamedTuple):
    """One tensor, as the learner publishes it and as an engine loads it."""

    name: str
    """Name in Hugging Face's ``named_parameters()``; tied parameters appear once."""
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=8)]
    dtype: str
    """The engine's dtype, in which it is sent."""

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Layout(Record, frozen=True, kw_only=True, dict=True):
    """Which tensors a version has and how its buffer is cut; the same for all versions of a run.

    The constructor raises ``ValueError`` for a layout that no buffer can have.
    """

    tensors: tuple[TensorSpec, ...]
    """The tensors, in the buffer's order."""
    bucket_bytes: Size
    """Bytes of every bucket but the last, a multiple of :data:`ALIGNMENT`."""

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("there are no parameters to publish: the iterable was empty")
        if self.bucket_bytes <= 0 or self.bucket_bytes % ALIGNMENT:
            raise ValueError(f"a bucket can't have {self.bucket_bytes} bytes")
        names: set[str] = set()
        for name, _, dtype in self.tensors:
            if dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise ValueError(f"{name} has dtype {dtype}, which can't be sent (known: {known})")
            if name in names:
                raise ValueError(f"{name} comes twice: hand over each tied parameter once")
            names.add(name)

    @cached_property
    def offsets(self) -> list[int]:
        """Offset of each tensor, a multiple of :data:`ALIGNMENT`, and the end of the last one."""
        found = [0]
        for tensor in self.tensors:
            found.append(found[-1] + _aligned(tensor.nbytes))
        return found

    @property
    def total_bytes(self) -> int:
        """Size of the buffer."""
        return self.offsets[-1]

    @property
    def bucket_count(self) -> int:
        """How many buckets cover the buffer."""
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def buckets(self) -> list[slice]:
        """The bytes of each bucket."""
        starts = range(0, self.total_bytes, self.bucket_bytes)
        return [slice(at, min(at + self.bucket_bytes, self.total_bytes)) for at in starts]

    @property
    def text(self) -> str:
        """The layout as JSON, for :func:`read_layout`."""
        return msgspec.json.encode(self).decode()


class SegmentPlace(NamedTuple):
    """Where other processes of the host find a version."""

    path: str
    """File of the :class:`~tandem.common.weights.shared_memory.Segment` that holds it."""
    layout: str
    """:attr:`Layout.text` of what is in it."""


def read_layout(text: str) -> Layout:
    """The inverse of :attr:`Layout.text`.

    Raises:
        WeightsError: the text isn't a layout.
    """
    return read_record(Layout, text, "the layout of a segment", WeightsError)


def plan(specs: Iterable[tuple[str, Sequence[int], Any]], bucket_bytes: int) -> Layout:
    """Lays tensors out in one buffer and cuts it into buckets of at most ``bucket_bytes``.

    Args:
        specs: (name, shape, dtype) in the order in which the tensors will be copied.
        bucket_bytes: greatest size of a bucket; rounded up to :data:`ALIGNMENT`.

    Raises:
        WeightsError: there are no tensors, a name occurs twice, or a dtype can't be sent.

    >>> layout = plan([("a", (3, 5), "float32"), ("b", (2,), "bfloat16")], 256)
    >>> layout.offsets, layout.total_bytes, layout.buckets
    ([0, 256, 512], 512, [slice(0, 256, None), slice(256, 512, None)])
    """
    tensors = tuple(
        TensorSpec(name=name, shape=tuple(shape), dtype=dtype_name(dtype))
        for name, shape, dtype in specs
    )
    try:
        return Layout(tensors=tensors, bucket_bytes=_aligned(bucket_bytes))
    except ValueError as error:
        raise WeightsError(str(error)) from None


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``torch.float32``, ``"torch.float32"`` and ``"float32"``."""
    return str(dtype).removeprefix("torch.")


class ScoredRows(Record, frozen=True, kw_only=True):
    """A few fixed rows of tokens with the log-probs that a version's weights give them.

    The learner scores them at each publication, a worker's engine after each commit. If the two differ
    by more than rounding, the engine's weights aren't those that were published.
    """

    rows: tuple[tuple[int, ...], ...]
    """Token ids, at least two in each."""
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probs in nats of each row's tokens except the first, at temperature 1."""

    def __post_init__(self) -> None:
        if not self.rows or sum(map(len, self.rows)) > MOST_TOKENS:
            raise ValueError(f"scored rows can't have {sum(map(len, self.rows))} tokens in all")
        lengths = [len(row) for row in self.rows]
        if min(lengths) < 2 or [n - 1 for n in lengths] != [len(some) for some in self.logprobs]:
            raise ValueError(f"rows of {lengths} tokens don't fit their log-probs")
        if not all(0 <= token < 1 << 31 for row in self.rows for token in row):
            raise ValueError("a scored row has an impossible token id")
        if not all(math.isfinite(value) for some in self.logprobs for value in some):
            raise ValueError("a scored row has a log-prob that isn't finite")


class WeightManifest(Record, frozen=True, kw_only=True, dict=True):
    """A complete description of one version of the weights, as a receiver must end up holding it.

    The constructor raises ``ValueError`` unless there is one checksum for each bucket.
    """

    run_id: str
    version: Version
    layout: Layout
    """The tensors, and how they are cut into buckets."""
    checksums: tuple[int, ...]
    """XXH3 of each bucket's bytes, padding included, 64 bits."""
    base: str
    """:func:`~tandem.common.adapters.base_digest` of the model that the tensors adapt; empty if they are
    a whole model."""
    scored: ScoredRows | None
    """Rows with the log-probs that these weights give them; None if the learner scored none."""

    def __post_init__(self) -> None:
        count = self.layout.bucket_count
        if len(self.checksums) != count:
            raise ValueError(
                f"the manifest of {self.version} has {len(self.checksums)} checksums for {count:,} buckets"
            )

    @cached_property
    def content(self) -> str:
        """SHA-256 of layout, checksums and base: equal contents are equal weights, whatever the version."""
        named = (self.layout, self.checksums, self.base)
        return hashlib.sha256(msgspec.msgpack.encode(named)).hexdigest()


def base_difference(own: str, offered: str) -> str | None:
    """Says that offered tensors aren't for the engine's base model; None if they are."""
    if own == offered:
        return None
    ours, theirs = (digest or "none, for a whole model" for digest in (own, offered))
    return (
        f"the offer is for another base model: its digest is {theirs}, and this worker's is {ours}: give "
        f"learner and workers the same weights files under model.path and the same learner.lora"
    )


def first_difference(
    expected: Sequence[tuple[str, Sequence[int], Any]], offered: Sequence[TensorSpec]
) -> str | None:
    """Names the first parameter of a manifest that the engine can't load.

    Args:
        expected: the engine's parameters as (name, shape, dtype).
        offered: the manifest's parameters.

    Returns:
        One sentence, or None if they agree. Order doesn't matter.
    """
    by_name = {tensor.name: tensor for tensor in offered}
    for name, shape, dtype in expected:
        tensor = by_name.get(name)
        if tensor is None:
            return f"{name} is missing: the engine has it, the manifest has not"
        for what, ours, theirs in (
            ("shape", list(shape), list(tensor.shape)),
            ("dtype", dtype_name(dtype), tensor.dtype),
        ):
            if ours != theirs:
                return f"{name} has {what} {ours} in the engine and {theirs} in the manifest"
    known = {name for name, _, _ in expected}
    return next((f"{name} is unknown to the engine" for name in by_name if name not in known), None)
