"""The learner: takes rows from the ledger, trains, publishes, checkpoints, ends the run.

One step, on rank 0::

    take -> journal(row) -> update -> journal(applied) -> publish -> confirm -> metrics

A resumed learner takes a new term, loads the newest checkpoint, trains the steps again that are
journalled above it, and only then publishes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from ..common import disk
from ..common.config import Config
from ..common.config.choices import micro_batch_refusal
from ..common.errors import (
    ConfigError,
    DamagedError,
    DataError,
    FencedError,
    RefusedError,
    RunFailedError,
    WireError,
)
from ..common.models import load_model, resolve
from ..common.parts import PartedLines
from ..common.records import Version
from ..common.run_folder import JoinInfo, RunFolder
from ..common.telemetry import Clock
from ..common.weights.scored_rows import ScoredRows, fixed_rows
from ..replay.connection import Store, connect
from ..replay.ledger import Ledger, Waiting
from ..replay.members import Members
from ..replay.store import EvaluationResult, RunStore
from .engine import DeepSpeedEngine
from .evaluations import Evaluations, record_of, told_in
from .forward.policy import device_of
from .metrics.grading_rates import GradingRates
from .metrics.idle import Idle
from .metrics.ratio_alarm import RatioAlarm, ratios_of
from .metrics.reports import describe, text_of
from .publish import WeightPublisher
from .ranks import Leader, follow
from .rendezvous import process_group
from .resume.checkpoints import Checkpoint, Checkpoints, what_is_left
from .resume.cut_back import cut_back
from .resume.journal import Journal
from .room import size_of, write_with_room
from .rows.sources import BatchSource, Fetch, LedgerSource, OfflineSource, StepBatch
from .schedule import learning_rate
from .transfer_rates import TransferRates
from .updates import Updates

log = logging.getLogger("tandem.learner")

HINT_SECONDS = 0.25
"""Longest wait for a hint before the ledger is asked again."""
FULL_SECONDS = 1.0
"""Between two looks, while a batch is waited for, whether Redis is too full for one to come."""
REPORT_SECONDS = 1.0
"""Between two reports to Redis."""


def main(
    join: JoinInfo,
    config: Config,
    *,
    name: str,
    folder: RunFolder | None,
    rank: int = 0,
    world_size: int = 1,
    master_port: int | None = None,
) -> int:
    """One rank of the learner; returns the exit code.

    Ends with 0 when the run is finished, and after SIGTERM, once the step at hand is done and a
    checkpoint is written.

    Raises:
        TandemError: the run can't go on; the message says why.
    """
    if folder is None:
        raise DataError("the learner keeps journal and checkpoints in the run's folder: give it")
    stop = _StopSignal(heed=rank == 0)
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with process_group(rank, world_size, master_port):
        model = load_model(
            config.model.path,
            dtype=config.model.dtype,
            attention=config.model.attention,
            device=device,
        )
        engine = DeepSpeedEngine(model, config, device)
        updates = Updates(engine, config)
        _check_unit(updates, config)
        if rank != 0:
            follow(engine, updates)
            return 0
        leader = Leader(engine, updates)
        store = connect(join, name=name)
        try:
            Trainer(store, join, config, name, folder, leader, stop).run()
        except FencedError:
            # A newer learner owns the run's state; leave without touching it.
            raise
        except DamagedError as error:
            raise DamagedError(f"{error}. {what_is_left(folder)}") from None
        except RunFailedError:
            RunStore(store).set_state("failed")
            raise
        finally:
            store.close()
        leader.stop()
    return 0


def _check_unit(updates: Updates, config: Config) -> None:
    """Of an objective of the user's own nobody knew before what it doesn't split."""
    unit, name = updates.objective.unit, config.learner.objective.name
    if unit != "row" and (refusal := micro_batch_refusal(config, unit=unit, what=name)):
        raise ConfigError(refusal)


class _Full:
    """No batch can come before samples are let go."""


class _StopSignal:
    """SIGTERM asks to drain. Followers leave that to rank 0."""

    def __init__(self, *, heed: bool) -> None:
        self.asked = False
        self._heed = heed
        signal.signal(signal.SIGTERM, self._on)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self.asked = self._heed
        if self._heed:
            disk.stop_waiting()


class Trainer:
    """Rank 0's loop."""

    def __init__(
        self,
        store: Store,
        join: JoinInfo,
        config: Config,
        name: str,
        folder: RunFolder,
        leader: Leader,
        stop: _StopSignal,
    ) -> None:
        self._store = store
        self._join = join
        self._config = config
        self._name = name
        self._folder = folder
        self._leader = leader
        self._stop = stop
        self._runs = RunStore(store)
        self._members = Members(store)
        self._ledger = Ledger(store, name)
        self._hints = store.hints("graded", "state")
        self._journal = Journal(folder.journal)
        self._checkpoints = Checkpoints(folder.checkpoints, config.learner.checkpoints_kept)
        self._evaluations = Evaluations(self._runs, self._members, config, lambda: self._stop.asked)
        self._clock = Clock()
        self._source: BatchSource
        self._publisher: WeightPublisher | None = None
        self._metrics: PartedLines
        self._samples: PartedLines
        self._resumed_from = 0
        self._published: Version | None = None
        # Shorter than the run's own, for which alone the model was tried.
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens - 1
        vocabulary = leader.engine.model.config.get_text_config().vocab_size
        self._rows = fixed_rows(vocabulary, longest, config.run.seed)
        self._term = 0
        self._step = 0
        self._saved = -1
        self._released = 0
        self._bad_in_a_row = 0
        self._idle: Idle
        self._reported = 0.0
        self._asked = 0.0
        self._rates = GradingRates()
        self._alarm = RatioAlarm()
        self._transfers = TransferRates()
        self._shares: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._progress = (time.monotonic(), 0)

    # The run.

    def run(self) -> None:
        """From the newest checkpoint to the end of the run, or until told to stop."""
        self._term = self._ledger.new_term(self._journal.last_term)
        offline = self._config.learner.source == "offline"
        self._source = (
            OfflineSource(self._config, self._runs)
            if offline
            else LedgerSource(self._ledger, self._runs)
        )
        total = self._source.total_steps
        self._idle = Idle(self._config, total)
        try:
            self._replay(self._resume())
            if not self._stop.asked:
                self._publish_first(total)
                self._train(total)
            if self._stop.asked and not self._ended(total):
                self._checkpoint()
                log.info(f"drained at step {self._step}")
            else:
                self._finish()
        finally:
            if self._publisher is not None:
                self._publisher.close()
            self._journal.close()
            self._hints.close()

    def _resume(self) -> int:
        """Goes back to the newest checkpoint; returns J, the steps that have rows.

        Nothing of the run's records is given up before all that it takes to go on is there.
        """
        self._checkpoints.clean()
        newest = self._newest()
        if newest is not None:
            self._leader.load(newest.folder)
            self._step = self._saved = newest.version.step
            # Redis may have lost what was asked for before it: all that may be due is asked for again.
            self._resumed_from = min(kept.version.step for kept in self._checkpoints.all())
            log.info(f"resumes from the checkpoint of step {self._step}")
        try:
            journalled = self._source.begin(self._term, self._journal, self._step)
            self._look_through(journalled)
        except (RefusedError, WireError) as error:
            raise DamagedError(str(error)) from None
        self._journal.resumed(self._term, self._step)
        self._cut_back()
        return journalled

    def _look_through(self, journalled: int) -> None:
        """Reads the batches of all steps that will be trained again.

        Raises:
            StoreError: one is gone or damaged.
        """
        for step in range(self._step + 1, journalled + 1):
            fetch = self._source.take(step, self._term)
            if isinstance(fetch, Waiting):
                return
            with self._leader.waiting():
                batch = fetch()
            self._journal.check(step, batch.row)

    def _cut_back(self) -> None:
        for path in (self._folder.metrics, self._folder.samples):
            cut_back(path, self._step, self._folder.cut)
        self._evaluations.begin(self._term, told_in(self._folder.metrics))
        self._metrics = PartedLines(self._folder.metrics)
        self._samples = PartedLines(self._folder.samples)

    def _newest(self) -> Checkpoint | None:
        newest = self._checkpoints.newest(self._journal.last_step)
        if newest is not None and newest.ranks != self._leader.engine.world_size:
            raise DataError(
                f"{newest.folder} was written by {newest.ranks} rank(s), and there are "
                f"{self._leader.engine.world_size}: resume with learner.ranks={newest.ranks}"
            )
        return newest

    def _replay(self, journalled: int) -> None:
        """Trains the steps again that have a row and are above the checkpoint."""
        if journalled > self._step:
            log.info(f"trains steps {self._step + 1} to {journalled} again from the journal")
        while self._step < journalled and not self._stop.asked:
            fetch = self._next(self._step + 1)
            if fetch is None:
                return
            self._do(fetch)
        self._clock.take()

    def _publish_first(self, total: int) -> None:
        self._publisher = WeightPublisher(
            self._store,
            self._join,
            self._config,
            self._term,
            self._name,
            snapshot_folder=self._folder.weights,
        )
        self._publisher.start()
        # Asked for before anybody holds the weights, so that it comes before the first lease.
        ids = self._evaluations.request_since(self._resumed_from, self._step, total)
        self._publish()
        engine = self._leader.engine
        log.info(
            f"term {self._term}, step {self._step} of {total}: "
            f"{engine.parameter_count():,} parameters in {self._config.model.dtype} on "
            f"{engine.world_size} rank(s), ZeRO-{engine.stage}, "
            f"objective {self._config.learner.objective.name}"
        )
        if self._config.evaluate.exact:
            self._await(ids)

    def _train(self, total: int) -> None:
        every = self._config.learner.checkpoint_every
        self._progress = (time.monotonic(), self._step)
        while not self._stop.asked:
            with self._clock.doing("wait/batch"):
                fetch = self._next(self._step + 1)
            if fetch is None:
                return
            self._do(fetch)
            if self._step < total and (
                self._step % every == 0 or self._source.checkpoint_is_due(self._saved)
            ):
                self._checkpoint()
            if self._step < total:
                ids = self._evaluations.request(self._step, total)
                if ids and self._config.evaluate.exact:
                    self._await(ids)
            self._tell_progress(total)

    def _ended(self, total: int) -> bool:
        return self._step >= total

    def _finish(self) -> None:
        self._checkpoint()
        # A run that is set in passes may end before its greatest number of steps.
        self._evaluations.request(self._step, self._step)
        self._publish()
        base = Path(resolve(self._config.model.path))
        with self._clock.doing("export"):
            write_with_room(
                self._folder.path,
                2 * self._leader.engine.parameter_count(),
                self._leader,
                lambda: self._leader.export(self._folder.model, base),
                undo=lambda: None,
            )
        log.info(f"wrote the model to {self._folder.model}")
        due = self._evaluations.open()
        if due and not self._evaluate_last(due):
            left = self._evaluations.open()
            log.warning(f"not evaluated: {', '.join(left)}")
        if self._stop.asked:
            return
        rejected = self._ledger.end("the learner has trained its last step", self._term)
        self._runs.set_state("finished")
        self._report(force=True)
        log.info(f"finished after step {self._step}; {rejected} group(s) in flight were let go")

    def _evaluate_last(self, ids: list[str]) -> bool:
        with self._leader.waiting():
            workers = self._config.rollout.workers > 0 or self._members.live("rollout")
            return bool(workers) and self._evaluations.wait(ids, self._log_evaluation)

    # One step.

    def _next(self, step: int) -> Fetch | None:
        """What fetches the step's batch; None when no row will come, or the process is to drain."""
        since = time.monotonic()
        while True:
            with self._leader.waiting():
                found = self._wait_for(step, since)
            if not isinstance(found, _Full):
                return found
            # A checkpoint is made by all ranks, which wait for no batch then.
            self._make_room()

    def _wait_for(self, step: int, since: float) -> Fetch | _Full | None:
        told = asked = time.monotonic()
        stall = self._config.launch.stall_seconds
        while not self._stop.asked:
            taken = self._source.take(step, self._term)
            if not isinstance(taken, Waiting):
                return taken
            if taken.ended:
                return None
            self._between(taken)
            now = time.monotonic()
            if now - asked >= FULL_SECONDS:
                asked = now
                if self._released < self._step and self._source.is_full():
                    return _Full()
            if now - told >= stall:
                told = now
                log.warning(f"no step for {now - since:.0f} s: {self._source.waiting_for()}")
            self._hints.wait(HINT_SECONDS)
        return None

    def _make_room(self) -> None:
        """Lets go of samples that are kept for a resume; without it, nothing would be leased."""
        if self._saved < self._step:
            log.warning(
                f"Redis is too full for another lease: a checkpoint is written at step "
                f"{self._step}, so that samples can be let go. Raise replay.maxmemory_mb, or "
                f"lower learner.checkpoint_every"
            )
            self._checkpoint()
            return
        log.warning(
            f"Redis is too full for another lease: the samples up to the newest checkpoint, of "
            f"step {self._saved}, are let go, so that no earlier one can be gone back to. Raise "
            f"replay.maxmemory_mb, or lower learner.checkpoint_every"
        )
        self._let_go(self._saved)

    def _let_go(self, step: int) -> None:
        self._source.durable(step, self._term)
        self._released = step

    def _between(self, waiting: Waiting) -> None:
        """What is done while a batch is waited for."""
        for result in self._evaluations.arrived():
            self._log_evaluation(result)
        self._report(str(waiting))

    def _do(self, fetch: Fetch) -> None:
        clock = self._clock
        with clock.doing("batch"):
            batch = fetch()
        step = batch.step
        with clock.doing("journal"):
            written = self._journal.row(self._term, step, batch.row)
        known = self._journal.outcome(step)
        if batch.quarantined or known == "quarantined":
            written()
            self._use_up(step, "quarantined before")
            return
        lr = learning_rate(self._config.learner.optimizer, step, self._source.total_steps)
        with clock.doing("compute"):
            outcome = self._leader.train(
                step,
                batch.groups,
                lr=lr,
                before_step=written,
                settled=known == "applied",
            )
        alarm = self._alarm.take(step, outcome.metrics, warn=not outcome.refused)
        if not outcome.applied:
            told = {"train/applied": 0.0, **ratios_of(outcome.metrics)}
            if outcome.refused and self._config.learner.ratio_check.on_alarm == "stop":
                self._halt(step, told, alarm)
            reason = alarm if outcome.refused else "loss or gradient not finite"
            self._quarantine(batch, outcome.undone, reason, told)
            return
        self._bad_in_a_row = 0
        self._step = step
        with clock.doing("journal"):
            noted = self._journal.applied(self._term, step, _trained(outcome.metrics))
        if self._must_publish(step):
            self._publish()
        with clock.doing("metrics"):
            compared = self._config.learner.objective.least_verdicts > 1
            described = describe(step, batch.groups, compared=compared)
            metrics = {**outcome.metrics, **described}
            for mixed in batch.groups[: self._config.log.samples_per_step]:
                self._samples.write(text_of(step, mixed))
        with clock.doing("journal"):
            noted()
        with clock.doing("confirm"):
            self._source.confirm(step, self._term)
        too_long = self._idle.saw(outcome.metrics)
        idle = {"train/idle_steps": float(self._idle.steps)}
        self._record({**metrics, **idle, **self._told()})
        if too_long:
            if self._config.learner.source == "offline":
                raise RunFailedError(f"step {step}: {self._idle.alarm}")
            log.warning(f"step {step}: {self._idle.alarm}")
        for result in self._evaluations.arrived():
            self._log_evaluation(result)
        self._report()

    def _halt(self, step: int, told: dict[str, float], alarm: str) -> NoReturn:
        """Ends the run before a step that the check of what was sampled refuses."""
        self._checkpoint()
        self._metrics.write({**self._stamped(told), "step": step})
        raise RunFailedError(
            f"step {step} is not trained (learner.ratio_check.on_alarm=stop): {alarm}. The checkpoint "
            f"of step {self._step} is from before it, and its groups stay as they are: starting again "
            f"comes back to them and stops here again, unless learner.ratio_check.on_alarm is tell "
            f"(trains on them) or quarantine (puts them aside)"
        )

    def _quarantine(
        self, batch: StepBatch, undone: bool, reason: str, told: dict[str, float]
    ) -> None:
        step = batch.step
        ids = ", ".join(mixed.group.group_id for mixed in batch.groups)
        log.warning(f"step {step}: {reason}; its groups are quarantined: {ids}")
        self._journal.quarantined(self._term, step, reason)()
        self._bad_in_a_row += 1
        if undone:
            # Earlier updates of the step are in the weights: back to the checkpoint and on.
            self._rewind(step - 1)
        self._use_up(step, reason)
        self._metrics.write(self._stamped(told))
        if self._bad_in_a_row >= self._config.learner.max_nonfinite:
            raise RunFailedError(
                f"{self._bad_in_a_row} steps in a row had a loss or gradient that isn't finite, or an "
                f"alarm of the ratio check (learner.max_nonfinite="
                f"{self._config.learner.max_nonfinite}), the last one step {step}, {reason}: look at "
                f"the quarantined groups; where the loss isn't finite, lower learner.optimizer.lr"
            )

    def _use_up(self, step: int, reason: str) -> None:
        self._source.quarantine(step, self._term, reason)
        self._step = step
        if self._publisher is not None:
            self._published = Version(term=self._term, step=step)
            self._publisher.restamp(self._published)

    def _rewind(self, step: int) -> None:
        newest = self._newest()
        if newest is None:
            raise RunFailedError(
                f"step {step + 1} had an update that isn't finite after others of the same step, "
                f"and there is no checkpoint to go back to: lower learner.optimizer.lr, or set "
                f"learner.minibatches=1"
            )
        publisher, self._publisher = self._publisher, None
        bad = self._bad_in_a_row
        self._leader.load(newest.folder)
        self._step = newest.version.step
        self._look_through(step)
        self._journal.resumed(self._term, self._step)
        for file in (self._metrics, self._samples):
            file.close()
        self._cut_back()
        self._replay(step)
        self._publisher = publisher
        self._bad_in_a_row = bad

    def _must_publish(self, step: int) -> bool:
        due = self._evaluations.due(step, self._source.total_steps)
        return step % self._config.weights.every == 0 or due

    def _publish(self) -> None:
        if self._publisher is None:
            return
        version = Version(term=self._term, step=self._step)
        if self._published == version:
            return
        scored = self._scored()
        with self._clock.doing("publish"):
            self._publisher.publish(version, self._leader.parameters(), scored)
        self._published = version

    def _scored(self) -> ScoredRows | None:
        """What the weights make of the run's fixed rows; None where nobody is to check."""
        if self._config.weights.check_bound == 0:
            return None
        with self._clock.doing("score"):
            found = self._leader.score(self._rows, getattr(torch, self._config.engine_dtype))
        if not bool(torch.isfinite(found).all()):
            log.warning(f"step {self._step}: the check's rows have log-probs that aren't finite")
            return None
        return ScoredRows(
            rows=tuple(map(tuple, self._rows.tolist())),
            logprobs=tuple(map(tuple, found.tolist())),
        )

    def _checkpoint(self) -> None:
        if self._saved == self._step:
            return
        with self._clock.doing("checkpoint"):
            before = self._checkpoints.all()[-1:]
            # Weights and both moments, of four bytes each.
            sizes = [size_of(checkpoint.folder) for checkpoint in before]
            least = max([12 * self._leader.engine.parameter_count(), *sizes])
            write_with_room(
                self._folder.checkpoints,
                least,
                self._leader,
                self._save,
                undo=self._checkpoints.clean,
            )
            self._saved = self._step
            # One alone might be damaged, and then the samples since the start are needed.
            kept = self._checkpoints.all()
            if len(kept) >= 2:
                self._let_go(kept[0].version.step)
        log.info(f"checkpoint of step {self._step}")

    def _save(self) -> None:
        self._checkpoints.save(
            Version(term=self._term, step=self._step),
            lambda folder: self._leader.save(folder),
            ranks=self._leader.engine.world_size,
            state={"run_id": self._join.run_id, "seed": self._config.run.seed},
            may_finish=self._still_newest,
        )

    def _still_newest(self) -> None:
        newest = self._ledger.term()
        if newest != self._term:
            raise FencedError(f"term {self._term} is over: a learner of term {newest} has started")

    # What is told.

    def _await(self, ids: list[str]) -> None:
        if ids:
            with self._clock.doing("wait/evaluation"), self._leader.waiting():
                self._evaluations.wait(ids, self._log_evaluation)

    def _log_evaluation(self, result: EvaluationResult) -> None:
        self._metrics.write({**record_of(result), "term": self._term, "time": time.time()})
        log.info(
            f"evaluation {result.id}: accuracy {result.accuracy:.1%} on {result.problems} "
            f"problems (weights of step {result.step}, {result.seconds:.1f} s)"
        )

    def _stamped(self, metrics: dict[str, float]) -> dict[str, Any]:
        return {"step": self._step, "term": self._term, "time": time.time(), **metrics}

    def _record(self, metrics: dict[str, float]) -> None:
        spent = self._clock.take()
        self._shares = spent
        self._last = metrics
        times = {f"time/{name}": seconds for name, seconds in spent.items()}
        self._metrics.write(self._stamped({**metrics, **times}))

    def _told(self) -> dict[str, float]:
        """What pools and workers have told since it was last asked, at most once a second."""
        now = time.monotonic()
        if now - self._asked < REPORT_SECONDS:
            return {}
        self._asked = now
        reports = self._runs.reports()
        sent = self._transfers.sent(self._publisher.stats()) if self._publisher is not None else {}
        return {
            **self._rates.take(reports),
            **self._transfers.lost(reports),
            **self._transfers.checked(reports),
            **sent,
        }

    def _report(self, waiting: str = "", *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        weights = self._publisher.stats() if self._publisher is not None else {}
        self._runs.report(
            self._name,
            {
                "role": "learner",
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "time": time.time(),
                "version": [self._term, self._step],
                "total_steps": self._source.total_steps,
                "waiting": waiting,
                "alarm": "; ".join(filter(None, (self._alarm.text, self._idle.alarm))),
                "seconds": self._shares,
                "weights": weights,
                "loss": _finite(self._last.get("train/loss")),
                "reward": _finite(self._last.get("reward/mean")),
            },
        )

    def _tell_progress(self, total: int) -> None:
        every = self._config.log.every
        if self._step % every and self._step != total:
            return
        since, before = self._progress
        now = time.monotonic()
        pace = (now - since) / max(1, self._step - before)
        self._progress = (now, self._step)
        last = self._last
        parts = [f"step {self._step}/{total}", f"{pace:.3f} s a step"]
        for name, label in (
            ("train/loss", "loss"),
            ("reward/mean", "reward"),
            ("reward/accuracy", "accuracy"),
            ("rollout/length_mean", "length"),
            ("replay/staleness_mean", "staleness"),
            ("train/grad_norm", "gradient"),
        ):
            if name in last:
                parts.append(f"{label} {last[name]:.4g}")
        waited = sum(s for name, s in self._shares.items() if name.startswith("wait/"))
        parts.append(f"waited {waited / max(self._shares.get('total', 0.0), 1e-9):.0%}")
        log.info(", ".join(parts))


def _trained(metrics: dict[str, float]) -> dict[str, int]:
    """What a step was trained on, for the journal."""
    tokens = metrics.get("train/tokens_own", 0) + metrics.get("train/tokens_expert", 0)
    return {"samples": int(metrics.get("train/rows", 0)), "tokens": int(tokens)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
