"""The groups that a worker's engine is generating, and what happens to each one that finishes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..common.config import Config
from ..common.errors import StoreError, TandemError, WireError
from ..common.records import FinishReason, Sample
from ..replay.ledger import Ledger
from ..replay.ledger_records import Lease
from .engine import Engine, FinishedGroup
from .leases import HeldGroup, Leases
from .new_weights.commit_check import CommitCheck
from .player import Player
from .submission import Submitter

log = logging.getLogger("tandem.rollout")


class Generation:
    """Batches in the engine; for use in one loop.

    Args:
        name: the worker's member id.
        config: the run's config.
        engine: generates; a player where problems have environments.
        ledger: knows how many verdicts a group needs.
        leases: holds the groups.
        check: the check of new weights, for which finished groups wait.
        submitter: takes finished groups.
        in_redis: runs a call that blocks on Redis outside the loop.
        on_finish: called whenever the engine has room for another group.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        engine: Engine | Player,
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
        # Ids of the groups in the engine; each one's event is set when it has left.
        self._inside: dict[str, asyncio.Event] = {}
        self.groups = 0
        """Number of groups in the engine, or that wait to enter."""
        self.failures = 0
        """Number of batches in a row of which the engine finished nothing."""
        self.counts = {
            "groups": 0,
            "samples": 0,
            "tokens": 0,
            "partial_groups": 0,
            "revoked_groups": 0,
            "failed_groups": 0,
        }
        """Counters since the worker's start, for its report."""

    def begin(self, groups: Sequence[HeldGroup]) -> None:
        """Gives the engine a batch; each group is submitted as it finishes.

        The ledger may have revoked a group that is in the engine and have leased it to this worker again.
        It then enters, as a batch of its own, once the engine is rid of the earlier attempt.
        """
        self.groups += len(groups)
        again = [held for held in groups if held.lease.group_id in self._inside]
        fresh = [held for held in groups if held.lease.group_id not in self._inside]
        if fresh:
            self._enter(fresh)
            self._spawn(self._generate(fresh))
        for held in again:
            self._spawn(self._generate_again(held))

    def _spawn(self, batch: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(batch)
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    def _enter(self, groups: Sequence[HeldGroup]) -> None:
        self._inside.update((held.lease.group_id, asyncio.Event()) for held in groups)

    def _leave(self, group_id: str) -> None:
        self._inside.pop(group_id).set()
        self.groups -= 1

    async def wait(self, seconds: float) -> None:
        """Waits until all batches have ended, but at most ``seconds``."""
        if self._batches:
            await asyncio.wait(self._batches, timeout=seconds)

    async def _generate_again(self, held: HeldGroup) -> None:
        """Ends an earlier attempt of a group, then generates the group."""
        group_id = held.lease.group_id
        # An engine that is down ends the earlier attempt by itself.
        with contextlib.suppress(TandemError):
            await self._engine.abort([group_id])
        while self._leases.holds(held) and (earlier := self._inside.get(group_id)):
            await earlier.wait()
        if self._leases.holds(held) and not held.is_late:
            self._enter([held])
            await self._generate([held])
            return
        self.groups -= 1
        if self._leases.holds(held):
            # Its deadline ends nothing any more: it came while the engine had the earlier attempt.
            why = "its deadline passed while its earlier attempt ended"
            await self.give_back(held.lease, why, failed=False)
        else:
            self._drop(held)
        self._on_finish()

    def _drop(self, held: HeldGroup) -> None:
        """Drops a group whose lease isn't this worker's any more."""
        self.counts["revoked_groups"] += 1
        self._leases.forget(held.lease.group_id, held.lease.attempt)

    async def _generate(self, groups: Sequence[HeldGroup]) -> None:
        """Generates one batch; submits each group as it finishes."""
        left = {held.lease.group_id: held for held in groups}
        finished = 0
        try:
            requests = [held.request(self._config) for held in groups]
            async for group in self._engine.generate(requests):
                held = left.pop(group.group_id)
                held.is_generated = True
                self._leave(group.group_id)
                self._on_finish()
                try:
                    finished += await self._hand_in(group, held)
                except StoreError as error:
                    # The lease expires by itself; the other groups go on.
                    log.warning(f"group {group.group_id}: {error}")
                    self._leases.forget(group.group_id, held.lease.attempt)
        except (TandemError, ValueError) as error:
            log.error(f"the engine gave up a batch: {error}")
        for group_id in left:
            self._leave(group_id)
        self._on_finish()
        for held in left.values():
            await self.give_back(held.lease, "the engine gave up its batch", failed=True)
        self.failures = 0 if finished else self.failures + 1

    async def _hand_in(self, finished: FinishedGroup, held: HeldGroup) -> bool:
        """Submits a finished group or gives its lease back; False if the engine failed to generate it."""
        lease = held.lease
        await self._check.settled(finished.samples)
        if not self._leases.holds(held):
            self._drop(held)
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
            if not held.is_late:  # It was aborted during a drain.
                await self.give_back(lease, "drained", failed=False)
                return True
            samples = at_deadline(samples)
            keeps_late = self._config.learner.objective.stragglers != "leave_out"
            # An episode that failed, or was cut before its environment paid it, has no verdict to come.
            counted = sum(
                s.episode is None or s.episode.failure is None
                for s in samples
                if keeps_late or s.finish_reason is not FinishReason.DEADLINE
            )
            enough = counted >= self._ledger.settings.least_verdicts
            # The ledger would reject a group with too few verdicts (its settings were read for the
            # lease), and a group in which no sample has ended teaches nothing.
            if not (ended and enough):
                await self.give_back(
                    lease,
                    f"{ended} of {len(finished.samples)} samples finished before its deadline",
                    failed=True,
                )
                return True
            self.counts["partial_groups"] += 1
        try:
            self._submitter.submit(
                held.group(self._name, dataclasses.replace(finished, samples=samples))
            )
        except WireError as error:
            log.error(f"group {lease.group_id} can't be sent: {error}")
            self.counts["failed_groups"] += 1
            await self.give_back(lease, str(error), failed=True)
            return True
        self.counts["groups"] += 1
        self.counts["samples"] += len(samples)
        self.counts["tokens"] += sum(len(s.tokens) for s in samples)
        return True

    async def give_back(self, lease: Lease, reason: str, *, failed: bool) -> bool:
        """Gives a lease back to the ledger, outside the loop; False if Redis is away."""
        call = partial(self._leases.give_back, lease, reason, failed=failed)
        return bool(await self._in_redis(call))


def at_deadline(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples of a group that are submitted at its deadline.

    These are the samples that ended, and those that were still being sampled, with their tokens so
    far and a finish reason of their own: leaving them out would favour short answers. A sample
    without any token can't be a row, and leaves its group like one without a verdict.
    """
    return tuple(
        replace(s, finish_reason=FinishReason.DEADLINE)
        if s.finish_reason is FinishReason.ABORT
        else s
        for s in samples
        if s.finish_reason is not FinishReason.ABORT or s.oldest_step is not None
    )
