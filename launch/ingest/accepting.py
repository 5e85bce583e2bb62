"""How expert traces are graded, and which are let in: at ingest, and where an archive is graded anew."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec.structs import replace

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


def accepted(
    trace: ExpertTrace,
    grade: Grade,
    grader: str,
    verdicts: Collection[str],
    counts: SourceCounts,
) -> ExpertTrace | None:
    """The trace with its grade; None if it isn't let in, which is counted.

    Args:
        trace: the trace, whatever grade it has.
        grade: the new one.
        grader: ``name@version`` of the grader.
        verdicts: those that are let in.
        counts: of what was left out.
    """
    if grade.verdict.value not in verdicts:
        name = grade.verdict.value
        counts.refused_traces[name] = counts.refused_traces.get(name, 0) + 1
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
