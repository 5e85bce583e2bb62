"""The part of ``metrics.jsonl`` that people look at, kept small: recent steps and every evaluation."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ...common.parts import HELD_OUT_PAIRS, parts
from ...common.ratio_check import alarm_of

_AGE = re.compile("[0-9]{1,4}")
WINDOW = 20
"""Number of steps that recent means and paces are taken over."""
MEMORY = "memory/"
"""Prefix of the metrics of memory."""
SHARE = "replay/staleness_share_"
"""Prefix of the staleness histogram's metrics; the age follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation of a held-out set."""

    set: str
    step: int
    """The step of the weights."""
    accuracy: float
    """Share of right answers, 0 to 1."""
    problems: int
    figures: Mapping[str, float] = field(default_factory=dict)
    """All figures by the names that they have in the metrics after the set's, as in ``pass@4`` or
    ``source/aime/accuracy``."""


def of_first(evaluations: Sequence[Evaluated], sets: Sequence[str]) -> tuple[str, list[Evaluated]]:
    """The evaluations of the one held-out set whose accuracy is shown where there is room for one.

    Args:
        evaluations: of all sets, by step.
        sets: names of the sets, the one to show first; empty if they aren't known.

    Returns:
        The set's name, empty if there is no other; and its evaluations, by step.
    """
    names = [*sets, *(one.set for one in evaluations)]
    if not names:
        return "", []
    shown = [one for one in evaluations if one.set == names[0]]
    return names[0] if len(set(names)) > 1 else "", shown


class History:
    """Takes the records of ``metrics.jsonl`` in their order in the file."""

    def __init__(self) -> None:
        self.step = 0
        """The latest step."""
        self.alarm = ""
        """The newest alarm of the ratio check, with its step and the number of steps with one; empty if
        there was none."""
        self._alarms = (0, 0)
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._evaluations: dict[tuple[str, int], Evaluated] = {}

    def add(self, record: Mapping[str, Any]) -> bool:
        """Takes a record; returns whether it is an evaluation."""
        step = record.get("step")
        if type(step) is not int:
            return False
        found = list(_evaluations(record, step))
        if found:
            # The evaluation's step is that of the weights, which may be long past.
            self._evaluations.update({(one.set, one.step): one for one in found})
            return True
        recent = self._recent
        if HELD_OUT_PAIRS in record:
            return False
        if recent and (step <= recent[-1]["step"] or record.get("term") != recent[-1].get("term")):
            # The learner was restarted: the time in between says nothing about the pace.
            recent.clear()
        recent.append(record)
        self.step = max(self.step, step)
        self.note_alarm(record)
        return False

    def note_alarm(self, record: Mapping[str, Any]) -> None:
        """Takes only the alarm from a step's record."""
        alarm, step = alarm_of(record), record.get("step")
        last, count = self._alarms
        # A learner that was killed writes steps again.
        if alarm and type(step) is int and step > last:
            self._alarms = (step, count + 1)
            others = f" ({count + 1:,} such steps in this run)" if count else ""
            self.alarm = f"step {step}: {alarm}{others}"

    @property
    def alarm_step(self) -> int:
        """The step of the newest alarm; 0 if there was none."""
        return self._alarms[0]

    @property
    def evaluations(self) -> tuple[Evaluated, ...]:
        """All evaluations, by step and set."""
        return tuple(sorted(self._evaluations.values(), key=lambda one: (one.step, one.set)))

    @property
    def newest(self) -> Mapping[str, Any] | None:
        """The newest step's record; None before the first."""
        return self._recent[-1] if self._recent else None

    def last(self, *names: str) -> float | None:
        """The value, in the newest step, of the first of these metrics that the step has."""
        return first_number(self.newest, *names) if self.newest is not None else None

    def values(self, name: str) -> tuple[float, ...]:
        """A metric's values in those recent steps that have it."""
        found = (first_number(record, name) for record in self._recent)
        return tuple(value for value in found if value is not None)

    def mean(self, name: str) -> float | None:
        """A metric's mean over the recent steps."""
        values = self.values(name)
        return sum(values) / len(values) if values else None

    def memory(self) -> dict[str, float]:
        """The newest value of each metric of memory in the recent steps, without its prefix."""
        found: dict[str, float] = {}
        for record in self._recent:
            for name, value in record.items():
                if name.startswith(MEMORY) and _is_number(value):
                    found[name.removeprefix(MEMORY)] = float(value)
        return found

    def seconds_per_step(self) -> float | None:
        """Recent pace; None until the learner has done two steps since its last start."""
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        if last["step"] == first["step"]:
            return None
        return max(1e-6, self._span() / (last["step"] - first["step"]))

    def per_second(self, *names: str) -> float | None:
        """Recent rate per second of metrics that count what a step did, added up."""
        span = self._span()
        if not span:
            return None
        # What the first step did was done before the span begins.
        later = list(self._recent)[1:]
        return sum(first_number(record, name) or 0.0 for record in later for name in names) / span

    def _span(self) -> float:
        """Seconds between the first and the last of the recent steps."""
        moments = [first_number(record, "time") for record in self._recent]
        if len(moments) < 2 or moments[0] is None or moments[-1] is None:
            return 0.0
        return max(0.0, moments[-1] - moments[0])

    def staleness(self) -> tuple[float, ...]:
        """Share of the recent samples by age in steps, from 0 on; empty if no step recorded it."""
        histograms = [ages for record in self._recent if (ages := _ages(record))]
        if not histograms:
            return ()
        oldest = max(max(ages) for ages in histograms)
        return tuple(
            sum(ages.get(age, 0.0) for ages in histograms) / len(histograms)
            for age in range(oldest + 1)
        )

    def learner_seconds(self) -> dict[str, float]:
        """The learner's recent seconds by activity, with ``total``."""
        seconds: dict[str, float] = {}
        for record in self._recent:
            for name, value in record.items():
                if name.startswith("time/") and _is_number(value):
                    activity = name.removeprefix("time/")
                    seconds[activity] = seconds.get(activity, 0.0) + value
        return seconds


