"""Sends ``metrics.jsonl`` to a tracker: every record once, even across restarts and resumed runs.

``trackers/<name>.json`` records what has been sent. Where the tracker's server says that it has less, the rest is sent
again. A learner that was killed trains journalled steps again and writes their records again; a step that was sent is not
sent twice, unless it was sent as one that isn't trained and is trained after all.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common import disk
from ...common.errors import DataError
from ...common.parts import HELD_OUT_PAIRS
from ...common.plain import damaged, fits, read_object, sealed, unsealed
from ...common.ratio_check import alarm_of
from ...common.run_folder import write_atomic
from ..board.tail import MetricsTail
from .tracker import Tracker, metrics_of

LOOK_SECONDS = 1.0
"""Time between two checks of the file."""
KEPT_EVERY = 1000
"""Number of records after which it is noted that they have been sent."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """What has been sent of a run."""

    rows: int = 0
    """Number of records."""
    step: int = 0
    """The last training step."""
    applied: bool = True
    """Whether it was trained. The one at which an alarm has stopped the run is met again when the run goes on."""
    evaluations: set[str] = field(default_factory=set)
    """Ids of evaluations."""

    @classmethod
    def read(cls, path: Path) -> Sent:
        """Reads the file; an empty record if there is none yet."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls()
        way_out = "remove it, and all records are sent again"
        content = read_object(data, str(path), DataError, way_out)
        kept = unsealed(content, str(path), DataError, way_out)
        evaluations = kept.get("evaluations")
        if not (
            fits(kept.get("rows"), int)
            and fits(kept.get("step"), int)
            and fits(kept.get("applied"), bool)
            and isinstance(evaluations, list)
            and all(isinstance(one, str) for one in evaluations)
        ):
            raise damaged(str(path), "lacks rows, step, applied or evaluations", DataError, way_out)
        return cls(
            rows=kept["rows"],
            step=kept["step"],
            applied=kept["applied"],
            evaluations=set(evaluations),
        )

    def write(self, path: Path) -> None:
        """Writes the file, replacing the old one."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        kept = {
            "rows": self.rows,
            "step": self.step,
            "applied": self.applied,
            "evaluations": sorted(self.evaluations),
        }
        disk.persist(path, lambda: write_atomic(path, json.dumps(sealed(kept)) + "\n"))

    def takes(self, record: dict[str, Any]) -> bool:
        """Notes a record; returns False if it was sent before."""
        step, evaluation = record.get("step"), record.get("eval/id")
        if not isinstance(step, int):
            return False
        if HELD_OUT_PAIRS in record:
            evaluation = f"pairs@{step}"
        if evaluation is not None:
            if evaluation in self.evaluations:
                return False
            self.evaluations.add(str(evaluation))
        else:
            applied = record.get("train/applied") != 0
            trained_now = step == self.step and applied and not self.applied
            if step <= self.step and not trained_now:
                return False
            self.step, self.applied = step, applied
        self.rows += 1
        return True

    def go_back(self, rows: int, records: Iterable[dict[str, Any]]) -> None:
        """Counts only the first ``rows`` of a run's records as sent, so that the others are sent again, under the same
        numbers."""
        before = replace(self, evaluations=set(self.evaluations))
        self.rows, self.step, self.applied, self.evaluations = 0, 0, True, set()
        for record in records:
            if self.rows == rows:
                return
            # One that wasn't sent may come before others that were, where a learner has cut the metrics back since.
            if not before.takes(record):
                self.takes(record)
        # Some have been cut off.
        self.rows = rows


class Following:
    """Follows a run's metrics for one tracker."""

    def __init__(self, tracker: Tracker, metrics: Path, state: Path, sent: Sent) -> None:
        self._tracker = tracker
        self._tail = MetricsTail(metrics)
        self._state = state
        self._sent = sent

    def catch_up(self, stop: threading.Event | None = None) -> int:
        """Sends new records, until ``stop`` is set, and returns their number."""
        before = kept = self._sent.rows
        for record in self._tail.records():
            if stop is not None and stop.is_set():
                break
            if self._sent.rows - kept >= KEPT_EVERY:
                kept = self._keep()
            row = self._sent.rows
            if self._sent.takes(record):
                self._tracker.log(row, record["step"], record["time"], metrics_of(record))
                if alarm := alarm_of(record):
                    self._tracker.alarm(record["step"], record["time"], alarm)
        if self._sent.rows > kept:
            self._keep()
        return self._sent.rows - before

    def _keep(self) -> int:
        """Notes what has been sent, and returns its number."""
        self._tracker.flush()
        self._sent.write(self._state)
        return self._sent.rows

    def follow(self, stop: threading.Event) -> None:
        """Sends records as they come until ``stop`` is set; then the last ones."""
        while not stop.is_set():
            self.catch_up()
            stop.wait(LOOK_SECONDS)
        self.catch_up()
