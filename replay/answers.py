"""What Redis holds and its scripts answer: declared, and read before anybody relies on it.

Every reader raises a :class:`~tandem.common.errors.StoreError` that names what is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from msgspec.structs import replace

from ..common.errors import DataError, StoreError
from ..common.plain import Count, Record, damaged, read_object, read_record
from .ledger_records import WAY_OUT, LedgerSettings, Row, Waiting
from .order import Order

FINAL = re.compile(rb"([TDR]):(\d{1,15}):\d{1,15}(?::([a-z_]+))?")
"""The place of a group that is no longer live."""


class Created(Record, frozen=True, kw_only=True):
    """Of ``create``."""

    created: bool
    differ: dict[str, str]
    """Frozen settings that the ledger has with other values, and these; empty for an unset one."""


class Leased(Record, frozen=True, array_like=True):
    """One lease of the answer to ``lease``."""

    serial: Count
    attempt: Count
    deadline_ms: Count


class Leases(Record, frozen=True, kw_only=True):
    """Of ``lease``."""

    leases: tuple[Leased, ...]
    wait: str
    state: str
    journalled: int
    now: int
    lease_ms: int


class Taken(Record, frozen=True, kw_only=True):
    """Of ``take``, where there is a row."""

    row: Row
    quarantined: str


class NotTaken(Record, frozen=True, kw_only=True):
    """Of ``take``, where there is none yet."""

    waiting: Waiting


class WaitedFor(Waiting, frozen=True, kw_only=True):
    """Of ``waiting``."""

    journalled: int
    graded: int
    leased: int
    returned: int


class PutBack(Record, frozen=True, kw_only=True):
    """Of ``retry``: serials that are admitted again, or why no row will take them."""

    back: tuple[int, ...] | None = None
    over: str | None = None

    def __post_init__(self) -> None:
        if (self.back is None) == (self.over is None):
            raise ValueError("it has one of back and over")


def read_created(raw: bytes) -> Created:
    """The answer to ``create``."""
    return read_record(Created, raw, "the answer to creating the ledger", StoreError, WAY_OUT)


def read_leases(raw: bytes) -> Leases:
    """The answer to ``lease``."""
    what = "the answer to a lease"
    return read_record(Leases, _with_list(raw, "leases", what), what, StoreError, WAY_OUT)


def read_put_back(raw: bytes, asked: Container[int]) -> PutBack:
    """The answer to ``retry``; what it puts back must have been asked for."""
    what = "the answer to a retry"
    found = read_record(PutBack, _with_list(raw, "back", what), what, StoreError, WAY_OUT)
    if not all(serial in asked for serial in found.back or ()):
        raise damaged(what, f"has back={str(found.back)[:80]}", StoreError, WAY_OUT)
    return found


def _with_list(raw: bytes, name: str, what: str) -> dict[str, Any]:
    """An empty list of Lua is an empty object of JSON."""
    content = read_object(raw, what, StoreError, WAY_OUT)
    return {**content, name: []} if content.get(name) == {} else content


def read_take(raw: bytes) -> Row | Waiting:
    """The answer to ``take``."""
    what = "the answer to a take"
    content = read_object(raw, what, StoreError, WAY_OUT)
    if "row" in content:
        taken = read_record(Taken, content, what, StoreError, WAY_OUT)
        return replace(taken.row, quarantined=taken.quarantined)
    if "ended" in content:
        return Waiting(group_id="", state="", worker="", reason="run ended", ended=True)
    return read_record(NotTaken, content, what, StoreError, WAY_OUT).waiting


def read_waiting(raw: bytes) -> str:
    """One line of the answer to ``waiting``."""
    what = "the answer to who is waited for"
    found = read_record(WaitedFor, raw, what, StoreError, WAY_OUT)
    return (
        f"row {found.journalled + 1} is {found} (graded {found.graded}, leased {found.leased}, "
        f"returned {found.returned})"
    )


def read_settings(stored: Mapping[bytes, bytes]) -> tuple[LedgerSettings, Order]:
    """The settings in Redis, and the order of problems that they give."""
    try:
        fields = {name.decode(): value.decode() for name, value in stored.items()}
        settings = LedgerSettings.from_fields(fields)
        return settings, settings.order()
    except KeyError as error:
        why = f"lacks the setting {error}"
    except (ValueError, TypeError, OverflowError, RecursionError, DataError) as error:
        why = f"has a setting that can't be read: {str(error)[:120]}"
    raise damaged("the ledger in Redis", why, StoreError, WAY_OUT)


def read_final(raw: bytes) -> str:
    """The state of a group that is no longer live."""
    found = FINAL.fullmatch(raw)
    if found is None or (found[1] == b"R") != bool(found[3]):
        raise damaged("a group's place in Redis", f"is {raw[:40]!r}", StoreError, WAY_OUT)
    step = found[2].decode()
    if found[3]:
        return f"rejected({found[3].decode()}, {step})"
    return f"taken({step})" if found[1] == b"T" else f"trained({step})"


def read_dead_letters(
    dead: Mapping[bytes, bytes], quarantined: Mapping[bytes, bytes]
) -> list[dict[str, Any]]:
    """Groups that were given up, by position, and quarantined rows, by step."""
    for number in (*dead, *quarantined):
        if not number.isdigit() or len(number) > 15:
            raise damaged("a dead letter", f"has the number {number[:40]!r}", StoreError, WAY_OUT)
    return [
        read_object(letter, f"the dead letter {int(serial)}", StoreError, WAY_OUT)
        for serial, letter in sorted(dead.items(), key=lambda item: int(item[0]))
    ] + [
        {"step": int(step), "reason": text(reason, f"the reason of row {int(step)}")}
        for step, reason in sorted(quarantined.items(), key=lambda item: int(item[0]))
    ]


def text(raw: bytes, what: str) -> str:
    """UTF-8 text."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise damaged(what, f"isn't UTF-8: {error}", StoreError, WAY_OUT) from None
