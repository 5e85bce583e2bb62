"""Follows ``metrics.jsonl`` and tells how the run gets on, in plain lines."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class MetricsTail:
    """Reads the records that are new in a file which may also be cut back and replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = -1

    def read(self) -> list[dict[str, Any]]:
        """Whole lines since the last call; all of them again after the file was replaced."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0
        if status.st_size == self._offset:
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue  # A line that a crash cut in two; the learner repeats its step.
        return records


class Progress:
    """The figures that a person watches, kept up to date from the metrics."""

    def __init__(
        self,
        path: Path,
        *,
        total: int | None,
        every: int,
        say: Callable[[str], None],
        restarts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._tail = MetricsTail(path)
        self._total = total
        self._every = every
        self._say = say
        self._restarts = restarts
        self._told = 0
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=max(2, every))
        self._samples = 0.0
        self._accuracy: tuple[float, int] | None = None
        self.step = 0
        """The latest step seen."""
        self.moved = time.monotonic()
        """When a step was last seen."""
        self.skip()

    def skip(self) -> None:
        """Takes what an earlier life of the run has written without telling of it."""
        for record in self._tail.read():
            self._take(record)
        self._told = self.step
        self._recent.clear()

    def update(self) -> None:
        """Reads what is new; prints a line every so many steps."""
        for record in self._tail.read():
            self._take(record)
            if self.step - self._told >= self._every or (
                self.step == self._total and self.step > self._told
            ):
                self._told = self.step
                self._say(self.line(record))

    def _take(self, record: Mapping[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        evaluations = [
            (key, value)
            for key, value in record.items()
            if key.startswith("eval/") and key.endswith("/accuracy")
        ]
        for _, value in evaluations:
            if isinstance(value, float | int):
                self._accuracy = (float(value), step)
        if evaluations:
            # Its step is that of the weights, which may be long past.
            return
        if step < self.step:
            # The learner was killed and repeats journalled steps.
            self._recent.clear()
        self.step = max(self.step, step)
        self.moved = time.monotonic()
        moment = record.get("time")
        if isinstance(moment, int | float):
            self._samples += float(record.get("train/rows") or 0)
            self._recent.append((step, float(moment), self._samples))

    def line(self, record: Mapping[str, Any]) -> str:
        """One line for a person."""
        width = len(str(self._total)) if self._total else 1
        parts = [f"step {self.step:>{width}}" + (f"/{self._total}" if self._total else "")]
        reward = first_number(record, "reward/mean")
        if reward is not None:
            parts.append(f"reward {reward:.3f}")
        loss = first_number(record, "train/loss")
        if reward is None and loss is not None:
            parts.append(f"loss {loss:.4f}")
        if self._accuracy is not None:
            accuracy, of = self._accuracy
            parts.append(f"held-out {100 * accuracy:.1f}% (step {of})")
        staleness = first_number(record, "replay/staleness_mean")
        if staleness is not None:
            parts.append(f"staleness {staleness:.1f}")
        left = None
        if len(self._recent) >= 2:
            (step0, time0, samples0), (step1, time1, samples1) = self._recent[0], self._recent[-1]
            spent = max(1e-6, time1 - time0)
            if samples1 > samples0:
                parts.append(f"{(samples1 - samples0) / spent:,.0f} samples/s")
            if self._total and step1 > step0:
                left = (self._total - step1) * spent / (step1 - step0)
        parts.append(f"restarts {self._restarts()}")
        if left is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)


def first_number(record: Mapping[str, Any], *keys: str) -> float | None:
    """The first of some keys that holds a number."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, int | float):
            return float(value)
    return None


def duration(seconds: float) -> str:
    """Seconds for a person.

    >>> duration(75)
    '1:15'
    >>> duration(3700)
    '1:01:40'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
