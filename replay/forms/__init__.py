"""Reads data files of many forms as problems and responses. Parses only: no tokenising, no grading.

Each form is one file of this folder, and one entry of :data:`FORMS`. A file's form is found by the
columns of its first row; where several forms have the same columns, by the values of its first rows, or the config names it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...common import import_path
from ...common.errors import ConfigError, DataError
from . import (
    conversation,
    countdown,
    gsm8k,
    hh,
    instructions,
    labelled,
    luffy,
    multiple_choice,
    preference,
    problem_solution,
    prompt,
    prompt_response,
    question_answer,
    task,
)
from .files import Raw, data_files, empty_columns, raw_rows
from .form import Form
from .row import Content, Message, RowError, UnwantedRow

__all__ = [
    "FORMS",
    "Content",
    "DataRow",
    "Form",
    "LeftOut",
    "Message",
    "RowError",
    "check_form",
    "data_files",
    "form_of",
    "named_form",
    "read_rows",
]

FORMS: tuple[Form, ...] = (
    luffy.FORM,
    prompt_response.FORM,
    labelled.FORM,
    problem_solution.FORM,
    question_answer.FORM,
    gsm8k.FORM,
    multiple_choice.FORM,
    conversation.FORM,
    preference.FORM,
    hh.FORM,
    countdown.FORM,
    task.FORM,
    prompt.FORM,
    instructions.FORM,
)


LOOKED_AT = 64
"""Rows of a file whose values may show its form, so that an odd first one is left out and doesn't decide for all."""


class DataRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One row that can be used, and its place."""

    number: int
    """Row number from 0, counted over all files of the source, and over rows that were left out."""
    place: str
    """File and row, for errors."""
    content: Content
    raw: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The columns that were read, as they are in the file."""


@dataclass(slots=True)
class LeftOut:
    """Rows that couldn't be used, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of rows for each reason."""
    seen: int = 0
    """Number of rows that were read, whether they can be used or not."""
    first: dict[str, str] = field(default_factory=dict)
    """For each reason the first row, with its place and value."""

    def add(self, reason: str, first: str) -> None:
        """Counts one row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, first)

    def __len__(self) -> int:
        """Number of rows."""
        return sum(self.counts.values())


def read_rows(
    path: Path,
    form: str | None = None,
    left_out: LeftOut | None = None,
    *,
    whole: bool = False,
    refuses: bool = False,
) -> Iterator[DataRow]:
    """Rows of a data file, or of the data files in a folder.

    Args:
        path: a file or a folder.
        form: name of a form, or ``package.module:function``; None = found by the columns.
        left_out: counts rows that can't be used; None = the first one raises.
        whole: whether all answers of a conversation are learned from.
        refuses: whether the first row that can't be used raises nevertheless, and only rows are counted that a form of
            the user's own leaves out.

    Raises:
        DataError: no such file, an unknown form, or one without conversations where they should be ``whole``, no rows,
            or (without ``left_out``, or where it ``refuses``) a bad row.
    """
    number = 0
    named = named_form(form) if form is not None else None
    for file in data_files(path):
        found, rows, empty = named, _raw(file, named), _unseen(file, form)
        for index in itertools.count():
            if (raw := next(rows, None)) is None:
                break
            place = f"{file} row {index}"
            if left_out is not None:
                left_out.seen = number + 1
            try:
                if isinstance(raw, RowError):
                    raise raw
                if found is None:
                    ahead = list(itertools.islice(rows, LOOKED_AT - 1))
                    found = form_of(file, *_readable([raw, *ahead], empty))
                    rows = itertools.chain(ahead, rows)
                    del ahead
                content = _reader(file, found, whole)(_without(raw, empty))
            except RowError as error:
                unwanted = isinstance(error, UnwantedRow)
                if (refuses or left_out is None) and not unwanted:
                    raise DataError(f"{place}, {error}") from None
                if left_out is not None:
                    left_out.add(error.reason, f"{place}, {error}")
            else:
                yield DataRow(number=number, place=place, content=content, raw=raw)
            number += 1
    if number == 0:
        raise DataError(f"{path} holds no rows: name a file with at least one problem")


def check_form(path: Path, form: str | None = None, *, whole: bool = False) -> None:
    """Finds the form of every file of a source by its first rows, in a moment.

    Raises:
        DataError: as :func:`read_rows` does, for what doesn't need the rest of the rows.
    """
    named = named_form(form) if form is not None else None
    is_empty = True
    for file in data_files(path):
        firsts = list(itertools.islice(_raw(file, named), LOOKED_AT))
        is_empty = is_empty and not firsts
        readable = _readable(firsts, _unseen(file, form))
        if named is not None or readable:
            _reader(file, named or form_of(file, *readable), whole)
    if is_empty:
        raise DataError(f"{path} holds no rows: name a file with at least one problem")


def _readable(rows: list[Raw], empty: frozenset[str]) -> list[Mapping[str, Any]]:
    return [_without(row, empty) for row in rows if not isinstance(row, RowError)]


def _unseen(file: Path, form: str | None) -> frozenset[str]:
    """Columns that Tandem's own forms don't see. A form of the user's own, and an environment, may ask for them."""
    return frozenset() if form is not None and ":" in form else empty_columns(file)


