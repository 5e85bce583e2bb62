"""What the supervisor learns from the processes' reports: how much of its time each role waited, and their alarms."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....common.errors import TandemError

if TYPE_CHECKING:
    from ....replay.store import RunStore

EVERY_SECONDS = 2.0
"""Time between two reads; each report covers the time since the role's last one, about as long."""
FRESH_SECONDS = 10.0
"""An older report says nothing of now."""


class IdleShares:
    """Seconds waited and seconds in all, by role; each report counts once."""

    def __init__(self) -> None:
        self._waited: dict[str, float] = {}
        self._total: dict[str, float] = {}
        self._seen: dict[str, float] = {}

    def add(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds reports, skipping those that were added before."""
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
        """Returns the share of its time that each role waited."""
        return {
            role: round(self._waited[role] / total, 4)
            for role, total in sorted(self._total.items())
            if total > 0
        }


def _key(report: Mapping[str, Any]) -> str:
    return "weights_alarm" if report.get("role") == "learner" else "alarm"


class ReportWatch:
    """A thread that reads the reports every two seconds, so that the supervisor never waits."""

    def __init__(self, runs: RunStore) -> None:
        self.idle = IdleShares()
        self.alarms: Mapping[str, str] = {}
        """What a person should look at now, by member; most of the learner's stand in its metrics."""
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
            # Reports from before this start of the run don't count.
            reports = {m: r for m, r in reports.items() if float(r.get("time") or 0) > began}
            self.idle.add(reports)
            fresh = time.time() - FRESH_SECONDS
            self.alarms = {
                member: str(alarm)
                for member, report in sorted(reports.items())
                if (alarm := report.get(_key(report))) and report["time"] > fresh
            }

    def stop(self) -> dict[str, float]:
        self._end.set()
        self._thread.join(EVERY_SECONDS)
        return self.idle.shares()
