"""Reads the new records of files of JSON lines while others write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.parts import parts, whole_end
from .history import parsed


class MetricsTail:
    """Reads the records that are new in files that may also be cut back and replaced.

    Args:
        path: the first part of the record, see :mod:`tandem.common.parts`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path
        self._offset = 0
        self._inode = -1

    def read(self) -> list[dict[str, Any]]:
        """Returns :meth:`records` as a list."""
        return list(self.records())

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields the whole lines since the last call, or all lines again if a file was replaced."""
        there = parts(self._path)
        if not self._is_where_it_was():
            self._part, self._inode = self._path, -1
        for part in there[there.index(self._part) if self._part in there else 0 :]:
            try:
                file = open(part, "rb")  # noqa: SIM115
            except FileNotFoundError:
                return  # A learner has just cut it off.
            with file:
                inode = os.fstat(file.fileno()).st_ino
                if (part, inode) != (self._part, self._inode):
                    self._part, self._inode, self._offset = part, inode, 0
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    # A line that a crash cut in two is left out; the learner repeats that step.
                    yield from parsed([line])

    def was_cut(self) -> bool:
        """Whether a file that was read has been cut back or replaced since, so that all lines come again."""
        return self._inode != -1 and not self._is_where_it_was()

    def skip(self) -> None:
        """Skips everything that is there."""
        there = parts(self._path)
        self._part, self._inode = self._path, -1
        if there:
            self._part = there[-1]
            self._offset, self._inode = whole_end(self._part), self._part.stat().st_ino

    def _is_where_it_was(self) -> bool:
        try:
            status = self._part.stat()
        except FileNotFoundError:
            return False
        return status.st_ino == self._inode and status.st_size >= self._offset
