"""A wait with a deadline; at half the deadline it logs who is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable


class Wait:
    """One wait for one party.

    ``who`` and ``what`` may be changed while it lasts: the next message has the new words.

    Args:
        who: the party that is waited for.
        what: what it should do, as in "acknowledge version 1.7".
        seconds: time until the deadline.
    """

    def __init__(self, who: str, what: str, seconds: float) -> None:
        self.who = who
        self.what = what
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Starts the deadline again, because the party has made progress."""
        self._since = time.monotonic()
        self._warned = False

    @property
    def next_look(self) -> float:
        """The ``time.monotonic()`` at which :meth:`expired` next has something to do."""
        return self._since + self.seconds * (1.0 if self._warned else 0.5)

    @property
    def pause(self) -> float:
        """Seconds until :attr:`next_look`, at least 0."""
        return max(0.0, self.next_look - time.monotonic())

    @property
    def waited(self) -> float:
        """Seconds since it began, or was restarted."""
        return time.monotonic() - self._since

    def expired(self, tell: Callable[[str], object] | None) -> bool:
        """Whether the deadline has passed; reports once at half of it, if ``tell`` is given."""
        waited = self.waited
        if not self._warned and waited >= self.seconds * 0.5:
            self._warned = True
            if tell is not None:
                tell(
                    f"waiting for {self.who} to {self.what}: {waited:.1f} s of {self.seconds:.1f} s"
                )
        return waited >= self.seconds

    def __str__(self) -> str:
        return f"{self.who} didn't {self.what} within {self.seconds:.1f} s"
