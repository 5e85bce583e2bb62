"""What a process reports about itself: its log, its metrics, and whom it waits for."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from . import disk
from .errors import DataError
from .plain import for_json, read_object
from .printable import PrintableStream, printable, raw


def start_log(role: str, level: str = "INFO") -> logging.Logger:
    """Logs to standard error, which the supervisor appends to ``logs/<process>.log``."""
    handler = logging.StreamHandler(PrintableStream(raw(sys.stderr)))
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger = logging.getLogger("tandem")
    logger.setLevel(level)
    return logger.getChild(role)


class JsonLines:
    """An append-only ``.jsonl`` file with one flushed line per record; waits while the disk is full.

    Numbers that JSON can't hold (NaN, infinity) are written as null. If a crash has cut the last line,
    it is removed first, so that the next record is on a line of its own.
    """

    def __init__(self, path: Path) -> None:
        _drop_cut_line(path)
        self._path = path
        self._file: FileIO | TextIO = open(path, "ab", buffering=0)  # noqa: SIM115

    @classmethod
    def on(cls, stream: TextIO) -> JsonLines:
        """The same for a stream that is already open, such as standard output."""
        made = cls.__new__(cls)
        made._file = stream
        return made

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record.

        Raises:
            DiskFull: there was no space for too long.
        """
        # Escapes make the file safe to show in a terminal, and also cover half surrogate pairs, which
        # have no bytes in UTF-8.
        line = printable(json.dumps(for_json(record), ensure_ascii=False))
        if isinstance(self._file, FileIO):
            disk.append(self._file, line.encode() + b"\n", self._path)
            return
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_cut_line(path: Path) -> None:
    try:
        file = open(path, "r+b")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        end = kept = file.seek(0, os.SEEK_END)
        while kept > 0:
            start = max(0, kept - 65536)
            file.seek(start)
            newline = file.read(kept - start).rfind(b"\n")
            if newline >= 0:
                kept = start + newline + 1
                break
            kept = start
        if kept == end:
            return
        file.seek(kept)
        try:
            json.loads(file.read())
        except (ValueError, RecursionError):
            file.truncate(kept)
        else:
            file.write(b"\n")  # only the end of the line was lost


def read_json_lines(
    path: Path, tell: Callable[[str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the records of a ``.jsonl`` file; a last line that a crash has cut is left out.

    Args:
        path: the file; it may be missing.
        tell: called with a sentence about every other unreadable line, which is left out.

    Raises:
        DataError: a line before the last isn't a JSON object, and there is no ``tell``.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        # Split at b"\n" alone: a text may hold other line separators (U+2028), and the cut may have
        # gone through a character.
        for number, line in enumerate(file, 1):
            whole = line.endswith(b"\n")
            try:
                record = read_object(
                    line, f"line {number} of {path}", DataError, "remove that line"
                )
            except DataError as error:
                if whole and tell is None:
                    raise
                if whole and tell is not None:
                    tell(f"left out: {error}")
                continue
            yield record


class Clock:
    """Divides a process's time into activities: when it was busy, and whom it waited for.

    >>> clock = Clock()
    >>> with clock.doing("wait/batch"):
    ...     pass
    >>> sorted(clock.take()) == ["total", "wait/batch"]
    True
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: list[tuple[str, list[float]]] = []
        self._since = time.perf_counter()

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Adds the block's wall time in seconds to an activity. Names of waits begin with ``wait/``."""
        begun = [time.perf_counter()]
        entry = (activity, begun)
        self._running.append(entry)
        try:
            yield
        finally:
            self._running = [other for other in self._running if other is not entry]
            self._add(activity, time.perf_counter() - begun[0])

    def _add(self, activity: str, spent: float) -> None:
        self._seconds[activity] = self._seconds.get(activity, 0.0) + spent

    def take(self) -> dict[str, float]:
        """Returns the seconds by activity since the last call, with ``total``.

        An activity that is still going on counts up to now.
        """
        now = time.perf_counter()
        for activity, begun in self._running:
            self._add(activity, now - begun[0])
            begun[0] = now
        taken = {**self._seconds, "total": now - self._since}
        self._seconds = {}
        self._since = now
        return taken
