"""Declares the data in Redis and its scripts' answers, and checks them before anybody relies on them.

Every reader raises a :class:`~tandem.common.errors.StoreError` that names what is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from msgspec.structs import replace

from ..common.errors import DataError, StoreError
from ..common.plain import Count, Record, damaged, read_object, read_record
from ..common.records import CommitResult
from .ledger_records import WAY_OUT, LedgerSettings, Receipt, Row, Waiting
from .rules.order import Order

FINAL = re.compile(rb"([TDR]):(\d{1,15}):\d{1,15}(?::([a-z_]+))?")
"""The place of a group that is no longer live."""
RESULTS = {result.value: result for result in CommitResult}


class Created(Record, frozen=True, kw_only=True):
    """The answer of ``create``."""

    created: bool
    differ: dict[str, str]
    """Frozen settings that have other values in the ledger, with these values; empty if unset."""


class Leased(Record, frozen=True, array_like=True):
    """One lease in the answer of ``lease``."""

    serial: Count
    attempt: Count
    deadline_ms: Count


class Leases(Record, frozen=True, kw_only=True):
    """The answer of ``lease``."""

    leases: tuple[Leased, ...]
    wait: str
    state: str
    journalled: int
    now: int
    lease_ms: int


class Committed(Record, frozen=True, kw_only=True):
    """The answer of ``commit``."""

    words: tuple[str, ...]
    """Of each group: what became of it, and why after a space."""


class Taken(Record, frozen=True, kw_only=True):
    """The answer of ``take`` if there is a row."""

    row: Row
    quarantined: str


class NotTaken(Record, frozen=True, kw_only=True):
    """The answer of ``take`` if there is no row yet."""

    waiting: Waiting


class WaitedFor(Waiting, frozen=True, kw_only=True):
    """The answer of ``waiting``."""

    journalled: int
    graded: int
    leased: int
    returned: int


class PutBack(Record, frozen=True, kw_only=True):
    """The answer of ``retry``: serials that are admitted again, or why no row will take them."""

    back: tuple[int, ...] | None = None
    over: str | None = None

    def __post_init__(self) -> None:
        if (self.back is None) == (self.over is None):
            raise ValueError("it has one of back and over")


def read_created(raw: bytes) -> Created:
    return read_record(Created, raw, "the answer to creating the ledger", StoreError, WAY_OUT)


def read_leases(raw: bytes) -> Leases:
    what = "the answer to a lease"
    return read_record(Leases, _with_list(raw, "leases", what), what, StoreError, WAY_OUT)


def read_committed(raw: bytes, count: int) -> list[Receipt | None]:
    """Reads the answer to a commit of ``count`` groups: None for a group that has to be sent again."""
    what = "the answer to a commit"
    words = read_record(Committed, raw, what, StoreError, WAY_OUT).words
    if len(words) != count:
        raise damaged(what, f"is of {len(words)} groups, not of {count}", StoreError, WAY_OUT)
    found: list[Receipt | None] = []
    for text in words:
        word, _, detail = text.partition(" ")
        if word == "resend":
            found.append(None)
        elif word in RESULTS:
            found.append(Receipt(result=RESULTS[word], detail=detail))
        else:
            raise damaged(what, f"says {text[:80]!r}", StoreError, WAY_OUT)
    return found


def read_put_back(raw: bytes, requested: Container[int]) -> PutBack:
    """Reads the answer to ``retry``; what it puts back must have been asked for."""
    what = "the answer to a retry"
    answer = read_record(PutBack, _with_list(raw, "back", what), what, StoreError, WAY_OUT)
    if not all(serial in requested for serial in answer.back or ()):
        raise damaged(what, f"has back={str(answer.back)[:80]}", StoreError, WAY_OUT)
    return answer


def _with_list(raw: bytes, name: str, what: str) -> dict[str, Any]:
    """Reads an object whose field ``name`` is a list; Lua writes an empty list as an empty object."""
    content = read_object(raw, what, StoreError, WAY_OUT)
    return {**content, name: []} if content.get(name) == {} else content


def read_take(raw: bytes) -> Row | Waiting:
    what = "the answer to a take"
    content = read_object(raw, what, StoreError, WAY_OUT)
    if "row" in content:
        taken = read_record(Taken, content, what, StoreError, WAY_OUT)
        return replace(taken.row, quarantined=taken.quarantined)
    if "ended" in content:
        return Waiting(group_id="", state="", worker="", reason="run ended", ended=True)
    return read_record(NotTaken, content, what, StoreError, WAY_OUT).waiting


def read_waiting(raw: bytes) -> str:
    """The answer to ``waiting`` as one line."""
    what = "the answer to who is waited for"
    answer = read_record(WaitedFor, raw, what, StoreError, WAY_OUT)
    return (
        f"row {answer.journalled + 1} is {answer} (graded {answer.graded}, leased {answer.leased}, "
        f"returned {answer.returned})"
    )


def read_settings(stored: Mapping[bytes, bytes]) -> tuple[LedgerSettings, Order]:
    """The settings in Redis, and the order of problems that follows from them."""
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
    match = FINAL.fullmatch(raw)
    if match is None or (match[1] == b"R") != bool(match[3]):
        raise damaged("a group's place in Redis", f"is {raw[:40]!r}", StoreError, WAY_OUT)
    step = match[2].decode()
    if match[3]:
        return f"rejected({match[3].decode()}, {step})"
    return f"taken({step})" if match[1] == b"T" else f"trained({step})"


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
    """Decodes UTF-8 text."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise damaged(what, f"isn't UTF-8: {error}", StoreError, WAY_OUT) from None
