"""Handles a full disk: whoever writes waits for space, and says so, instead of failing.

A full disk is nobody's fault and may pass, so a write that finds no space is repeated until it
succeeds, for ``launch.full_disk_seconds`` at most, or until the process is asked to end. A line is
written whole or taken back, so that nothing is lost and no half line is left.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import select
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from .errors import TandemError
from .printable import PrintableStream

log = logging.getLogger("tandem")

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT)
"""System errors for no space, or no more space for this user."""
LOOK_SECONDS = 0.5
"""Time between two attempts."""
TOLD_SECONDS = 30.0
"""Time between two log lines about one wait."""
ROOM = 1 << 20
"""Bytes that must be free for a disk not to count as full."""
HELD = 1 << 18
"""Bytes of a log that are kept in memory while they can't be written."""

_patience = 600.0
_stop = threading.Event()


class DiskFull(TandemError):
    """There was no space for too long, or the process was asked to end while there was none."""

    exit_code = 75  # EX_TEMPFAIL: starting again helps as soon as there is space.


def set_patience(seconds: float) -> None:
    """Sets how long this process waits for space: ``launch.full_disk_seconds``."""
    global _patience
    _patience = seconds


def patience() -> float:
    """Seconds that this process waits for space."""
    return _patience


def stop_waiting() -> None:
    """Ends all waits for space, since the process is to end. May be called by a signal handler."""
    _stop.set()


def stopping() -> bool:
    """Whether :func:`stop_waiting` was called."""
    return _stop.is_set()


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no space."""
    return isinstance(error, OSError) and error.errno in FULL


def free_bytes(folder: Path) -> int:
    """Bytes that can be written below a folder; 0 if that can't be determined."""
    try:
        return shutil.disk_usage(_there(folder)).free
    except OSError:
        return 0


def has_room(folder: Path, nbytes: int = ROOM) -> bool:
    """Whether a file of this size can be written into a folder; tries it with up to 1 MiB.

    Other problems of the folder don't count.
    """
    folder = _there(folder)
    try:
        if nbytes > ROOM and shutil.disk_usage(folder).free < nbytes:
            return False
        with tempfile.TemporaryFile(dir=folder, prefix=".room-", buffering=0) as file:
            write_all(file, bytes(min(nbytes, ROOM)))
            os.fsync(file.fileno())
    except OSError as error:
        return not is_full(error)
    return True


def persist(path: Path, write: Callable[[], T]) -> T:
    """Calls ``write`` until it finds space.

    Args:
        path: the file that it writes, for messages.
        write: must leave nothing behind if it raises an error in :data:`FULL`.

    Raises:
        DiskFull: there was no space for too long.
    """
    wait = None
    while True:
        try:
            result = write()
        except OSError as error:
            if not is_full(error):
                raise
            wait = wait or SpaceWait(path)
            wait.go_on()
            continue
        if wait is not None:
            wait.over()
        return result


def await_room(folder: Path, nbytes: int = ROOM) -> None:
    """Returns once ``nbytes`` can be written into a folder.

    Raises:
        DiskFull: there was no space for too long.
    """
    wait = None
    while not has_room(folder, nbytes):
        wait = wait or SpaceWait(folder, nbytes)
        wait.go_on()
    if wait is not None:
        wait.over()


class SpaceWait:
    """One wait for space."""

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        self._path = path
        self._needed = f" and {nbytes / 1e6:,.1f} MB are needed" if nbytes else ""
        self._began = time.monotonic()
        self._told = -TOLD_SECONDS

    def go_on(self) -> None:
        """Waits a little.

        Raises:
            DiskFull: the wait has been too long.
        """
        waited = time.monotonic() - self._began
        if waited - self._told >= TOLD_SECONDS:
            self._told = waited
            log.warning(
                f"{self.said()}: waiting for space, {max(0.0, _patience - waited):.0f} s at most"
            )
        if waited >= _patience or _stop.wait(LOOK_SECONDS):
            raise DiskFull(
                f"{self.said()}, after {waited:.0f} s: make room there and start again; it goes on "
                f"from what is written"
            )

    def said(self) -> str:
        """The first half of a sentence, naming the file and its folder."""
        return (
            f"{self._path} can't be written, its disk is full ({_there(self._path)} has "
            f"{free_bytes(self._path) / 1e6:,.1f} MB free{self._needed})"
        )

    def over(self) -> None:
        """Reports that there is space again."""
        waited = time.monotonic() - self._began
        log.info(f"{self._path}: there is space again after {waited:.0f} s")


def append(file: IO[bytes], data: bytes, path: Path, *, sync: bool = False) -> None:
    """Appends to an unbuffered file, waiting for space.

    While there is no space, the file ends where it ended before, so that nobody reads half a line.

    Args:
        file: opened with ``"ab", buffering=0``.
        data: the bytes to append.
        path: the file's path, for messages.
        sync: whether the data must be on disk (``fsync``) on return.

    Raises:
        DiskFull: there was no space for too long.
    """
    persist(path, lambda: try_append(file, data, sync=sync))


def try_append(file: IO[bytes], data: bytes, *, sync: bool = False) -> None:
    """Appends all of it or nothing; see :func:`append`.

    Raises:
        OSError: it can't be written now.
    """
    start = os.fstat(file.fileno()).st_size
    try:
        write_all(file, data)
        if sync:
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # A pipe or a device can't be cut back.
            os.ftruncate(file.fileno(), start)
        raise


def keep_streams() -> None:
    """Replaces this process's standard output and error by streams that a full disk can't break.

    Text that can't be written is kept, up to 256 KiB, and written when there is space again. What the streams
    escape stays escaped, and a character that their encoding lacks is written as its escape.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            stream.flush()
            raw = _Patient(stream.fileno())
        except (OSError, ValueError, AttributeError):
            continue  # It is closed, or not a real stream.
        kept = io.TextIOWrapper(
            # Every write goes through to `raw` at once, which takes all of it.
            raw,
            encoding=stream.encoding,
            # An alarm has Greek letters, and must end no run whose terminal has none.
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )
        setattr(sys, name, PrintableStream(kept) if isinstance(stream, PrintableStream) else kept)


class _Patient(io.FileIO):
    """A stream whose writes never fail for lack of space."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._held = bytearray()
        self._lost = 0
        # A signal's handler may print in the middle of a print.
        self._lock = threading.RLock()
        self._writing = False

    def write(self, data: Any, /) -> int:
        with self._lock:
            size = len(memoryview(data).cast("B"))
            if len(self._held) + size > HELD:
                self._lost += size
            else:
                self._held += data
            if not self._writing:
                self._writing = True
                try:
                    self._let_out()
                finally:
                    self._writing = False
            return size

    def _let_out(self) -> None:
        try:
            while self._held or self._lost:
                if not self._held:
                    lost, self._lost = self._lost, 0
                    self._held += b"(%d bytes are missing here: the disk was full)\n" % lost
                done = super().write(bytes(self._held))
                if done is None:  # A non-blocking pipe is full.
                    select.select([], [self], [], 1.0)
                else:
                    del self._held[:done]
        except OSError as error:
            if not is_full(error):
                raise


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Writes all bytes to an unbuffered file."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _there(path: Path) -> Path:
    """A path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
