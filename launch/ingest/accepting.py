"""Which graded expert traces are let in: at ingest, and where an archive is graded anew."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from ...common.records import ExpertTrace, Verdict
from ...reward.grades import Grade
from .counts import SourceCounts


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
