"""Answers and grades any samples of a benchmark's problems, in any order: what can be cut, resumed and spread.

A sample depends on the weights, the problem, the cell's settings, the seed and its own number, and not on which
other samples are made with it: each is a group of its own for the engine, whose noise is keyed by it. Only the
last bits of its log-probs depend on what else is in the batch; with ``block`` that is settled too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...common.errors import TandemError
from ...common.records import Problem, Sample, SamplingParams
from ...replay.evaluating.evaluated import Cell, EvaluatedSample
from ...reward.grading import GradeItem, Grader
from ..engine import FinishedGroup, GroupRequest
from ..leases import task_of
from .keeping import count_of, kept

WINDOW = 4096
"""Samples that an engine has at a time, running or waiting."""
GRADED = 512
"""Greatest number of samples that are graded and kept together."""
SILENCE_SECONDS = 3600.0
"""How long an engine may finish no sample: it catches one that is stuck, and no set is too large for it."""

Place = tuple[int, int]
"""Of a sample: its problem's place in the benchmark, and its number."""


class SamplesRefusedError(TandemError):
    """Some samples can't be made at all; all others have been.

    Args:
        reasons: of each, why.
        then: what to do, which follows the first reason.
    """

    def __init__(self, reasons: Sequence[str], then: str = "") -> None:
        samples = "1 sample" if len(reasons) == 1 else f"{len(reasons)} samples"
        super().__init__(f"{samples} can't be made: {reasons[0]}{then}")
        self.reasons = tuple(reasons)


class Sampler(Protocol):
    """What answers: an engine, a player, or an endpoint elsewhere."""

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group once, as it finishes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark's problems, as one model gets them, and how its samples are graded."""

    problems: Sequence[Problem]
    """In their order."""
    grader: Grader
    """The grader whose verdict counts."""
    second: Grader | None = None
    """A second one, whose verdicts stand beside it."""
    subject: str | None = None
    """Column that says what a problem is about."""
    level: str | None = None
    """Column that says how hard it is."""

    def places(self, cell: Cell) -> list[Place]:
        """All samples of a cell, by problem, then number."""
        return [
            (place, number)
            for place, problem in enumerate(self.problems)
            for number in range(count_of(problem, cell.temperature, cell.samples))
        ]


