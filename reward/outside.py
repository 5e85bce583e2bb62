"""Components that run outside the dispatcher: functions of the user's own, code in a sandbox, judges.

A function gets a whole group in one call. If that call hung, ran out of memory or raised (twice),
and the config says that completions are judged one by one (``scope: sample``), each completion is
then tried alone, so that one bad text costs its group nothing. Code runs sample by sample. A judge is
asked sample by sample, by threads of this process: its group holds no grader while it waits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.config import RewardConfig
from ..common.errors import TandemError
from ..common.records import Verdict
from .components.asking import Asking
from .components.code import CodeReward
from .components.registry import Graded
from .components.scoring import Part, Scorer
from .graders.grader_processes import GraderProcesses
from .graders.requests import Outcome, Restart
from .servers import Answered, Servers

logger = logging.getLogger("tandem.reward")

TRIAL_SECONDS = 30.0
"""Deadline of a sandbox's trial, whatever a test's is: the machine may be starting other processes."""
_WORST = (Verdict.CRASHED, Verdict.JUDGE_FAILED, Verdict.MEMORY, Verdict.TIMEOUT)


@dataclass(slots=True, kw_only=True)
class OutsideResult:
    """The results for a group."""

    samples: list[Graded]
    """``[G]`` samples, with the verdict of their tests if they have some."""
    values: list[dict[str, float | Sequence[float] | None]]
    """``[G]`` values by component."""
    failures: list[Verdict | None]
    """``[G]`` how a component that matters failed; None unless one did."""
    seconds: list[float]
    """``[G]`` seconds in other processes; a call for several samples is divided among them."""


class Outside:
    """Runs these components of one config.

    Args:
        scorer: the config's components.
        processes: the graders, which have imported the scorer's functions.
        config: the run's ``reward`` section.
        counts: counters of calls and failures.
        cost: called with every outcome.
        on_restart: called with every process that was replaced.
    """

    def __init__(
        self,
        scorer: Scorer,
        processes: GraderProcesses,
        config: RewardConfig,
        *,
        counts: Counter[str],
        cost: Callable[[Outcome], None],
        on_restart: Callable[[Restart], None],
    ) -> None:
        self._parts = scorer.outside
        self._processes = processes
        self._counts = counts
        self._cost = cost
        self._told: set[str] = set()
        self.last_error = ""
        """The last line of the last error."""
        self.sandboxes: list[GraderProcesses] = []
        """The runners of code; empty unless the config has a component that runs code."""
        deadlines = [config.deadline_seconds]
        deadlines += [part.config.deadline_seconds or 0.0 for part in self._parts]
        self.servers = Servers(counts)
        """What is asked of judges and reward models; without such a component nothing ever is."""
        for part in scorer.remote:
            self.servers.add(part.name, part.function)
        self._code: CodeReward | None = None
        for part in scorer.sandboxed:
            self._code = part.function
            deadlines.append(part.function.total_seconds)
            self.sandboxes.append(
                GraderProcesses(
                    config.graders,
                    deadline=part.function.total_seconds,
                    memory_mb=config.memory_mb,
                    on_restart=on_restart,
                    sandbox=part.function.sandbox,
                )
            )
        self.longest_deadline = max(deadlines)
        """Seconds that the slowest legitimate request may take."""

    def has_tests(self, extra: Mapping[str, Any]) -> bool:
        """Whether a row is judged by running its tests."""
        return self._code is not None and self._code.has_tests(extra)

    def check(self) -> Callable[[], bool]:
        """Makes every sandbox run something; the returned function says whether all have succeeded.

        Raises:
            TandemError: from the returned function, if one hasn't.
        """
        outcomes: list[Outcome] = []
        for sandbox in self.sandboxes:
            sandbox.submit("code", CodeReward.trial(), outcomes.append, deadline=TRIAL_SECONDS)

        def succeeded() -> bool:
            for outcome in outcomes:
                passed, total, late = outcome.result or (0, 1, 0)
                if passed != total:
                    why = "it ran out of time" if late else "it failed its test"
                    raise TandemError(
                        f"the sandbox is broken: a program that passes its test was run for a trial, and "
                        f"{outcome.reason or outcome.failure or why}; no code is graded. Choose another way by "
                        f"params.sandbox of the component code, or grade on another host"
                    )
            return len(outcomes) == len(self.sandboxes)

        return succeeded

    def begin(self, samples: Sequence[Graded], done: Callable[[OutsideResult], None]) -> None:
        """Starts on a group; ``done`` gets the result, now or from a later poll."""
        count = len(samples)
        result = OutsideResult(
            samples=list(samples),
            values=[{} for _ in samples],
            failures=[None] * count,
            seconds=[0.0] * count,
        )
        # Of an episode that failed nothing is asked.
        alive = [index for index, sample in enumerate(samples) if not sample.has_failed]
        parts = self._parts if alive else []
        begun, ended = _counted(lambda: done(result))

        def call() -> None:
            for part in parts:
                if part.kind.place == "grader":
                    self._call(part, result, alive, begun, ended)
            ended()

        # Functions see the verdict of the tests, and so come after them.
        run_begun, run_ended = _counted(call)
        for part in parts:
            for index in alive:
                if part.kind.place == "sandbox":
                    self._run_code(part, result, index, run_begun, run_ended)
                elif part.kind.place == "remote":
                    self._ask(part, result, index, begun, ended)
        run_ended()

    def _call(
        self,
        part: Part,
        result: OutsideResult,
        indices: list[int],
        begun: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        begun()
        self._counts["function_calls"] += 1

        def finish(outcome: Outcome) -> None:
            self._cost(outcome)
            for index in indices:
                result.seconds[index] += outcome.seconds / len(indices)
            if outcome.failure is None:
                for index, value in zip(indices, outcome.result, strict=True):
                    result.values[index][part.name] = value
            elif len(indices) > 1 and part.config.scope == "sample":
                self._tell(part, outcome)
                for index in indices:
                    self._call(part, result, [index], begun, ended)
            else:
                self._tell(part, outcome)
                self._counts["function_failures"] += len(indices)
                for index in indices:
                    _failed(part, result, index, outcome.failure)
            ended()

        payload = part.function.payload([result.samples[index] for index in indices])
        deadline = part.config.deadline_seconds
        self._processes.submit("function", payload, finish, deadline=deadline)

    def _ask(
        self,
        part: Part,
        result: OutsideResult,
        index: int,
        begun: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        asking: Asking = part.function
        sample = result.samples[index]
        is_known, value = asking.known(sample)
        if is_known:
            result.values[index][part.name] = value
            return
        begun()

        def finish(answered: Answered) -> None:
            result.seconds[index] += answered.seconds
            if answered.score is None:
                _failed(part, result, index, Verdict.JUDGE_FAILED)
            else:
                result.values[index][part.name] = answered.score
            ended()

        self.servers.asked[part.name].ask(asking.api.question(sample), finish)

    def _run_code(
        self,
        part: Part,
        result: OutsideResult,
        index: int,
        begun: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        code: CodeReward = part.function
        sample = result.samples[index]
        if not code.has_tests(sample.extra):
            result.values[index][part.name] = None
            return
        ready = code.prepare(sample)
        if ready.payload is None:
            result.values[index][part.name] = ready.value
            result.samples[index] = dataclasses.replace(sample, verdict=ready.verdict)
            if ready.verdict is Verdict.GOLD_UNPARSABLE:
                _failed(part, result, index, ready.verdict)
            return
        begun()
        self._counts["code_runs"] += 1

        def finish(outcome: Outcome) -> None:
            self._cost(outcome)
            result.seconds[index] += outcome.seconds
            if outcome.failure is not None:
                self._tell(part, outcome)
                _failed(part, result, index, outcome.failure)
                # Tests also give the verdict that "accuracy" pays.
                result.samples[index] = dataclasses.replace(sample, verdict=outcome.failure)
            else:
                passed, total, timed_out = outcome.result
                self._counts["code_timeouts"] += timed_out
                value, verdict = code.judge(passed, total)
                result.values[index][part.name] = value
                result.samples[index] = dataclasses.replace(
                    sample, verdict=verdict, extracted=ready.program
                )
            ended()

        self.sandboxes[0].submit("code", ready.payload, finish, deadline=code.total_seconds + 5.0)

    def _tell(self, part: Part, outcome: Outcome) -> None:
        self.last_error = f"{part.name}: {outcome.reason or outcome.failure}"
        if self.last_error not in self._told and len(self._told) < 100:
            self._told.add(self.last_error)
            logger.warning(f"reward component {self.last_error}")


def _counted(done: Callable[[], None]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions, for what begins and what ends; ``done`` follows an end more than there were beginnings."""
    left = 1

    def begun() -> None:
        nonlocal left
        left += 1

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            done()

    return begun, ended


def _failed(part: Part, result: OutsideResult, index: int, failure: Verdict | None) -> None:
    result.values[index][part.name] = None
    if part.matters and failure is not None:
        known = result.failures[index]
        if known is None or (
            failure in _WORST and known in _WORST and _WORST.index(failure) < _WORST.index(known)
        ):
            result.failures[index] = failure
