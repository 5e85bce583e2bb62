"""The rollout worker: leases groups, generates them, sees them through to their receipts.

One process has one engine. The asyncio loop drives it; what waits on Redis or on a socket runs
in threads beside it::

    loop        hold a version -> claim a due evaluation -> lease -> generate -> submit -> again
    redis       the loop's own Redis calls, so that a slow Redis never holds up a weight change
    keeper      heartbeat, renewal of leases, group deadlines
    listener    hints (taken, version, state), which wake a waiting loop
    endpoint    with environments: their episodes' requests, in the loop itself
    submit      finished groups, until their receipts
    weights-*   new versions, committed into the engine between two token steps
    decode      the engine's
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from ..common import disk
from ..common.config import Config
from ..common.errors import DeadlineError, StoreError
from ..common.records import GroupReceipt, Version
from ..common.sockets import CurveKeys
from ..common.telemetry import Clock
from ..common.weights.protocol import Membership
from ..replay.connection import Store
from ..replay.ledger import Ledger
from ..replay.members import Members
from ..replay.store import RunStore
from .engine import Engine
from .evaluate.claims import ClaimedEvaluations
from .generation import Generation
from .keeper import Keeper
from .leases import Leases
from .memory import held
from .new_weights.receiving import receiving
from .playing import Playing
from .submission import Submitter, live_pools

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

ROLE = "rollout"
REPORT_SECONDS = 2.0
"""Time between two reports."""
IDLE_SECONDS = 0.25
"""Longest wait for a hint before looking again."""
OUTAGE_SECONDS = 300.0
"""A worker ends after this long without Redis; its supervisor starts it again."""
BATCHES_OUTSTANDING = 4
"""Number of batches without receipts at which a worker waits for the pool."""
DRAIN_SHARE = 0.4
"""Share of ``launch.drain_seconds`` for the groups being generated, and again for their receipts."""
MAX_ENGINE_FAILURES = 3
"""Number of batches in a row of which the engine finished nothing, after which the process ends."""
EXIT_UNLIKE = 65
"""Exit status of a worker whose weights aren't those that were published (EX_DATAERR)."""


