"""Prints lines on standard output, and waits only once for one that takes nothing, as a terminal after Ctrl-S or a pager."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable

KEPT = 200
"""Number of lines that are kept while they can't be printed; of more, the oldest are left out."""
PATIENCE_SECONDS = 2.0
"""How long one line may take to be printed before whoever says it goes on, and how long the last ones of a process that was
stopped may take."""
_late: list[threading.Thread] = []
"""Threads whose lines have waited for a reader."""


def await_reader() -> None:
    """Returns once all lines are printed, or nobody reads any more: at a command's end a pager may take its time."""
    for thread in _late:
        thread.join()


class Lines:
    """Prints lines in their order, in a thread that lives while there are any. Thread-safe.

    Args:
        lost: is called when nobody reads any more.
    """

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._left_out = 0
        self._printing: threading.Thread | None = None
        self._late = False

    def print(self, line: str) -> None:
        """Returns when the line is printed, or after a while; at once if earlier lines still wait."""
        with self._lock:
            self._waiting.append(line)
            if len(self._waiting) > KEPT:
                self._waiting.popleft()
                self._left_out += 1
            if self._printing is None:
                self._printing = threading.Thread(target=self._run, name="lines", daemon=True)
                self._printing.start()
            thread, late = self._printing, self._late
        if late:
            return
        thread.join(PATIENCE_SECONDS)
        with self._lock:
            self._late = self._printing is thread
        if self._late:
            # Only then may the process end before its lines are printed.
            _late.append(thread)
            atexit.register(lambda: thread.join(PATIENCE_SECONDS))

    def _run(self) -> None:
        while (text := self._next()) is not None:
            try:
                print(text, flush=True)
            except OSError:
                # EPIPE or EIO: nobody reads any more. Python would try again at exit.
                self._lost()

    def _next(self) -> str | None:
        """What waits, as one text; None if nothing does, and the thread ends."""
        with self._lock:
            lines = list(self._waiting)
            if self._left_out:
                lines.insert(
                    0, f"({self._left_out} lines are missing here: the output was blocked)"
                )
            self._waiting.clear()
            self._left_out = 0
            if not lines:
                self._printing = None
                self._late = False
                return None
            return "\n".join(lines)
