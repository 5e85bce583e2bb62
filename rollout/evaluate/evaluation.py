"""Accuracy of a policy on a held-out set, with any engine and the run's own grader.

A rollout worker uses it for evaluations during a run, and ``tandem evaluate`` for a model
folder on its own, which needs no Redis.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...common.config import Config, RewardConfig
from ...common.errors import DataError, TandemError
from ...common.records import Problem, Sample, SamplingParams
from ...replay.evaluating.evaluations import four_classes
from ...reward.grading import Grade, Grader
from ..engine import Engine, GroupRequest
from ..engines import make_engine
from ..leases import task_of
from ..player import Player
from . import scores
from .episodes import playing, unless_it_dies
from .keeping import classified, count_of, item, kept

SILENCE_SECONDS = 3600.0
"""How long an engine may finish no problem: it catches one that is stuck, and no set is too large for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of evaluating a set of problems."""

    problems: int
    """Number of problems."""
    samples: int
    """Responses per problem (k of avg@k), of those whose rows aren't repeated."""
    accuracy: float
    """avg@k: mean over problems of the share of their responses that are correct."""
    pass_rate: float
    """Share of problems with at least one correct response: pass@k where each has k."""
    format_share: float
    """Share of responses in the right form; NaN if the reward has no component for it."""
    right_and_formed: float | None
    """Share of responses that are correct and in the right form; None if the form isn't known."""
    classes: dict[str, float]
    """Shares by form, then answer: ``11``, ``10``, ``01``, ``00``; empty if the form isn't known."""
    reward: float
    """Mean composed reward of the responses that have one; NaN if none has."""
    mean_length: float
    """Mean tokens per response, end token included."""
    cut_share: float
    """Share of responses that were cut by the length limit."""
    ungraded: int
    """Responses whose grading failed by no fault of theirs; they count as not correct."""
    by_source: dict[str, float]
    """Accuracy by data source."""
    pass_by_source: dict[str, float]
    """``pass_rate`` by data source."""
    problems_by_source: dict[str, int]
    """Number of problems by data source."""
    step: int | None
    """Step of the oldest weights that sampled; None if the engine has no version."""
    version: str
    """Versions of the weights that sampled, ``term.step``, oldest first; empty if there are none."""
    seconds: float
    """Wall time in seconds, grading included."""
    tokens: int
    """Number of sampled tokens."""
    figures: dict[str, float]
    """Further figures by name: ``pass@k`` for powers of two, ``maj@k``, ``truncated``, ``ungraded``, the bounds
    ``accuracy_low`` and ``accuracy_high`` of the 95% interval, and by source as ``source/NAME/pass@k``."""
    responses: tuple[tuple[Sample, Grade], ...] = field(repr=False, default=())
    """Every response with its grade, by problem, then sample."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, without the responses; NaN becomes None."""
        plain = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "responses"
        }
        return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in plain.items()}


