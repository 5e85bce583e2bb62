"""Evaluations that a worker claims: what counts into their time, and what becomes of an engine's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tandem.common.config import build
from tandem.common.records import FinishReason, Problem, Sample, SamplingParams, Version
from tandem.replay.evaluating.evaluations import EvaluationRequest, EvaluationResult
from tandem.rollout.engine import FinishedGroup, GroupRequest
from tandem.rollout.evaluate.claims import ClaimedEvaluations

REQUEST = EvaluationRequest(id="held@1", set_name="held", step=1)


class Answers:
    """Answers each request with a token, or with an error from one on."""

    version = Version(term=1, step=1)

    def __init__(self, *, fails_at: int | None = None, refuses: bool = False) -> None:
        self._fails_at = fails_at
        self._refuses = refuses
        self.answered = 0

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        for number, request in enumerate(requests):
            if number == self._fails_at:
                error = "it can't be done"
                yield FinishedGroup(
                    group_id=request.group_id, samples=(), error=error, refused=self._refuses
                )
                await asyncio.sleep(0)
                continue
            self.answered += 1
            yield FinishedGroup(group_id=request.group_id, samples=(SAMPLE,))
            await asyncio.sleep(0)


SAMPLE = Sample(
    tokens=np.zeros(1, dtype=np.int32),
    source=np.zeros(1, dtype=np.uint8),
    logprobs=np.zeros(1, dtype=np.float32),
    spans=(),
    finish_reason=FinishReason.STOP,
    sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=4),
    text="",
    reward=None,
    verdict=None,
    components={},
    extracted=None,
    grader=None,
)


class Ledger:
    """What a claimed evaluation asks of the run's store."""

    def __init__(self) -> None:
        self.results: list[EvaluationResult] = []
        self.given_back: list[tuple[str, bool]] = []

    def eval_set(self, name: str, limit: int | None) -> list[Problem]:
        return [
            Problem(
                problem_id=f"{name}/{number}",
                prompt_text="",
                prompt_tokens=np.array([3], dtype=np.int32),
                gold="1",
                data_source=name,
                ability="",
                trace_ids=(),
                extra={},
            )
            for number in range(50)
        ]

    def finish_evaluation(self, id_: str, result: EvaluationResult) -> None:
        self.results.append(result)

    def give_back_evaluation(self, id_: str, member: str, *, reason: str, failed: bool) -> None:
        self.given_back.append((reason, failed))


async def settled(**of: Any) -> None:
    """The weights have passed their check."""


async def never(**of: Any) -> None:
    """They are being checked."""
    await asyncio.Event().wait()


def claimed(engine: Any, check: Callable[..., Any], *, held: float = 0.0) -> Ledger:
    """One evaluation by an engine whose weights change for so many seconds when it is claimed."""
    ledger = Ledger()
    config = build({"run": {"steps": 1}, "data": {"train": [{"path": "unused"}]}}, [])

    async def run() -> None:
        async def in_redis(call: Callable[[], Any]) -> Any:
            return call()

        runs: Any = ledger
        state: Any = SimpleNamespace(suspect=False, settled=check)
        steady = asyncio.Lock()
        evaluations = ClaimedEvaluations("worker", engine, runs, config, state, steady, in_redis)
        await steady.acquire()
        asyncio.get_running_loop().call_later(held, steady.release)
        try:
            await asyncio.wait_for(evaluations.run(REQUEST), 60.0)
        finally:
            evaluations.close()

    asyncio.run(run())
    return ledger


def test_the_wait_for_new_weights_is_no_part_of_an_evaluations_time() -> None:
    claimed(Answers(), settled)  # The graders' imports.
    (result,) = claimed(Answers(), settled, held=5.0).results
    assert result.seconds < 5.0
    assert result.problems == 50


def test_an_engines_error_is_told_at_once_and_the_check_of_the_weights_isnt_waited_for() -> None:
    ((reason, failed),) = claimed(Answers(fails_at=1), never).given_back
    assert failed
    assert reason == "evaluate held: held/1 can't be answered: it can't be done"


def test_a_problem_that_cannot_be_answered_ends_a_runs_own_evaluation() -> None:
    engine = Answers(fails_at=0, refuses=True)
    ((reason, failed),) = claimed(engine, settled).given_back
    assert failed
    assert "held/0 can't be answered" in reason
    assert engine.answered < 50