async def answer(
    sampler: Sampler,
    benchmark: Benchmark,
    cell: Cell,
    wanted: Sequence[Place],
    keep: Callable[[list[EvaluatedSample]], None],
    *,
    token_ids: bool = False,
    together: bool = False,
    block: bool = False,
    window: int = WINDOW,
    silence: float | None = SILENCE_SECONDS,
) -> None:
    """Samples and grades; ``keep`` gets the samples in the order in which they come, from a thread.

    Args:
        sampler: an engine that has been started; it may answer others at the same time.
        benchmark: the problems, and the graders.
        cell: how they are sampled.
        wanted: the samples that are to be made.
        keep: called for some samples at a time, never twice at once.
        token_ids: whether the samples keep their tokens.
        together: grade and keep a problem's samples only when all that are wanted are there, as one group: parts of a
            reward may compare them with one another. The first sample that can't be made ends it.
        block: give the engine all of ``wanted`` at once, so that its samples are always the same to the last bit. Nothing
            else may run there.
        window: greatest number of samples that the engine is given at a time.
        silence: seconds without a finished sample after which the engine counts as stuck; None = endless.

    Raises:
        SamplesRefusedError: samples can't be made; it comes when all others are. Not with ``together``.
        TandemError: the engine has failed, or is stuck.
    """
    refused: list[str] = []
    finished: asyncio.Queue[tuple[Place, Sample] | None] = asyncio.Queue()
    requests = {_name(cell, benchmark.problems[p], n): (p, n) for p, n in wanted}
    ended = asyncio.Event()
    limit = asyncio.timeout(silence)
    outstanding = answered = 0
    held = _Held(place for place, _ in requests.values()) if together else None

    async def feed(chunk: Sequence[GroupRequest]) -> None:
        nonlocal outstanding, answered
        async for group in sampler.generate(chunk):
            place = requests[group.group_id]
            answered += 1
            if silence is not None and not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + silence)
            if group.error is not None:
                problem = benchmark.problems[place[0]].problem_id
                reason = f"{cell.name}: {problem} can't be answered: {group.error}"
                if together or not group.refused:
                    raise TandemError(reason)
                refused.append(reason)
            else:
                await finished.put((place, group.samples[0]))
            outstanding -= 1
            ended.set()

    async def produce() -> None:
        nonlocal outstanding
        step = len(requests) if block else max(1, window // 2)
        names = list(requests)
        async with limit, asyncio.TaskGroup() as feeding:
            for start in range(0, len(names), max(1, step)):
                chunk = [
                    _request(name, requests, benchmark, cell)
                    for name in names[start : start + step]
                ]
                while outstanding > window - len(chunk) and outstanding:
                    ended.clear()
                    await ended.wait()
                outstanding += len(chunk)
                feeding.create_task(feed(chunk))
        await finished.put(None)

    async def consume() -> None:
        over = False
        while not over:
            some = [await finished.get()]
            while not finished.empty() and len(some) < GRADED:
                some.append(finished.get_nowait())
            over = some[-1] is None
            samples = [one for one in some if one is not None]
            if held is not None:
                samples = held.whole(samples)
            if samples:
                await asyncio.to_thread(
                    lambda: keep(_graded(benchmark, samples, token_ids, together))  # noqa: B023
                )

    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(produce())
            both.create_task(consume())
    except BaseExceptionGroup as group:
        error = _first(group)
        if isinstance(error, TimeoutError) and limit.expired():
            error = TandemError(
                f"{cell.name}: the engine answered {answered} of {len(requests)} samples, and then none in "
                f"{silence:.0f} s: it is stuck, or too slow for rollout.max_new_tokens, which you can lower"
            )
        raise error from None
    if refused:
        raise SamplesRefusedError(refused)


class _Held:
    """Samples of problems of which others are still to come.

    Args:
        places: of every sample that is wanted the problem's place.
    """

    def __init__(self, places: Iterable[int]) -> None:
        self._left = Counter(places)
        self._samples: dict[int, list[tuple[Place, Sample]]] = {}

    def whole(self, some: Sequence[tuple[Place, Sample]]) -> list[tuple[Place, Sample]]:
        """Takes finished samples, and returns those of problems that are whole now, by number."""
        found: list[tuple[Place, Sample]] = []
        for one in some:
            problem = one[0][0]
            self._left[problem] -= 1
            of_problem = self._samples.setdefault(problem, [])
            of_problem.append(one)
            if not self._left[problem]:
                found += sorted(self._samples.pop(problem), key=lambda sample: sample[0])
        return found


def _first(error: BaseException) -> BaseException:
    """The error that ended a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _name(cell: Cell, problem: Problem, number: int) -> str:
    """Keys the noise: equal for another model, engine or worker, and for another place in the folder."""
    sampling = f"t{cell.temperature:g} p{cell.top_p:g} {cell.template}"
    return f"{cell.benchmark} {sampling}:{problem.problem_id}:{number}"


def _request(
    name: str, places: Mapping[str, Place], benchmark: Benchmark, cell: Cell
) -> GroupRequest:
    problem = benchmark.problems[places[name][0]]
    return GroupRequest(
        group_id=name,
        prompt_tokens=problem.prompt_tokens,
        count=1,
        sampling=SamplingParams(
            temperature=cell.temperature,
            top_p=cell.top_p,
            top_k=0,
            max_new_tokens=cell.max_new_tokens,
        ),
        seed=cell.seed,
        stop=cell.stop,
        prompt_text=problem.prompt_text,
        task=task_of(problem),
    )


def _graded(
    benchmark: Benchmark,
    samples: Sequence[tuple[Place, Sample]],
    token_ids: bool,
    together: bool,
) -> list[EvaluatedSample]:
    items = [
        GradeItem.of(benchmark.problems[place], sample, group=f"{place}" if together else "")
        for (place, _), sample in samples
    ]
    grades = benchmark.grader.grade_texts(items)
    seconds = (
        [None] * len(items) if benchmark.second is None else benchmark.second.grade_texts(items)
    )
    return [
        kept(
            benchmark.problems[place],
            sample,
            grade,
            place=place,
            number=number,
            grader=benchmark.grader.name,
            subject=benchmark.subject,
            level=benchmark.level,
            second=second,
            token_ids=token_ids,
        )
        for ((place, number), sample), grade, second in zip(samples, grades, seconds, strict=True)
    ]
