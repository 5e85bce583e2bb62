"""Reads from Redis what it knows of a run: the ledger's counts, members, their reports, evaluations."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import TandemError
from ...replay.evaluating.evaluations import EvaluationResult
from ...replay.hosts import ROLE as HOST
from ...replay.hosts import Host, Hosts
from ...replay.ledger import Ledger
from ...replay.members import Member, Members
from ...replay.store import RunStore

if TYPE_CHECKING:
    from ...replay.connection import Store

EVERY_SECONDS = 1.0
"""Time between two looks of the live view; the roles report every second or two."""
HEARD_WITHIN = 60.0
"""A member that hasn't been heard of for this long is no longer shown."""
HOSTS_WITHIN = 600.0
"""A host that hasn't been heard of for this long is no longer shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One look into Redis."""

    time: float
    """When it was taken, in seconds since the epoch by this host's clock."""
    state: str
    """running, draining, finished or failed."""
    counts: Mapping[str, int]
    """Groups by state in the ledger."""
    journalled: int
    """Number of rows that were journalled."""
    term: int
    """The newest learner's term."""
    limit: int
    """``replay.max_staleness``."""
    steps: int | None
    """Steps of the run, if their number is set."""
    waiting_for: str
    """Whom the next row waits for, in one line."""
    members: tuple[Member, ...]
    """Members heard of within :data:`HEARD_WITHIN`, without hosts."""
    reports: Mapping[str, Mapping[str, Any]]
    """The newest report of every member that was heard of in the last hour."""
    evaluations: tuple[EvaluationResult, ...]
    """Evaluations that are done."""
    evaluations_open: int
    """Evaluations that were requested and aren't done."""
    grader_restarts: int
    """Restarts of graders, as the pools counted them."""
    hosts: tuple[Host, ...] = ()
    """Hosts heard of within :data:`HOSTS_WITHIN`."""
    dead_letters: tuple[Mapping[str, Any], ...] = ()
    """Groups that were given up, if they were asked for."""


def ask(store: Store, *, dead_letters: bool = False) -> Facts:
    """Looks into Redis with a few small round trips.

    Raises:
        StoreError: Redis doesn't answer, or holds no ledger of the run.
    """
    ledger, runs = Ledger(store, "board"), RunStore(store)
    settings = ledger.settings
    return Facts(
        time=time.time(),
        state=runs.state(),
        counts=ledger.counts(),
        journalled=ledger.journalled(),
        term=ledger.term(),
        limit=settings.max_staleness,
        steps=settings.steps,
        waiting_for="" if settings.offline else ledger.waiting_for(),
        members=tuple(m for m in Members(store).live(within=HEARD_WITHIN) if m.role != HOST),
        hosts=tuple(Hosts(store).live(within=HOSTS_WITHIN)),
        reports=runs.reports(),
        evaluations=tuple(runs.evaluations()),
        evaluations_open=len(runs.open_evaluations()),
        grader_restarts=runs.restart_count(),
        dead_letters=tuple(ledger.dead_letters()) if dead_letters else (),
    )


class Activity:
    """Seconds by activity of every member, over its latest reports; each report counts once.

    Learner, worker and pool each report them in their own form; only this class reads all three.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._most = seconds
        self._kept: dict[str, list[tuple[float, dict[str, float]]]] = {}

    def add(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds reports, skipping those that were added before."""
        for member, report in reports.items():
            moment = float(report.get("time") or 0.0)
            kept = self._kept.setdefault(member, [])
            if kept and moment <= kept[-1][0]:
                continue
            kept.append((moment, seconds_of(report)))
            while len(kept) > 1 and moment - kept[0][0] > self._most:
                kept.pop(0)

    def seconds(self, member: str) -> dict[str, float]:
        """A member's recent seconds by activity, with ``total``; empty if nothing is known."""
        added: dict[str, float] = {}
        for _, seconds in self._kept.get(member, ()):
            for activity, spent in seconds.items():
                added[activity] = added.get(activity, 0.0) + spent
        return added


def seconds_of(report: Mapping[str, Any]) -> dict[str, float]:
    """A report's seconds by activity, with ``total``; empty if the report has none."""
    clock = report.get("clock") or report.get("seconds")
    if not isinstance(clock, Mapping) or not clock.get("total"):
        return {}
    return {str(name): float(spent) for name, spent in clock.items()}


class FactsWatch:
    """A thread that looks into Redis every second, so that neither view nor supervisor waits."""

    def __init__(self, store: Store) -> None:
        self.facts: Facts | None = None
        """The newest look; None before the first."""
        self.problem = ""
        """Why there is no newer look; empty if there is one."""
        self.activity = Activity()
        self._store = store
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="facts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.0 if self.facts is None else EVERY_SECONDS):
            self._look()
        self._look()

    def _look(self) -> None:
        try:
            facts = ask(self._store)
        except TandemError as error:
            # Redis is away; the supervisor restarts it and says so.
            self.problem = str(error)
        else:
            self.activity.add(facts.reports)
            self.facts, self.problem = facts, ""

    def stop(self) -> None:
        """Looks once more and ends the thread; a thread that Redis doesn't answer is left behind."""
        self._end.set()
        self._thread.join(EVERY_SECONDS)
