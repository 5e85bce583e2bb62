"""How far a command has come with the rows of a file."""

from __future__ import annotations

import os
import time
from typing import IO, TextIO, cast

from rich.cells import cell_len, set_cell_size

from ..common.printable import raw

BAR = 24
"""Width of the progress bar, in columns."""
DRAW_SECONDS = 0.2
"""Time between two drawings of the bar."""
TELL_SECONDS = 30.0
"""Time between two lines of progress if there is no terminal."""


class Progress:
    """A bar on a terminal, otherwise a line now and then."""

    def __init__(self, stream: IO[str], verb: str, total: int | None, done: int = 0) -> None:
        """Nothing is drawn yet.

        Args:
            stream: where it is drawn.
            verb: what happens to the rows, as in ``graded``.
            total: number of rows, if it is known.
            done: number of rows that were done before.
        """
        # The bar goes back to the beginning of its line.
        self._stream = raw(cast(TextIO, stream))
        self._verb = verb
        self._total = total
        self._done = self._began_with = done
        self._since = time.monotonic()
        self._live = stream.isatty()
        self._drawn = 0
        self._next = self._since + (DRAW_SECONDS if self._live else TELL_SECONDS)

    @property
    def seconds(self) -> float:
        """Time since it was made."""
        return time.monotonic() - self._since

    def add(self, rows: int = 1) -> None:
        """Counts rows that are done."""
        self._done += rows
        self.turn()

    def turn(self) -> bool:
        """Draws if it is time to; always returns False."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (DRAW_SECONDS if self._live else TELL_SECONDS)
            self._draw("\r" if self._live else "", "" if self._live else "\n")
        return False

    def end(self) -> None:
        """Draws for the last time."""
        if self._live:
            self._draw("\r", "\n")

    def _draw(self, start: str, end: str) -> None:
        pace = (self._done - self._began_with) / max(1e-9, self.seconds)
        text = f"{self._verb} {self._done:,}"
        if self._total:
            share = min(1.0, self._done / self._total)
            full = round(share * BAR)
            bar = "#" * full + "." * (BAR - full)
            text = f"{self._verb} {self._done:,}/{self._total:,} [{bar}] {share:4.0%}"
            if pace > 0 and self._done < self._total:
                text += f", {time_left((self._total - self._done) / pace)} left"
        text += f"  {pace:,.0f} rows/s"
        if self._live:
            text = self._fitted(text)
        self._stream.write(f"{start}{text}{end}")
        self._stream.flush()

    def _fitted(self, text: str) -> str:
        """A line that covers the one drawn before, and is narrower than the window, in which it would wrap."""
        width, self._drawn = max(self._drawn, cell_len(text)), cell_len(text)
        columns = os.get_terminal_size(self._stream.fileno()).columns
        # A serial line reports 0, which says nothing about it.
        return set_cell_size(text, min(width, columns - 1) if columns else width)


def time_left(seconds: float) -> str:
    """A duration as people say it.

    >>> time_left(7.4), time_left(200), time_left(7300)
    ('7 s', '3 min', '2 h 2 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
