"""Some rows of a source, as problems and expert traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...common.records import ExpertTrace, Problem
from ...replay.forms import DataRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some rows of a source that are used."""

    problems: tuple[Problem, ...]
    traces: tuple[ExpertTrace, ...]
    """Accepted traces of these problems."""
    rows: tuple[DataRow, ...]
    """The row of each problem."""

    def of_rows(self) -> Iterator[tuple[Problem, DataRow, ExpertTrace | None]]:
        """Each problem with its row, and its trace if it has one."""
        # The worse response of a pair comes after the better one.
        traces = {trace.problem_id: trace for trace in reversed(self.traces)}
        for problem, row in zip(self.problems, self.rows, strict=True):
            yield problem, row, traces.get(problem.problem_id)


def first_of(chunk: Chunk, most: int) -> Chunk:
    """The chunk's first problems, and their traces."""
    if len(chunk.problems) <= most:
        return chunk
    problems = chunk.problems[:most]
    kept = {problem.problem_id for problem in problems}
    traces = tuple(trace for trace in chunk.traces if trace.problem_id in kept)
    return Chunk(problems=problems, traces=traces, rows=chunk.rows[:most])
