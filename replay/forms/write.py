"""Writes rows in a form of one's choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from ...common.errors import ConfigError, DataError
from . import named_form
from .row import Content, RowError

ELEMENT = "[]"
"""Stands for the elements of a list in the path of a value."""
LONG = "long"
"""Kind of whole numbers that have no 64 bits, and are always text."""


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
        self._kinds: dict[tuple[str, ...], set[str]] = {}
        """The kinds of values of each column, and of each key of the structs and of the elements of the lists in it."""

    def add(self, content: Content) -> None:
        """Writes a row.

        Raises:
            RowError: the form can't hold it, or what it holds would teach something else.
        """
        assert self.form.write is not None
        columns = self.form.write(content)
        self._check_judgement(self.form.read(columns), content)
        # Not before: whoever made the writer has to be able to discard it.
        self._file = self._file or open(self._part, "w", encoding="utf-8")  # noqa: SIM115
        for name, value in columns.items():
            self._note((name,), value)
        self._file.write(json.dumps(columns, ensure_ascii=False) + "\n")
        self.rows += 1

    def _check_judgement(self, found: Content, content: Content) -> None:
        """Refuses a row that reads as a response without the data's verdict on it; a question alone may do without."""
        name = self.form.name
        if found.target is None:
            return
        if content.label is False and found.label is not False:
            what = f"says that the response is a wrong one, which the form {name} can't hold"
            raise RowError("label", False, what, "write the rows as labelled or conversation")
        if content.rejected is not None and found.rejected is None:
            what = f"has no place in the form {name}"
            raise RowError("rejected", content.rejected, what, "write pairs as preference")

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
        columns = [path[0] for path in self._kinds if len(path) == 1]
        with open(self._part, encoding="utf-8") as lines:
            while chosen := list(islice(lines, 1_000)):
                yield [
                    {name: self._of_one_kind((name,), row.get(name)) for name in columns}
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
        if len(kinds) > 1 or LONG in kinds:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            return {key: self._of_one_kind((*path, key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._of_one_kind((*path, ELEMENT), inner) for inner in value]
        return value


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None or value == {}:
        return "boolean" if isinstance(value, bool) else "null"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return LONG
    if isinstance(value, int | float):
        return "number"
    return type(value).__name__
