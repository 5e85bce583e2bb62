"""A command on a real pty, whose bytes go through a terminal emulator: what a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyte


class OnPty:
    """A process with a controlling terminal of its own, and the screen of that terminal."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        screen: type[pyte.Screen] = pyte.Screen,
    ) -> None:
        self.screen = screen(columns, rows)
        self.raw = b""
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self.master, self._slave = pty.openpty()
        self._resize(columns, rows)
        self.modes = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            cwd=cwd,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)

    def lines(self) -> list[str]:
        """What stands on the screen, without the blanks at the ends of lines."""
        with self._lock:
            return [line.rstrip() for line in self.screen.display]

    def text(self) -> str:
        """The same as one text."""
        return "\n".join(self.lines()).rstrip()

    @contextmanager
    def still(self) -> Iterator[pyte.Screen]:
        """The screen, on which nothing changes meanwhile."""
        with self._lock:
            yield self.screen

    def cursor(self) -> tuple[int, int]:
        """Column and row, from 0."""
        with self._lock:
            return self.screen.cursor.x, self.screen.cursor.y

    def await_text(self, condition: Callable[[str], bool], seconds: float = 30.0) -> str:
        """The screen's text, once it is as wanted."""
        end = time.monotonic() + seconds
        while not condition(text := self.text()):
            assert time.monotonic() < end, f"after {seconds:.0f} s the screen is\n{text}"
            time.sleep(0.02)
        return text

    def resize(self, columns: int, rows: int) -> None:
        """As when a person drags the window; the kernel sends SIGWINCH."""
        with self._lock:
            self.screen.resize(rows, columns)
            self._resize(columns, rows)

    def _resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Keys that a person presses."""
        os.write(self.master, text.encode())

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code, with all output read."""
        code = self.process.wait(seconds)
        # The slave is ours too: the reader ends when both have closed it.
        modes = termios.tcgetattr(self._slave)
        os.close(self._slave)
        self._slave = -1
        self._reader.join(5.0)
        assert modes == self.modes, "the terminal's modes were changed"
        return code

    def end(self) -> None:
        """Ends it, whatever state it is in; once is enough."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1
            self._reader.join(5.0)
        if self.master >= 0:
            os.close(self.master)
            self.master = -1