async def evaluate(
    engine: Engine | Player,
    problems: Sequence[Problem],
    grader: Grader,
    *,
    temperature: float = 0.0,
    samples: int = 1,
    max_new_tokens: int,
    seed: int = 0,
    top_p: float = 1.0,
    name: str = "evaluation",
    stop: tuple[str, ...] = (),
    silence: float = SILENCE_SECONDS,
) -> Evaluation:
    """Answers every problem ``samples`` times and grades the answers.

    Args:
        engine: an engine that has been started; it may run other groups at the same time.
        problems: at least one problem.
        grader: the run's grader.
        temperature: 0 = greedy, which gives one response per problem whatever ``samples`` says.
        samples: k of avg@k.
        max_new_tokens: greatest number of tokens of a response.
        seed: keys the noise together with ``name`` and the problem's place.
        top_p: share of the probability that is sampled from.
        name: with the same name, seed and weights, the responses are the same.
        stop: strings that end a response.
        silence: seconds without a finished problem after which the engine counts as stuck.

    Raises:
        DataError: there are no problems.
        TandemError: the engine couldn't answer a problem, or is stuck.
    """
    if not problems:
        raise DataError("an evaluation needs at least one problem, and the set is empty")
    start = time.perf_counter()
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=0, max_new_tokens=max_new_tokens
    )
    requests = [
        GroupRequest(
            group_id=f"{name}:{i}",
            prompt_tokens=problem.prompt_tokens,
            count=count_of(problem, temperature, samples),
            sampling=sampling,
            seed=seed,
            stop=stop,
            task=task_of(problem),
        )
        for i, problem in enumerate(problems)
    ]
    answered: dict[str, tuple[Sample, ...]] = {}
    try:
        async with asyncio.timeout(silence) as limit:
            async for group in engine.generate(requests):
                limit.reschedule(asyncio.get_running_loop().time() + silence)
                if group.error is not None:
                    number = int(group.group_id.rpartition(":")[2])
                    raise TandemError(
                        f"{name}: problem {problems[number].problem_id} can't be answered: "
                        f"{group.error}"
                    )
                answered[group.group_id] = group.samples
    except TimeoutError:
        raise TandemError(
            f"{name}: the engine answered {len(answered)} of {len(problems)} problems, and then none in "
            f"{silence:.0f} s: it is stuck, or too slow for rollout.max_new_tokens, which you can lower"
        ) from None
    responses = [answered[request.group_id] for request in requests]
    items = [
        item(problem, sample, group=f"{place}")
        for place, (problem, group) in enumerate(zip(problems, responses, strict=True))
        for sample in group
    ]

    def grade() -> Evaluation:
        grades = grader.grade_texts(items)
        return summarise(
            problems, responses, grades, seconds=time.perf_counter() - start, grader=grader
        )

    return await asyncio.to_thread(grade)


class Evaluator:
    """:func:`evaluate` with one engine and one grader, whose processes start when first needed."""

    def __init__(self, engine: Engine | Player, reward: RewardConfig) -> None:
        self._engine = engine
        self.grader = Grader(reward)

    async def evaluate(self, problems: Sequence[Problem], **settings: Any) -> Evaluation:
        """See :func:`evaluate`."""
        return await evaluate(self._engine, problems, self.grader, **settings)

    def close(self) -> None:
        """Ends the grader's processes."""
        self.grader.close()


def summarise(
    problems: Sequence[Problem],
    responses: Sequence[Sequence[Sample]],
    grades: Sequence[Grade],
    *,
    seconds: float,
    grader: Grader | None = None,
) -> Evaluation:
    """The result for graded responses.

    Args:
        problems: ``[N]`` problems.
        responses: for each problem its responses, at least one.
        grades: grades by problem, then response.
        seconds: wall time of the whole evaluation.
        grader: says which wrong answers are the same, for majorities; without one each is for itself.
    """
    flat = [sample for group in responses for sample in group]
    places = [(place, n) for place, group in enumerate(responses) for n in range(len(group))]
    samples = [
        kept(problems[place], sample, grade, place=place, number=number, grader=_name(grader))
        for (place, number), sample, grade in zip(places, flat, grades, strict=True)
    ]
    if grader is not None and len(flat) > len(problems):
        samples = classified(samples, grader)
    groups = scores.by_problem(samples)
    by_source = scores.split(groups, "source")
    found = scores.figures(groups)
    forms = [one.formed for one in samples]
    formed = np.array([bool(form) for form in forms])
    correct = np.array([one.correct for one in samples])
    is_known = any(form is not None for form in forms)
    both = float(np.mean(formed & correct)) if is_known else None
    accuracy = found["accuracy"]
    steps = [s.oldest_step for s in flat if s.oldest_step is not None]
    versions = sorted({(span.term, span.step) for s in flat for span in s.spans})
    return Evaluation(
        problems=len(problems),
        samples=min(map(len, responses)),
        accuracy=accuracy,
        pass_rate=_any_right(groups),
        format_share=found["format"] if is_known else float("nan"),
        right_and_formed=both,
        classes=four_classes(accuracy, float(np.mean(formed)) if is_known else float("nan"), both),
        reward=found["reward"] if found["reward"] is not None else float("nan"),
        mean_length=found["length"],
        cut_share=found["truncated"],
        ungraded=found["ungraded"],
        by_source={s: float(scores.shares(part).mean()) for s, part in sorted(by_source.items())},
        pass_by_source={s: _any_right(part) for s, part in sorted(by_source.items())},
        problems_by_source={s: len(part) for s, part in sorted(by_source.items())},
        step=min(steps, default=None),
        version=" ".join(f"{term}.{step}" for term, step in versions),
        seconds=seconds,
        tokens=sum(len(sample.tokens) for sample in flat),
        figures=_flat(found, by_source),
        responses=tuple(zip(flat, grades, strict=True)),
    )


