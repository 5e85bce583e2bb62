"""The interface of a tracker, which takes the rows of ``metrics.jsonl`` one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

BOOKKEEPING = frozenset({"step", "term", "time", "eval/id"})
"""Keys of a record that aren't metrics."""


class Tracker(ABC):
    """One destination. Its methods may raise whatever its library raises: it has its own process."""

    rows: int | None = None
    """Number of records that its server had when this process began; None = there is no server, or nobody knows."""

    @abstractmethod
    def log(self, row: int, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Logs one record.

        Args:
            row: number of the record among all that this run has ever sent here, from 0.
            step: step of the run; for an evaluation, the step of its weights, which may be long past.
            time: Unix time of the record.
            metrics: values by their names in ``metrics.jsonl``.
        """

    @abstractmethod
    def alarm(self, step: int, time: float, text: str) -> None:
        """Logs, beside the step's metrics, something that a person should look at.

        Args:
            step: step of the run.
            time: Unix time of its record.
            text: a sentence with the figures.
        """

    @abstractmethod
    def flush(self) -> None:
        """Makes what was logged readable."""

    @abstractmethod
    def close(self) -> None:
        """Closes the log, which may be continued later.

        Raises:
            DeadlineError: not everything has arrived; the message says how it gets there.
        """


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record; what is null in JSON (NaN, infinity) is left out.

    >>> metrics_of({"step": 3, "term": 1, "time": 0.5, "train/loss": 2, "train/k3": None})
    {'train/loss': 2.0}
    """
    return {
        name: float(value)
        for name, value in record.items()
        if name not in BOOKKEEPING
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
