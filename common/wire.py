"""The one encoding of every record: MessagePack in a frame with schema version and checksum.

Frame::

    b"TDM" | schema version, 1 byte | xxh3-64 of the body, 8 bytes little-endian | body

The body is the MessagePack of ``[kind, {field: value}]``. Arrays travel as raw little-endian
bytes of their fixed dtype. Whatever is not exactly that (another version, an unknown kind or
field, a missing field, a wrong type, a message that is too long, cut or damaged) is refused
with a :class:`~tandem.common.errors.WireError` that says which. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import operator
import struct
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from typing import Any, TypeVar

import msgpack
import numpy as np
import xxhash

from . import records
from .errors import WireError

SCHEMA_VERSION = 1
MAGIC = b"TDM"
HEADER = struct.Struct("<3sBQ")
MAX_MESSAGE_BYTES = 64 << 20
"""Longest message that is read: a group of 64 samples of 32k tokens is under 24 MB."""

RECORD_KINDS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        records.Version,
        records.VersionSpan,
        records.SamplingParams,
        records.Sample,
        records.Problem,
        records.ExpertTrace,
        records.Group,
        records.GroupSubmission,
        records.GroupReceipt,
    )
}

R = TypeVar("R")
_Encoder = Callable[[Any, str], Any]
_Decoder = Callable[[Any, str], Any]
"""Each takes the value and where it stands, for the error."""

_PLAIN_TYPES = (str, int, float, bool, type(None))


def _fail(where: str, what: str) -> WireError:
    return WireError(f"refused message: {where} {what}")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Checks free-form data (``extra``): plain values, lists and string-keyed maps only."""
    if depth > 8:
        raise _fail(where, "is nested deeper than 8 levels")
    if isinstance(value, _PLAIN_TYPES):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v, where, depth + 1) for v in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _fail(where, f"has a key that isn't a string: {key!r}")
        return {k: _plain(v, where, depth + 1) for k, v in value.items()}
    raise _fail(where, f"holds a {type(value).__name__}, which isn't plain data")


def _array_codec(dtype: np.dtype[Any]) -> tuple[_Encoder, _Decoder]:
    little = dtype.newbyteorder("<")
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None

    def encode(value: Any, where: str) -> bytes:
        if type(value) is np.ndarray and value.ndim == 1 and value.dtype == little:
            return value.tobytes()
        array = np.asarray(value)
        if array.ndim != 1:
            raise _fail(where, f"should be one-dimensional, and its shape is {array.shape}")
        if array.dtype != little and array.size:
            # Other widths of the same kind are taken where nothing is lost.
            if limits is None:
                fits = array.dtype.kind in "fiu"
            else:
                fits = (
                    array.dtype.kind in "iu"
                    and int(array.min()) >= limits.min
                    and int(array.max()) <= limits.max
                )
            if not fits:
                raise _fail(where, f"holds {array.dtype} values that {dtype} can't hold")
        data: bytes = array.astype(little, copy=False).tobytes()
        return data

    def decode(value: Any, where: str) -> Any:
        if not isinstance(value, bytes):
            raise _fail(where, f"should be the bytes of {dtype}, not {type(value).__name__}")
        try:
            return np.frombuffer(value, dtype=little)
        except ValueError:
            raise _fail(
                where, f"has {len(value)} bytes, not a multiple of {dtype.itemsize}"
            ) from None

    return encode, decode


def _scalar_codec(kind: type) -> tuple[_Encoder, _Decoder]:
    """str, int, bool or float; encoding takes NumPy's scalars as well."""
    accepted: dict[type, tuple[type, ...]] = {
        str: (str,),
        bool: (bool, np.bool_),
        int: (int, np.integer),
        float: (float, int, np.floating, np.integer),
    }
    allowed = accepted[kind]
    takes_ints = kind is float

    def encode(value: Any, where: str) -> Any:
        if type(value) is kind:
            return value
        if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
            raise _fail(where, f"should be {kind.__name__}, not {type(value).__name__}")
        return kind(value)

    def decode(value: Any, where: str) -> Any:
        if type(value) is kind:
            return value
        if takes_ints and type(value) is int:
            return float(value)
        expected = "a number" if takes_ints else kind.__name__
        raise _fail(where, f"should be {expected}, not {type(value).__name__}")

    return encode, decode


