"""The rows of data files as plain values: parquet, JSON lines and JSON arrays, which may be gzipped, and CSV.

What a file is follows from its first bytes, and only CSV from its name (``.csv``). It is read piece by piece, so that memory
doesn't grow with it, and a row that can't be read doesn't end the file.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...common.errors import DataError
from ...common.hub import DATA_ENDINGS as HUB_ENDINGS
from .row import RowError

DATA_ENDINGS = (*HUB_ENDINGS, ".csv")
"""Endings of the files of a folder that are read. A data set of the hub that has CSV files alone comes as parquet."""
MAX_ROW_CHARACTERS = 16 << 20
"""Longest row of JSON, and longest field of CSV, that is read."""
BATCH_ROWS = 256
PIECE_CHARACTERS = 1 << 20

Raw = Mapping[str, Any] | RowError
Choose = Callable[[Collection[str]], list[str] | None]
"""Says which of a parquet file's columns have to be read; None = all."""


def data_files(path: Path) -> list[Path]:
    """The files of a source: the file itself, or those in a folder and the folders in it, sorted by path.

    Hidden ones are left out. Data sets of the hub have their files in folders, as ``main/train-….parquet``.

    Raises:
        DataError: there are none.
    """
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.name.endswith(DATA_ENDINGS)
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
            and file.is_file()
        )
        if not files:
            raise DataError(f"{path} is a folder without data files ({', '.join(DATA_ENDINGS)})")
        return files
    if not path.exists():
        raise DataError(f"{path} is missing: give the path of a data file or of a folder of them")
    return [path]


def raw_rows(path: Path, choose: Choose = lambda present: None) -> Iterator[Raw]:
    """Rows of one file, in order; in place of a row that can't be read, the reason.

    Raises:
        DataError: the file can't be read at all, or not past some row.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(4)
            if start == b"PAR1":
                yield from _parquet(path, choose)
                return
            file.seek(0)
            if path.suffix == ".csv":
                yield from _csv(path, file)
            elif start[:2] == b"\x1f\x8b":
                with gzip.open(file) as inner:
                    yield from _json(path, inner)  # type: ignore[arg-type]
            else:
                yield from _json(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read: {error}") from None


def _parquet(path: Path, choose: Choose) -> Iterator[Raw]:
    row = 0
    try:
        # With buffers filled in advance, all that was read stays in memory until the file is closed.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=choose(names)):
                for raw in _plain(batch):
                    yield raw
                    row += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is damaged after row {row}: {error}"
            if row
            else f"{path} can't be read as parquet: {error}"
        ) from None


def _plain(batch: pa.RecordBatch) -> Iterator[Raw]:
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        # Such as bytes that aren't UTF-8: only the rows that have them are left out.
        for row in range(batch.num_rows):
            try:
                yield from batch.slice(row, 1).to_pylist()
            except (ValueError, OverflowError, pa.ArrowException) as error:
                yield RowError("row", str(error), "can't be read", "correct it or leave it out")


def _csv(path: Path, file: IO[bytes]) -> Iterator[Raw]:
    """Rows under the header that the file begins with."""
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    lines = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in lines:
            if not cells:
                continue  # An empty line.
            if header is None:
                header = cells
                twice = next(
                    (name for name in cells if name.strip() and cells.count(name) > 1), None
                )
                if twice is not None:
                    raise DataError(
                        f"{path} has two columns named {twice!r:.60}: give each its own name, or leave one out"
                    )
            elif len(cells) > len(header):
                # A comma too many puts values under the wrong columns.
                way_out = "put texts with commas into double quotes"
                yield RowError("row", cells, "has more fields than the header", way_out)
            else:
                # An empty cell is how CSV writes that there is no value, and some writers leave the last ones out.
                filled = (cell if cell.strip() else None for cell in cells)
                yield dict(itertools.zip_longest(header, filled))
    except csv.Error as error:
        raise DataError(
            f"{path} line {lines.line_num} can't be read as CSV: {_first_line(error)}"
        ) from None
    except UnicodeDecodeError as error:
        # Texts are decoded some lines ahead.
        raise DataError(
            f"{path} can't be read as CSV after line {lines.line_num}: {_first_line(error)}; store the file as UTF-8"
        ) from None


def empty_columns(path: Path) -> frozenset[str]:
    """Columns of a CSV file in which no row has a value; none of other files.

    The rows after those in which every column has had a value aren't looked at.
    """
    if path.suffix != ".csv":
        return frozenset()
    empty: set[str] | None = None
    try:
        for row in raw_rows(path):
            if isinstance(row, RowError):
                continue
            if empty is None:
                empty = set(row)
            empty -= {name for name, value in row.items() if value is not None}
            if not empty:
                break
    except DataError:
        pass  # Whoever reads the rows is told of it.
    return frozenset(empty or ())


def _json(path: Path, file: IO[bytes]) -> Iterator[Raw]:
    reader = io.BufferedReader(file, PIECE_CHARACTERS)  # type: ignore[type-var]
    start = reader.peek(PIECE_CHARACTERS).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if start == b"[":
        yield from _array(path, reader)
    elif start == b"{":
        alone = _alone(reader)
        reader.seek(0)
        yield from _lines(reader) if alone is None else [alone]
    else:
        raise DataError(
            f"{path} is neither parquet nor JSON: it begins with {reader.peek(8)[:8]!r}; convert it to "
            f"JSON lines or parquet, or name CSV with a header .csv"
            if start
            else f"{path} is empty"
        )


def _alone(file: IO[bytes]) -> Raw | None:
    """The object over several lines that a file consists of, as each problem of MATH in its own; None if it isn't one."""
    start = b""
    while not start.strip().removeprefix(codecs.BOM_UTF8):
        start = file.readline(MAX_ROW_CHARACTERS)
    if start.rstrip().endswith(b"}"):
        return None  # One object a line, or a broken line of such a file.
    content = (start + file.read(MAX_ROW_CHARACTERS)).removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode("utf-8", "surrogateescape")
        return _checked(json.loads(text), text)
    except (ValueError, RecursionError):
        return None