def read(path: Path) -> History:
    """The history from all parts of a run's metrics; parses only what it keeps."""
    history = History()
    kept: list[bytes] = []
    recent: deque[bytes] = deque()
    for part in parts(path):
        with open(part, "rb") as file:
            for line in file:
                # A crash of the host may have cut the last line; the learner writes it again.
                if not line.endswith(b"\n"):
                    break
                if b'"eval/' in line:
                    kept.append(line)
                    continue
                recent.append(line)
                if len(recent) <= 2 * WINDOW:
                    continue
                old = recent.popleft()
                if b'"ratio/alarm": 1' in old:
                    for record in parsed([old]):
                        history.note_alarm(record)
    for record in parsed([*kept, *recent]):
        history.add(record)
    return history


def parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Records of whole lines; damaged lines are left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def first_number(record: Mapping[str, Any], *keys: str) -> float | None:
    """The value of the first key that holds a number."""
    for key in keys:
        value = record.get(key)
        if _is_number(value):
            return float(value)
    return None


def _is_number(value: Any) -> TypeGuard[float]:
    # Nothing that float() or a sum could fail on: no NaN, no infinity, no endlessly long integer.
    return isinstance(value, int | float) and -1e300 < value < 1e300


def _ages(record: Mapping[str, Any]) -> dict[int, float]:
    return {
        int(name.removeprefix(SHARE)): float(value)
        for name, value in record.items()
        if name.startswith(SHARE) and _AGE.fullmatch(name.removeprefix(SHARE)) and _is_number(value)
    }


def _evaluations(record: Mapping[str, Any], step: int) -> Iterator[Evaluated]:
    name = str(record.get("eval/id", "")).rpartition("@")[0]
    accuracy = record.get(f"eval/{name}/accuracy")
    if _is_number(accuracy):
        yield Evaluated(
            set=name,
            step=step,
            accuracy=float(accuracy),
            problems=int(first_number(record, f"eval/{name}/problems") or 0),
            figures={
                key.removeprefix(f"eval/{name}/"): float(value)
                for key, value in record.items()
                if key.startswith(f"eval/{name}/") and _is_number(value)
            },
        )
