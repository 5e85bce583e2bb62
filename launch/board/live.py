"""The source of the live view: the supervisor's own figures and, through a thread, Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .assembly import assemble
from .facts import FactsWatch
from .progress import Progress
from .snapshot import Known, Snapshot
from .tail import MetricsTail

if TYPE_CHECKING:
    from pathlib import Path

    from ...replay.connection import Store


class LiveLook:
    """Makes a snapshot whenever it is called; never waits.

    Args:
        known: what was known of the run when it was started this time.
        began: when that was, in seconds since the epoch.
        progress: the supervisor's own, whose history is shared.
        restarts: path of ``restarts.jsonl``.
        state: returns the state that the supervisor is in.
    """

    def __init__(
        self,
        known: Known,
        *,
        began: float,
        progress: Progress,
        restarts: Path,
        state: Callable[[], str],
    ) -> None:
        self._known = known
        self._began = began
        self._progress = progress
        self._tail = MetricsTail(restarts)
        self._restarts: list[dict[str, Any]] = []
        self._state = state
        self._facts: FactsWatch | None = None

    def ask(self, store: Store) -> None:
        """Starts to look into Redis as well."""
        self._facts = FactsWatch(store)

    def __call__(self) -> Snapshot:
        now = time.time()
        self._restarts += self._tail.read()
        known = replace(
            self._known,
            state=self._state(),
            elapsed_seconds=(self._known.elapsed_seconds or 0.0) + now - self._began,
        )
        watch = self._facts
        with self._progress.reading() as history:
            return assemble(
                known,
                history,
                watch.facts if watch else None,
                watch.activity if watch else None,
                restarts=self._restarts,
                problem=watch.problem if watch else "",
                now=now,
            )

    def stop(self) -> None:
        """Stops looking into Redis."""
        if self._facts is not None:
            self._facts.stop()
