"""Which expert traces enter a group, and which own rows they replace: keyed, never by chance."""

from __future__ import annotations

from collections.abc import Sequence

from ..common.records import Problem
from .order import permutation


def choose_traces(problem: Problem, seed: int, group_id: str, per_group: int) -> tuple[str, ...]:
    """Trace ids attached to a group at admission, in ledger order; at most ``per_group``.

    A problem with more traces than that gets a draw keyed by (seed, group id), so that a group
    that is leased again holds the same ones.
    """
    traces = problem.trace_ids
    if per_group <= 0 or not traces:
        return ()
    if len(traces) <= per_group:
        return tuple(traces)
    drawn = permutation(len(traces), "traces", seed, group_id)[:per_group]
    return tuple(traces[i] for i in sorted(drawn.tolist()))


def choose_replaced(
    seed: int, step: int, group_id: str, own_rows: Sequence[int], count: int
) -> tuple[int, ...]:
    """Own rows that give way to traces chosen after grading, ascending; a group keeps G rows.

    Keyed by (seed, step, group id).
    """
    if count > len(own_rows):
        raise ValueError(f"{count} traces can't replace {len(own_rows)} own rows of {group_id}")
    drawn = permutation(len(own_rows), "replaced", seed, step, group_id)[:count]
    return tuple(sorted(own_rows[i] for i in drawn.tolist()))
