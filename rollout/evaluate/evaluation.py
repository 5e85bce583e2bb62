"""Accuracy of a policy on a held-out set, with any engine and the run's own grader.

A rollout worker uses it for evaluations during a run, and ``tandem evaluate`` for a model
folder on its own, which needs no Redis.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...common.config import Config, EvaluateConfig, ModelConfig, RewardConfig, RolloutConfig
from ...common.errors import DataError, TandemError
from ...common.records import FinishReason, Problem, Sample, SamplingParams, Verdict
from ...replay.store import four_classes
from ...reward.grading import Grade, GradeItem, Grader
from ..engine import Engine, GroupRequest
from ..engines import make_engine
from ..leases import task_of
from ..player import Player
from .episodes import playing, unless_it_dies

FORMAT = "format"
"""The reward component that says whether a response has the right form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of evaluating a set of problems."""

    problems: int
    """Number of problems."""
    samples: int
    """Responses per problem (k of avg@k)."""
    accuracy: float
    """avg@k: mean over problems of the share of their responses that are correct."""
    pass_rate: float
    """pass@k: share of problems with at least one correct response."""
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
    """pass@k by data source."""
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
    deadline: float = 3600.0,
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
        deadline: seconds for everything.

    Raises:
        DataError: there are no problems.
        TandemError: the engine couldn't answer a problem, or the deadline has passed.
    """
    if not problems:
        raise DataError("an evaluation needs at least one problem, and the set is empty")
    start = time.perf_counter()
    count = 1 if temperature == 0 else samples
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=0, max_new_tokens=max_new_tokens
    )
    requests = [
        GroupRequest(
            group_id=f"{name}:{i}",
            prompt_tokens=problem.prompt_tokens,
            count=count,
            sampling=sampling,
            seed=seed,
            stop=stop,
            task=task_of(problem),
        )
        for i, problem in enumerate(problems)
    ]
    answered: dict[str, tuple[Sample, ...]] = {}
    try:
        async with asyncio.timeout(deadline):
            async for group in engine.generate(requests):
                if group.error is not None:
                    number = int(group.group_id.rpartition(":")[2])
                    raise TandemError(
                        f"{name}: problem {problems[number].problem_id} can't be answered: "
                        f"{group.error}"
                    )
                answered[group.group_id] = group.samples
    except TimeoutError:
        raise TandemError(
            f"{name}: the engine answered {len(answered)} of {len(problems)} problems in "
            f"{deadline:.0f} s: evaluate fewer problems, or shorter responses"
        ) from None
    responses = [answered[request.group_id] for request in requests]
    items = [
        GradeItem(
            text=sample.text,
            gold=problem.gold,
            data_source=problem.data_source,
            finish_reason=sample.finish_reason,
            prompt_text=problem.prompt_text,
            tokens=sample.tokens,
            extra=problem.extra,
            group=f"{place}",
            episode=sample.episode,
        )
        for place, (problem, group) in enumerate(zip(problems, responses, strict=True))
        for sample in group
    ]
    grades = await asyncio.to_thread(grader.grade_texts, items)
    return summarise(problems, responses, grades, seconds=time.perf_counter() - start)


class Evaluator:
    """:func:`evaluate` with one engine and one grader, whose processes start when first needed."""

    def __init__(self, engine: Engine | Player, reward: RewardConfig) -> None:
        self._engine = engine
        self._grader = Grader(reward)

    async def evaluate(self, problems: Sequence[Problem], **settings: Any) -> Evaluation:
        """See :func:`evaluate`."""
        return await evaluate(self._engine, problems, self._grader, **settings)

    def close(self) -> None:
        """Ends the grader's processes."""
        self._grader.close()


