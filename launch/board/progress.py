"""Follows ``metrics.jsonl`` and reports a run's progress in plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..wording import duration
from .history import History, first_number, of_first, read
from .tail import MetricsTail


class Progress:
    """The figures that a person watches, kept up to date from the metrics. Thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        total: int | None,
        every: int,
        say: Callable[[str], None],
        restarts: Callable[[], int] = lambda: 0,
        held_out: Sequence[str] = (),
    ) -> None:
        self._path = path
        self._tail = MetricsTail(path)
        self._total = total
        self._every = every
        self._say = say
        self._restarts = restarts
        self._held_out = held_out
        self._said_step = 0
        self._alarm_step = 0
        self._lock = threading.Lock()
        self.history = History()
        """What the metrics say; read it inside :meth:`reading`."""
        self.moved = time.monotonic()
        """When a step was last seen (monotonic time)."""
        self.skip()

    @property
    def step(self) -> int:
        return self.history.step

    def skip(self) -> None:
        """Reads what was written before this start of the run without reporting it."""
        self._read_all()
        self._said_step = self.step
        self._alarm_step = self.history.alarm_step

    def _read_all(self) -> None:
        """Reads the metrics from their beginning, and parses only what is kept of them."""
        self._tail.skip()
        self.history = read(self._path)
        self.moved = time.monotonic()

    def update(self) -> None:
        """Reads what is new; prints a line every ``every`` steps."""
        with self._lock:
            if self._tail.was_cut():
                self._go_back()
            for record in self._tail.records():
                if not self.history.add(record):
                    self.moved = time.monotonic()
                self._report(record)

    def _go_back(self) -> None:
        """Follows a learner that has started again and cut the metrics back to its checkpoint."""
        reached = self.step
        self._read_all()
        # Steps that are trained again are no progress.
        self.history.step = max(reached, self.step)
        if self.history.newest is not None:
            self._report(self.history.newest)

    def _report(self, record: Mapping[str, Any]) -> None:
        """Prints a line about a step if one is due."""
        due = self.step - self._said_step >= self._every
        if not due and not (self.step == self._total and self.step > self._said_step):
            return
        self._said_step = self.step
        if self.history.alarm_step > self._alarm_step:
            self._alarm_step = self.history.alarm_step
            self._say(f"alarm: {self.history.alarm}")
        self._say(self.line(record))

    @contextmanager
    def reading(self) -> Iterator[History]:
        """The history, which nothing changes inside the ``with`` block."""
        self.update()
        with self._lock:
            yield self.history

    def line(self, record: Mapping[str, Any]) -> str:
        history = self.history
        width = len(str(self._total)) if self._total else 1
        parts = [f"step {self.step:>{width}}" + (f"/{self._total}" if self._total else "")]
        reward = first_number(record, "reward/mean")
        if reward is not None:
            parts.append(f"reward {reward:.3f}")
        loss = first_number(record, "train/loss")
        if reward is None and loss is not None:
            parts.append(f"loss {loss:.4f}")
        name, evaluations = of_first(history.evaluations, self._held_out)
        if evaluations:
            newest = evaluations[-1]
            label = f"held-out {name}" if name else "held-out"
            parts.append(f"{label} {100 * newest.accuracy:.1f}% (step {newest.step})")
        staleness = first_number(record, "replay/staleness_mean")
        if staleness is not None:
            parts.append(f"staleness {staleness:.1f}")
        samples = history.per_second("train/rows")
        if samples:
            parts.append(f"{samples:,.0f} samples/s")
        parts.append(f"restarts {self._restarts()}")
        pace = history.seconds_per_step()
        if self._total and pace is not None:
            parts.append(f"{duration((self._total - self.step) * pace)} left")
        return "  ".join(parts)
