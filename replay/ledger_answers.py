"""What the ledger's scripts answer and its keys hold, read into records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..common.errors import DataError, StoreError
from ..common.plain import damaged, read_object, read_record
from .answers import WAY_OUT, checked, settings_from, text
from .ledger_records import LedgerSettings, Row, Waiting
from .order import Order

FINAL = re.compile(rb"([TDR]):(\d{1,15}):\d{1,15}(?::([a-z_]+))?")
"""The place of a group that is no longer live."""


def read_settings(stored: Mapping[bytes, bytes]) -> tuple[LedgerSettings, Order]:
    """The settings in Redis, and the order of problems that they give.

    Raises:
        StoreError: they aren't a ledger's.
    """
    settings: LedgerSettings = settings_from(stored, LedgerSettings.from_fields)
    try:
        return settings, settings.order()
    except DataError as error:
        raise StoreError(f"the ledger in Redis is damaged: {error}; {WAY_OUT}") from None


def read_take(raw: bytes) -> Row | Waiting:
    """The answer to ``take``.

    Raises:
        StoreError: it isn't one.
    """
    what = "the answer to a take"
    answer = read_object(raw, what, StoreError, WAY_OUT)
    if "row" in answer:
        return Row.from_dict(answer["row"], checked(what, answer, quarantined=str)["quarantined"])
    if "ended" in answer:
        return Waiting(group_id="", state="", worker="", reason="run ended", ended=True)
    waiting = checked(what, answer, waiting=dict)["waiting"]
    return read_record(Waiting, waiting, what, StoreError, WAY_OUT)


def read_final(raw: bytes) -> str:
    """The state of a group that is no longer live.

    Raises:
        StoreError: it isn't one.
    """
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
    """Groups that were given up, by position, and quarantined rows, by step.

    Raises:
        StoreError: one isn't a dead letter.
    """
    for number in (*dead, *quarantined):
        if not number.isdigit() or len(number) > 15:
            raise damaged("a dead letter", f"has the number {number[:40]!r}", StoreError, WAY_OUT)
    found = [
        read_object(text, f"the dead letter {int(serial)}", StoreError, WAY_OUT)
        for serial, text in sorted(dead.items(), key=lambda item: int(item[0]))
    ]
    return found + [
        {"step": int(step), "reason": text(reason, f"the reason of row {int(step)}")}
        for step, reason in sorted(quarantined.items(), key=lambda item: int(item[0]))
    ]


def read_waiting(raw: bytes) -> str:
    """One line of the answer to ``waiting``.

    Raises:
        StoreError: it isn't one.
    """
    what = "the answer to who is waited for"
    answer = read_object(raw, what, StoreError, WAY_OUT)
    sizes = checked(what, answer, journalled=int, graded=int, leased=int, returned=int)
    rest = {name: value for name, value in answer.items() if name not in sizes}
    waiting = read_record(Waiting, rest, what, StoreError, WAY_OUT)
    return (
        f"row {sizes['journalled'] + 1} is {waiting} (graded {sizes['graded']}, leased "
        f"{sizes['leased']}, returned {sizes['returned']})"
    )
