"""A terminal to write to without ever waiting for it: its size, its speed, whose turn it is."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import time
from typing import TextIO

SMALLEST = (40, 8)
"""Columns and rows below which a live view is of no use."""
PLAIN_TERMS = ("", "dumb", "unknown")
"""Values of TERM that promise no cursor movement."""
ASCII_TERMS = ("linux", "vt52", "vt100", "vt102", "vt220", "ansi", "cons25")
"""Values of TERM whose fonts often lack block characters."""


def wants_live(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a live view can be drawn."""
    if os.environ.get("TERM", "") in PLAIN_TERMS:
        return False
    try:
        return stream.isatty() and _large_enough(stream.fileno())
    except (OSError, ValueError):
        return False


def has_colour() -> bool:
    """False if NO_COLOR is set to anything (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def has_blocks(stream: TextIO) -> bool:
    """Whether block characters can be expected to show."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    return encoding.startswith("utf") and os.environ.get("TERM", "") not in ASCII_TERMS


def _large_enough(fd: int) -> bool:
    columns, rows = os.get_terminal_size(fd)
    # A serial line reports 0 by 0, which says nothing about it.
    return columns >= SMALLEST[0] and rows >= SMALLEST[1]


class Tty:
    """The terminal behind a file descriptor, to write to.

    Text that the terminal doesn't accept yet is kept. Raises ``OSError`` if the terminal is gone.
    """

    def __init__(self, fd: int = 1) -> None:
        self._given = fd
        try:
            # Opened anew: O_NONBLOCK on the descriptor that we were given would apply to the shell too.
            self._fd = os.open(
                os.ttyname(fd), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            # The terminal belongs to another user (su) or another mount: writing to it may block.
            self._fd = os.dup(fd)
        self._pending = b""
        self._input = 0
        self.written = 0
        """Bytes that the terminal has accepted so far."""

    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        size = os.get_terminal_size(self._given)
        return size.columns, size.lines

    def foreground(self) -> bool:
        """False while the process is in its shell's background and must not draw."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return True  # Not our controlling terminal, so there is no background.

    def typed(self) -> bool:
        """Whether lines were typed since the last call; they are left for whoever reads them."""
        try:
            answer = fcntl.ioctl(self._given, termios.FIONREAD, b"\0" * 4)
        except OSError:
            return False
        before, self._input = self._input, int.from_bytes(answer, sys.byteorder)
        return self._input > before

    def write(self, text: str) -> None:
        """Queues text; :meth:`flush` writes it."""
        data = text.encode("utf-8", "replace")
        self._pending += data
        self.written += len(data)

    def flush(self, patience: float = 0.0) -> bool:
        """Writes queued text, waiting at most ``patience`` seconds; returns False if some is left."""
        end = time.monotonic() + patience
        while self._pending:
            try:
                count = os.write(self._fd, self._pending)
            except BlockingIOError:
                # Ctrl-S, or a line slower than we write.
                if time.monotonic() >= end:
                    return False
                time.sleep(0.02)
                continue
            self._pending = self._pending[count:]
        return True

    def close(self) -> None:
        os.close(self._fd)


def silence(stream: TextIO = sys.stdout) -> None:
    """Discards what is still written to a stream whose terminal has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