class Worker:
    """One rollout worker.

    Args:
        config: the run's config.
        name: the worker's member id.
        store: the connection to the run's Redis.
        client: the run's client keys.
        engine: an engine that has been started.
        stop: set when the worker should drain and end.
        redis: the one thread that talks to Redis for the loop.
        base: digest of the model that new weights are adapters for; empty if they are a whole model.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        store: Store,
        client: CurveKeys,
        engine: Engine,
        stop: asyncio.Event,
        redis: ThreadPoolExecutor,
        base: str = "",
    ) -> None:
        self._name = name
        self._config = config
        self._store = store
        self._engine = engine
        self._stop = stop
        self._redis = redis
        self._loop = asyncio.get_running_loop()
        self._batch = config.rollout.groups_per_batch
        self._ahead = config.rollout.groups_ahead
        self._clock = Clock()
        self._nudge = asyncio.Event()
        self._ended = threading.Event()
        self._state = "running"
        self._after_job = False
        self._waiting_for = ""
        # Groups that were leased for a version that wasn't loaded yet, and that version.
        self._early: list[str] = []
        self._early_for: Version | None = None
        self._runs = RunStore(store)
        self._members = Members(store)
        ledger = Ledger(store, name)
        self._leases = Leases(ledger, self._runs, config, self._abort)
        self._submitter = Submitter(
            name,
            partial(live_pools, self._members),
            client,
            self._on_receipt,
            most=BATCHES_OUTSTANDING * self._batch,
        )
        self._playing = (
            Playing(name, config, engine, self._members, self._runs, client)
            if config.environments.is_on
            else None
        )
        self._sampler = engine if self._playing is None else self._playing.player
        receiver = receiving(
            Membership(run_id=store.run_id, member=name, registry=self._members, client=client),
            config,
            engine,
            term=ledger.term,
            base=base,
            on_change=self._on_change,
            spoil=self._spoil,
        )
        self._check, self._committer = receiver.check, receiver.committer
        self._receiver = receiver.receiver
        self._generation = Generation(
            name,
            config,
            self._sampler,
            ledger,
            self._leases,
            self._check,
            self._submitter,
            self._in_redis,
            self._nudge.set,
        )
        self._evaluations = ClaimedEvaluations(
            name,
            engine,
            self._runs,
            config,
            self._check,
            self._committer.steady,
            self._in_redis,
            sampler=self._sampler,
        )
        self._keeper = Keeper(
            name, self._members, self._leases, lambda: engine.version, self._evaluations.renew
        )
        self._listener = threading.Thread(target=self._listen, name="listener", daemon=True)

    # The life of the process.

    async def run(self) -> int:
        """Starts everything, works, drains; returns the exit status."""
        self._loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        await self._in_redis(self._register)
        self._submitter.start()
        self._receiver.start()
        self._keeper.start()
        self._listener.start()
        if self._playing is not None:
            await self._playing.start()
        reporting = asyncio.create_task(self._reporting())
        log.info(f"{self._name} is ready")
        try:
            status = await self._work()
            return max(status, await self._drain())
        finally:
            reporting.cancel()
            self._ended.set()
            if self._playing is not None:
                await self._playing.close()
            await asyncio.to_thread(self._receiver.close)
            await asyncio.to_thread(self._submitter.close)
            await self._engine.close()
            await asyncio.to_thread(self._evaluations.close)
            await asyncio.to_thread(self._keeper.close)
            await asyncio.to_thread(self._listener.join, 2.0)
            await self._leave()

    def _on_sigterm(self) -> None:
        log.info(f"{self._name} was asked to end; draining")
        disk.stop_waiting()
        self._stop.set()
        self._nudge.set()
        self._loop.call_later(DRAIN_SHARE * self._config.launch.drain_seconds, self._cut_short)

    def _cut_short(self) -> None:
        """During a drain, ends what is still being generated; its leases are given back."""
        self._abort(self._leases.ids())
        self._evaluations.cancel()

    def _spoil(self) -> None:
        """Discards everything under way, since it may have tokens of weights that failed their check."""
        self._leases.spoil()
        self._evaluations.cancel()

    def _on_change(self) -> None:
        """Called when new weights wait to be loaded, when the engine serves them or couldn't load them, and
        when their check has ended."""
        early, version = self._early_for, self._engine.version
        if early is not None and self._committer.coming != early:
            if version is None or version < early:
                # With the version that is still in use, they may be too stale for their step.
                self._abort(self._early)
            self._early, self._early_for = [], None
        self._nudge.set()
        self._keeper.wake()

    def _on_receipt(self, receipt: GroupReceipt) -> None:
        self._leases.forget(receipt.group_id, receipt.attempt)

    def _abort(self, group_ids: list[str]) -> None:
        asyncio.run_coroutine_threadsafe(self._sampler.abort(group_ids), self._loop)

    def _register(self) -> None:
        self._members.register(
            ROLE,
            self._name,
            {"pid": os.getpid(), "host": socket.gethostname(), "version": None},
        )

    async def _leave(self) -> None:
        try:
            await asyncio.wait_for(self._in_redis(lambda: self._members.leave(self._name)), 5.0)
        except (StoreError, TimeoutError) as error:
            log.warning(f"{self._name} leaves without deregistering: {error}")

    async def _in_redis(self, call: Callable[[], T]) -> T:
        """Runs a blocking call in the one thread that talks to Redis for the loop."""
        return await self._loop.run_in_executor(self._redis, call)

    # Working.

    async def _work(self) -> int:
        """Works until SIGTERM, or until the run has ended and nothing is left to evaluate."""
        outage: float | None = None
        while not self._stop.is_set():
            try:
                worked = await self._turn()
                if self._state in ("finished", "failed") and not worked:
                    log.info(f"the run is {self._state}; {self._name} ends")
                    return 0
                outage = None
            except StoreError as error:
                now = time.monotonic()
                outage = outage or now
                if now - outage > OUTAGE_SECONDS:
                    log.error(f"gave up after {now - outage:.0f} s without Redis: {error}")
                    return 1
                log.warning(f"Redis is away, trying again: {error}")
                with self._clock.doing("wait/redis"):
                    await self._nap(1.0)
            if exhausted := getattr(self._engine, "exhausted", None):
                raise exhausted
            # An engine that can't recover says so, if it knows: each try would cost a group or an evaluation an
            # attempt.
            failures, broken = self._generation.failures, getattr(self._engine, "broken", "")
            if failures >= MAX_ENGINE_FAILURES:
                broken = broken or f"the engine failed {failures} batches in a row"
            if broken:
                log.error(f"{broken}; {self._name} ends so that a fresh process can take its place")
                return 1
            # Last: an engine that has failed fails the check of its weights, too.
            if self._committer.hopeless:
                log.error(
                    f"{self._committer.hopeless}; {self._name} ends so that a fresh process can try again"
                )
                return EXIT_UNLIKE
        return 0

    async def _turn(self) -> bool:
        """Does one evaluation or one batch; False if there was nothing to do."""
        held = self._engine.version
        if held is None or self._check.suspect:
            which = "the first weights" if held is None else "weights that pass their check"
            self._waiting_for = f"learner: {which}"
            self._state = await self._in_redis(self._runs.state)
            with self._clock.doing("wait/version"):
                await self._nap(IDLE_SECONDS)
            return False
        # If new weights wait for the running samples, the next groups are leased for them meanwhile, and are
        # in the engine when it has loaded them.
        coming = None
        if self._playing is None and not self._config.run.deterministic:
            coming = self._committer.coming
        held = coming or held
        under_way = self._under_way() if coming is None else len(self._early)
        if under_way > (self._ahead if self._playing is None else self._batch + self._ahead - 1):
            with self._clock.doing("generate"):
                await self._nap(IDLE_SECONDS)
            return False
        if self._playing is not None and (lacking := self._playing.lacking()):
            self._waiting_for = f"environments: {lacking}"
            self._state = await self._in_redis(self._runs.state)
            with self._clock.doing("wait/environments"):
                await self._nap(IDLE_SECONDS)
            return False
        if self._config.run.deterministic and self._check.unchecked is not None:
            # The check's samples would be in the batch of some groups and not of others, and the last bits
            # of a sample's log-probs depend on what else is in its batch.
            with self._clock.doing("wait/check"):
                await self._nap(IDLE_SECONDS)
            return False
        # Also while the weights are being checked: its result waits for that, and if training samples
        # were drawn instead, the learner's next version would come first.
        # After a job of an evaluation that isn't the run's own, groups come first.
        request, after_job = None, self._after_job
        self._after_job = False
        if not after_job:
            with self._clock.doing("generate" if self._generation.groups else "redis"):
                request = await self._in_redis(
                    lambda: self._runs.claim_evaluation(self._name, held)
                )
        if request is not None:
            self._after_job = request.job is not None
            with self._clock.doing("evaluate"):
                await self._evaluations.run(request)
            return True
        if self._submitter.outstanding >= BATCHES_OUTSTANDING * self._batch:
            self._waiting_for = "reward pool: receipts"
            self._state = await self._in_redis(self._runs.state)
            with self._clock.doing("wait/pool"):
                await asyncio.to_thread(self._submitter.wait_room, IDLE_SECONDS)
            return False
        room = self._batch + self._ahead - under_way
        with self._clock.doing("generate" if self._generation.groups else "redis"):
            reply, groups = await self._in_redis(lambda: self._leases.take(held, room))
        self._state = reply.state
        if self._check.suspect:
            for lease in reply.leases:
                await self._generation.give_back(
                    lease, "the weights failed their check", failed=False
                )
            return False
        if not reply.leases:
            self._waiting_for = "" if self._generation.groups else reply.wait or "ledger"
            slug = _slug(self._waiting_for)
            if after_job:
                return True
            with self._clock.doing(f"wait/{slug}" if self._waiting_for else "generate"):
                await self._nap(IDLE_SECONDS)
            return False
        self._waiting_for = ""
        if coming is not None:
            self._early_for = coming
            self._early += [lease.group_id for lease in reply.leases]
        self._generation.begin(groups)
        if coming is not None and self._committer.coming != coming:
            self._on_change()
        return True

    def _under_way(self) -> int:
        """Groups in the engine or on their way there, less as many as the episodes that are over would make: a
        slow episode leaves the places of its group's others to the next groups."""
        over = 0 if self._playing is None else self._playing.player.over
        return self._generation.groups - over // self._config.rollout.group_size

    async def _nap(self, seconds: float) -> None:
        """Waits for a hint, a new version or SIGTERM, but at most ``seconds``."""
        try:
            await asyncio.wait_for(self._nudge.wait(), seconds)
        except TimeoutError:
            pass
        self._nudge.clear()

    # Beside the loop.

    def _listen(self) -> None:
        """Passes hints on to the loop."""
        hints = self._store.hints("taken", "version", "state")
        while not self._ended.is_set():
            if hints.wait(1.0) is not None and not self._ended.is_set():
                self._loop.call_soon_threadsafe(self._nudge.set)
        hints.close()

    async def _reporting(self) -> None:
        """Reports figures every two seconds."""
        before, since = self._engine.stats(), time.monotonic()
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            now, stats = time.monotonic(), self._engine.stats()
            report = self._report(stats.sampled_tokens - before.sampled_tokens, now - since)
            before, since = stats, now
            try:
                await self._in_redis(partial(self._runs.report, self._name, report))
            except StoreError as error:
                log.warning(f"no report: {error}")

    def _report(self, tokens: int, seconds: float) -> dict[str, Any]:
        taken = self._clock.take()
        total = max(taken.pop("total"), 1e-9)
        version = self._engine.version
        submissions = self._submitter.stats()
        receipts = sum(submissions.results.values())
        return {
            "role": ROLE,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "version": [version.term, version.step] if version else None,
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "shares": {name: spent / total for name, spent in sorted(taken.items())},
            "clock": {**taken, "total": total},
            "waiting_for": self._waiting_for,
            "leases": len(self._leases),
            "counts": {**self._generation.counts, "evaluations": self._evaluations.done},
            "engine": asdict(self._engine.stats()),
            "submission": {
                "submitted": submissions.submitted,
                "resent": submissions.resent,
                "outstanding": submissions.outstanding,
                "pools": submissions.pools,
                "results": dict(submissions.results),
                "mean_receipt_seconds": submissions.receipt_seconds / max(receipts, 1),
            },
            "weights": {**self._receiver.stats(), "check": self._check.stats()},
            "memory": held(getattr(self._engine, "processes", ())),
            "episodes": None if self._playing is None else self._playing.report(),
            "alarm": self._check.counts.alarm
            or ("" if self._playing is None else self._playing.player.alarm),
        }

    # Draining.

    async def _drain(self) -> int:
        """Gives back what was not generated and waits for the receipts of what was."""
        deadline = DRAIN_SHARE * self._config.launch.drain_seconds
        status = 0
        # After SIGTERM everything is cut short at this same deadline; a finished run needs nothing more.
        if self._state in ("finished", "failed"):
            self._cut_short()
        await self._generation.wait(deadline)
        try:
            await asyncio.to_thread(self._submitter.drain, deadline)
        except DeadlineError as error:
            log.error(str(error))
            status = 1
        for lease in self._leases.left():
            if not await self._generation.give_back(lease, "drained", failed=False):
                # Each of the others would wait for Redis as long. They expire as well.
                break
        return status


def _slug(reason: str) -> str:
    """Turns a wait's reason into the name of an activity: its first words, without figures."""
    return reason.split(":")[0].strip().replace(" ", "_") or "ledger"
