"""The groups that a worker has leased: taken with everything needed to generate them, renewed, given back.

The loop takes groups and gives them back, the keeper's thread renews them and watches their deadlines,
and the submitter's thread forgets each one with its receipt. All methods may be called from any of these
threads unless they say otherwise; those that talk to the ledger block on Redis.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ..common.config import Config
from ..common.config.groups import replays_own
from ..common.errors import StoreError
from ..common.records import ENVIRONMENT, Group, Problem, SamplingParams, Version
from ..replay.experience import Experience
from ..replay.ledger import Ledger
from ..replay.ledger_records import Lease, LeaseReply
from ..replay.rules.mixing import choose_traces
from ..replay.store import RunStore
from .engine import FinishedGroup, GroupRequest, Task, no_tokens
from .prefixes import Prefixes, prefixes

log = logging.getLogger("tandem.rollout")

PROBLEMS_KEPT = 4096
"""Number of problems that are kept in memory, because a later pass leases them again."""


@dataclass(slots=True)
class HeldGroup:
    """A group of which this worker holds a lease."""

    lease: Lease
    problem: Problem
    """The problem that the group's samples answer."""
    traces: tuple[str, ...]
    """Ids of the expert traces that complete the group, or may replace failed samples."""
    begins: Prefixes | None
    """How the samples begin, if they begin with a part of a trace."""
    deadline: float
    """When the group is ended with what it has (monotonic seconds)."""
    is_revoked: bool = False
    """Whether the ledger has taken the group back, so that nothing of it is submitted."""
    is_late: bool = False
    """Whether the group was ended at its deadline."""
    is_generated: bool = False
    """Whether the engine is done with it, so that there is nothing to end at its deadline."""
    is_spoiled: bool = False
    """Whether it may have tokens of weights that failed their check, so that nothing is submitted."""

    def request(self, config: Config) -> GroupRequest:
        """The request to the engine."""
        rollout = config.rollout
        # Traces that enter only if all samples failed replace some of them after grading.
        rows_of_traces = len(self.traces) if config.expert.when == "always" else 0
        return GroupRequest(
            group_id=self.lease.group_id,
            prompt_tokens=self.problem.prompt_tokens,
            count=rollout.group_size - rows_of_traces,
            sampling=SamplingParams(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=0,
                max_new_tokens=rollout.max_new_tokens,
            ),
            seed=config.run.seed,
            stop=config.data.stops,
            prefix_tokens=(self.begins.tokens if self.begins else ()) or no_tokens(),
            prefix_logprobs=(self.begins.logprobs if self.begins else ()) or None,
            longest=rollout.max_new_tokens,
            shortest=rollout.min_new_tokens,
            task=task_of(self.problem),
        )

    def group(self, worker: str, finished: FinishedGroup) -> Group:
        """The finished group as it is submitted."""
        group = Group.of(
            self.problem,
            finished.samples,
            group_id=self.lease.group_id,
            attempt=self.lease.attempt,
            worker=worker,
            trace_ids=self.traces,
        )
        if finished.prompt_tokens is None:
            return group
        return replace(
            group, prompt_tokens=finished.prompt_tokens, prompt_text=finished.prompt_text or ""
        )


def task_of(problem: Problem) -> Task | None:
    """What is played in an environment for a problem; None if it is a prompt like any other."""
    task = problem.extra.get(ENVIRONMENT)
    return None if task is None else Task(environment=task["name"], row=task["row"])


