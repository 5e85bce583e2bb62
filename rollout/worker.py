"""The rollout worker: leases groups, generates them, sees them through to their receipts.

One process has one engine. The asyncio loop drives it; what waits on Redis or on a socket runs
in threads beside it::

    loop        hold a version -> claim a due evaluation -> lease -> generate -> submit -> again
    redis       the loop's own Redis calls, so that a slow Redis never holds up a weight change
    keeper      heartbeat, renewal of leases, group deadlines
    listener    hints (taken, version, state), which wake a waiting loop
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
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from ..common import disk
from ..common.config import Config
from ..common.errors import DeadlineError, StoreError, TandemError, WireError
from ..common.records import (
    FinishReason,
    Group,
    GroupReceipt,
    Problem,
    Sample,
    SamplingParams,
    Version,
)
from ..common.run_folder import JoinInfo, RunFolder
from ..common.sockets import check_address
from ..common.telemetry import Clock
from ..replay.connection import Store, connect
from ..replay.ledger import Lease, LeaseReply, Ledger
from ..replay.members import Members
from ..replay.rules import choose_traces
from ..replay.store import EvaluationRequest, EvaluationResult, RunStore
from .commit_check import CommitCheck
from .engine import Engine, FinishedGroup, GroupRequest, NamedWeights, no_tokens
from .engines import make_engine
from .prefixes import Prefixes, prefixes
from .submission import PoolAddress, Submitter

if TYPE_CHECKING:
    from ..common.weights.buffer import StagedTensors
    from ..common.weights.scored_rows import ScoredRows
    from .evaluate.evaluation import Evaluation, Evaluator

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

ROLE = "rollout"
BEAT_SECONDS = 2.0
"""Between two heartbeats."""
REPORT_SECONDS = 2.0
"""Between two reports."""
IDLE_SECONDS = 0.25
"""Longest wait for a hint before looking again."""
OUTAGE_SECONDS = 300.0
"""Redis away for so long ends the worker; its supervisor starts it again."""
BATCHES_OUTSTANDING = 4
"""Batches without receipts at which a worker waits for the pool."""
PROBLEMS_KEPT = 4096
"""Problems kept in memory."""
DRAIN_SHARE = 0.4
"""Of ``launch.drain_seconds``: for what is being generated, and again for its receipts."""
MAX_ENGINE_FAILURES = 3
"""Batches in a row of which the engine finished nothing; then the process ends."""
EXIT_UNLIKE = 65
"""Exit status of a worker whose weights aren't those that were published (EX_DATAERR)."""
SWITCH_SECONDS = 0.0005
"""How long a thread may hold the interpreter while the decode thread waits for it."""


def main(join: JoinInfo, config: Config, *, name: str, folder: RunFolder | None) -> int:
    """Works until the run has ended or SIGTERM asks to drain; returns the exit status."""
    import torch

    # Before any parallel work, which fixes them.
    torch.set_num_threads(config.rollout.threads)
    torch.set_num_interop_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        return asyncio.run(Worker(join, config, name).run())
    except TandemError as error:
        log.error(str(error))
        return error.exit_code


@dataclass(slots=True)
class _Held:
    """A lease that this worker holds."""

    lease: Lease
    """Of the group."""
    deadline: float
    """The group's deadline (monotonic)."""
    revoked: bool = False
    """It is another worker's now: nothing of it is to be submitted."""
    late: bool = False
    """It was aborted at its deadline."""
    spoiled: bool = False
    """It may have tokens of weights that aren't what they are called."""


