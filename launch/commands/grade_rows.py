"""Rows of ``tandem grade``: what they must hold, how they become grade items, and what is written for them.

A row is a JSON object on its own line: ``id``, ``completion`` and, if the reward compares answers,
``gold``. ``prompt``, ``data_source``, ``finish_reason``, ``completion_ids``, ``group`` and ``extra``
are optional. Any other key is a column for the user's own functions, as is any key of ``extra``.
Rows of one ``group`` must follow one another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...common.errors import DataError
from ...common.records import PROMPT_MESSAGES, FinishReason
from ...reward.grading import Grade, GradeItem

ADDED = ("verdict", "reward", "components", "extracted", "seconds", "grader", "reward_digest")
"""Keys that grading adds to a row."""
OWN_KEYS = frozenset(
    (
        *("id", "completion", "gold", "prompt", "data_source", "finish_reason"),
        *("completion_ids", "group", "extra", *ADDED),
    )
)
"""Keys that aren't columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the input."""

    line: int
    """The line's number, from 1."""
    raw: Mapping[str, Any]
    """The row as it was read."""
    item: GradeItem
    """The part of the row that is graded."""
    has_gold: bool
    """Whether it has a gold answer, or tests."""


class Reader:
    """Reads rows; its errors say which line is wrong, and how.

    Args:
        name: name of the input, for errors.
        needs_gold: whether the reward compares with a gold answer.
        has_tests: whether a row's columns hold tests, which stand in for a gold answer.
        opener: how prompts end, for rows that don't say theirs.
    """

    def __init__(
        self,
        name: str,
        *,
        needs_gold: bool,
        has_tests: Callable[[Mapping[str, Any]], bool],
        opener: str = "",
    ) -> None:
        self._name = name
        self._needs_gold = needs_gold
        self._has_tests = has_tests
        self._opener = opener
        self._groups: set[str] = set()
        self._group = ""

    def rows(self, lines: Iterable[bytes]) -> Iterator[Row]:
        """Yields the rows of these lines, skipping empty lines.

        Raises:
            DataError: a line isn't a row, or lacks a key.
        """
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield self._row(number, line)

    def _row(self, number: int, line: bytes) -> Row:
        where = f"{self._name} line {number}"
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} isn't JSON: {error}") from None
        if not isinstance(raw, dict):
            raise DataError(f"{where} isn't a JSON object but {type(raw).__name__}")
        for key in ("id", "completion"):
            if raw.get(key) is None:
                there = ", ".join(map(str, raw)) or "nothing"
                raise DataError(f"{where} has no {key!r} (it has {there})")
        extra = raw.get("extra") or {}
        if not isinstance(extra, dict):
            raise DataError(f"{where}: extra is {type(extra).__name__}, not an object")
        columns = {k: v for k, v in raw.items() if k not in OWN_KEYS} | extra
        if isinstance(raw.get("prompt"), list):
            columns[PROMPT_MESSAGES] = raw["prompt"]
        gold = raw.get("gold")
        has_gold = gold is not None or self._has_tests(columns)
        if not has_gold and self._needs_gold:
            raise DataError(
                f"{where} has no 'gold', and the reward asks for an answer: add it, or name "
                f"components that need none with --reward"
            )
        item = GradeItem(
            text=_text(where, "completion", raw["completion"]),
            gold="" if gold is None else _text(where, "gold", gold),
            data_source=str(raw.get("data_source") or ""),
            finish_reason=_finish_reason(where, raw.get("finish_reason")),
            prompt_text=_text(where, "prompt", raw.get("prompt") or self._opener),
            tokens=_tokens(where, raw.get("completion_ids")),
            extra=columns,
            group=self._in_group(where, raw.get("group")),
        )
        return Row(line=number, raw=raw, item=item, has_gold=has_gold)

    def _in_group(self, where: str, group: object) -> str:
        name = "" if group is None else str(group)
        if name != self._group:
            if name and name in self._groups:
                raise DataError(f"{where}: group {name!r} comes again: sort the rows by group")
            self._groups.add(name)
            self._group = name
        return name


def _text(where: str, key: str, value: object) -> str:
    """A text, a number as text, or the content of the last message of a conversation."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: {key} is {type(value).__name__}, not text")
    return str(value)


def _finish_reason(where: str, value: Any) -> FinishReason:
    try:
        return FinishReason.STOP if value is None else FinishReason(value)
    except ValueError:
        known = ", ".join(reason.value for reason in FinishReason)
        raise DataError(f"{where}: finish_reason={value!r} isn't one of {known}") from None


def _tokens(where: str, value: object) -> Any:
    if value is None:
        return None
    try:
        return np.array(value, dtype=np.int32).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{where}: completion_ids isn't a list of token ids") from None


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Groups the rows that are graded together: those of one group; any other row alone."""
    batch: list[Row] = []
    for row in rows:
        if batch and (not row.item.group or row.item.group != batch[-1].item.group):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def graded(row: Row, grade: Grade, grader: str, digest: str) -> dict[str, Any]:
    """A row with its results; ``verdict`` is null if the row has no gold answer."""
    return {
        **row.raw,
        "verdict": grade.verdict.value if row.has_gold else None,
        "reward": grade.reward,
        "components": grade.components,
        "extracted": grade.extracted,
        "seconds": round(grade.seconds, 6),
        "grader": grader,
        "reward_digest": digest,
    }
