"""Follows a run's metrics and has its callbacks called; whatever they do, the run goes on.

The metrics' file is what lies between the learner and the callbacks: the learner never waits for them, and a slow
one falls behind without taking memory. ``trackers/callbacks.json`` records what they were called for, before they
are, so that nothing is called for twice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from ...common import disk
from ...common.config import Config
from ...common.errors import ConfigError, DataError, StoreError
from ...common.plain import Count, Record, read_object, read_record, sealed, unsealed
from ...common.run_folder import RunFolder, write_atomic
from ...replay.callback_requests import CallbackRequests, Requested, Stop
from ..board.tail import MetricsTail
from ..trackers.following import Sent
from ..trackers.tracker import metrics_of
from ..wording import shown
from .caller import Answer, Asked, Caller, Ended
from .handle import MOST_NAMES, OWN_NAME

log = logging.getLogger("tandem.callbacks")

LOOK_SECONDS = 0.2
"""Time between two checks of the metrics."""
END_SECONDS = 15.0
"""Time for the calls that are left when the run ends."""
MOST_ENDS = 3
"""A callback in whose calls the process ended so often is switched off."""
LONGEST_PAUSE = 60.0
"""Seconds between two attempts to start the callbacks' process at most; the first pause is 1 s, each later one twice as
long."""
MOST_ERRORS_SHOWN = 20
"""Number of different exceptions of one callback whose tracebacks are logged."""
PUT_SECONDS = 5.0
"""How long Redis may take for a request, before the next calls are made and it is tried again."""


class Tally(Record, frozen=True, kw_only=True):
    """How the calls of one callback went, over all starts of the run."""

    calls: Count = 0
    """Number of calls."""
    errors: Count = 0
    """Number of calls that raised an exception."""
    ended: Count = 0
    """Number of calls in which the process ended or was killed at the deadline."""
    missed: Count = 0
    """Number of calls that weren't made because the process couldn't be started."""
    off: bool = False
    """Whether it is switched off."""

    @property
    def failed(self) -> int:
        """Number of calls that failed or weren't made."""
        return self.errors + self.ended + self.missed


def read_tallies(path: Path) -> dict[str, Tally]:
    """Tallies by import path; none if no callback has been called.

    Raises:
        DataError: the file is damaged.
    """
    way_out = "stop the run, remove it and start again: the counts begin anew"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    content = read_object(data, str(path), DataError, way_out)
    return {
        name: read_record(Tally, one, str(path), DataError, way_out)
        for name, one in unsealed(content, str(path), DataError, way_out).items()
    }


def switched_off(config: Config, folder: RunFolder) -> list[str]:
    """A line for each of a run's callbacks that isn't called any more, with the way out.

    A damaged file of tallies is such a line as well, since nothing that befalls callbacks ends a run.
    """
    try:
        tallies = read_tallies(folder.callbacks)
    except DataError as error:
        return [f"warning: the callbacks aren't called: {error}"]
    return [
        f"warning: {path} is switched off, since it ended or hung its process {MOST_ENDS} times: once it is mended, "
        f"stop the run, remove {shown(folder.callbacks)} and start again"
        for path in config.run.callbacks
        if path in tallies and tallies[path].off
    ]


@dataclass(slots=True)
class _Callback:
    index: int
    path: str
    tally: Tally
    seen: set[str] = field(default_factory=set)

    def count(self, **changes: Any) -> None:
        self.tally = structs.replace(self.tally, **changes)


