"""Reads what another process wrote as the type that it should have, or refuses it by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash

from .errors import TandemError, WireError

R = TypeVar("R")
Count = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number from 0."""

UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, MemoryError)
"""Errors that msgspec raises for bytes of the wrong form."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of records that travel: they hold exactly the annotated fields.

    The constructor checks no types. A field without a default is required.
    """


def for_json(value: Any) -> Any:
    """A copy with None for numbers that JSON can't write, and plain numbers for NumPy's and torch's."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): for_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(inner) for inner in value]
    if hasattr(value, "item"):
        return for_json(value.item())
    return value


def reason(error: Exception, name: str) -> str:
    """Which field of ``name`` is wrong, and how: ``Sample.spans[...].term: Expected `int`, …``."""
    what, _, place = str(error).rpartition(" - at ")
    where = place.replace("$", name, 1).replace("`", "") if what else name
    line = " ".join((what or place).split()) or type(error).__name__
    return f"{where[-120:]}: {line[:200]}"


_NAMES = {
    list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def read_json(data: bytes | str, what: str, error: type[TandemError], way_out: str = "") -> Any:
    """Reads any JSON value.

    Args:
        data: UTF-8.
        what: names the data in the error, as in ``row 7 in Redis``.
        error: raised if it isn't JSON.
        way_out: what the user should do then.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise damaged(what, f"isn't JSON: {one_line(cause, 120)}", error, way_out) from None


def read_object(
    data: bytes | str, what: str, error: type[TandemError], way_out: str = ""
) -> dict[str, Any]:
    """Reads a JSON object; see :func:`read_json`."""
    content = read_json(data, what, error, way_out)
    if not isinstance(content, dict):
        raise damaged(what, f"is {_NAMES[type(content)]}, not an object", error, way_out)
    return content


SEAL = "xxh3"
"""Key of a digest of everything else in an object."""


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a digest of its content (xxh3-64 of its canonical JSON) to an object, for :func:`unsealed`."""
    return {**content, SEAL: _digest(content)}


def unsealed(
    content: Mapping[str, Any],
    what: str,
    error: type[TandemError],
    way_out: str = "",
    *,
    always: bool = False,
) -> dict[str, Any]:
    """Checks that a sealed object is as it was written, and returns its content.

    Args:
        content: the object.
        what: names the object in the error.
        error: raised if the content doesn't match its digest.
        way_out: what the user should do then.
        always: require a digest; objects without one may be from an older version of Tandem.
    """
    opened = dict(content)
    seal = opened.pop(SEAL, None)
    if seal != _digest(opened) and (always or seal is not None):
        raise damaged(what, "isn't the one of its digest", error, way_out)
    return opened


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_record(
    cls: type[R], content: Any, what: str, error: type[TandemError], way_out: str = ""
) -> R:
    """Reads a :class:`Record` from JSON, or from data that was read from JSON.

    All fields without a default must be there with values of their types, and no other fields.
    """
    if isinstance(content, bytes | str):
        content = read_object(content, what, error, way_out)
    try:
        return msgspec.convert(content, cls)
    except UNREADABLE as cause:
        raise damaged(
            what, f"can't be read: {reason(cause, cls.__name__)}", error, way_out
        ) from None


def as_json(record: Record) -> str:
    """A record as the JSON that :func:`read_record` reads.

    Figures that aren't finite stay what they are (``NaN``, ``Infinity``), which msgspec's own JSON would turn
    into null.
    """
    return json.dumps(msgspec.to_builtins(record))


def read_message(cls: Any, data: bytes, what: str) -> Any:
    """Reads MessagePack of a declared type: a :class:`Record`, a union of records, a tuple.

    Raises:
        WireError: it is anything else; the message says where.
    """
    try:
        return _decoder(cls).decode(data)
    except UNREADABLE as error:
        raise WireError(f"refused {what}: {reason(error, 'message')}") from None


@cache
def _decoder(cls: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(cls)


def fits(value: Any, kind: type) -> bool:
    """Whether a JSON value has a plain type: a number is never a bool, but an int is also a float."""
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def damaged(what: str, why: str, error: type[TandemError], way_out: str = "") -> TandemError:
    """The error for something that can't be read as what it should be."""
    return error(f"{what} is damaged: it {why}" + (f"; {way_out}" if way_out else ""))


def one_line(error: BaseException, limit: int = 200, *, kind: bool = False) -> str:
    """An error's text as one line of at most so many characters; the name of its kind if it has none.

    Args:
        error: the error.
        limit: greatest number of characters.
        kind: whether the name of its kind stands before the text.

    >>> one_line(ValueError("of\\ntwo lines"), kind=True)
    'ValueError: of two lines'
    """
    name = type(error).__name__
    line = " ".join(str(error).split()) or name
    line = line if len(line) <= limit else f"{line[: limit - 1]}…"
    return f"{name}: {line}" if kind else line