def _lines(file: IO[bytes]) -> Iterator[Raw]:
    first = True
    while line := file.readline(MAX_ROW_CHARACTERS + 1):
        if len(line) > MAX_ROW_CHARACTERS and not line.endswith(b"\n"):
            while (rest := file.readline(PIECE_CHARACTERS)) and not rest.endswith(b"\n"):
                pass
            yield _too_long(line[:100])
            continue
        if first:
            line, first = line.removeprefix(codecs.BOM_UTF8), False
        if line.strip():
            yield _object(line.decode("utf-8", "surrogateescape"))


def _object(text: str) -> Raw:
    try:
        return _checked(json.loads(text), text)
    except (ValueError, RecursionError) as error:
        return RowError("row", text[:100], f"isn't JSON ({_first_line(error)})", "correct it")


def _checked(value: Any, text: str) -> Raw:
    """The value, if it is an object whose texts can be encoded."""
    if not isinstance(value, dict):
        return RowError("row", value, "isn't an object", "store {column: value, …}")
    if _UNDECODED.search(text):
        return RowError("row", text[:100], "isn't UTF-8", "store the file as UTF-8")
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return RowError("row", text[:100], "has half a character (\\ud…)", "correct it")
    return value


_UNDECODED = re.compile("[\udc80-\udcff]")


def _array(path: Path, file: IO[bytes]) -> Iterator[Raw]:
    """Objects of an array, each as soon as it is complete."""
    pieces = codecs.getreader("utf-8")(file, "surrogateescape")
    decoder = json.JSONDecoder()
    buffer = pieces.read(PIECE_CHARACTERS).removeprefix("\ufeff").lstrip()
    # The buffer is only cut where a piece is added: cutting it for every row takes quadratic time.
    at, row = 1, 0
    while True:
        at = _after_space(buffer, at)
        if row and buffer.startswith(",", at):
            at = _after_space(buffer, at + 1)
        if buffer.startswith("]", at):
            _check_ends(path, buffer[at + 1 :], pieces, row)
            return
        try:
            value, end = decoder.raw_decode(buffer, at)
            # A number at the end of the buffer may go on.
            if end == len(buffer) and not isinstance(value, dict):
                raise ValueError("it isn't complete")
        except RecursionError:
            raise DataError(f"{path} row {row} is nested too deep") from None
        except ValueError as error:
            more = pieces.read(PIECE_CHARACTERS)
            if not more:
                raise DataError(
                    f"{path} is damaged after row {row}: {_first_line(error)}"
                ) from None
            if len(buffer) - at > MAX_ROW_CHARACTERS:
                raise DataError(
                    f"{path} row {row} isn't JSON, or has more than {MAX_ROW_CHARACTERS:,} "
                    f"characters: {_first_line(error)}"
                ) from None
            buffer, at = buffer[at:] + more, 0
            continue
        yield _checked(value, buffer[at:end])
        at = end
        row += 1


def _check_ends(path: Path, rest: str, pieces: codecs.StreamReader, rows: int) -> None:
    """Raises ``DataError`` if anything but space follows an array, as where files were put one behind the other."""
    while not (found := rest.strip()):
        rest = pieces.read(PIECE_CHARACTERS)
        if not rest:
            return
    raise DataError(
        f"{path} has more after its array of {rows:,} rows: {found[:20]!r}: put all rows into one array, or "
        f"store each array in a file of its own"
    )


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


_SPACE = re.compile(r"\s*")


def _too_long(start: bytes) -> RowError:
    return RowError(
        "row",
        start.decode("utf-8", "replace"),
        f"has more than {MAX_ROW_CHARACTERS:,} bytes",
        "leave it out",
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:80] or type(error).__name__
