"""What the engine of a worker is generating, and what becomes of each group that it finishes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ..common.config import Config
from ..common.errors import StoreError, TandemError, WireError
from ..common.records import FinishReason, Sample
from ..replay.ledger import Ledger
from ..replay.ledger_records import Lease
from .commit_check import CommitCheck
from .engine import Engine, FinishedGroup
from .leases import HeldGroup, Leases
from .submission import Submitter

log = logging.getLogger("tandem.rollout")


class Generation:
    """Batches in the engine; for one loop.

    Args:
        name: the worker's member id.
        config: the run's.
        engine: generates.
        ledger: knows how many verdicts a group needs.
        leases: holds the groups.
        check: of new weights; finished groups wait for it.
        submitter: takes finished groups.
        in_redis: runs a call that blocks on Redis, beside the loop.
        on_finish: called whenever the engine has room for another group.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        engine: Engine,
        ledger: Ledger,
        leases: Leases,
        check: CommitCheck,
        submitter: Submitter,
        in_redis: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_finish: Callable[[], None],
    ) -> None:
        self._name = name
        self._config = config
        self._engine = engine
        self._ledger = ledger
        self._leases = leases
        self._check = check
        self._submitter = submitter
        self._in_redis = in_redis
        self._on_finish = on_finish
        self._batches: set[asyncio.Task[None]] = set()
        self.groups = 0
        """Groups that the engine has."""
        self.failures = 0
        """Batches in a row of which the engine finished nothing."""
        self.counts = {
            "groups": 0,
            "samples": 0,
            "tokens": 0,
            "partial_groups": 0,
            "revoked_groups": 0,
            "failed_groups": 0,
        }
        """Since the worker's start, for its report."""

    def begin(self, groups: Sequence[HeldGroup]) -> None:
        """Gives the engine a batch; each group is handed in as it finishes."""
        self.groups += len(groups)
        batch = asyncio.create_task(self._generate(groups))
        self._batches.add(batch)
        batch.add_done_callback(self._batches.discard)

    async def wait(self, seconds: float) -> None:
        """Until all batches have ended, but no longer than ``seconds``."""
        if self._batches:
            await asyncio.wait(self._batches, timeout=seconds)

    async def _generate(self, groups: Sequence[HeldGroup]) -> None:
        """Generates one batch; hands in each group as it finishes."""
        left = {held.lease.group_id: held for held in groups}
        finished = 0
        try:
            requests = [held.request(self._config) for held in groups]
            async for group in self._engine.generate(requests):
                held = left.pop(group.group_id)
                self.groups -= 1
                self._on_finish()
                try:
                    finished += await self._hand_in(group, held)
                except StoreError as error:
                    # The lease expires by itself; the other groups go on.
                    log.warning(f"group {group.group_id}: {error}")
                    self._leases.forget(group.group_id)
        except (TandemError, ValueError) as error:
            log.error(f"the engine gave up a batch: {error}")
        self.groups -= len(left)
        self._on_finish()
        for held in left.values():
            await self.give_back(held.lease, "the engine gave up its batch", failed=True)
        self.failures = 0 if finished else self.failures + 1

    async def _hand_in(self, finished: FinishedGroup, held: HeldGroup) -> bool:
        """Submits a finished group or gives its lease back; False if the engine failed at it."""
        lease = held.lease
        await self._check.settled(finished.samples)
        if self._leases.still_holds(lease.group_id) is None:
            self.counts["revoked_groups"] += 1
            self._leases.forget(lease.group_id)
            return True
        if held.is_spoiled:
            await self.give_back(lease, "the weights failed their check", failed=False)
            return True
        if finished.error is not None:
            log.warning(f"group {lease.group_id} failed: {finished.error}")
            self.counts["failed_groups"] += 1
            await self.give_back(lease, finished.error, failed=True)
            return False
        samples = finished.samples
        ended = sum(s.finish_reason is not FinishReason.ABORT for s in samples)
        if ended < len(samples):
            if not held.is_late:  # It was aborted in a drain.
                await self.give_back(lease, "drained", failed=False)
                return True
            samples = at_deadline(samples)
            keeps_late = self._config.learner.objective.stragglers != "leave_out"
            enough = (len(samples) if keeps_late else ended) >= self._ledger.settings.least_verdicts
            # The ledger would reject a group with too few verdicts (its settings were read for the
            # lease), and a group without a sample that ended teaches nothing.
            if not (ended and enough):
                await self.give_back(
                    lease,
                    f"{ended} of {len(finished.samples)} samples finished before its deadline",
                    failed=True,
                )
                return True
            self.counts["partial_groups"] += 1
        try:
            self._submitter.submit(held.group(self._name, samples))
        except WireError as error:
            log.error(f"group {lease.group_id} can't be sent: {error}")
            self.counts["failed_groups"] += 1
            await self.give_back(lease, str(error), failed=True)
            return True
        self.counts["groups"] += 1
        self.counts["samples"] += len(samples)
        self.counts["tokens"] += sum(len(s.tokens) for s in samples)
        return True

    async def give_back(self, lease: Lease, reason: str, *, failed: bool) -> None:
        """Gives a lease back to the ledger, beside the loop."""
        await self._in_redis(lambda: self._leases.give_back(lease, reason, failed=failed))


def at_deadline(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """What of a group's samples is handed in at its deadline.

    Those that ended, and those that were still being sampled, with the tokens they had, under a
    finish reason of their own: leaving them out would favour short answers. One of which no token
    was sampled can be no row; it leaves its group as one without a verdict does.
    """
    return tuple(
        replace(s, finish_reason=FinishReason.DEADLINE)
        if s.finish_reason is FinishReason.ABORT
        else s
        for s in samples
        if s.finish_reason is not FinishReason.ABORT or s.oldest_step is not None
    )
