"""What one version of the weights consists of: names, places, buckets and checksums.

All tensors of a version lie in one flat buffer, each at an aligned offset; the buffer is cut
into buckets, each with its own checksum::

    params    a.weight [0, 4096)   a.bias [4096, 4160)   b.weight [4352, …)
    buckets   [0, bucket_bytes)                [bucket_bytes, 2 * bucket_bytes)  …

This file imports no torch; dtypes are named as torch names them (``float32``, ``bfloat16``).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..errors import WeightsError
from ..records import Version
from ..wire import register

ALIGNMENT = 256
"""Bytes; offsets of tensors and buckets are multiples, so that any dtype can be viewed in
place and a bucket can be summed as 64-bit words."""

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
"""Bytes of one element of each dtype that can travel."""

MOST_TOKENS = 65_536
"""Of all scored rows together; more are refused when they are read."""

_NUMBER = "(?:0|[1-9][0-9]{0,14})"
_LINE = re.compile(
    f"([a-z0-9_]{{1,20}}) (-|{_NUMBER}(?:x{_NUMBER}){{0,7}}) ({_NUMBER}) ({_NUMBER}) ([^\\x00-\\x1f]+)"
)
"""A line of a layout. Numbers are bounded, so that no product of sizes takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor's place in the flat buffer."""

    name: str
    """As Hugging Face's ``named_parameters()`` yields it; tied ones appear once."""
    dtype: str
    """On the wire, which is the engine's."""
    shape: tuple[int, ...]
    """Sizes."""
    offset: int
    """First byte, a multiple of :data:`ALIGNMENT`."""
    nbytes: int
    """Bytes without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One piece of the flat buffer, sent and checked by itself."""

    offset: int
    """First byte, a multiple of :data:`ALIGNMENT`."""
    nbytes: int
    """Bytes, padding included."""
    checksum: int
    """XXH3 of its bytes, 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """A few fixed rows of tokens with the log-probs that a version's weights give them.

    The learner scores them at each publication, a worker's engine after each commit: what differs by
    more than rounding is not the version that was published.
    """

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


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """One version of the weights, in full: what a receiver must end up holding."""

    run_id: str
    """The run that the version belongs to."""
    version: Version
    """Which version it is."""
    layout: str
    """Where each tensor lies: :func:`layout_text`. One string, because it is the same for every
    version of a run and is then read only once."""
    buckets: tuple[Bucket, ...]
    """In the buffer's order; together they cover it."""
    total_bytes: int
    """Of the flat buffer."""
    content: str
    """SHA-256 over layout and buckets: equal contents are equal weights, whatever the version."""
    digest: str
    """SHA-256 over run id, version and content; it travels over CURVE, the bytes do not."""
    scored: ScoredRows | None = None
    """What an engine that has loaded these weights must make of some rows; None = nobody said.
    In no digest: it travels over CURVE alone."""

    @property
    def params(self) -> tuple[TensorEntry, ...]:
        """The tensors, in the buffer's order."""
        return read_layout(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor lies and where buckets are cut; the same for all versions of a run."""

    params: tuple[TensorEntry, ...]
    """In the order given."""
    text: str
    """The same as text."""
    ranges: tuple[tuple[int, int], ...]
    """(offset, nbytes) of each bucket."""
    total_bytes: int
    """Of the flat buffer, a multiple of :data:`ALIGNMENT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlace:
    """Where other processes of the host find a version: a segment and what lies in it."""

    path: str
    """File of the :class:`~tandem.common.weights.shared_memory.Segment`."""
    nbytes: int
    """Its size."""
    layout: str
    """Where each tensor lies: :func:`layout_text`."""


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``torch.float32``, ``"torch.float32"`` and ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan(specs: Iterable[tuple[str, Sequence[int], Any]], bucket_bytes: int) -> Layout:
    """Lays tensors out in one buffer and cuts it into buckets of at most ``bucket_bytes``.

    Args:
        specs: (name, shape, dtype) in the order in which the tensors will be copied.
        bucket_bytes: greatest size of a bucket; rounded up to :data:`ALIGNMENT`.

    Raises:
        WeightsError: no tensors, a name that comes twice, or a dtype that can't travel.

    >>> layout = plan([("a", (3, 5), "float32"), ("b", (2,), "bfloat16")], 256)
    >>> [(p.offset, p.nbytes) for p in layout.params], layout.ranges
    ([(0, 60), (256, 4)], ((0, 256), (256, 256)))
    """
    entries: list[TensorEntry] = []
    seen: set[str] = set()
    offset = 0
    for name, shape, dtype in specs:
        kind = dtype_name(dtype)
        if kind not in ITEM_BYTES:
            raise WeightsError(
                f"{name} has dtype {kind}, which can't travel (known: {', '.join(ITEM_BYTES)})"
            )
        if name in seen:
            raise WeightsError(f"{name} comes twice: hand over each tied parameter once")
        seen.add(name)
        nbytes = math.prod(shape) * ITEM_BYTES[kind]
        entries.append(
            TensorEntry(name=name, dtype=kind, shape=tuple(shape), offset=offset, nbytes=nbytes)
        )
        offset += _aligned(nbytes)
    if not entries:
        raise WeightsError("there are no parameters to publish: the iterable was empty")
    step = _aligned(bucket_bytes)
    ranges = tuple((start, min(step, offset - start)) for start in range(0, offset, step))
    params = tuple(entries)
    return Layout(params=params, text=layout_text(params), ranges=ranges, total_bytes=offset)


def layout_text(params: Iterable[TensorEntry]) -> str:
    """One line a tensor: dtype, sizes, offset, bytes, name.

    >>> entry = TensorEntry(name="a.w", dtype="float32", shape=(2, 3), offset=0, nbytes=24)
    >>> layout_text([entry])
    'float32 2x3 0 24 a.w\\n'
    """
    return "".join(
        f"{p.dtype} {'x'.join(map(str, p.shape)) or '-'} {p.offset} {p.nbytes} {p.name}\n"
        for p in params
    )


@lru_cache(maxsize=4)
def read_layout(text: str) -> tuple[TensorEntry, ...]:
    """The inverse of :func:`layout_text`.

    Raises:
        WeightsError: a line that isn't of that form.
    """
    entries: list[TensorEntry] = []
    # Each line has its end, the last one too.
    lines = text.split("\n")
    if lines.pop():
        raise WeightsError(f"the layout is cut off after {text[-200:]!r}")
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is None:
            raise WeightsError(f"the layout has a line that can't be read: {line[:200]!r}")
        dtype, sizes, offset, nbytes, name = found.groups()
        shape = tuple(int(size) for size in sizes.split("x")) if sizes != "-" else ()
        entries.append(
            TensorEntry(name=name, dtype=dtype, shape=shape, offset=int(offset), nbytes=int(nbytes))
        )
    return tuple(entries)


def content_digest(layout: str, buckets: Iterable[Bucket]) -> str:
    """SHA-256 over what the buffer holds: layout and checksums."""
    digest = hashlib.sha256(layout.encode())
    for b in buckets:
        digest.update(f"\n{b.offset} {b.nbytes} {b.checksum}".encode())
    return digest.hexdigest()


def manifest_digest(run_id: str, version: Version, content: str) -> str:
    """SHA-256 over run id, version and content."""
    return hashlib.sha256(
        f"{run_id}\0{version.term}\0{version.step}\0{content}".encode()
    ).hexdigest()


def make_manifest(
    run_id: str,
    version: Version,
    layout: Layout,
    checksums: Sequence[int],
    scored: ScoredRows | None = None,
) -> WeightManifest:
    """The manifest of one version, from the layout and the checksums of its buckets."""
    buckets = tuple(
        Bucket(offset=offset, nbytes=nbytes, checksum=value)
        for (offset, nbytes), value in zip(layout.ranges, checksums, strict=True)
    )
    content = content_digest(layout.text, buckets)
    return WeightManifest(
        run_id=run_id,
        version=version,
        layout=layout.text,
        buckets=buckets,
        total_bytes=layout.total_bytes,
        content=content,
        digest=manifest_digest(run_id, version, content),
        scored=scored,
    )


def restamped(manifest: WeightManifest, version: Version) -> WeightManifest:
    """The same weights under this version."""
    if manifest.version == version:
        return manifest
    digest = manifest_digest(manifest.run_id, version, manifest.content)
    return replace(manifest, version=version, digest=digest)


def check_manifest(manifest: WeightManifest) -> None:
    """Checks that a manifest is consistent in itself.

    Raises:
        WeightsError: buckets that leave gaps, tensors that overlap or don't fit, or digests that aren't
            those of the manifest's content.
    """
    end = 0
    for b in manifest.buckets:
        if b.offset != end or b.nbytes <= 0 or b.nbytes % ALIGNMENT:
            raise WeightsError(
                f"the manifest of {manifest.version} has a bucket of {b.nbytes} bytes at byte "
                f"{b.offset}, where byte {end} was next"
            )
        end += b.nbytes
    if end != manifest.total_bytes:
        raise WeightsError(
            f"the buckets of {manifest.version} hold {end:,} bytes, the manifest names "
            f"{manifest.total_bytes:,}"
        )
    _check_places(manifest.layout, manifest.total_bytes)
    if manifest.content != content_digest(manifest.layout, manifest.buckets):
        raise WeightsError(f"the manifest of {manifest.version} has a wrong content digest")
    if manifest.digest != manifest_digest(manifest.run_id, manifest.version, manifest.content):
        raise WeightsError(f"the manifest of {manifest.version} has a wrong digest")


@lru_cache(maxsize=8)
def _check_places(layout: str, total_bytes: int) -> None:
    end = 0
    seen: set[str] = set()
    for p in read_layout(layout):
        if p.name in seen:
            raise WeightsError(f"{p.name} is named twice")
        seen.add(p.name)
        size = ITEM_BYTES.get(p.dtype)
        if size is None:
            raise WeightsError(f"{p.name} has the unknown dtype {p.dtype!r}")
        if p.nbytes != math.prod(p.shape) * size:
            raise WeightsError(
                f"{p.name} is named with {p.nbytes} bytes, but {p.dtype} {list(p.shape)} has "
                f"{math.prod(p.shape) * size}"
            )
        if p.offset != end or p.offset + p.nbytes > total_bytes:
            raise WeightsError(
                f"{p.name} lies at bytes [{p.offset}, {p.offset + p.nbytes}) of {total_bytes}, "
                f"which overlap another tensor, leave a gap or leave the buffer: byte {end} was next"
            )
        end = p.offset + _aligned(p.nbytes)
    # More would be allocated for nothing.
    if end != total_bytes:
        raise WeightsError(f"the tensors end at byte {end:,} of a buffer of {total_bytes:,} bytes")


def damage(manifest: WeightManifest, index: int, found: int) -> str | None:
    """What is wrong with a bucket of which this checksum was found; None where nothing is."""
    b = manifest.buckets[index]
    if found == b.checksum:
        return None
    return (
        f"bucket {index} of version {manifest.version} (bytes {b.offset:,} to "
        f"{b.offset + b.nbytes:,}) was damaged: its checksum is {found:016x}, the manifest's is "
        f"{b.checksum:016x}"
    )


def first_difference(
    expected: Sequence[tuple[str, Sequence[int], Any]], params: Sequence[TensorEntry]
) -> str | None:
    """Names the first parameter in which a manifest isn't what an engine can load.

    Args:
        expected: the engine's (name, shape, dtype).
        params: the manifest's.

    Returns:
        One sentence, or None where they agree. Order doesn't matter.
    """
    offered = {p.name: p for p in params}
    for name, shape, dtype in expected:
        entry = offered.get(name)
        if entry is None:
            return f"{name} is missing: the engine has it, the manifest has not"
        if tuple(shape) != entry.shape:
            return (
                f"{name} has shape {list(shape)} in the engine and {list(entry.shape)} in the "
                f"manifest"
            )
        if dtype_name(dtype) != entry.dtype:
            return (
                f"{name} has dtype {dtype_name(dtype)} in the engine and {entry.dtype} in the "
                f"manifest"
            )
    known = {name for name, _, _ in expected}
    for p in params:
        if p.name not in known:
            return f"{p.name} is unknown to the engine"
    return None