def _name(grader: Grader | None) -> str:
    return "" if grader is None else grader.name


def _any_right(groups: Sequence[scores.Group]) -> float:
    return float(np.mean([any(one.correct for one in group) for group in groups]))


def _flat(
    found: Mapping[str, Any], by_source: Mapping[str, Sequence[scores.Group]]
) -> dict[str, float]:
    """Figures that a run records beside its own."""

    def several(figures: Mapping[str, Any]) -> dict[str, float]:
        return {k: v for k, v in figures.items() if k.startswith(("pass@", "maj"))}

    low, high = found["interval"]
    flat = {
        "accuracy_low": low,
        "accuracy_high": high,
        "truncated": found["truncated"],
        "ungraded": float(found["ungraded"]),
        **several(found),
    }
    for source, groups in by_source.items():
        flat |= {f"source/{source}/{k}": v for k, v in several(scores.figures(groups)).items()}
    return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A set that a model folder is evaluated on."""

    name: str
    """Its name, which also keys the noise."""
    problems: Sequence[Problem]
    """Rendered and tokenised with the model's tokenizer."""
    config: Config
    """The whole config with the set's own settings (:func:`tandem.common.config.of_set`)."""


def evaluate_folder(
    sets: Sequence[HeldOut],
    found: Callable[[HeldOut, Evaluation], None],
    *,
    max_rows: int = 256,
) -> None:
    """Evaluates a model folder in this process, with one engine for all sets, without a run or Redis.

    Args:
        sets: at least one; their configs have the same model and engine.
        found: called with each set's result, in their order, before the next set begins.
        max_rows: greatest number of responses generated at a time.

    Raises:
        ConfigError: an environment can't be loaded.
        DataError: the folder holds no model, or a set has no problems.
        TandemError: the environment server has ended.
    """
    config = max((one.config for one in sets), key=lambda own: own.rollout.max_new_tokens)
    prompts = [len(problem.prompt_tokens) for one in sets for problem in one.problems]
    if config.environments.is_on:
        prompts.append(config.data.max_prompt_tokens)

    async def run() -> None:
        engine = make_engine(
            config.model,
            config.rollout,
            max_rows=max_rows,
            max_prompt_tokens=max(prompts, default=1),
        )
        await engine.start()
        try:
            for one in sets:
                found(one, await _evaluated(engine, one))
        finally:
            await engine.close()

    asyncio.run(run())


async def _evaluated(engine: Engine, held_out: HeldOut) -> Evaluation:
    own = held_out.config
    with Grader(own.reward) as grader:

        def answers(sampler: Engine | Player) -> Coroutine[Any, Any, Evaluation]:
            return evaluate(
                sampler,
                held_out.problems,
                grader,
                temperature=own.evaluate.temperature,
                top_p=own.evaluate.top_p,
                samples=own.evaluate.samples,
                max_new_tokens=own.rollout.max_new_tokens,
                stop=own.data.stops,
                seed=own.run.seed,
                name=held_out.name,
            )

        if not own.environments.is_on:
            return await answers(engine)
        async with playing(engine, own) as (player, server):
            return await unless_it_dies(asyncio.create_task(answers(player)), server)
