"""A wait with a deadline that says, at half of it, who is waited for."""

from __future__ import annotations

import logging
import time


class Wait:
    """One wait for one party.

    Args:
        who: member that is waited for.
        what: what it should do, as in "acknowledge version 1.7".
        seconds: until the deadline.
    """

    def __init__(self, who: str, what: str, seconds: float) -> None:
        self.who = who
        self.what = what
        self.seconds = seconds
        self._since = time.monotonic()
        self._told = False

    @property
    def next_look(self) -> float:
        """``time.monotonic()`` at which :meth:`expired` has something to do."""
        return self._since + self.seconds * (1.0 if self._told else 0.5)

    @property
    def waited(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._since

    def expired(self, log: logging.Logger) -> bool:
        """True past the deadline; logs once at half of it."""
        waited = self.waited
        if not self._told and waited >= self.seconds * 0.5:
            self._told = True
            log.warning(
                f"waiting for {self.who} to {self.what}: {waited:.1f} s of {self.seconds:.1f} s"
            )
        return waited >= self.seconds

    def __str__(self) -> str:
        return f"{self.who} didn't {self.what} within {self.seconds:.1f} s"
