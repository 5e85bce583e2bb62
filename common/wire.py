"""The one encoding of every record: MessagePack in a frame with schema version and checksum.

Frame::

    b"TDM" | schema version, 1 byte | xxh3-64 of the body, 8 bytes little-endian | body

The body is the MessagePack of ``[kind, {field: value}]``. Arrays travel as raw little-endian
bytes of their declared dtype. Anything that is not exactly that (another version, an unknown kind or
field, a missing field, a wrong type, a message that is too long, cut or damaged) is refused
with a :class:`~tandem.common.errors.WireError` that says which. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import xxhash

from .errors import WireError
from .plain import UNREADABLE, Record, reason
from .records import array_dtype

SCHEMA_VERSION = 1
"""Goes up when a reader of the older version would misread a record. The data that a stopped run has in
Redis have the version that wrote them, so a new version needs a reader for the old one as well."""
MAGIC = b"TDM"
HEADER = struct.Struct("<3sBQ")
MAX_MESSAGE_BYTES = 64 << 20
"""Longest message that is read; a group of 64 samples of 32k tokens is under 24 MB."""

R = TypeVar("R")


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).data
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} isn't plain data")


def _to_array(annotation: Any, value: Any) -> Any:
    dtype = array_dtype(annotation)
    if not isinstance(value, bytes):
        raise ValueError(f"Expected the bytes of `{dtype}`, got `{type(value).__name__}`")
    if len(value) % dtype.itemsize:
        raise ValueError(f"{len(value)} bytes aren't a multiple of {dtype.itemsize}")
    return np.frombuffer(value, dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_from_numpy)
_BODY = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


@cache
def _start(kind: str) -> bytes:
    """What a body begins with, before its record: MessagePack's mark of a pair, and the kind."""
    return b"\x92" + _ENCODER.encode(kind)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_to_array)


def encode(record: Any) -> bytes:
    """Encodes one record.

    Raises:
        WireError: a field holds a value of the wrong type, or the message would be longer than
            ``MAX_MESSAGE_BYTES``.
    """
    cls: Any = type(record)
    kind = cls.__name__
    if not issubclass(cls, Record):
        raise WireError(f"a {kind} isn't a record: only a Record travels")
    try:
        fields = _ENCODER.encode(record)
        # Making a record checks no types, so what couldn't be read must fail here, where it was made.
        _decoder(cls).decode(fields)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise WireError(f"a {kind} can't travel: {_unencodable(record)}: {error}") from None
    except UNREADABLE as error:
        raise WireError(f"a {kind} can't travel: {reason(error, kind)}") from None
    start = _start(kind)
    size = len(start) + len(fields)
    if size + HEADER.size > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {kind} of {size:,} bytes is over the limit of "
            f"{MAX_MESSAGE_BYTES:,}: send fewer or shorter samples a group"
        )
    checksum = xxhash.xxh3_64(start)
    checksum.update(fields)
    return b"".join((HEADER.pack(MAGIC, SCHEMA_VERSION, checksum.intdigest()), start, fields))


def _unencodable(record: Any) -> str:
    """The first field that MessagePack can't encode."""
    for name in getattr(record, "__struct_fields__", ()):
        try:
            _ENCODER.encode(getattr(record, name))
        except (OverflowError, TypeError, UnicodeEncodeError):
            return f"{type(record).__name__}.{name}"
    return type(record).__name__


def decode(data: bytes | memoryview, expected: type[R]) -> R:
    """Decodes one record and checks that it is an ``expected``.

    Arrays in the result are read-only.

    Raises:
        WireError: the message is not exactly one valid record of that kind.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise _refused(f"it has {len(data):,} bytes, over the limit of {MAX_MESSAGE_BYTES:,}")
    if len(data) < HEADER.size:
        raise _refused(f"it is truncated: {len(data)} bytes, the header alone has {HEADER.size}")
    magic, version, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _refused(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != SCHEMA_VERSION:
        raise _refused(f"it has schema version {version}; this side speaks {SCHEMA_VERSION}")
    body = memoryview(data)[HEADER.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise _refused("it is damaged or truncated: its checksum doesn't match")
    try:
        kind, fields = _BODY.decode(body)
        if kind != expected.__name__:
            raise _refused(f"it is a {kind[:40]!r}, not the expected {expected.__name__}")
        record: R = _decoder(cast(Any, expected)).decode(fields)
    except UNREADABLE as error:
        raise _refused(reason(error, expected.__name__)) from None
    return record


def is_of(data: bytes | memoryview, kind: type[Record]) -> bool:
    """Whether a message says that it is a record of this kind; nothing else of it is checked."""
    return bytes(data[HEADER.size :][: len(_opening(kind))]) == _opening(kind)


@cache
def _opening(kind: type[Record]) -> bytes:
    """What the body of such a record's message begins with."""
    return b"\x92" + _ENCODER.encode(kind.__name__)


def _refused(why: str) -> WireError:
    return WireError(f"refused message: {why}")
