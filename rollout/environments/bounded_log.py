"""Keeps what a process prints in a file of bounded length."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

MOST_BYTES = 8 << 20
"""Length at which a file is set aside; the one that was set aside before it is given up."""


class BoundedLog(asyncio.Protocol):
    """Reads a pipe into a file, which only our user can read.

    Args:
        file: the file; ``<file>.1`` is the one before it.
        most: length at which a new one is begun.
    """

    def __init__(self, file: Path, most: int = MOST_BYTES) -> None:
        self._file, self._most = file, most
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._length = os.fstat(self._descriptor).st_size

    def data_received(self, data: bytes) -> None:
        """Writes what has come. A full disk costs the text, and nothing else."""
        with contextlib.suppress(OSError):
            if self._length + len(data) > self._most:
                with contextlib.suppress(FileNotFoundError):
                    self._file.replace(f"{self._file}.1")
                # Closed once there is a new one: until then the number may not become another file's.
                full = self._descriptor
                self._open()
                os.close(full)
            self._length += os.write(self._descriptor, data)

    def connection_lost(self, error: Exception | None) -> None:
        """Closes the file when the process and all that print with it have ended."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
