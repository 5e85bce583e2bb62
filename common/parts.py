"""A record of a run in several files: ``metrics.jsonl``, ``metrics-0002.jsonl``, …

What grows with every step is cut into parts, so that no reader and no repair has to go through all
of a long run: a part that is full is never written to again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .telemetry import JsonLines, read_json_lines

PART_BYTES = 16 << 20
"""A part that has reached so much is left, and the next one begun."""


def parts(path: Path) -> list[Path]:
    """The files of a record that are there, oldest first.

    Args:
        path: The first one, ``metrics.jsonl``.
    """
    found = [one for one in path.parent.glob(f"{path.stem}-*{path.suffix}") if number_of(path, one)]
    found.sort(key=lambda one: number_of(path, one))
    return ([path] if path.exists() else []) + found


def part_of(path: Path, number: int) -> Path:
    """The file with this number; the first one has the record's own name."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number:04d}{path.suffix}")


def number_of(path: Path, part: Path) -> int:
    """A part's number; 0 for a file that is none."""
    if part.name == path.name:
        return 1
    match = re.fullmatch(r"-([0-9]{4,18})", part.name[len(path.stem) : -len(path.suffix)])
    return int(match[1]) if match and part.name == part_of(path, int(match[1])).name else 0


def is_part(path: Path, name: str) -> bool:
    """Whether an entry of the folder belongs to a record."""
    return number_of(path, path.with_name(name)) > 0


class PartedLines:
    """Appends records to the newest part, as :class:`JsonLines`, and begins the next in time."""

    def __init__(self, path: Path) -> None:
        self._first = path
        self._path = (parts(path) or [path])[-1]
        self._lines = JsonLines(self._path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record."""
        if self._path.stat().st_size >= PART_BYTES:
            self._lines.close()
            self._path = part_of(self._first, number_of(self._first, self._path) + 1)
            self._lines = JsonLines(self._path)
        self._lines.write(record)

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def read_parts(path: Path, tell: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
    """Records of all parts, as :func:`read_json_lines`."""
    for part in parts(path):
        yield from read_json_lines(part, tell)


def whole_end(path: Path) -> int:
    """Bytes of a file's whole lines."""
    end = os.path.getsize(path)
    with open(path, "rb") as file:
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
