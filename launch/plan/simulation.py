"""A simulated run, event by event: who waits for whom, and how long a step takes.

The simulation runs workers, engines, the reward pool and the learner under the ledger's own rules
(:mod:`tandem.replay.rules.leases` and :mod:`tandem.replay.rules.cutting`, which mirror its scripts). No formula
gives the time of an asynchronous step: it depends on how long the longest sample holds up its row, on
how many groups the staleness bound lets begin in the meantime, and on what new weights cost the
samples that are under way.

    worker    leases when it holds a version and at most ``ahead`` groups, up to ``batch + ahead``
    ledger    admits a group if J + floor(r/B) - w <= eta, and cuts rows in the order of ids
    engine    runs ``slots`` samples at a time; each iteration gives each of them one token
    pool      grades finished groups one after the other
    learner   takes a row as soon as it is complete, trains, publishes, and takes the next
    versions  arrive some time after a publication and pause each engine that runs

Failures, evaluations and checkpoints are left out. If a window lets a row pass over a late group,
the row waits for it (``replay.late=wait``).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from ...replay.rules.cutting import cut
from ...replay.rules.leases import Limits, why_not_leased
from .lengths import Lengths

DRAWN = 1024
"""Groups whose lengths are drawn; later groups repeat these lengths."""
GRID = 256
"""Number of equal parts of the longest response at whose ends samples may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """How many seconds one engine takes.

    An iteration takes ``host + max(weights + cached_token * context, row * rows)``: memory is read
    during the arithmetic, and the host's work comes on top.
    """

    host: float
    """Host time per iteration: scheduling, sampling, detokenising."""
    weights: float = 0.0
    """Time per iteration to read the weights."""
    cached_token: float = 0.0
    """Time per iteration to read the keys and values of one token."""
    row: float = 0.0
    """Time per iteration for the arithmetic of one sample's token."""
    prompt_token: float = 0.0
    """Time to compute the keys and values of one token, of a prompt or again after new weights."""
    load: float = 0.0
    """Time to load new weights, during which nothing is sampled."""

    def iteration(self, rows: int, context: float) -> float:
        """Seconds in which each of ``rows`` samples, with ``context`` tokens in all, gets one token."""
        return self.host + max(self.weights + self.cached_token * context, self.row * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpeed:
    """How many seconds the learner takes."""

    step: float
    """Fixed time of a step: the optimizer, the exchange of gradients."""
    token: float = 0.0
    """Time per own token of the row."""
    publish: float = 0.0
    """Time to copy the weights out, between two steps."""
    transfer: float = 0.0
    """Time from a publication until the workers hold the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulated run depends on."""

    limits: Limits
    """The ledger's limits: B, the staleness bound, the window, the greatest number of leases."""
    workers: int
    """Rollout workers, each with one engine."""
    samples: int
    """Own samples per group."""
    batch: int
    """``rollout.groups_per_batch``."""
    ahead: int
    """``rollout.groups_ahead``."""
    slots: int
    """Samples that an engine runs at a time."""
    whole_groups: bool = False
    """Whether an engine begins a group only when all its samples have slots, as the torch engine
    does; vLLM begins them one by one."""
    lengths: Lengths
    """Lengths of responses, in tokens."""
    prompt: float = 0.0
    """Mean tokens of a prompt, which the samples of a group share."""
    engine: EngineSpeed
    """Speed of each engine."""
    learner: LearnerSpeed
    """Speed of all ranks together."""
    recompute: bool = True
    """``rollout.recompute_kv``."""
    every: int = 1
    """``weights.every``: steps from one publication to the next."""
    graded_a_second: float = math.inf
    """Samples that the reward pools grade per second, all graders together."""
    shared: bool = False
    """Whether learner and engines take turns on the same GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulated run did, averaged over its measured steps."""

    step: float
    """Seconds between two steps."""
    trained: float
    """Seconds of a step in which the learner worked, publication included."""
    learner_waits: float
    """Share of the time in which the learner waited for a row."""
    engines_wait: float
    """Share of the engines' time in which an engine had no sample to run."""
    engines_pause: float
    """Share of the engines' time that new weights took."""
    running: float
    """Mean number of samples that an engine ran at a time while it had any."""
    tokens_per_second: float
    """Sampled tokens per second, all engines together."""
    staleness: float
    """Mean age of a group's oldest token when it is trained on, in steps."""


@dataclass(slots=True, eq=False)
class _Group:
    serial: int
    tokens: int
    """Tokens of all its samples."""
    left: int
    """Samples that haven't ended."""
    oldest: int | None = None
    """Version of its first token."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker with its engine."""

    held: int = 0
    """Step of the version that it holds."""
    in_engine: int = 0
    """Number of groups in the engine."""
    waiting: deque[tuple[_Group, int]] = field(default_factory=deque)
    """Samples that have no slot yet: group and length."""
    running: int = 0
    """Number of samples that have a slot."""
    ends: list[float] = field(default_factory=list)
    """Heap of the iterations after which samples end."""
    ending: dict[float, list[tuple[_Group, int]]] = field(default_factory=dict)
    """Iteration to the samples that end after it: group and length."""
    context: float = 0.0
    """Tokens of all running samples."""
    iterations: float = 0.0
    """Iterations done by :attr:`since`."""
    since: float = 0.0
    """When the engine was last brought up to date, or until when it is paused."""
    iteration: float = 0.0
    """Seconds per iteration, until the next change."""
    event: int = 0
    """Number of its current event; events with older numbers are void."""
    idle: float = 0.0
    """Seconds without a sample."""
    paused: float = 0.0
    """Seconds spent loading weights and computing keys and values again."""
    tokens: float = 0.0
    """Tokens sampled so far."""


class _Run:
    """The state of one simulated run."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.limits = replace(scenario.limits, late="wait", steps=0, total_groups=0)
        self.now = 0.0
        self.events: list[tuple[float, int, str, object]] = []
        self.count = 0
        self.order = np.random.default_rng(seed)
        self.lengths = scenario.lengths.draw(DRAWN, scenario.samples, seed).tolist()
        # Samples end on a grid, so that several end at once and a plan takes only seconds.
        self.grain = max(1, scenario.lengths.limit // GRID)
        self.workers = [_Worker() for _ in range(scenario.workers)]
        self.journalled = 0
        self.cursor = 0
        self.leased: dict[int, int] = {}
        self.graded: dict[int, int | None] = {}
        self.tokens_of: dict[int, int] = {}
        self.blocked: int | None = None
        self.pool_free = 0.0
        self.training = False
        self.worked = 0.0
        self.ages = 0.0
        self.taken: list[float] = []

    # Events.

    def at(self, time: float, kind: str, what: object = None) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, kind, what))

    def until(self, steps: int) -> None:
        """Runs until this many steps have begun."""
        while len(self.taken) < steps:
            self.now, _, kind, what = heapq.heappop(self.events)
            match kind, what:
                case "engine", (int(index), int(event)):
                    worker = self.workers[index]
                    if event == worker.event:
                        self.finish(index, worker)
                case "graded", _Group() as group:
                    self.grade(group)
                case "trained", int(step):
                    self.publish(step)
                case "free", _:
                    self.training = False
                    self.take()
                case "version", int(step):
                    self.update(step)

    # Workers and engines.

    def lease_all(self) -> None:
        for index in self.order.permutation(len(self.workers)):
            self.lease(int(index), self.workers[index])

    def lease(self, index: int, worker: _Worker) -> None:
        """Leases groups as a worker does whenever something has changed."""
        scenario = self.scenario
        if worker.in_engine > scenario.ahead:
            return
        room = scenario.batch + scenario.ahead - worker.in_engine
        given = 0
        while given < room and not why_not_leased(
            self.limits,
            serial=self.cursor,
            is_new=True,
            rank=len(self.leased) + len(self.graded),
            leased=len(self.leased),
            journalled=self.journalled,
            held_step=worker.held,
        ):
            lengths = self.lengths[self.cursor % DRAWN]
            group = _Group(self.cursor, sum(lengths), len(lengths))
            worker.waiting.extend((group, length) for length in lengths)
            self.leased[self.cursor] = worker.held
            self.cursor += 1
            given += 1
        if given:
            worker.in_engine += given
            self.advance(worker)
            self.fill(worker)
            self.schedule(index, worker)

    def advance(self, worker: _Worker) -> None:
        """Brings an engine's state up to the present time."""
        passed = self.now - worker.since
        if passed <= 0:
            return  # It is paused.
        if worker.running:
            done = passed / worker.iteration
            worker.iterations += done
            worker.context += done * worker.running
            worker.tokens += done * worker.running
        else:
            worker.idle += passed
        worker.since = self.now

    def fill(self, worker: _Worker) -> None:
        """Begins as many waiting samples as there are free slots."""
        scenario = self.scenario
        while worker.waiting:
            group, _ = worker.waiting[0]
            beginning = scenario.samples if scenario.whole_groups else 1
            if worker.running and worker.running + beginning > scenario.slots:
                return
            for _ in range(beginning):
                _, length = worker.waiting.popleft()
                if group.oldest is None:
                    group.oldest = worker.held
                    self.pause(worker, scenario.engine.prompt_token * scenario.prompt)
                end = worker.iterations + length
                if self.grain > 1:
                    end = self.grain * max(1, round(end / self.grain))
                if end not in worker.ending:
                    worker.ending[end] = []
                    heapq.heappush(worker.ends, end)
                worker.ending[end].append((group, length))
                worker.running += 1
                worker.context += scenario.prompt

    def pause(self, worker: _Worker, seconds: float) -> None:
        worker.since = max(worker.since, self.now) + seconds

    def schedule(self, index: int, worker: _Worker) -> None:
        """Schedules the end of the engine's next sample."""
        worker.event += 1
        if not worker.running:
            return
        rows = worker.running
        iterations = max(0.0, worker.ends[0] - worker.iterations)
        context = worker.context + rows * iterations / 2
        worker.iteration = self.scenario.engine.iteration(rows, context)
        ends = max(worker.since, self.now) + iterations * worker.iteration
        self.at(ends, "engine", (index, worker.event))

    def finish(self, index: int, worker: _Worker) -> None:
        """Ends the samples that are complete."""
        self.advance(worker)
        while worker.ends and worker.ends[0] <= worker.iterations + 1e-6:
            for group, length in worker.ending.pop(heapq.heappop(worker.ends)):
                worker.running -= 1
                worker.context -= self.scenario.prompt + length
                group.left -= 1
                if not group.left:
                    worker.in_engine -= 1
                    seconds = self.scenario.samples / self.scenario.graded_a_second
                    self.pool_free = max(self.pool_free, self.now) + seconds
                    self.at(self.pool_free, "graded", group)
        if not worker.running:
            worker.context = 0.0  # Removes what rounding to the grid has left.
        self.fill(worker)
        self.schedule(index, worker)
        self.lease(index, worker)

    def update(self, step: int) -> None:
        """Gives every worker a new version."""
        scenario = self.scenario
        for worker in self.workers:
            if step <= worker.held:
                continue
            self.advance(worker)
            worker.held = step
            seconds = scenario.engine.load
            if scenario.recompute and worker.running:
                seconds += scenario.engine.prompt_token * worker.context
            worker.paused += seconds
            self.pause(worker, seconds)
        for index, worker in enumerate(self.workers):
            self.schedule(index, worker)
        self.lease_all()

    # The pool and the learner.

    def grade(self, group: _Group) -> None:
        were_refused = len(self.leased) >= self.limits.max_inflight
        del self.leased[group.serial]
        self.graded[group.serial] = group.oldest
        self.tokens_of[group.serial] = group.tokens
        if group.serial == self.blocked:
            self.blocked = None
        if not self.training and self.blocked is None:
            self.take()
        if were_refused:
            self.lease_all()

    def take(self) -> None:
        """Asks for the next row, as the learner does whenever it is free or a group was graded."""
        limits, step = self.limits, self.journalled + 1
        if len(self.graded) < limits.groups_per_step:
            return
        next_row = cut(
            limits,
            step=step,
            graded=self.graded,
            leased=self.leased,
            returned=(),
            cursor=self.cursor,
        )
        for serial in next_row.stale:
            del self.graded[serial]
        if not next_row.row:
            # In strict order, nothing changes before this group is graded.
            self.blocked = next_row.waits_for if limits.window == 1 else None
            return
        tokens = 0
        for serial in next_row.row:
            self.ages += step - 1 - (self.graded.pop(serial) or 0)
            tokens += self.tokens_of.pop(serial)
        self.journalled = step
        self.taken.append(self.now)
        self.training = True
        learner = self.scenario.learner
        seconds = learner.step + learner.token * tokens
        self.worked += seconds
        if self.scenario.shared:
            for index, worker in enumerate(self.workers):
                self.advance(worker)
                self.pause(worker, seconds)
                self.schedule(index, worker)
        self.at(self.now + seconds, "trained", step)
        self.lease_all()

    def publish(self, step: int) -> None:
        learner = self.scenario.learner
        free = self.now
        if step % self.scenario.every == 0:
            free += learner.publish
            self.worked += learner.publish
            self.at(free + learner.transfer, "version", step)
        self.at(free, "free")


def simulate(scenario: Scenario, *, seed: int = 0, steps: int = 16, warm: int = 8) -> Simulated:
    """Simulates a run and averages over its last steps.

    The same scenario and seed give the same figures, and every split of a node gets the same lengths.

    Args:
        seed: determines the lengths, and the order in which waiting workers are woken.
        steps: number of steps that are measured.
        warm: number of steps before them, until the run is in its steady state.
    """
    if not scenario.workers or not scenario.samples:
        seconds = scenario.learner.step
        return Simulated(
            step=seconds,
            trained=seconds,
            learner_waits=0.0,
            engines_wait=0.0,
            engines_pause=0.0,
            running=0.0,
            tokens_per_second=0.0,
            staleness=0.0,
        )
    run = _Run(scenario, seed)
    run.lease_all()
    run.until(warm)
    begun = _totals(run)
    run.until(warm + steps)
    ended = _totals(run)
    passed, worked, ages, tokens, idle, paused, iterating = (
        after - before for before, after in zip(begun, ended, strict=True)
    )
    engines = passed * scenario.workers
    return Simulated(
        step=passed / steps,
        trained=worked / steps,
        learner_waits=max(0.0, 1 - worked / passed),
        engines_wait=idle / engines,
        engines_pause=paused / engines,
        running=tokens / max(iterating, 1e-9),
        tokens_per_second=tokens / passed,
        staleness=ages / steps / scenario.limits.groups_per_step,
    )


def _totals(run: _Run) -> tuple[float, ...]:
    for worker in run.workers:
        run.advance(worker)
    workers = run.workers
    return (
        run.now,
        run.worked,
        run.ages,
        sum(worker.tokens for worker in workers),
        sum(worker.idle for worker in workers),
        sum(worker.paused for worker in workers),
        sum(worker.iterations for worker in workers),
    )