def _without(row: Mapping[str, Any], empty: frozenset[str]) -> Mapping[str, Any]:
    return {name: row[name] for name in row if name not in empty} if empty else row


def _reader(file: Path, form: Form, whole: bool) -> Callable[[Mapping[str, Any]], Content]:
    if not whole:
        return form.read
    if form.read_whole is None:
        able = " or ".join(one.name for one in FORMS if one.read_whole is not None)
        raise DataError(
            f"{file} has the form {form.name}, whose rows have one response each, and turns=all learns from all "
            f"answers of a conversation: leave turns out, or store the rows in the form {able}"
        )
    return form.read_whole


def _raw(file: Path, form: Form | None) -> Iterator[Raw]:
    def choose(present: Any) -> list[str] | None:
        row = dict.fromkeys(present, "")
        fits = form if form is not None else _only(_matching(row))
        return fits.reads(present) if fits is not None and fits.reads is not None else None

    return raw_rows(file, choose)


def _matching(*rows: Mapping[str, Any]) -> list[Form]:
    """The forms that fit rows with the same columns best: those that read the most of the columns."""
    matches = [max(map(form.match, rows)) for form in FORMS]
    best = max(matches)
    return [form for form, match in zip(FORMS, matches, strict=True) if best[0] and match == best]


def _only(forms: list[Form]) -> Form | None:
    return forms[0] if len(forms) == 1 else None


def form_of(file: Path, row: Mapping[str, Any], *more: Mapping[str, Any]) -> Form:
    """The form of a file with this first row.

    Args:
        file: the file, for errors.
        row: its first row, whose columns count.
        more: rows after it, whose values count as well where they show a form.

    Raises:
        DataError: none has these columns, or several have.
    """
    alike = [{name: other[name] for name in row} for other in more if other.keys() >= row.keys()]
    fits = _matching(row, *alike)
    if len(fits) == 1:
        return fits[0]
    has = f"it has {', '.join(map(str, row)) or 'no columns'}"
    if fits:
        names = " or ".join(form.name for form in fits)
        raise DataError(
            f"{file} could be of several forms ({has}): set the source's form to {names}"
        )
    known = ", ".join(form.name for form in FORMS)
    raise DataError(
        f"{file} has the columns of no known form ({has}){_nearest(row)}: rename them, or set the "
        f"source's form to one of {known}, or to a function of yours (package.module:function)"
    )


def _nearest(row: Mapping[str, Any]) -> str:
    """Which form has the row's columns but one; empty if none has."""
    for form in FORMS:
        for columns in form.columns:
            lacking = [name for name in columns if name not in row]
            if len(lacking) == 1 and len(columns) > 1:
                return f", the nearest is {form.name}, which lacks {lacking[0]}"
    return ""


def named_form(name: str, *, key: str = "form") -> Form:
    """The form with this name, or a user's own.

    Raises:
        ConfigError: there is no such form or function, or the function can't be called with a row.
    """
    if ":" in name:
        function = _imported(name)
        return Form(
            name=name,
            about="a function of yours",
            columns=(),
            read=_own(name, function, whole=False),
            read_whole=_own(name, function, whole=True),
        )
    for form in FORMS:
        if form.name == name:
            return form
    raise ConfigError(
        f"{key}={name} isn't known: use {', '.join(form.name for form in FORMS)}, or "
        f"package.module:function"
    )


def _imported(name: str) -> Callable[[Mapping[str, Any]], Any]:
    function: Any = import_path.load(name, key="form")
    if not callable(function):
        raise ConfigError(f"form={name} isn't a function: {function!r:.200}")
    import_path.check_call(function, f"form={name}", "a row", {})
    return function


def _own(
    name: str, function: Callable[[Mapping[str, Any]], Any], *, whole: bool
) -> Callable[[Mapping[str, Any]], Content]:
    def read(row: Mapping[str, Any]) -> Content:
        try:
            made = function(row)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            raise RowError(
                "row", row, f"was refused by {name}", f"{type(error).__name__}: {error}"[:200]
            ) from None
        if made is None:
            raise UnwantedRow("row", row, f"was left out by {name}", "return a mapping to keep it")
        if isinstance(made, Content):
            return msgspec.structs.replace(made, kept_whole=tuple(made.extra))
        if not isinstance(made, Mapping):
            raise RowError("row", made, f"is what {name} returned", "return a mapping or None")
        fits = _only(_matching(made))
        if fits is None:
            raise RowError(
                "row",
                dict(made),
                f"as {name} returns it has no known form",
                "return prompt and gold",
            )
        return _reader(Path(name), fits, whole)(made)

    return read