def _codec(annotation: Any) -> tuple[_Encoder, _Decoder]:
    """Encoder and decoder for one annotated type."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        if len(inner) != 1 or len(inner) == len(args):
            raise TypeError(f"only `X | None` unions can be carried, not {annotation}")
        encode, decode = _codec(inner[0])
        return (
            lambda value, where: None if value is None else encode(value, where),
            lambda value, where: None if value is None else decode(value, where),
        )
    if origin is np.ndarray:
        return _array_codec(np.dtype(typing.get_args(args[1])[0]))
    if origin is tuple:
        encode, decode = _codec(args[0])

        def decode_tuple(value: Any, where: str) -> tuple[Any, ...]:
            if not isinstance(value, list):
                raise _fail(where, f"should be a list, not {type(value).__name__}")
            return tuple([decode(item, where) for item in value])

        return (lambda value, where: [encode(item, where) for item in value]), decode_tuple
    if origin is not None and issubclass(origin, Mapping):
        if args[1] is Any:

            def decode_extra(value: Any, where: str) -> Any:
                if not isinstance(value, dict):
                    raise _fail(where, f"should be a map, not {type(value).__name__}")
                return _plain(value, where)

            return _plain, decode_extra
        encode, decode = _codec(args[1])

        def encode_map(value: Any, where: str) -> dict[str, Any]:
            for key in value:
                if not isinstance(key, str):
                    raise _fail(where, f"has a key that isn't a string: {key!r}")
            return {k: encode(v, where) for k, v in value.items()}

        def decode_map(value: Any, where: str) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise _fail(where, f"should be a map, not {type(value).__name__}")
            for key in value:
                if not isinstance(key, str):
                    raise _fail(where, f"has a key that isn't a string: {key!r}")
            return {k: decode(v, where) for k, v in value.items()}

        return encode_map, decode_map
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        kind = int if issubclass(annotation, IntEnum) else str
        members = {kind(member.value): member for member in annotation}

        def encode_enum(value: Any, where: str) -> Any:
            if type(value) is annotation:
                return value.value
            try:
                return annotation(value).value
            except ValueError:
                raise _fail(where, f"is {value!r}, not one of {list(members)}") from None

        def decode_enum(value: Any, where: str) -> Any:
            member = members.get(value) if type(value) is kind else None
            if member is None:
                raise _fail(where, f"is {value!r}, not one of {list(members)}")
            return member

        return encode_enum, decode_enum
    if dataclasses.is_dataclass(annotation):
        return _record_codec(annotation)
    if annotation in (int, str, bool, float):
        return _scalar_codec(annotation)
    raise TypeError(f"{annotation} can't be carried on the wire")


_RECORD_CODECS: dict[type, tuple[_Encoder, _Decoder]] = {}


def _record_codec(cls: Any) -> tuple[_Encoder, _Decoder]:
    known = _RECORD_CODECS.get(cls)
    if known is not None:
        return known
    hints = typing.get_type_hints(cls)
    name_of = cls.__name__
    names = tuple(f.name for f in dataclasses.fields(cls))
    codecs = {name: _codec(hints[name]) for name in names}
    expected = codecs.keys()
    get_all = operator.attrgetter(*names)
    single = len(names) == 1
    # Scalars of the very type that is declared need no call: most fields of most records.
    scalars = [(n, hints[n], *codecs[n], f"{name_of}.{n}") for n in names if hints[n] in _SCALARS]
    others = [(n, *codecs[n], f"{name_of}.{n}") for n in names if hints[n] not in _SCALARS]

    def encode(value: Any, where: str) -> dict[str, Any]:
        if type(value) is not cls:
            raise _fail(where, f"should be a {name_of}, not {type(value).__name__}")
        values = get_all(value)
        fields = {names[0]: values} if single else dict(zip(names, values, strict=True))
        for name, kind, enc, _, place in scalars:
            if type(fields[name]) is not kind:
                fields[name] = enc(fields[name], place)
        for name, enc, _, place in others:
            fields[name] = enc(fields[name], place)
        return fields

    def decode(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _fail(where, f"should be a {name_of}, not {type(value).__name__}")
        if value.keys() != expected:
            unknown = sorted(str(k) for k in value.keys() - expected)
            if unknown:
                raise _fail(where, f"has unknown fields {unknown[:5]}")
            missing = sorted(expected - value.keys())
            raise _fail(where, f"lacks the fields {missing[:5]}")
        for name, kind, _, dec, place in scalars:
            if type(value[name]) is not kind:
                value[name] = dec(value[name], place)
        for name, _, dec, place in others:
            value[name] = dec(value[name], place)
        try:
            return cls(**value)
        except ValueError as error:
            raise _fail(where, str(error)) from None

    _RECORD_CODECS[cls] = (encode, decode)
    return encode, decode


_SCALARS = (str, int, float, bool)


def encode(record: Any) -> bytes:
    """Encodes one record of :data:`RECORD_KINDS`.

    Raises:
        WireError: it isn't a record, or is longer than ``MAX_MESSAGE_BYTES``.
    """
    cls = type(record)
    if RECORD_KINDS.get(cls.__name__) is not cls:
        raise WireError(f"{cls.__name__} is not a record that travels")
    fields = _record_codec(cls)[0](record, cls.__name__)
    try:
        body = msgpack.packb([cls.__name__, fields], use_bin_type=True)
    except (OverflowError, ValueError) as error:  # an int over 64 bits, an unpaired surrogate
        raise WireError(f"a {cls.__name__} can't travel: {error}") from None
    if len(body) + HEADER.size > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {cls.__name__} of {len(body):,} bytes is over the limit of "
            f"{MAX_MESSAGE_BYTES:,}: send fewer or shorter samples a group"
        )
    return HEADER.pack(MAGIC, SCHEMA_VERSION, xxhash.xxh3_64_intdigest(body)) + body


def decode(data: bytes | memoryview, expected: type[R]) -> R:
    """Decodes one record and checks that it is an ``expected``.

    Arrays in the result are read-only views of the message's bytes.

    Raises:
        WireError: the message is not exactly one valid record of that kind.
    """
    view = bytes(data)
    if len(view) > MAX_MESSAGE_BYTES:
        raise _fail("it", f"has {len(view):,} bytes, over the limit of {MAX_MESSAGE_BYTES:,}")
    if len(view) < HEADER.size:
        raise _fail("it", f"is truncated: {len(view)} bytes, the header alone has {HEADER.size}")
    magic, version, checksum = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise _fail("it", f"begins with {magic!r}, not {MAGIC!r}")
    if version != SCHEMA_VERSION:
        raise _fail("it", f"has schema version {version}; this side speaks {SCHEMA_VERSION}")
    body = view[HEADER.size :]
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise _fail("it", "is damaged or truncated: its checksum doesn't match")
    try:
        # Skipping makes no objects. A header that claims more items than there are ends here, not
        # in a list of that length.
        unpacker = msgpack.Unpacker(None, max_buffer_size=MAX_MESSAGE_BYTES)
        unpacker.feed(body)
        unpacker.skip()
        content = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (
        ValueError,
        TypeError,
        msgpack.exceptions.UnpackException,
        RecursionError,
        MemoryError,
        OverflowError,
    ) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise _fail("its body", f"isn't valid MessagePack: {why}") from None
    if not (isinstance(content, list) and len(content) == 2 and isinstance(content[0], str)):
        raise _fail("its body", "isn't [kind, fields]")
    kind, fields = content
    if kind not in RECORD_KINDS:
        raise _fail("its kind", f"is unknown: {kind[:40]!r}")
    if kind != expected.__name__:
        raise _fail("its kind", f"is {kind}, not the expected {expected.__name__}")
    record: R = _record_codec(expected)[1](fields, kind)
    return record


def register(cls: type[R]) -> type[R]:
    """Adds a record kind defined elsewhere in ``common`` (a class decorator).

    Raises:
        ValueError: the name is taken by another class.
    """
    if RECORD_KINDS.setdefault(cls.__name__, cls) is not cls:
        raise ValueError(f"{cls.__name__} is already the name of another record")
    return cls
