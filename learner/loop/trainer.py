"""The learner: takes rows from the ledger, trains, publishes, checkpoints, ends the run.

One step, on rank 0::

    take -> journal(row) -> update -> journal(applied) -> publish -> confirm -> metrics

A resumed learner takes a new term, loads the newest checkpoint, trains again the steps that are
journalled above it, and only then publishes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ...common.config import Config
from ...common.errors import DamagedError, RefusedError, RunFailedError, TandemError, WireError
from ...common.models import resolve
from ...common.records import Version
from ...common.run_folder import JoinInfo, RunFolder
from ...common.telemetry import Clock
from ...replay.connection import Store
from ...replay.evaluating.evaluations import EvaluationResult
from ...replay.ledger import Ledger
from ...replay.ledger_records import Waiting
from ...replay.members import Members, membership
from ...replay.store import RunStore
from ..adapters import identity
from ..metrics.idle import Idle
from ..metrics.ratio_alarm import RatioAlarm, ratios_of
from ..metrics.reports import describe, left_out, trained_on
from ..ranks import Leader
from ..resume.journal import Journal
from ..rows.sources import Fetch, StepBatch, source_of
from ..updates.updates import StepOutcome
from .best import Best
from .callbacks import Callbacks
from .evaluations import Evaluations, record_of, recorded_in
from .publishing import Publishing
from .reporter import Reporter
from .saving import Saver, write_with_room
from .schedule import both_factors, check_warmup, learning_rates
from .stop_signal import StopSignal

log = logging.getLogger("tandem.learner")

HINT_SECONDS = 0.25
"""Longest wait for a hint before the ledger is asked again."""
FULL_SECONDS = 1.0
"""Time between two checks, while waiting for a batch, whether Redis is too full for one to come."""


class _Full:
    """No batch can come until samples are freed."""


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
        stop: StopSignal,
    ) -> None:
        self._store = store
        self._config = config
        self._name = name
        self._folder = folder
        self._leader = leader
        self._stop = stop
        self._runs = RunStore(store)
        self._members = Members(store)
        self._ledger = Ledger(store, name)
        self._hints = store.hints("graded", "state")
        self._clock = Clock()
        self._journal = Journal(folder.journal)
        self._term = self._ledger.new_term(self._journal.last_term)
        self._source = source_of(config, self._ledger, self._runs)
        whole = self._source.total_steps
        self._total = min(whole, config.run.last_step or whole)
        self._factors: tuple[list[float], list[float]] = ([], [])
        if config.learner.train:
            check_warmup(config, whole)
            self._factors = both_factors(config.learner, whole, folder.schedule)
        with leader.waiting():
            kept = {"run_id": join.run_id, "seed": config.run.seed, **identity(config)}
        kept["frozen"] = leader.frozen()
        self._saver = Saver(
            folder,
            kept=config.learner.checkpoints_kept,
            leader=leader,
            ledger=self._ledger,
            source=self._source,
            clock=self._clock,
            term=self._term,
            state=kept,
        )
        self._held_out = self._source.held_out()
        self._reporter = Reporter(self._runs, config, folder, name, self._clock, self._total)
        self._reporter.always = leader.engine.sizes
        self._evaluations = Evaluations(
            self._runs, self._members, config, self._total, lambda: self._stop.asked
        )
        self._callbacks = Callbacks(store, config, pairs=bool(self._held_out))
        self._best: Best | None = None
        if config.evaluate.best is not None:
            self._best = Best(folder, config.evaluate.best, self._export, config.evaluate.limit)
        self._early: dict[int, list[dict[str, Any]]] = {}
        """Records of evaluations that have arrived again before their step was, by step."""
        self._publishing = Publishing(config, leader, self._clock)
        self._step = 0
        self._bad_in_a_row = 0
        self._idle = Idle(config, self._total)
        self._alarm = RatioAlarm()

    @property
    def _version(self) -> Version:
        return Version(term=self._term, step=self._step)

    # The run.

    def run(self) -> None:
        """Runs from the newest checkpoint to the end of the run, or until asked to stop."""
        try:
            journalled = self._resume()
            oldest = self._saver.oldest()
            self._replay(journalled)
            self._callbacks.settle()
            if not self._stop.asked:
                self._publish_first(oldest)
                self._train()
            if self._stop.asked and self._step < self._total:
                self._saver.save(self._step)
                log.info(f"drained at step {self._step}")
            else:
                self._finish()
        finally:
            self._publishing.close()
            self._journal.close()
            self._hints.close()

    def _resume(self) -> int:
        """Goes back to the newest checkpoint; returns J, the number of steps that have rows.

        None of the run's records is given up before everything needed to go on is there.
        """
        newest = self._saver.load_newest(self._journal.last_step)
        if newest is not None:
            self._step = newest
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
            StoreError: a batch is gone or damaged.
        """
        for step in range(self._step + 1, journalled + 1):
            fetch = self._source.take(step, self._term)
            if isinstance(fetch, Waiting):
                return
            with self._leader.waiting():
                batch = fetch()
            self._journal.check(step, batch.row)

    def _cut_back(self) -> None:
        self._reporter.cut_back(self._step)
        self._evaluations.begin(self._term, recorded_in(self._folder.metrics))
        if self._best is not None:
            self._best.begin(self._step)

    def _replay(self, journalled: int) -> None:
        """Trains again the steps that have a row and are above the checkpoint."""
        if journalled > self._step:
            log.info(f"trains steps {self._step + 1} to {journalled} again from the journal")
        while self._step < journalled and not self._stop.asked:
            fetch = self._next(self._step + 1)
            if fetch is None:
                return
            self._do(fetch)
        self._clock.take()

    def _publish_first(self, oldest: int) -> None:
        """Publishes the weights that were resumed from; ``oldest`` is the step of the oldest checkpoint."""
        member = membership(self._store, self._name)
        self._publishing.start(member, self._term, self._folder.weights)
        # Requested before anybody holds the weights, so that it comes before the first lease.
        # Redis may also have lost requests from before the newest checkpoint.
        ids = self._evaluations.request_since(oldest, self._step)
        self._publishing.publish(self._version)
        engine = self._leader.engine
        log.info(
            f"term {self._term}, step {self._step} of {self._total}: {engine.described}, "
            f"objective {self._config.learner.objective.name}"
        )
        if self._config.evaluate.exact:
            self._await(ids)

    def _train(self) -> None:
        every, total = self._config.learner.checkpoint_every, self._total
        self._reporter.begin(self._step)
        while not self._stop.asked and self._step < total and not self._callbacks.stops():
            step = self._step + 1
            with self._clock.doing("wait/batch"):
                fetch = self._next(step)
            if fetch is None:
                return
            self._do(fetch)
            if self._step < step:
                return
            wanted = self._callbacks.take_checkpoint() or self._step % every == 0
            if self._step < total and (wanted or self._source.checkpoint_is_due(self._saver.saved)):
                self._saver.save(self._step)
            if self._step < total:
                self._evaluate()
            self._callbacks.settle()
            self._reporter.progress(self._step)

    def _evaluate(self) -> None:
        """Requests the evaluation of this step's weights if it is due or a callback wants it."""
        asked = self._callbacks.take_evaluation()
        wanted = asked and self._callbacks.can_evaluate
        ids = self._evaluations.request(self._step, wanted=wanted)
        if wanted:
            self._publishing.publish(self._version)
        if asked:
            self._compare(self._step, wanted=True)
        if ids and self._config.evaluate.exact:
            self._await(ids)

    def _finish(self) -> None:
        self._reporter.end_block()
        reason = "the learner has trained its last step"
        if self._callbacks.stop is not None and self._step < self._total:
            self._callbacks.ended(self._callbacks.stop, self._step)
            self._compare(self._step, wanted=True)
            reason = "a callback has stopped the run"
        self._saver.save(self._step)
        self._evaluations.request(self._step, is_last=True)
        self._publishing.publish(self._version)
        self._export(self._folder.model)
        log.info(f"wrote the model to {self._folder.model}")
        due = self._evaluations.open()
        if due and not self._evaluate_last(due):
            left = self._evaluations.open()
            log.warning(f"not evaluated: {', '.join(left)}")
        if self._stop.asked:
            return
        rejected = self._ledger.end(reason, self._term)
        self._runs.set_state("finished")
        self._report(force=True)
        log.info(f"finished after step {self._step}; {rejected} group(s) in flight were let go")

    def _export(self, folder: Path) -> None:
        base = Path(resolve(self._config.model.path))
        with self._clock.doing("export"):
            write_with_room(
                self._folder.path,
                self._leader.engine.export_bytes(),
                self._leader,
                lambda: self._leader.export(folder, base),
                undo=lambda: None,
            )

    def _evaluate_last(self, ids: list[str]) -> bool:
        with self._leader.waiting():
            workers = self._config.rollout.workers > 0 or self._members.live("rollout")
            return bool(workers) and self._evaluations.wait(ids, self._log_evaluation)

    # One step.

    def _next(self, step: int) -> Fetch | None:
        """Returns a function that fetches the step's batch; None if no row will come or the process is to drain."""
        since = time.monotonic()
        while True:
            with self._leader.waiting():
                fetch = self._wait_for(step, since)
            if not isinstance(fetch, _Full):
                return fetch
            # A checkpoint is written by all ranks, which then don't wait for a batch.
            self._saver.make_room(self._step)

    def _wait_for(self, step: int, since: float) -> Fetch | _Full | None:
        warned_at = checked_at = time.monotonic()
        stall = self._config.launch.stall_seconds
        while not self._stop.asked:
            taken = self._source.take(step, self._term)
            if not isinstance(taken, Waiting):
                return taken
            if taken.ended or self._callbacks.stops():
                return None
            self._between(taken)
            now = time.monotonic()
            if now - checked_at >= FULL_SECONDS:
                checked_at = now
                if self._saver.can_make_room(self._step) and self._source.is_full():
                    return _Full()
            if now - warned_at >= stall:
                warned_at = now
                log.warning(f"no step for {now - since:.0f} s: {self._source.waiting_for()}")
            self._hints.wait(HINT_SECONDS)
        return None

    def _between(self, waiting: Waiting) -> None:
        """Called between checks while a batch is waited for."""
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
        if batch.quarantined or self._journal.outcome(step) == "quarantined":
            written()
            if not self._journal.outcome(step):
                # The journal may be an older copy than Redis.
                self._journal.quarantined(self._term, step, "quarantined before")()
            self._use_up(step, "quarantined before")
            # The step's first record was set aside if the learner has gone back behind it.
            self._reporter.record(self._version, {"train/applied": 0.0})
            self._measure(step)
            return
        if self._config.log.archive:
            # Before it is trained on, so that no step of the weights is missing there.
            with clock.doing("archive"):
                self._reporter.archive(batch)
        outcome = self._update(batch, written, settled=self._journal.was_applied(step))
        alarm = self._alarm.take(step, outcome.metrics, warn=not outcome.refused)
        if not outcome.applied:
            figures = {"train/applied": 0.0, **ratios_of(outcome.metrics)}
            if outcome.refused and self._config.learner.ratio_check.on_alarm == "stop":
                self._halt(step, figures, alarm)
            reason = alarm if outcome.refused else "loss or gradient not finite"
            self._quarantine(batch, outcome.undone, reason, figures)
            if self._step == step:
                self._measure(step)
            return
        self._bad_in_a_row = 0
        self._step = step
        with clock.doing("journal"):
            noted = self._journal.applied(self._term, step, trained_on(outcome.metrics))
        if step % self._config.weights.every == 0 or self._evaluations.due(step):
            self._publishing.publish(self._version)
        with clock.doing("metrics"):
            compared = self._config.learner.objective.least_verdicts > 1
            metrics = outcome.metrics | describe(step, batch.groups, compared=compared)
            metrics |= left_out(batch.row, self._config.replay.dynamic_sampling)
        with clock.doing("journal"):
            noted()
        with clock.doing("confirm"):
            self._source.confirm(step, self._term)
        # Only now, since a learner whose term is over fails at the confirmation.
        with clock.doing("metrics"):
            self._reporter.samples(step, batch.groups)
        trains = self._config.learner.train
        too_long = trains and self._idle.saw(step, outcome.metrics)
        idle = {"train/idle_steps": float(self._idle.steps)} if trains else {}
        logged = self._callbacks.look()
        self._reporter.step(self._version, {**metrics, **idle, **logged}, self._publishing.stats())
        if too_long and self._config.learner.source == "offline":
            raise RunFailedError(f"step {step}: {self._idle.alarm}")
        if too_long:
            log.warning(f"step {step}: {self._idle.alarm}")
        self._measure(step)
        for result in self._evaluations.arrived():
            self._log_evaluation(result)
        self._report()

    def _measure(self, step: int) -> None:
        """Measures this step's weights, and takes in evaluations of them that arrived before it was trained again."""
        self._compare(step)
        for record in self._early.pop(step, ()):
            if self._best is not None:
                self._best.saw(record)

    def _compare(self, step: int, *, wanted: bool = False) -> None:
        due = step == self._total or self._evaluations.due(step)
        # What is due was compared at the step itself.
        if self._held_out and due != wanted:
            with self._clock.doing("compare"):
                found = self._leader.compare(step, self._held_out)
            self._reporter.compared(self._version, found)

    def _update(
        self, batch: StepBatch, written: Callable[[], None], *, settled: bool
    ) -> StepOutcome:
        """Trains on the step's groups, or lets them pass where the run only samples."""
        if not self._config.learner.train:
            written()
            return StepOutcome(applied=True, undone=False, metrics={"train/lr": 0.0})
        total = self._source.total_steps
        lrs = learning_rates(self._config.learner, batch.step, total, self._factors)
        with self._clock.doing("compute"):
            return self._leader.train(
                batch.step, batch.groups, lrs=lrs, before_step=written, settled=settled
            )

    def _halt(self, step: int, figures: dict[str, float], alarm: str) -> NoReturn:
        """Ends the run before a step that the ratio check refuses."""
        self._saver.save(self._step)
        self._reporter.record(Version(term=self._term, step=step), figures)
        raise RunFailedError(
            f"step {step} is not trained (learner.ratio_check.on_alarm=stop): {alarm}. The checkpoint "
            f"of step {self._step} is from before it, and its groups stay as they are: starting again "
            f"comes back to them and stops here again, unless learner.ratio_check.on_alarm is tell "
            f"(trains on them) or quarantine (puts them aside)"
        )

    def _quarantine(
        self, batch: StepBatch, undone: bool, reason: str, figures: dict[str, float]
    ) -> None:
        step = batch.step
        ids = ", ".join(mixed.group.group_id for mixed in batch.groups)
        log.warning(f"step {step}: {reason}; its groups are quarantined: {ids}")
        self._journal.quarantined(self._term, step, reason)()
        self._bad_in_a_row += 1
        if undone:
            # Earlier updates of the step are in the weights, so it goes back to the checkpoint.
            if not self._rewind(step - 1):
                # Each start begins to count anew, and one follows another here.
                while self._journal.outcome(step - self._bad_in_a_row) == "quarantined":
                    self._bad_in_a_row += 1
                self._end_if_too_many(step, reason)
                # Only a new process has the base model's weights. The journal tells it what to leave out.
                raise TandemError(
                    f"step {step} had an update that isn't finite after others of the same step, and there is no "
                    f"checkpoint to go back to: the learner starts again from the base model, without step {step}"
                )
            if self._step < step - 1:
                return  # It is to end. The next start comes back to the step, which the journal has.
        self._use_up(step, reason)
        self._reporter.record(self._version, figures)
        self._end_if_too_many(step, reason)

    def _end_if_too_many(self, step: int, reason: str) -> None:
        if self._bad_in_a_row >= self._config.learner.max_nonfinite:
            raise RunFailedError(
                f"{self._bad_in_a_row} steps in a row had a loss or gradient that isn't finite, or an "
                f"alarm of the ratio check (learner.max_nonfinite="
                f"{self._config.learner.max_nonfinite}), the last one step {step}, {reason}: look at "
                f"the quarantined groups; where the loss isn't finite, lower learner.optimizer.lr"
            )

    def _use_up(self, step: int, reason: str) -> None:
        self._source.quarantine(step, self._term, reason, max(0, self._saver.saved))
        self._step = step
        if self._publishing.has(self._journal.applied_step):
            self._publishing.restamp(self._version)
        else:
            # With weights.every over 1, the weights of the last steps are published nowhere.
            self._publishing.publish(self._version)

    def _rewind(self, step: int) -> bool:
        """Goes back to the newest checkpoint, and trains from there to this step again; False if there is none."""
        newest = self._saver.load_newest(self._journal.last_step)
        if newest is None:
            return False
        bad = self._bad_in_a_row
        self._step = newest
        self._look_through(step)
        self._journal.resumed(self._term, self._step)
        self._cut_back()
        with self._publishing.paused():
            self._replay(step)
        self._bad_in_a_row = bad
        return True

    # Reports.

    def _await(self, ids: list[str]) -> None:
        if ids:
            with self._clock.doing("wait/evaluation"), self._leader.waiting():
                self._evaluations.wait(ids, self._log_evaluation)

    def _log_evaluation(self, result: EvaluationResult) -> None:
        self._reporter.evaluation(result, self._term)
        if self._best is None:
            return
        if result.step == self._step:
            self._best.saw(record_of(result))
        elif result.step > self._step:
            # A learner died while it waited for it, and its step is still to be trained again.
            self._early.setdefault(result.step, []).append(record_of(result))
        else:
            self._best.missed(record_of(result), self._step)

    def _report(self, waiting: str = "", *, force: bool = False) -> None:
        self._reporter.report(
            self._version,
            weights=self._publishing.stats(),
            alarm="; ".join(filter(None, (self._alarm.text, self._idle.alarm))),
            waiting=waiting,
            force=force,
        )
