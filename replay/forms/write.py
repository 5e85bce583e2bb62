"""Writes rows in a form of one's choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from ...common.errors import ConfigError, DataError
from . import FORMS, countdown, form_of, named_form
from .form import Form
from .row import HISTORY, SYSTEM, Content, RowError

ELEMENT = "[]"
"""Stands for the elements of a list in the path of a value."""
LONG = "long"
"""Kind of whole numbers that have no 64 bits, and are always text."""
ALIKE = ({"whole", "wide"}, {"whole", "float"})
"""Kinds that a column of parquet may hold as they are; no column has both fractions and whole numbers beyond 53 bits."""


class RowWriter:
    """Writes rows in one form: as parquet, or as JSON lines if the file's name ends so.

    Args:
        path: the file, which is there once :meth:`finish` has been called.
        form: name of the form.

    Raises:
        ConfigError: there is no such form, or it can only be read.
    """

    def __init__(self, path: str, form: str) -> None:
        self.path = Path(path).expanduser()
        self.form = named_form(form)
        if self.form.write is None:
            raise ConfigError(f"{form} can't be written: name a built-in form")
        self.rows = 0
        """Number of rows written."""
        # The columns' types are known once all rows are.
        self._part = self.path.with_name(f".{self.path.name}.part")
        self._made = self.path.with_name(f".{self.path.name}.made")
        self._file: TextIO | None = None
        taken = {n for form in FORMS for n in (*chain(*form.columns), *form.also)}
        taken |= {SYSTEM, HISTORY}
        of_extra = self.form.of_extra
        # Rows of every form name their environment in one column.
        self._taken = taken - {*of_extra, "environment"} if of_extra is not None else set()
        """Columns by which forms are known, or in which one looks, and which a row's other columns can't be."""
        self._first: dict[str, Any] = {}
        self._names: dict[str, None] = {}
        """The columns of all rows."""
        self._kinds: dict[tuple[str, ...], set[str]] = {}
        """The kinds of values of each column, and of each key of the structs and of the elements of the lists in it."""

    def add(self, content: Content) -> None:
        """Writes a row.

        Raises:
            RowError: the form can't hold it, or what it holds would teach something else.
        """
        columns = self._row(content)
        self._first = self._first or columns
        self._names |= dict.fromkeys(columns)
        # Not before: whoever made the writer has to be able to discard it.
        self._file = self._file or open(self._part, "w", encoding="utf-8")  # noqa: SIM115
        for name, value in columns.items():
            self._note((name,), value)
        self._file.write(json.dumps(columns, ensure_ascii=False) + "\n")
        self.rows += 1

    def _row(self, content: Content) -> dict[str, Any]:
        """A row that is known by its columns in the file, and reads as the content."""
        assert self.form.write is not None
        # In every row alike, so that a column of the file means one thing; but a reward finds what it needs by its names.
        for taken in (self._taken - set(countdown.MADE), self._taken):
            extra = {
                f"extra_{name}" if name in taken else name: value
                for name, value in content.extra.items()
            }
            columns = self.form.write(replace(content, extra=extra))
            found = self._read_back(columns, content)
            if found is not None:
                break
        else:
            self.form.read(columns)  # Its own error says more.
            what = f"would be read as another one than it is, written as {self.form.name}"
            raise RowError("row", columns, what, "write it in another form")
        # A question alone may do without the verdict on its response.
        if found.target is not None and content.label is False and found.label is not False:
            what = (
                f"says that the response is a wrong one, which the form {self.form.name} can't hold"
            )
            raise RowError("label", False, what, "write the rows as labelled or conversation")
        return columns

    def _read_back(self, columns: dict[str, Any], content: Content) -> Content | None:
        """What a row reads as, in the form that its columns show; None if it isn't the content."""
        try:
            known = self._form_of(columns)
            found = self.form.read(columns)
            same = known is self.form or _said(known.read(columns)) == _said(found)
        except DataError:
            return None
        return found if same and self._is_of(found, content) else None

    def _is_of(self, found: Content, content: Content) -> bool:
        """Whether a row that is read again says nothing that it didn't say. Not every form holds all."""
        prompt, gold, target, *judged = _said(found)
        asked, known, answer, *verdicts = _said(content)
        if prompt != asked or gold not in ("", known):
            return False
        # Only GSM8K's answers are written otherwise: with the gold answer in their last line.
        if target not in (None, answer) and (answer is None or self.form.name != "gsm8k"):
            return False
        return all(now in (None, then) for now, then in zip(judged, verdicts, strict=True))

    def _form_of(self, columns: dict[str, Any]) -> Form:
        """The form of the file with this row, in which rows have one another's columns and any value may show a form."""
        names = self._names | dict.fromkeys(columns)
        return form_of(self.path, names | (self._first or columns), names | columns)

    def finish(self) -> None:
        """Puts the file in its place.

        Raises:
            DataError: it would have no rows.
        """
        if self._file is None:
            raise DataError(f"no row can be written as {self.form.name}: {self.path} isn't made")
        self._file.close()
        if self.path.suffix not in (".jsonl", ".ndjson"):
            self._convert()
        self._part.replace(self.path)

    def discard(self) -> None:
        """Removes what was written, unless it is finished."""
        if self._file is not None:
            self._file.close()
        self._part.unlink(missing_ok=True)
        self._made.unlink(missing_ok=True)

    def _convert(self) -> None:
        schema = pa.schema([])
        for rows in self._batches():
            schema = pa.unify_schemas(
                [schema, pa.Table.from_pylist(rows).schema], promote_options="permissive"
            )
        with pq.ParquetWriter(self._made, schema) as writer:
            for rows in self._batches():
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        self._made.replace(self._part)

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        """Rows with all columns; where values of a column, of a key in it, or elements of its lists are of several
        kinds, they are JSON."""
        with open(self._part, encoding="utf-8") as lines:
            while chosen := list(islice(lines, 1_000)):
                yield [
                    {name: self._of_one_kind((name,), row.get(name)) for name in self._names}
                    for row in map(json.loads, chosen)
                ]

    def _note(self, path: tuple[str, ...], value: Any) -> None:
        self._kinds.setdefault(path, set()).add(_kind(value))
        if isinstance(value, dict):
            for key, inner in value.items():
                self._note((*path, str(key)), inner)
        elif isinstance(value, list):
            for inner in value:
                self._note((*path, ELEMENT), inner)

    def _of_one_kind(self, path: tuple[str, ...], value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if value == {}:
            return None  # Parquet has no struct without a key.
        kinds = self._kinds[path] - {"null"}
        alike = len(kinds) == 1 or any(kinds <= some for some in ALIKE)
        if not alike or LONG in kinds:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            return {key: self._of_one_kind((*path, key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._of_one_kind((*path, ELEMENT), inner) for inner in value]
        return value


def _said(content: Content) -> tuple[Any, ...]:
    """What a row is used for: whom it asks what, and what is known of the answer."""
    # Some forms begin or end texts in lines of their own.
    prompt = tuple((message.role, message.content.split()) for message in content.prompt)
    target, rejected = (
        None if text is None else text.strip() for text in (content.target, content.rejected)
    )
    return prompt, content.gold.strip(), target, content.label, rejected


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None or value == {}:
        return "boolean" if isinstance(value, bool) else "null"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return LONG
    if isinstance(value, int):
        return "whole" if abs(value) <= 1 << 53 else "wide"
    return type(value).__name__