class Leases:
    """The leases of one worker.

    Args:
        ledger: gives the leases.
        runs: has the problems and traces.
        config: the run's config.
        abort: ends groups in the engine, by id, with what they have; it returns at once.
    """

    def __init__(
        self, ledger: Ledger, runs: RunStore, config: Config, abort: Callable[[list[str]], None]
    ) -> None:
        self._ledger = ledger
        self._runs = runs
        self._config = config
        self._abort = abort
        self._held: dict[str, HeldGroup] = {}
        self._lock = threading.Lock()
        # Only `take` uses it.
        self._problems: OrderedDict[str, Problem] = OrderedDict()
        self.seconds = config.replay.lease_seconds
        """Seconds that a lease lasts without being renewed; the ledger reports it with each reply."""

    def __len__(self) -> int:
        return len(self._held)

    def take(self, version: Version, room: int) -> tuple[LeaseReply, list[HeldGroup]]:
        """Leases up to ``room`` groups; to be called from one thread at a time.

        A group of which an earlier lease is held still was revoked or has expired unnoticed: only the
        new lease is held from now on.

        Args:
            version: the version that the engine serves.
            room: greatest number of groups.

        Raises:
            StoreError: Redis is away; what was leased already is given back, or expires.
        """
        reply = self._ledger.lease(version, room)
        self.seconds = reply.lease_seconds
        now = time.monotonic()
        try:
            taken = self._with_problems(reply.leases, version.step)
        except StoreError:
            for lease in reply.leases:
                self.give_back(lease, "problems or traces can't be read", failed=False)
            raise
        with self._lock:
            for held in taken:
                held.deadline = now + (held.lease.deadline_ms - reply.now_ms) / 1000
                self._held[held.lease.group_id] = held
        return reply, taken

    def _with_problems(self, leases: Sequence[Lease], step: int) -> list[HeldGroup]:
        wanted = [lease.problem_id for lease in leases]
        missing = [name for name in dict.fromkeys(wanted) if name not in self._problems]
        if missing:
            read = self._runs.problems(missing)
            self._problems.update(zip(missing, read, strict=True))
        for name in wanted:
            self._problems.move_to_end(name)
        expert, seed = self._config.expert, self._config.run.seed
        if replays_own(self._config):
            problem_ids = {lease.group_id: lease.problem_id for lease in leases}
            chosen = Experience(self._runs).chosen(problem_ids, seed) if problem_ids else {}
        else:
            chosen = {
                lease.group_id: choose_traces(
                    self._problems[lease.problem_id], seed, lease.group_id, expert.per_group
                )
                for lease in leases
            }
        begins: dict[str, Prefixes] = {}
        if expert.prefix is not None:
            names = list(dict.fromkeys(name for some in chosen.values() for name in some))
            traces = dict(zip(names, self._runs.traces(names), strict=True)) if names else {}
            begins = {
                group_id: prefixes(self._config, group_id, step, [traces[name] for name in some])
                for group_id, some in chosen.items()
                if some
            }
        held = [
            HeldGroup(
                lease=lease,
                problem=self._problems[lease.problem_id],
                # A trace that samples begin with isn't a row of its own.
                traces=chosen[lease.group_id] if expert.prefix is None else (),
                begins=begins.get(lease.group_id),
                deadline=float("inf"),
            )
            for lease in leases
        ]
        while len(self._problems) > PROBLEMS_KEPT:
            self._problems.popitem(last=False)
        return held

    def holds(self, held: HeldGroup) -> bool:
        """Whether this worker still holds a group by the lease that it was taken with."""
        with self._lock:
            return self._held.get(held.lease.group_id) is held and not held.is_revoked

    def give_back(self, lease: Lease, reason: str, *, failed: bool) -> bool:
        """Gives a group back to the ledger; what can't be given back expires by itself.

        Args:
            lease: the group's lease.
            reason: the reason, for people.
            failed: whether it counts as a failed attempt of the group.

        Returns:
            False if Redis is away.
        """
        self.forget(lease.group_id, lease.attempt)
        try:
            self._ledger.give_back(
                lease.group_id, lease.attempt, reason=reason[:200], failed=failed
            )
        except StoreError as error:
            log.warning(f"group {lease.group_id} wasn't given back and will expire: {error}")
            return False
        return True

    def forget(self, group_id: str, attempt: int) -> None:
        """Drops a group: it has a receipt, or its lease is left to expire. A later attempt stays."""
        with self._lock:
            held = self._held.get(group_id)
            if held is not None and held.lease.attempt == attempt:
                del self._held[group_id]

    def ids(self) -> list[str]:
        """Ids of all groups that are held."""
        with self._lock:
            return list(self._held)

    def left(self) -> list[Lease]:
        """Leases of all groups that are held."""
        with self._lock:
            return [held.lease for held in self._held.values()]

    def renew(self) -> None:
        """Renews all leases; ends the groups that aren't this worker's any more.

        Raises:
            StoreError: Redis is away.
        """
        with self._lock:
            wanted = dict(self._held)
        if not wanted:
            return
        lost = self._ledger.renew(wanted)
        revoked = []
        with self._lock:
            for group_id in lost:
                held = wanted[group_id]
                # It may have been leased again, to this worker, since the ledger answered.
                if self._held.get(group_id) is held and not held.is_revoked:
                    held.is_revoked = True
                    revoked.append(group_id)
        if revoked:
            log.info(f"leases revoked: {', '.join(revoked)}")
            self._abort(revoked)

    def end_late(self) -> None:
        """Ends the groups that have reached their deadline, with what they have."""
        now = time.monotonic()
        late = []
        with self._lock:
            for group_id, held in self._held.items():
                if not (held.is_late or held.is_generated) and now >= held.deadline:
                    held.is_late = True
                    late.append(group_id)
        if late:
            log.warning(f"past their deadline, ended with what they have: {', '.join(late)}")
            self._abort(late)

    def spoil(self) -> None:
        """Ends all groups, which may have tokens of weights that failed their check."""
        with self._lock:
            for held in self._held.values():
                held.is_spoiled = True
            ids = list(self._held)
        self._abort(ids)