class Host:
    """Has the callbacks of one run called, until the run ends.

    Args:
        config: the run's config.
        folder: the run's folder.
        requests: takes what the callbacks ask for.
        output: gets what they print.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        requests: CallbackRequests,
        output: Callable[[bytes], None],
    ) -> None:
        self._folder = folder
        self._requests = requests
        settings = config.run
        before = read_tallies(folder.callbacks)
        self._callbacks = [
            _Callback(index, path, before.get(path, Tally()))
            for index, path in enumerate(settings.callbacks)
        ]
        self._caller = Caller(
            settings.callbacks,
            seconds=settings.callback_seconds,
            memory_mb=settings.callback_memory_mb,
            output=output,
        )
        self._pause = 1.0
        self._next_start = 0.0
        self._tail = MetricsTail(folder.metrics)
        self._state = folder.called
        self._new = not self._state.exists()
        self._sent = Sent.read(self._state)
        self._requested = Requested()
        self._unwritten = False
        self._stop = threading.Event()

    def end(self) -> None:
        """Asks :meth:`run` to return, after :data:`END_SECONDS` at the latest. For a signal handler."""
        self._caller.cut_at = time.monotonic() + END_SECONDS
        self._stop.set()

    def run(self) -> None:
        """Calls the callbacks for every record that comes, and at the end for the last ones."""
        self._requested = self._requests.read()
        if self._new:
            self._skip_older()
        try:
            self._start()
            while not self._stop.is_set():
                self._catch_up()
                self._put()
                self._stop.wait(LOOK_SECONDS)
            self._catch_up()
            self._put()
        finally:
            self._caller.close()
            self._write_tallies()

    def _skip_older(self) -> None:
        """Notes the records from before this start, if the run had no callbacks then."""
        began = float(self._folder.read_run().get("began") or 0.0)
        for record in MetricsTail(self._folder.metrics).records():
            if float(record.get("time") or 0.0) < began:
                self._sent.takes(record)
        self._sent.write(self._state)

    def _catch_up(self) -> None:
        for record in self._tail.records():
            if not self._sent.takes(record):
                continue
            if time.monotonic() >= self._caller.cut_at:
                log.warning(
                    f"the run ends: callbacks aren't called for step {record['step']} and what follows"
                )
                return
            self._sent.write(self._state)
            for callback in self._callbacks:
                if callback.tally.off:
                    continue
                if self._start():
                    self._call(callback, record)
                else:
                    callback.count(missed=callback.tally.missed + 1)
                    self._count_failures()
            self._put()

    def _start(self) -> bool:
        """Starts the callbacks' process if it isn't running; returns whether it is."""
        if self._caller.running:
            return True
        if all(one.tally.off for one in self._callbacks) or time.monotonic() < self._next_start:
            return False
        try:
            self._caller.start()
        except (ConfigError, Ended, OSError) as error:
            log.error(
                f"the callbacks' process can't be started, and callbacks aren't called until it can be: {error}; "
                f"trying again in {self._pause:.0f} s"
            )
            self._next_start = time.monotonic() + self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            return False
        self._pause = 1.0
        return True

    def _call(self, callback: _Callback, record: dict[str, Any]) -> None:
        step, tally = int(record["step"]), callback.tally
        callback.count(calls=tally.calls + 1)
        try:
            answer = self._caller.call(callback.index, step, metrics_of(record))
        except Ended as error:
            if time.monotonic() >= self._caller.cut_at:
                log.warning(f"{callback.path} was still busy with step {step} when the run ended")
                return
            off = tally.ended + 1 >= MOST_ENDS
            callback.count(ended=tally.ended + 1, off=off)
            after = "is called no more" if off else "a new process goes on with the next call"
            log.error(f"{callback.path}, step {step}: the process {error}; {after}")
            self._count_failures()
            return
        if answer.error:
            callback.count(errors=tally.errors + 1)
            self._tell(callback, step, answer)
            self._count_failures()
        self._ask(callback, step, answer.asked)

    def _tell(self, callback: _Callback, step: int, answer: Answer) -> None:
        """Logs a traceback the first time that its last line comes."""
        last = answer.error.rstrip().rpartition("\n")[2][:200]
        if last not in callback.seen and len(callback.seen) < MOST_ERRORS_SHOWN:
            callback.seen.add(last)
            log.error(f"{callback.path}, step {step}, raised:\n{answer.error.rstrip()}")

    def _count_failures(self) -> None:
        """Writes the tallies, and their sum into the run's metrics."""
        self._write_tallies()
        failed = sum(one.tally.failed for one in self._callbacks)
        self._change(values={OWN_NAME: float(failed)})

    def _write_tallies(self) -> None:
        tallies = {one.path: structs.asdict(one.tally) for one in self._callbacks}
        text = json.dumps(sealed(tallies)) + "\n"
        disk.persist(self._folder.callbacks, lambda: write_atomic(self._folder.callbacks, text))

    def _ask(self, callback: _Callback, step: int, asked: Asked) -> None:
        if asked.stop is not None and self._requested.stop is None:
            stop = Stop(callback=callback.path, reason=asked.stop, step=step)
            log.info(f"{callback.path}, step {step}, stops the run: {asked.stop}")
            self._requested = structs.replace(self._requested, stop=stop)
            self._unwritten = True
        self._change(
            values=asked.values, checkpoint=asked.checkpoint, evaluate=asked.evaluate, by=callback
        )

    def _change(
        self,
        *,
        values: dict[str, float],
        checkpoint: bool = False,
        evaluate: bool = False,
        by: _Callback | None = None,
    ) -> None:
        if not (values or checkpoint or evaluate):
            return
        old, number = self._requested, self._requested.newest + 1
        kept = dict(old.values)
        for name, value in values.items():
            if name in kept or name == OWN_NAME or len(kept) <= MOST_NAMES:
                kept[name] = (number, value)
            elif by is not None and "names" not in by.seen:
                by.seen.add("names")
                log.error(f"{by.path} logs more than {MOST_NAMES} names: {name} is left out")
        self._requested = structs.replace(
            old,
            checkpoint=number if checkpoint else old.checkpoint,
            evaluate=number if evaluate else old.evaluate,
            values=kept,
        )
        self._unwritten = True

    def _put(self) -> None:
        """Writes the requests; while Redis is away, callbacks go on being called."""
        if not self._unwritten:
            return
        try:
            self._requests.put(self._requested, PUT_SECONDS)
            self._unwritten = False
        except StoreError as error:
            log.warning(f"requests of callbacks wait: {error}")
