"""Adds up, from the processes' reports, how much of its time each role spent waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...common.errors import TandemError

if TYPE_CHECKING:
    from ...replay.store import RunStore

EVERY_SECONDS = 2.0
"""Between two looks; the roles report about as often, each on the time since its last report."""


class IdleShares:
    """Seconds waited and in all, by role. A report counts once, for the time that it covers."""

    def __init__(self) -> None:
        self._waited: dict[str, float] = {}
        self._total: dict[str, float] = {}
        self._seen: dict[str, float] = {}

    def add(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes in reports; those that were seen before change nothing."""
        for member, report in reports.items():
            moment = float(report.get("time") or 0.0)
            since = self._seen.get(member)
            if since is not None and moment <= since:
                continue
            self._seen[member] = moment
            clock = report.get("clock")
            if not isinstance(clock, Mapping) or not clock.get("total"):
                continue
            role = str(report.get("role") or member.partition("-")[0])
            waited = sum(v for name, v in clock.items() if name.startswith("wait/"))
            self._waited[role] = self._waited.get(role, 0.0) + float(waited)
            self._total[role] = self._total.get(role, 0.0) + float(clock["total"])

    def shares(self) -> dict[str, float]:
        """Share of its time that each role waited."""
        return {
            role: round(self._waited[role] / total, 4)
            for role, total in sorted(self._total.items())
            if total > 0
        }


class ReportWatch:
    """A thread that reads the reports every two seconds, so that the supervisor never waits."""

    def __init__(self, runs: RunStore) -> None:
        self.idle = IdleShares()
        self._runs = runs
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.time()
        while not self._end.wait(EVERY_SECONDS):
            try:
                reports = self._runs.reports()
            except TandemError:
                continue  # Redis is away; the supervisor brings it back and says so.
            # What an earlier life of the run has left there is not of this one.
            self.idle.add({m: r for m, r in reports.items() if float(r.get("time") or 0) > began})

    def stop(self) -> dict[str, float]:
        """Ends the thread and returns the shares."""
        self._end.set()
        self._thread.join(EVERY_SECONDS)
        return self.idle.shares()
