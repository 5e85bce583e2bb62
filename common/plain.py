"""What another process wrote: read as what it should be, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
import xxhash

from .errors import TandemError

R = TypeVar("R")

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError)
"""What msgspec raises for bytes that aren't what they should be."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what travels: its annotations say what is read, and nothing else is.

    Making one checks no types. A field without a default must be there.
    """


def reason(error: Exception, name: str) -> str:
    """Which field of ``name`` is wrong, and how: ``Sample.spans[...].term: Expected `int`, …``."""
    what, _, place = str(error).rpartition(" - at ")
    where = place.replace("$", name, 1).replace("`", "") if what else name
    line = " ".join((what or place).split()) or type(error).__name__
    return f"{where[-120:]}: {line[:200]}"


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def read_json(data: bytes | str, what: str, error: type[TandemError], way_out: str = "") -> Any:
    """Any JSON value.

    Args:
        data: UTF-8.
        what: What it is, for the error: ``row 7 in Redis``.
        error: Raised where it isn't JSON.
        way_out: What to do then.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as cause:
        raise damaged(what, f"isn't JSON: {_brief(cause)}", error, way_out) from None


def read_object(
    data: bytes | str, what: str, error: type[TandemError], way_out: str = ""
) -> dict[str, Any]:
    """A JSON object; see :func:`read_json`."""
    content = read_json(data, what, error, way_out)
    if not isinstance(content, dict):
        raise damaged(what, f"is {kind_of(content)}, not an object", error, way_out)
    return content


SEAL = "xxh3"
"""Key of a digest of all else in an object."""


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """An object with a digest of its content (xxh3-64 of its canonical JSON), for :func:`unsealed`."""
    return {**content, SEAL: _digest(content)}


def unsealed(
    content: Mapping[str, Any],
    what: str,
    error: type[TandemError],
    way_out: str = "",
    *,
    always: bool = False,
) -> dict[str, Any]:
    """The content of a sealed object, which is as it was written.

    Args:
        content: The object.
        what: What it is, for the error.
        error: Raised where it isn't the one of its digest.
        way_out: What to do then.
        always: It must have a digest; without one it may be of an older version of Tandem.
    """
    found = dict(content)
    seal = found.pop(SEAL, None)
    if seal != _digest(found) and (always or seal is not None):
        raise damaged(what, "isn't the one of its digest", error, way_out)
    return found


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_record(
    cls: type[R],
    content: bytes | str | Mapping[str, Any],
    what: str,
    error: type[TandemError],
    way_out: str = "",
) -> R:
    """A dataclass of plain fields: ``int``, ``float``, ``str``, ``bool``, or one of them or None,
    and ``dict[str, …]`` of one of them.

    Every field that has no default must be there, with a value of its type; nothing else may be.
    """
    if not isinstance(content, Mapping):
        content = read_object(content, what, error, way_out)
    fields = _fields(typing.cast(Any, cls))
    for name in content:
        if name not in fields:
            raise damaged(what, f"has the unknown field {str(name)[:60]!r}", error, way_out)
    for name, (kind, optional, required) in fields.items():
        if name not in content:
            if required:
                raise damaged(what, f"lacks the field {name!r}", error, way_out)
        elif not (_fits(content[name], kind) or (optional and content[name] is None)):
            wanted = _name_of(kind) + (" or null" if optional else "")
            raise damaged(
                what, f"has {name}={_brief(repr(content[name]))}, not {wanted}", error, way_out
            )
    try:
        return cls(**content)
    except ValueError as cause:  # the record's own invariants
        raise damaged(what, f"can't be: {_brief(cause)}", error, way_out) from None


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is not dict:
        return fits(value, kind)
    of = typing.get_args(kind)[1]
    return isinstance(value, dict) and all(fits(one, of) for one in value.values())


def _name_of(kind: Any) -> str:
    if typing.get_origin(kind) is not dict:
        return _NAMES[kind]
    return f"an object in which every value is {_NAMES[typing.get_args(kind)[1]]}"


def fits(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a plain type: no number is a bool, a whole one is a float too."""
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def damaged(what: str, why: str, error: type[TandemError], way_out: str = "") -> TandemError:
    """The error for something that can't be read as what it should be."""
    return error(f"{what} is damaged: it {why}" + (f"; {way_out}" if way_out else ""))


def kind_of(value: Any) -> str:
    """What a JSON value is, for a person."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else _NAMES[type(value)]


def _brief(text: Any) -> str:
    line = " ".join(str(text).split()) or type(text).__name__
    return line if len(line) <= 120 else f"{line[:117]}…"


@cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool, bool]]:
    """Plain type, whether it may be null, and whether it must be there, of each field."""
    found = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, optional = hints[field.name], False
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
            optional = True
        of = typing.get_args(kind) if typing.get_origin(kind) is dict else (str, kind)
        if of[0] is not str or of[1] not in _NAMES:
            raise TypeError(f"{cls.__name__}.{field.name} is no plain value: {kind}")
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        found[field.name] = (kind, optional, required)
    return found
