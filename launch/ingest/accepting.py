"""How expert traces are graded, and which are let in: at ingest, and where an archive is graded anew."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from ...common.config import Config
from ...common.config.expert import ExpertConfig
from ...common.config.groups import has_groups
from ...common.records import ExpertTrace, Group, Int32Array, Problem, Source, Verdict
from ...reward.grades import Grade, GradeItem
from .counts import SourceCounts


def item_of(trace: ExpertTrace, asked: Problem | Group) -> GradeItem:
    """A trace as what is graded.

    Args:
        trace: the trace; of a whole conversation its last answer is graded.
        asked: what it answers.
    """
    return GradeItem(
        text=trace.text,
        gold=asked.gold,
        data_source=asked.data_source,
        prompt_text=asked.prompt_text,
        tokens=_last_answer(trace),
        extra=asked.extra,
    )


def _last_answer(trace: ExpertTrace) -> Int32Array:
    """``[A]`` the tokens that ``text`` is of."""
    if trace.source is None:
        return trace.tokens
    written = np.flatnonzero(trace.source == Source.EXPERT)
    return trace.tokens[np.split(written, np.flatnonzero(np.diff(written) > 1) + 1)[-1]]


def trains_on_traces(config: Config) -> bool:
    """Whether a run trains on stored responses alone."""
    return not has_groups(config)


def admitted(config: Config, *, alone: bool = True) -> tuple[str, ...]:
    """Verdicts with which graded traces are let in.

    Args:
        config: what is let in.
        alone: whether they are alone in their groups, as those of data files are.
    """
    if not _learns_from_wrong_ones(config, alone):
        return config.expert.accept
    # A failure of the grader says nothing of a text.
    return tuple(verdict.value for verdict in Verdict if not verdict.leaves_baseline)


def _learns_from_wrong_ones(config: Config, alone: bool) -> bool:
    """Whether traces that are graded wrong are let in although ``expert.accept`` is at its default."""
    objective = config.learner.objective
    if not objective.rejects or config.expert.accept != ExpertConfig().accept:
        return False
    # One that compares the rows of groups learns nothing from a trace that is alone in its own.
    return not alone or (trains_on_traces(config) and objective.unit == "row")


def accepted(
    trace: ExpertTrace,
    grade: Grade,
    grader: str,
    config: Config,
    counts: SourceCounts,
    *,
    alone: bool = True,
) -> ExpertTrace | None:
    """The trace with its grade; None if it isn't let in, which is counted.

    Args:
        trace: the trace, whatever grade it has.
        grade: the new one.
        grader: ``name@version`` of the grader.
        config: what is let in.
        counts: of what was left out.
        alone: whether its group has no other row, as with those of data files.
    """
    if (why := _refusal(grade, config, alone)) is not None:
        counts.refused_traces[why] = counts.refused_traces.get(why, 0) + 1
        return None
    if grade.verdict is Verdict.CORRECT and not grade.reward:
        # Its row would be below the baseline, so that the expert's tokens would be unlearned.
        counts.unpaid_traces += 1
        return None
    return replace(
        trace,
        reward=grade.reward,
        verdict=grade.verdict,
        components=grade.components,
        grader=grader,
    )


def _refusal(grade: Grade, config: Config, alone: bool) -> str | None:
    """Why a trace of this grade isn't let in, beginning with its verdict; None if it is, or if it is paid nothing."""
    verdict = grade.verdict.value
    if verdict not in admitted(config, alone=alone):
        return verdict
    if grade.reward is None:
        return f"{verdict} without a reward"
    if grade.verdict is Verdict.CORRECT or grade.reward <= 0:
        return None
    # Alone, it would be learned from as a good one, which nobody has asked for who names no verdicts.
    learned = alone and _learns_from_wrong_ones(config, alone)
    return f"{verdict} and yet paid" if learned else None