def summarise(
    problems: Sequence[Problem],
    responses: Sequence[Sequence[Sample]],
    grades: Sequence[Grade],
    *,
    seconds: float,
) -> Evaluation:
    """The result for graded responses.

    Args:
        problems: ``[N]`` problems.
        responses: ``[N][k]`` responses to them.
        grades: ``[N * k]`` grades by problem, then sample.
        seconds: wall time of the whole evaluation.
    """
    count = len(responses[0])
    correct = np.array([_is_correct(grade) for grade in grades])
    per_problem = correct.reshape(len(problems), count)
    forms = [g.components.get(FORMAT) for g in grades]
    formed = np.array([value is not None and value > 0 for value in forms])
    known_forms = [value for value in forms if value is not None]
    rewards = [g.reward for g in grades if g.reward is not None]
    flat = [sample for group in responses for sample in group]
    steps = [s.oldest_step for s in flat if s.oldest_step is not None]
    versions = sorted({(span.term, span.step) for s in flat for span in s.spans})
    sources = sorted({problem.data_source for problem in problems})
    of_source = {
        source: np.array([problem.data_source == source for problem in problems])
        for source in sources
    }
    both = float(np.mean(formed & correct)) if known_forms else None
    accuracy = float(per_problem.mean())
    return Evaluation(
        problems=len(problems),
        samples=count,
        accuracy=accuracy,
        pass_rate=float(per_problem.any(axis=1).mean()),
        format_share=float(np.mean(known_forms)) if known_forms else float("nan"),
        right_and_formed=both,
        classes=four_classes(
            accuracy, float(np.mean(formed)) if known_forms else float("nan"), both
        ),
        reward=float(np.mean(rewards)) if rewards else float("nan"),
        mean_length=float(np.mean([len(sample.tokens) for sample in flat])),
        cut_share=float(np.mean([s.finish_reason is FinishReason.LENGTH for s in flat])),
        ungraded=sum(grade.verdict.leaves_baseline for grade in grades),
        by_source={s: float(per_problem[mask].mean()) for s, mask in of_source.items()},
        pass_by_source={
            s: float(per_problem[mask].any(axis=1).mean()) for s, mask in of_source.items()
        },
        problems_by_source={s: int(mask.sum()) for s, mask in of_source.items()},
        step=min(steps, default=None),
        version=" ".join(f"{term}.{step}" for term, step in versions),
        seconds=seconds,
        tokens=sum(len(sample.tokens) for sample in flat),
        responses=tuple(zip(flat, grades, strict=True)),
    )


def _is_correct(grade: Grade) -> bool:
    """Whether the answer is right; a judge that fails costs the reward, not the accuracy."""
    failed = grade.verdict is Verdict.JUDGE_FAILED
    return (grade.answer if failed else grade.verdict) is Verdict.CORRECT


def evaluate_folder(
    model_path: str,
    problems: Sequence[Problem],
    *,
    model: ModelConfig | None = None,
    rollout: RolloutConfig | None = None,
    reward: RewardConfig | None = None,
    settings: EvaluateConfig | None = None,
    stop: tuple[str, ...] = (),
    seed: int = 0,
    name: str = "evaluation",
    max_rows: int = 256,
    played: Config | None = None,
) -> Evaluation:
    """Evaluates a model folder in this process, without a run or Redis.

    Args:
        model_path: a Hugging Face folder, a hub name or ``miniature``.
        problems: rendered and tokenised with that model's tokenizer.
        model, rollout, reward, settings: sections as in a run's config; defaults if None.
        stop: strings that end a response.
        seed: seed of the noise.
        name: name of the set, which also keys the noise.
        max_rows: greatest number of responses generated at a time.
        played: the whole config where problems are played in its environments; its model is ``model_path``.

    Raises:
        ConfigError: an environment can't be loaded.
        DataError: the folder holds no model, or there are no problems.
        TandemError: the environment server has ended.
    """
    rollout = rollout or RolloutConfig()
    settings = settings or EvaluateConfig()
    model = (model or ModelConfig()).model_copy(update={"path": model_path})

    async def run() -> Evaluation:
        longest = max((len(problem.prompt_tokens) for problem in problems), default=1)
        if played is not None:
            longest = max(longest, played.data.max_prompt_tokens)
        engine = make_engine(model, rollout, max_rows=max_rows, max_prompt_tokens=longest)
        await engine.start()
        try:
            with Grader(reward or RewardConfig()) as grader:

                def answers(sampler: Engine | Player) -> Coroutine[Any, Any, Evaluation]:
                    return evaluate(
                        sampler,
                        problems,
                        grader,
                        temperature=settings.temperature,
                        top_p=settings.top_p,
                        samples=settings.samples,
                        max_new_tokens=rollout.max_new_tokens,
                        stop=stop,
                        seed=seed,
                        name=name,
                    )

                if played is None:
                    return await answers(engine)
                async with playing(engine, played) as (player, server):
                    return await unless_it_dies(asyncio.create_task(answers(player)), server)
        finally:
            await engine.close()

    return asyncio.run(run())
