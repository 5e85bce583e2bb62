"""From responses and grades to the samples that an evaluation keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...common.records import PROMPT_MESSAGES, REPEATS, Problem, Sample
from ...replay.evaluating.evaluated import EvaluatedSample
from ...reward.grading import Grade, Grader
from . import scores

SUBJECTS = ("subject", "category", "type")
LEVELS = ("level", "difficulty")
"""Columns that say so, if a set names none."""


def count_of(problem: Problem, temperature: float, samples: int) -> int:
    """Number of responses to a problem: one if they are greedy, and more if its row is repeated."""
    return 1 if temperature == 0 else samples * int(problem.extra.get(REPEATS, 1))


def kept(
    problem: Problem,
    sample: Sample,
    grade: Grade,
    *,
    place: int,
    number: int,
    grader: str,
    subject: str | None = None,
    level: str | None = None,
    second: Grade | None = None,
    token_ids: bool = False,
) -> EvaluatedSample:
    """The record of a graded response, as yet without a class of answers.

    Args:
        place: the problem's place in the benchmark.
        number: the response's number.
        grader: ``name@version``.
        subject, level: columns that say so; None = the usual ones.
        second: a second grader's grade.
        token_ids: whether the tokens are kept.
    """
    logprobs = sample.logprobs.astype(np.float64)
    known = logprobs[~np.isnan(logprobs)]
    return EvaluatedSample(
        problem_id=problem.problem_id,
        place=place,
        sample=number,
        source=problem.data_source,
        prompt=problem.prompt_text,
        response=sample.text,
        gold=problem.gold,
        finish_reason=sample.finish_reason,
        verdict=grade.verdict,
        answer=grade.answer,
        components=grade.components,
        reward=grade.reward,
        grader=grader,
        tokens=len(sample.tokens),
        logprob=float(known.sum()) if len(known) or not len(sample.tokens) else None,
        version=" ".join(
            f"{term}.{step}" for term, step in sorted({(s.term, s.step) for s in sample.spans})
        ),
        extracted=grade.extracted,
        subject=_column(problem, (subject,) if subject else SUBJECTS),
        level=_column(problem, (level,) if level else LEVELS),
        second=second.verdict if second is not None else None,
        question=_question(problem),
        token_ids=sample.tokens.tolist() if token_ids else None,
        turns=len(sample.episode.turns) if sample.episode is not None else None,
    )


def _question(problem: Problem) -> str | None:
    messages = problem.extra.get(PROMPT_MESSAGES, ())
    contents = [one["content"] for one in messages if one["role"] != "system"]
    return contents[0] if len(contents) == 1 and contents[0] != problem.prompt_text else None


def _column(problem: Problem, names: Sequence[str]) -> str | None:
    values: list[Any] = [problem.extra.get(name) for name in names]
    return next((str(v) for v in values if isinstance(v, str | int | float)), None)


def classified(samples: Sequence[EvaluatedSample], grader: Grader) -> list[EvaluatedSample]:
    """The samples by problem, then number, with the classes of their answers, which the grader compares."""
    groups = scores.by_problem(samples)
    answers = [[(one.extracted, one.correct) for one in group] for group in groups]
    classes = scores.answer_classes(answers, grader.same_answers)
    return [
        replace(one, answer_class=group[found].sample if found is not None else None)
        for group, of_group in zip(groups, classes, strict=True)
        for one, found in zip(group, of_group, strict=True)
    ]
