"""Asks the rollout workers to evaluate the held-out sets, and gathers what they find."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..common.config import Config
from ..replay.members import Members
from ..replay.store import EvaluationRequest, EvaluationResult, RunStore

log = logging.getLogger("tandem.learner")

LOOK_SECONDS = 0.25
"""Between two looks for results."""
ABANDONED_SECONDS = 60.0
"""No live rollout worker for so long: nobody will evaluate."""
DEADLINE_SECONDS = 3600.0
"""For one evaluation that is waited for."""


class Evaluations:
    """Evaluations of a run. Ids are ``<set>@<step>``, so asking twice asks once.

    Args:
        runs: Where requests and results are.
        members: Tells whether a worker is there.
        config: The run's.
        stopping: True once the process is to drain.
    """

    def __init__(
        self, runs: RunStore, members: Members, config: Config, stopping: Callable[[], bool]
    ) -> None:
        self._runs = runs
        self._members = members
        self._settings = config.evaluate
        self._sets = [held.name for held in config.data.evaluate]
        self._limits = {held.name: held.limit for held in config.data.evaluate}
        self._stopping = stopping
        self._open: list[str] = []
        self._looked = 0.0

    def due(self, step: int, total: int) -> bool:
        """Whether the config wants an evaluation of this step's weights."""
        settings = self._settings
        if step == 0:
            return settings.at_start
        if step >= total:
            return settings.at_end
        return settings.every > 0 and step % settings.every == 0

    def request(self, step: int, total: int) -> list[str]:
        """Asks for the evaluation of every held-out set, if one is due; returns their ids."""
        if not self._sets or not self.due(step, total):
            return []
        whole = step == 0 or step >= total
        ids = []
        for name in self._sets:
            limits = [self._limits[name], None if whole else self._settings.limit]
            self._runs.request_evaluation(
                EvaluationRequest(
                    id=f"{name}@{step}",
                    set_name=name,
                    step=step,
                    limit=min((limit for limit in limits if limit is not None), default=None),
                    temperature=self._settings.temperature,
                    samples=self._settings.samples,
                    final=step >= total,
                )
            )
            ids.append(f"{name}@{step}")
        self._open += [name for name in ids if name not in self._open]
        return ids

    def arrived(self) -> list[EvaluationResult]:
        """Results that have come since the last call; looks at most every 0.25 s."""
        now = time.monotonic()
        if not self._open or now - self._looked < LOOK_SECONDS:
            return []
        self._looked = now
        found = [(name, self._runs.evaluation(name)) for name in self._open]
        self._open = [name for name, result in found if result is None]
        return [result for _, result in found if result is not None]

    def wait(
        self,
        ids: list[str],
        got: Callable[[EvaluationResult], None],
        deadline: float = DEADLINE_SECONDS,
    ) -> bool:
        """Waits for these results and hands over whatever arrives; False where they don't come.

        Gives up at the deadline, when the process is to drain, and when no rollout worker has
        been there for a minute.
        """
        start = seen = time.monotonic()
        looked = 0.0
        told = False
        while any(name in self._open for name in ids):
            for result in self.arrived():
                got(result)
            now = time.monotonic()
            if self._stopping():
                return False
            if now - looked >= 2.0:
                looked = now
                if self._members.live("rollout"):
                    seen = now
            waited = ", ".join(name for name in ids if name in self._open)
            if waited and (now - start > deadline or now - seen > ABANDONED_SECONDS):
                why = (
                    f"no rollout worker has been there for {ABANDONED_SECONDS:.0f} s"
                    if now - seen > ABANDONED_SECONDS
                    else f"it was not done in {deadline:.0f} s"
                )
                log.warning(f"goes on without the evaluation {waited}: {why}")
                return False
            if waited and not told and now - start > deadline / 2:
                told = True
                log.warning(f"has waited {now - start:.0f} s for a worker to evaluate {waited}")
            if waited:
                time.sleep(0.02)
        return True
