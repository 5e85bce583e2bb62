"""A record of a run in several files: ``metrics.jsonl``, ``metrics-0002.jsonl``, …

Records that grow with every step are cut into parts, so that no reader and no repair has to go through
all of a long run: a full part is never written to again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .telemetry import JsonLines, read_json_lines

HELD_OUT_PAIRS = "heldout/preference_pairs"
"""In ``metrics.jsonl``, a key of the record of held-out pairs alone, which comes after the record of its step."""
PART_BYTES = 16 << 20
"""Size at which a part is full and the next one begins."""


def parts(path: Path) -> list[Path]:
    """The existing files of a record, oldest first.

    Args:
        path: the first file, such as ``metrics.jsonl``.
    """
    existing = [
        one for one in path.parent.glob(f"{path.stem}-*{path.suffix}") if number_of(path, one)
    ]
    existing.sort(key=lambda one: number_of(path, one))
    return ([path] if path.exists() else []) + existing


def part_of(path: Path, number: int) -> Path:
    """The file with this number; the first one has the record's own name."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number:04d}{path.suffix}")


def number_of(path: Path, part: Path) -> int:
    """A part's number; 0 if the file isn't a part."""
    if part.name == path.name:
        return 1
    match = re.fullmatch(r"-([0-9]{4,18})", part.name[len(path.stem) : -len(path.suffix)])
    return int(match[1]) if match and part.name == part_of(path, int(match[1])).name else 0


def is_part(path: Path, name: str) -> bool:
    """Whether a folder's entry belongs to a record."""
    return number_of(path, path.with_name(name)) > 0


class PartedLines:
    """Appends records to the newest part, like :class:`JsonLines`, and begins new parts when due."""

    def __init__(self, path: Path) -> None:
        self._first = path
        self._path = (parts(path) or [path])[-1]
        self._lines = JsonLines(self._path)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._path.stat().st_size >= PART_BYTES:
            self._lines.close()
            self._path = part_of(self._first, number_of(self._first, self._path) + 1)
            self._lines = JsonLines(self._path)
        self._lines.write(record)

    def close(self) -> None:
        self._lines.close()


def read_parts(path: Path, tell: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the records of all parts, like :func:`read_json_lines`."""
    for part in parts(path):
        yield from read_json_lines(part, tell)


def whole_end(path: Path) -> int:
    """Size in bytes of a file up to the end of its last whole line."""
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
