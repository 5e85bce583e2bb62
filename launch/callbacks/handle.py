"""What a callback gets besides the step and its metrics: a handle with which it can ask for something."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

REASON_LENGTH = 500
"""Characters of a reason; longer ones are cut."""
MOST_NAMES = 100
"""Number of different names that a run's callbacks may log."""
OWN_NAME = "failures"
"""The name under which Tandem itself counts failed calls."""
_NAME = re.compile(r"[\w.@-]+(?:/[\w.@-]+)*", re.ASCII)


class Handle:
    """Collects what one call of a callback asks for; it is passed on when the call has ended.

    The run doesn't wait for callbacks, so whatever is asked for happens some steps later.
    """

    def __init__(self) -> None:
        self._stop: str | None = None
        self._checkpoint = self._evaluate = False
        self._values: dict[str, float] = {}

    def stop(self, reason: str) -> None:
        """Ends the run as finished: checkpoint, last evaluation, model and summary, which has the reason."""
        if self._stop is None:
            self._stop = " ".join(str(reason).split())[:REASON_LENGTH] or "no reason given"

    def checkpoint(self) -> None:
        """Asks for a checkpoint after the step that is under way."""
        self._checkpoint = True

    def evaluate(self) -> None:
        """Asks for an evaluation of the held-out sets after the step that is under way."""
        self._evaluate = True

    def log(self, name: str, value: float) -> None:
        """Puts a number into the metrics as ``callback/<name>``, in the record of a step that follows.

        Args:
            name: letters, digits, ``_ . @ -``, in parts divided by ``/``; at most 80 characters.
            value: a finite number; of one name the newest value is recorded.

        Raises:
            ValueError: the name or the value isn't such a one, or there are too many names.
        """
        if not isinstance(name, str) or len(name) > 80 or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r:.100} can't name a metric: use letters, digits, _ . @ - and /"
            )
        if name == OWN_NAME:
            raise ValueError(
                f"callback/{OWN_NAME} is where failed calls are counted: choose another"
            )
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r:.80} isn't a finite number")
        if name not in self._values and len(self._values) >= MOST_NAMES:
            raise ValueError(
                f"{name} is one name too many: a run's callbacks log {MOST_NAMES} at most"
            )
        self._values[name] = float(value)

    def asked(self) -> dict[str, Any]:
        """Everything that was asked for, as plain data."""
        return {
            "stop": self._stop,
            "checkpoint": self._checkpoint,
            "evaluate": self._evaluate,
            "values": self._values,
        }
