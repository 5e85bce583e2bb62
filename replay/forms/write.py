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
from .row import Content


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
        self._kinds: dict[str, set[str]] = {}

    def add(self, content: Content) -> None:
        """Writes a row.

        Raises:
            RowError: the form can't hold it.
        """
        assert self.form.write is not None
        columns = self.form.write(content)
        # Not before: whoever made the writer has to be able to discard it.
        self._file = self._file or open(self._part, "w", encoding="utf-8")  # noqa: SIM115
        for name, value in columns.items():
            self._kinds.setdefault(name, set()).add(_kind(value))
        self._file.write(json.dumps(columns, ensure_ascii=False) + "\n")
        self.rows += 1

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
        """Rows with all columns; values of columns that have several kinds of them are JSON."""
        with open(self._part, encoding="utf-8") as lines:
            while chosen := list(islice(lines, 1_000)):
                yield [
                    {
                        name: _as_kind(row.get(name), kinds - {"null"})
                        for name, kinds in self._kinds.items()
                    }
                    for row in map(json.loads, chosen)
                ]


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return type(value).__name__


def _as_kind(value: Any, kinds: set[str]) -> Any:
    if value is None or len(kinds) <= 1 or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
