"""Asks the rollout workers to evaluate the held-out sets, and collects the results.

Requests and results are in Redis; what was recorded is in ``metrics.jsonl``. So each evaluation that
is due is recorded once, whichever process dies: a learner that starts takes over the requests that
aren't recorded (:meth:`Evaluations.begin`), and repeats those that are due since its checkpoint, in
case its predecessor didn't get to it (:meth:`Evaluations.request_since`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ...common.config import Config, of_set
from ...common.parts import parts
from ...common.waiting import Wait
from ...replay.evaluating.evaluations import EvaluationRequest, EvaluationResult
from ...replay.members import Members
from ...replay.store import RunStore

log = logging.getLogger("tandem.learner")

LOOK_SECONDS = 0.25
"""Time between two checks for results."""
ASK_SECONDS = 2.0
"""Time between two checks whether Redis still has every request."""
ABANDONED_SECONDS = 60.0
"""Time without a live rollout worker after which nobody is expected to evaluate."""
DEADLINE_SECONDS = 3600.0
"""How long one evaluation may take while it is waited for."""
WHOLE = ".whole"
"""Suffix of the id of a last evaluation of the whole set, after one of a part at the same step."""


class Evaluations:
    """Evaluations of a run. Ids are ``<set>@<step>``, so that a repeated request changes nothing.

    Args:
        runs: holds requests and results.
        members: knows whether a worker is there.
        config: the run's config.
        total: greatest number of steps that the run may take.
        stopping: returns True once the process is to drain.
    """

    def __init__(
        self,
        runs: RunStore,
        members: Members,
        config: Config,
        total: int,
        stopping: Callable[[], bool],
    ) -> None:
        self._runs = runs
        self._members = members
        self._settings = config.evaluate
        self._total = total
        self._sets = [held.name for held in config.data.evaluate]
        self._limits = {held.name: held.limit for held in config.data.evaluate}
        self._own = {held.name: of_set(config, held).evaluate for held in config.data.evaluate}
        self._stopping = stopping
        self._term = 0
        self._recorded: set[str] = set()
        # What isn't recorded, by id: its request, or None where a predecessor has asked.
        self._open: dict[str, EvaluationRequest | None] = {}
        self._looked = self._asked = 0.0
        self._wanted: set[int] = set()

    def begin(self, term: int, recorded: Iterable[str]) -> None:
        """Takes over requests that aren't recorded; all of their results arrive again.

        Args:
            term: the learner's term.
            recorded: ids that have a record in ``metrics.jsonl``.
        """
        self._term = term
        self._recorded = set(recorded)
        asked = self._runs.asked_evaluations()
        self._open = {name: None for name in asked if name not in self._recorded}

    def due(self, step: int) -> bool:
        """Whether the config asks for an evaluation of this step's weights."""
        settings = self._settings
        if step == 0:
            return settings.at_start
        if step >= self._total:
            return settings.at_end
        return settings.every > 0 and step % settings.every == 0

    def request(self, step: int, *, is_last: bool = False, wanted: bool = False) -> list[str]:
        """Requests the evaluation of every held-out set, if one is due or wanted; returns their ids.

        Args:
            step: the step whose weights are evaluated.
            is_last: whether the run ends with this step. A run that is set in passes, or that a callback
                stops, may end before its last possible step, and may then have requested a part of the
                set already.
            wanted: whether a callback wants an evaluation that isn't due.
        """
        is_last = is_last or step >= self._total
        due = self._settings.at_end if is_last and step else self.due(step)
        if not self._sets or not (wanted or due):
            return []
        if wanted:
            self._wanted.add(step)
        asked_before = is_last and step < self._total and (step in self._wanted or self.due(step))
        ids = []
        for name in self._sets:
            whole = self._limits[name]
            part = min((n for n in (whole, self._settings.limit) if n is not None), default=None)
            limit = whole if step == 0 or is_last else part
            id_ = f"{name}@{step}{WHOLE if asked_before and limit != part else ''}"
            if id_ in self._recorded:
                continue
            request = EvaluationRequest(
                id=id_,
                set_name=name,
                step=step,
                limit=limit,
                temperature=self._own[name].temperature,
                samples=self._own[name].samples,
            )
            self._runs.request_evaluation(request, self._term)
            self._open[id_] = request
            ids.append(id_)
        return ids

    def request_since(self, first: int, last: int) -> list[str]:
        """Requests what is due from one step to another, both included; returns the ids."""
        return [id_ for step in range(first, last + 1) for id_ in self.request(step)]

    def open(self) -> list[str]:
        """Ids of requests that aren't recorded."""
        return list(self._open)

    def arrived(self) -> list[EvaluationResult]:
        """Results that are there and not recorded, each once; checks at most every 0.25 s.

        Requests that Redis has lost are made again.
        """
        now = time.monotonic()
        if not self._open or now - self._looked < LOOK_SECONDS:
            return []
        self._looked = now
        if now - self._asked >= ASK_SECONDS:
            self._asked = now
            self._ask_again()
        results = self._runs.evaluation_results(self.open())
        self._recorded |= results.keys()
        for name, reason in self._runs.given_up_evaluations().items():
            if name in self._open:
                del self._open[name]
                log.error(f"evaluation {name} is given up, it failed too often; the last: {reason}")
        for name in results:
            self._open.pop(name, None)
        return sorted(results.values(), key=lambda result: (result.step, result.id))

    def _ask_again(self) -> None:
        """Asks again for what Redis has lost, as one that is killed may lose its last second."""
        asked = set(self._runs.asked_evaluations())
        for name, request in self._open.items():
            if request is not None and name not in asked:
                log.warning(f"Redis has lost the request for the evaluation {name}: asks again")
                self._runs.request_evaluation(request, self._term)

    def wait(
        self,
        ids: list[str],
        got: Callable[[EvaluationResult], None],
        deadline: float = DEADLINE_SECONDS,
    ) -> bool:
        """Waits for these results and passes on whatever arrives; False if they don't come.

        Gives up at the deadline, when the process is to drain, and when no rollout worker has
        been there for a minute.
        """
        wait = Wait("a rollout worker", "evaluate", deadline)
        seen, looked = time.monotonic(), 0.0
        while any(name in self._open for name in ids):
            for result in self.arrived():
                got(result)
            now = time.monotonic()
            if self._stopping():
                return False
            if now - looked >= 2.0:
                looked = now
                # If nobody at all was heard of, Redis is out of reach or its disk is full.
                if self._members.live("rollout") or not self._members.live():
                    seen = now
            waited = ", ".join(name for name in ids if name in self._open)
            if not waited:
                continue
            wait.what = f"evaluate {waited}"
            if wait.expired(log.warning) or now - seen > ABANDONED_SECONDS:
                why = (
                    f"no rollout worker has been there for {ABANDONED_SECONDS:.0f} s"
                    if now - seen > ABANDONED_SECONDS
                    else f"it was not done in {deadline:.0f} s"
                )
                log.warning(f"goes on without the evaluation {waited}: {why}")
                return False
            time.sleep(0.02)
        return True


def recorded_in(path: Path) -> set[str]:
    """Ids of the evaluations that have a record in the metrics."""
    found: set[str] = set()
    for part in parts(path):
        with open(part, "rb") as file:
            for line in file:
                if b'"eval/id"' not in line:
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue  # cut by a crash: it will be recorded again
                if isinstance(record, dict) and "eval/id" in record:
                    found.add(str(record["eval/id"]))
    return found


def record_of(result: EvaluationResult) -> dict[str, Any]:
    """The metrics of a result, with the ``step`` of the weights that it measured."""
    due = result.id.rpartition("@")[2].removesuffix(WHOLE)
    return {
        "step": result.step,
        "eval/id": result.id,
        "eval/due": int(due) if due.isdecimal() else result.step,
        "eval/version": result.version,
        **{f"eval/{result.set_name}/{name}": value for name, value in result.all_figures().items()},
    }