class Worker:
    """One rollout worker."""

    def __init__(self, join: JoinInfo, config: Config, name: str) -> None:
        self.name = name
        self.config = config
        self._join = join
        self._batch = config.rollout.groups_per_batch
        self._ahead = config.rollout.groups_ahead
        # Groups that the engine has, and who takes what it finishes.
        self._in_engine = 0
        self._generating: set[asyncio.Task[None]] = set()
        self._clock = Clock()
        self._held: dict[str, _Held] = {}
        # Guards `_held`, which loop, keeper and the submitter's thread change.
        self._lock = threading.Lock()
        self._problems: OrderedDict[str, Problem] = OrderedDict()
        self._nudge = asyncio.Event()
        self._stop = asyncio.Event()
        self._ended = threading.Event()
        self._wake_keeper = threading.Event()
        self._state = "running"
        self._lease_seconds = config.replay.lease_seconds
        self._evaluating: EvaluationRequest | None = None
        self._evaluation: asyncio.Task[Evaluation] | None = None
        self._evaluator: Evaluator | None = None
        self._steady = asyncio.Lock()
        self._unlike = ""
        self._failures = 0
        self._counts = {
            "groups": 0,
            "samples": 0,
            "tokens": 0,
            "partial_groups": 0,
            "revoked_groups": 0,
            "failed_groups": 0,
            "evaluations": 0,
        }
        self._waiting_for = ""
        self._redis = ThreadPoolExecutor(1, thread_name_prefix="redis")
        self._threads: list[threading.Thread] = []

    # The life of the process.

    async def run(self) -> int:
        """Starts everything, works, drains."""
        from .weights import WeightReceiver

        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        self._store: Store = await self._in_redis(lambda: connect(self._join, name=self.name))
        self._runs = RunStore(self._store)
        self._ledger = Ledger(self._store, self.name)
        self._members = Members(self._store)
        client = await self._in_redis(self._runs.curve_client)
        # Loading a large model takes minutes, in which the loop must hear of SIGTERM.
        self._engine: Engine = await asyncio.to_thread(
            make_engine,
            self.config.model,
            self.config.rollout,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
        )
        if not await self._start_engine():
            return 0
        weights, rollout = self.config.weights, self.config.rollout
        self._check = CommitCheck(
            self._engine,
            dtypes=(self.config.model.dtype, self.config.engine_dtype),
            bound=weights.check_bound,
            temperature=rollout.temperature,
            runs_on=rollout.recompute_kv,
            seconds=weights.commit_seconds,
            longest=self.config.data.max_prompt_tokens + rollout.max_new_tokens,
        )
        self._submitter = Submitter(
            self.name,
            self._pools,
            client,
            self._on_receipt,
            most=BATCHES_OUTSTANDING * self._batch,
        )
        receiver = WeightReceiver(
            self._store,
            self.name,
            self._engine.parameter_specs(),
            self._commit_weights,
            config=self.config,
            # What an engine that users bring needn't say.
            device=getattr(self._engine, "weights_device", "cpu"),
            on_host=getattr(self._engine, "weights_on_host", True),
            check=self._check_weights if self._check.is_on else None,
        )
        self._receiver = receiver
        await self._in_redis(self._register)
        self._submitter.start()
        receiver.start()
        for title, target in (("keeper", self._keep), ("listener", self._listen)):
            thread = threading.Thread(target=target, name=title, daemon=True)
            thread.start()
            self._threads.append(thread)
        reporting = asyncio.create_task(self._reporting())
        log.info(f"{self.name} is ready")
        try:
            status = await self._work()
            return max(status, await self._drain())
        finally:
            reporting.cancel()
            self._ended.set()
            self._wake_keeper.set()
            await asyncio.to_thread(receiver.close)
            await asyncio.to_thread(self._submitter.close)
            await self._engine.close()
            if self._evaluator is not None:
                await asyncio.to_thread(self._evaluator.close)
            for thread in self._threads:
                await asyncio.to_thread(thread.join, 2.0)
            await self._leave()
            self._redis.shutdown(wait=False, cancel_futures=True)

    async def _start_engine(self) -> bool:
        """Starts the engine; False where SIGTERM came first."""
        # vLLM takes half a minute, and a large model minutes.
        starting = asyncio.create_task(self._engine.start())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.wait({starting})
        return False

    def _on_sigterm(self) -> None:
        log.info(f"{self.name} was told to end; draining")
        disk.stop_waiting()
        self._stop.set()
        self._nudge.set()
        self._loop.call_later(DRAIN_SHARE * self.config.launch.drain_seconds, self._cut_short)

    def _cut_short(self) -> None:
        """Ends what is still being generated in a drain; its leases are given back."""
        with self._lock:
            held = list(self._held)
        self._abort(held)
        if self._evaluation is not None:
            self._evaluation.cancel()

    def _register(self) -> None:
        self._members.register(
            ROLE,
            self.name,
            {"pid": os.getpid(), "host": socket.gethostname(), "version": None},
        )

    async def _leave(self) -> None:
        try:
            await asyncio.wait_for(self._in_redis(lambda: self._members.leave(self.name)), 5.0)
        except (StoreError, TimeoutError) as error:
            log.warning(f"{self.name} leaves without saying so: {error}")

    async def _in_redis(self, call: Callable[[], T]) -> T:
        """Runs a blocking call in the one thread that talks to Redis for the loop."""
        return await self._loop.run_in_executor(self._redis, call)

    # Working.

    async def _work(self) -> int:
        """Until SIGTERM, or until the run has ended and nothing is left to evaluate."""
        outage: float | None = None
        while not self._stop.is_set():
            try:
                worked = await self._turn()
                if self._state in ("finished", "failed") and not worked:
                    log.info(f"the run is {self._state}; {self.name} ends")
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
            if self._unlike:
                log.error(f"{self._unlike}; {self.name} ends so that a fresh process can try again")
                return EXIT_UNLIKE
            # An engine that can't be mended says so, if it knows: each try costs its groups one.
            if self._failures and (broken := getattr(self._engine, "broken", "")):
                log.error(f"{broken}; {self.name} ends so that a fresh process can take its place")
                return 1
            if self._failures >= MAX_ENGINE_FAILURES:
                log.error(
                    f"the engine failed {self._failures} batches in a row; {self.name} ends so "
                    f"that a fresh process can take its place"
                )
                return 1
        return 0

    async def _turn(self) -> bool:
        """One evaluation or one batch; False if there was nothing to do."""
        held = self._engine.version
        if held is None or self._check.suspect:
            which = "the first weights" if held is None else "weights that pass their check"
            self._waiting_for = f"learner: {which}"
            self._state = await self._in_redis(self._runs.state)
            with self._clock.doing("wait/version"):
                await self._nap(IDLE_SECONDS)
            return False
        if self._in_engine > self._ahead:
            with self._clock.doing("generate"):
                await self._nap(IDLE_SECONDS)
            return False
        # Also while the weights are being checked: its result waits for that, and what is sampled for
        # training instead would make the learner's next version come first.
        with self._clock.doing("generate" if self._in_engine else "redis"):
            request = await self._in_redis(lambda: self._runs.claim_evaluation(self.name, held))
        if request is not None:
            with self._clock.doing("evaluate"):
                await self._evaluate(request)
            return True
        if self._submitter.outstanding >= BATCHES_OUTSTANDING * self._batch:
            self._waiting_for = "reward pool: receipts"
            with self._clock.doing("wait/pool"):
                await asyncio.to_thread(self._submitter.wait_room, IDLE_SECONDS)
            return False
        room = self._batch + self._ahead - self._in_engine
        with self._clock.doing("generate" if self._in_engine else "redis"):
            reply, problems, begun = await self._in_redis(lambda: self._lease(held, room))
        self._state, self._lease_seconds = reply.state, reply.lease_seconds
        if self._check.suspect:
            for lease in reply.leases:
                await self._give_back(lease, "the weights failed their check", failed=False)
            return False
        if not reply.leases:
            self._waiting_for = "" if self._in_engine else reply.wait or "ledger"
            slug = _slug(self._waiting_for)
            with self._clock.doing(f"wait/{slug}" if self._waiting_for else "generate"):
                await self._nap(IDLE_SECONDS)
            return False
        self._waiting_for = ""
        self._in_engine += len(reply.leases)
        generating = asyncio.create_task(self._generate(reply.leases, problems, begun))
        self._generating.add(generating)
        generating.add_done_callback(self._generating.discard)
        return True

    async def _nap(self, seconds: float) -> None:
        """Waits for a hint, a new version or SIGTERM, but no longer than ``seconds``."""
        try:
            await asyncio.wait_for(self._nudge.wait(), seconds)
        except TimeoutError:
            pass
        self._nudge.clear()

    def _lease(
        self, held: Version, room: int
    ) -> tuple[LeaseReply, dict[str, Problem], dict[str, Prefixes]]:
        """Leases with their problems, and by group how its samples begin where they begin with a
        trace (in the Redis thread)."""
        reply = self._ledger.lease(held, room)
        now = time.monotonic()
        with self._lock:
            for lease in reply.leases:
                left = (lease.deadline_ms - reply.now_ms) / 1000
                self._held[lease.group_id] = _Held(lease, now + left)
        wanted = [lease.problem_id for lease in reply.leases]
        missing = list(dict.fromkeys(i for i in wanted if i not in self._problems))
        try:
            if missing:
                found = self._runs.problems(missing)
                self._problems.update(zip(missing, found, strict=True))
            begun = self._begun(reply.leases, held.step)
        except StoreError:
            for lease in reply.leases:
                self._give_back_now(lease, "problems or traces can't be read", failed=False)
            raise
        chosen = {i: self._problems[i] for i in wanted}
        for i in wanted:
            self._problems.move_to_end(i)
        while len(self._problems) > PROBLEMS_KEPT:
            self._problems.popitem(last=False)
        return reply, chosen, begun

    def _begun(self, leases: Sequence[Lease], step: int) -> dict[str, Prefixes]:
        """By group with a trace, how its samples begin; nothing where traces enter whole."""
        if self.config.expert.prefix is None:
            return {}
        names = {lease.group_id: self._traces(lease) for lease in leases}
        wanted = list(dict.fromkeys(name for some in names.values() for name in some))
        known = dict(zip(wanted, self._runs.traces(wanted), strict=True)) if wanted else {}
        return {
            group_id: prefixes(self.config, group_id, step, [known[name] for name in some])
            for group_id, some in names.items()
            if some
        }

    def _traces(self, lease: Lease) -> tuple[str, ...]:
        return choose_traces(
            self._problems[lease.problem_id],
            self.config.run.seed,
            lease.group_id,
            self.config.expert.per_group,
        )

    async def _generate(
        self,
        leases: Sequence[Lease],
        problems: dict[str, Problem],
        begun: Mapping[str, Prefixes],
    ) -> None:
        """Generates one batch; hands in each group as it finishes."""
        rollout, seed = self.config.rollout, self.config.run.seed
        sampling = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=0,
            max_new_tokens=rollout.max_new_tokens,
        )
        # Traces that samples begin with fill no row of their own.
        whole = self.config.expert.prefix is None
        per_group = self.config.expert.per_group if whole else 0
        traces = {
            lease.group_id: choose_traces(
                problems[lease.problem_id], seed, lease.group_id, per_group
            )
            for lease in leases
        }
        # Those that enter only where all failed replace samples once they are graded.
        instead = self.config.expert.when == "always"
        nothing = Prefixes(tokens=(), logprobs=())
        requests = [
            GroupRequest(
                group_id=lease.group_id,
                prompt_tokens=problems[lease.problem_id].prompt_tokens,
                count=rollout.group_size - (len(traces[lease.group_id]) if instead else 0),
                sampling=sampling,
                seed=seed,
                prefix_tokens=begun.get(lease.group_id, nothing).tokens or no_tokens(),
                prefix_logprobs=begun.get(lease.group_id, nothing).logprobs or None,
                longest=rollout.max_new_tokens,
            )
            for lease in leases
        ]
        left = {lease.group_id: lease for lease in leases}
        finished = 0
        try:
            async for group in self._engine.generate(requests):
                lease = left.pop(group.group_id)
                self._in_engine -= 1
                self._nudge.set()
                try:
                    finished += await self._hand_in(
                        group, lease, problems[lease.problem_id], traces[group.group_id]
                    )
                except StoreError as error:
                    # The lease expires by itself; the other groups go on.
                    log.warning(f"group {group.group_id}: {error}")
                    self._forget(group.group_id)
        except (TandemError, ValueError) as error:
            log.error(f"the engine gave up a batch: {error}")
        self._in_engine -= len(left)
        self._nudge.set()
        for lease in left.values():
            await self._give_back(lease, "the engine gave up its batch", failed=True)
        self._failures = 0 if finished else self._failures + 1

    async def _hand_in(
        self, finished: FinishedGroup, lease: Lease, problem: Problem, traces: tuple[str, ...]
    ) -> int:
        """Submits one finished group or gives its lease back; 1 where the engine did its part."""
        await self._check.settled(finished.samples)
        with self._lock:
            held = self._held.get(lease.group_id)
        if held is None or held.revoked:
            self._counts["revoked_groups"] += 1
            self._forget(lease.group_id)
            return 1
        if held.spoiled:
            await self._give_back(lease, "the weights failed their check", failed=False)
            return 1
        if finished.error is not None:
            log.warning(f"group {lease.group_id} failed: {finished.error}")
            self._counts["failed_groups"] += 1
            await self._give_back(lease, finished.error, failed=True)
            return 0
        samples = finished.samples
        ended = sum(s.finish_reason is not FinishReason.ABORT for s in samples)
        if ended < len(samples):
            if not held.late:  # Aborted in a drain.
                await self._give_back(lease, "drained", failed=False)
                return 1
            samples = at_deadline(samples)
            keeps_late = self.config.learner.objective.stragglers != "leave_out"
            enough = (len(samples) if keeps_late else ended) >= self._ledger.settings.least_verdicts
            # Of too few the ledger would reject the group (its settings were read for the lease),
            # and without one that ended there is nothing to learn from.
            if not (ended and enough):
                await self._give_back(
                    lease,
                    f"{ended} of {len(finished.samples)} samples finished before its deadline",
                    failed=True,
                )
                return 1
            self._counts["partial_groups"] += 1
        group = Group(
            group_id=lease.group_id,
            attempt=lease.attempt,
            worker=self.name,
            problem_id=problem.problem_id,
            prompt_tokens=problem.prompt_tokens,
            prompt_text=problem.prompt_text,
            gold=problem.gold,
            data_source=problem.data_source,
            samples=samples,
            trace_ids=traces,
            extra=problem.extra,
        )
        try:
            self._submitter.submit(group)
        except WireError as error:
            log.error(f"group {lease.group_id} can't be sent: {error}")
            self._counts["failed_groups"] += 1
            await self._give_back(lease, str(error), failed=True)
            return 1
        self._counts["groups"] += 1
        self._counts["samples"] += len(samples)
        self._counts["tokens"] += sum(len(s.tokens) for s in samples)
        return 1

    async def _give_back(self, lease: Lease, reason: str, *, failed: bool) -> None:
        await self._in_redis(lambda: self._give_back_now(lease, reason, failed=failed))

    def _give_back_now(self, lease: Lease, reason: str, *, failed: bool) -> None:
        self._forget(lease.group_id)
        try:
            self._ledger.give_back(
                lease.group_id, lease.attempt, reason=reason[:200], failed=failed
            )
        except StoreError as error:
            log.warning(f"group {lease.group_id} wasn't given back and will expire: {error}")

    def _forget(self, group_id: str) -> None:
        with self._lock:
            self._held.pop(group_id, None)

    def _on_receipt(self, receipt: GroupReceipt) -> None:
        self._forget(receipt.group_id)

    # Evaluation.

    async def _evaluate(self, request: EvaluationRequest) -> None:
        """Evaluates the weights in use, which are held still for it."""
        from .evaluate.evaluation import Evaluator

        if self._evaluator is None:
            self._evaluator = Evaluator(self._engine, self.config.reward)
        self._evaluating = request
        try:
            problems = await self._in_redis(
                lambda: self._runs.eval_set(request.set_name, request.limit)
            )
            async with self._steady:
                version = self._engine.version
                self._evaluation = asyncio.create_task(
                    self._evaluator.evaluate(
                        problems,
                        temperature=request.temperature,
                        top_p=self.config.evaluate.top_p,
                        samples=request.samples,
                        max_new_tokens=self.config.rollout.max_new_tokens,
                        seed=self.config.run.seed,
                        name=f"evaluate {request.set_name}",
                    )
                )
                await asyncio.wait([self._evaluation])
            await self._check.settled(self._responses(self._evaluation))
            if self._evaluation.cancelled() or self._check.suspect:
                reason = "the weights failed their check" if self._check.suspect else "drained"
                await self._give_back_evaluation(request, reason, failed=False)
                return
            found = self._evaluation.result()
            step = version.step if version is not None else request.step
            result = EvaluationResult(
                id=request.id,
                set_name=request.set_name,
                step=found.step if found.step is not None else step,
                version=found.version,
                accuracy=found.accuracy,
                samples=found.samples,
                pass_rate=found.pass_rate,
                accuracy_by_source=found.by_source,
                pass_by_source=found.pass_by_source,
                problems_by_source=found.problems_by_source,
                problems=found.problems,
                format_share=found.format_share,
                right_and_formed=found.right_and_formed,
                mean_length=found.mean_length,
                seconds=found.seconds,
                member=self.name,
            )
            await self._in_redis(lambda: self._runs.finish_evaluation(request.id, result))
            self._counts["evaluations"] += 1
            log.info(
                f"{request.set_name} at step {result.step}: accuracy {found.accuracy:.1%} of "
                f"{found.problems} problems in {found.seconds:.1f} s"
            )
        except StoreError:
            raise
        except (TandemError, ValueError) as error:
            # This or another worker tries again, unless it has failed too often.
            log.error(f"evaluation {request.id} failed: {error}")
            await self._give_back_evaluation(request, str(error), failed=True)
        finally:
            self._evaluating = None

    async def _give_back_evaluation(
        self, request: EvaluationRequest, reason: str, *, failed: bool
    ) -> None:
        # Not to be renewed any more; another worker may claim it from here on.
        self._evaluating = None
        await self._in_redis(
            lambda: self._runs.give_back_evaluation(
                request.id, self.name, reason=reason, failed=failed
            )
        )
        log.info(f"evaluation {request.id} was given back: {reason}")

    # New weights.

    def _commit_weights(self, tensors: StagedTensors, version: Version) -> float:
        """Called from the receiver's thread; returns when the engine serves the version."""
        done = asyncio.run_coroutine_threadsafe(self._commit(tensors, version), self._loop)
        return done.result(self.config.weights.commit_seconds)

    async def _commit(self, tensors: StagedTensors, version: Version) -> float:
        still = False
        before = self._engine.stats().load_seconds
        try:
            # An evaluation should be of one version, but not at the price of the deadline.
            async with asyncio.timeout(self.config.weights.commit_seconds / 2):
                await self._steady.acquire()
            still = True
        except TimeoutError:
            log.warning(f"version {version} is committed into a long evaluation")
        try:
            if tensors:
                if self._check.is_on:
                    await self._check.begin(version)
                await self._engine.load(NamedWeights(dict(tensors), tensors.place), version)
            else:
                await self._engine.restamp(version)
        except BaseException:
            self._check.end(passed=None)
            raise
        finally:
            if still:
                self._steady.release()
        self._nudge.set()
        self._wake_keeper.set()
        return self._engine.stats().load_seconds - before

    def _check_weights(self, version: Version, scored: ScoredRows | None) -> bool:
        """Called from the receiver's thread when the engine serves a version; False = it is to be
        fetched and loaded anew."""
        done = asyncio.run_coroutine_threadsafe(self._examine(version, scored), self._loop)
        return done.result()

    async def _examine(self, version: Version, scored: ScoredRows | None) -> bool:
        try:
            found = await self._check.examine(version, scored)
            failed = [str(difference) for difference in found if not difference.passes]
        except TandemError as error:
            failed = [str(error)]
        except Exception as error:
            # Groups wait for the check's end, whatever that is.
            log.exception(f"version {version} couldn't be checked")
            failed = [f"it couldn't be checked: {type(error).__name__}: {error}"]
        self._check.end(passed=not failed)
        self._nudge.set()
        if not failed:
            return True
        # Before anything that has waited goes on.
        self._spoil()
        told = f"version {version} isn't what the learner published ({'; '.join(failed)})"
        self._check.counts.alarm = told
        if self._check.in_a_row == 1:
            log.error(f"{told}: what it sampled is discarded, and it is fetched anew")
            return False
        self._unlike = (
            f"{told}, loaded {self._check.in_a_row} times. If it is the engine's own rounding, raise "
            f"weights.check_bound (0: no check)"
        )
        return True

    def _spoil(self) -> None:
        """Ends and discards all that is under way: it may have tokens of weights that are none."""
        with self._lock:
            for held in self._held.values():
                held.spoiled = True
            ids = list(self._held)
        self._abort(ids)
        if self._evaluation is not None:
            self._evaluation.cancel()

    @staticmethod
    def _responses(evaluation: asyncio.Task[Evaluation]) -> list[Sample]:
        if evaluation.cancelled() or evaluation.exception() is not None:
            return []
        return [sample for sample, _ in evaluation.result().responses]

    # Beside the loop.

    def _pools(self) -> list[PoolAddress]:
        found = []
        for member in self._members.live("reward"):
            if "endpoint" not in member.info:
                continue
            endpoint, key = member.info["endpoint"], member.info.get("public_key")
            try:
                check_address(member.member, endpoint, key)
            except WireError as error:
                log.warning(str(error))
                continue
            found.append(PoolAddress(member=member.member, endpoint=endpoint, public_key=key))
        return found

    def _listen(self) -> None:
        """Passes hints on to the loop."""
        hints = self._store.hints("taken", "version", "state")
        while not self._ended.is_set():
            if hints.wait(1.0) is not None and not self._ended.is_set():
                self._loop.call_soon_threadsafe(self._nudge.set)
        hints.close()

    def _keep(self) -> None:
        """Heartbeats, renews leases and minds the groups' deadlines."""
        next_beat = next_renewal = 0.0
        told: Version | None = None
        while not self._ended.is_set():
            now = time.monotonic()
            try:
                version = self._engine.version
                # A new version is told at once: it is what a status of the run is read for.
                if now >= next_beat or version != told:
                    next_beat, told = now + BEAT_SECONDS, version
                    self._members.beat(
                        self.name, {"version": [version.term, version.step] if version else None}
                    )
                    evaluating = self._evaluating
                    if evaluating is not None:
                        self._runs.renew_evaluation(evaluating.id, self.name)
                if now >= next_renewal:
                    next_renewal = now + self._lease_seconds / 3
                    self._renew()
                self._end_late(now)
            except StoreError as error:
                log.warning(f"no heartbeat and no renewal: {error}")
            wake = min(next_beat, next_renewal) - time.monotonic()
            self._wake_keeper.wait(min(max(wake, 0.05), 1.0))
            self._wake_keeper.clear()

    def _renew(self) -> None:
        with self._lock:
            wanted = list(self._held)
        if not wanted:
            return
        lost = self._ledger.renew(wanted)
        revoked = []
        with self._lock:
            for group_id in lost:
                held = self._held.get(group_id)
                if held is not None and not held.revoked:
                    held.revoked = True
                    revoked.append(group_id)
        if revoked:
            log.info(f"leases revoked: {', '.join(revoked)}")
            self._abort(revoked)

    def _end_late(self, now: float) -> None:
        late = []
        with self._lock:
            for group_id, held in self._held.items():
                if not held.late and now >= held.deadline:
                    held.late = True
                    late.append(group_id)
        if late:
            log.warning(f"past their deadline, ended with what they have: {', '.join(late)}")
            self._abort(late)

    def _abort(self, group_ids: list[str]) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.abort(group_ids), self._loop)

    async def _reporting(self) -> None:
        """Reports figures every two seconds."""
        before, since = self._engine.stats(), time.monotonic()
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            now, stats = time.monotonic(), self._engine.stats()
            report = self._report(stats.sampled_tokens - before.sampled_tokens, now - since)
            before, since = stats, now
            try:
                await self._in_redis(partial(self._runs.report, self.name, report))
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
            "leases": len(self._held),
            "counts": dict(self._counts),
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
            "alarm": self._check.counts.alarm,
        }

    # Draining.

    async def _drain(self) -> int:
        """Gives back what was not generated and waits for the receipts of what was."""
        deadline = DRAIN_SHARE * self.config.launch.drain_seconds
        status = 0
        if self._generating:
            # Cut short at this same deadline, after SIGTERM; a finished run needs nothing more.
            if self._state in ("finished", "failed"):
                self._cut_short()
            await asyncio.wait(self._generating, timeout=deadline)
        try:
            await asyncio.to_thread(self._submitter.drain, deadline)
        except DeadlineError as error:
            log.error(str(error))
            status = 1
        with self._lock:
            left = [held.lease for held in self._held.values()]
        for lease in left:
            await self._give_back(lease, "drained", failed=False)
        return status


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


def _slug(reason: str) -> str:
    """A wait's reason as the name of an activity: its first words, without figures."""
    return reason.split(":")[0].strip().replace(" ", "_") or "ledger"
