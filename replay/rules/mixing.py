"""Which expert traces enter a group, and which own rows they replace: drawn by key, never by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...common.records import Problem
from .order import permutation


def choose_traces(problem: Problem, seed: int, group_id: str, per_group: int) -> tuple[str, ...]:
    """Ids of the traces attached to a group at admission, in ledger order; at most ``per_group``.

    If a problem has more traces than that, they are drawn by (seed, group id), so that a group
    that is leased again has the same ones.
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
    """Own rows that are replaced by traces chosen after grading, ascending; a group keeps G rows.

    Drawn by (seed, step, group id): the rows for which the SHA-1 of these and their place is smallest,
    which ``take.lua`` can compute as well.
    """
    if count > len(own_rows):
        raise ValueError(f"{count} traces can't replace {len(own_rows)} own rows of {group_id}")

    def drawn(place: int) -> str:
        key = f"replaced:{seed}:{step}:{group_id}:{place}"
        return hashlib.sha1(key.encode(), usedforsecurity=False).hexdigest()

    return tuple(sorted(sorted(own_rows, key=drawn)[:count]))


def mix(
    traces: Sequence[str],
    *,
    when: str,
    correct: int,
    own_rows: Sequence[int],
    group_size: int,
    seed: int,
    step: int,
    group_id: str,
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Traces that are rows of a group in its step, and the own samples that they replace.

    Args:
        traces: ids chosen at admission.
        when: ``always``: the traces took the places of samples that weren't asked for.
            ``all_failed``: they enter if no own sample is correct, and then take the places of
            samples without a verdict, which aren't rows, and of own rows for the rest.
        correct: number of own samples with the verdict ``correct``.
        own_rows: places of the samples that have a verdict to learn from, ascending.
        group_size: G.
        seed: the run's seed.
        step: the step that takes the group.
        group_id: the group's id.

    >>> group = {"own_rows": (0, 1, 3), "group_size": 4, "seed": 7, "step": 1, "group_id": "0-0"}
    >>> mix(["a", "b"], when="all_failed", correct=0, **group)
    (('a', 'b'), (1,))
    >>> mix(["a", "b"], when="all_failed", correct=1, **group)
    ((), ())
    """
    if when == "always":
        return tuple(traces), ()
    if correct:
        return (), ()
    count = min(len(own_rows), max(0, len(own_rows) + len(traces) - group_size))
    return tuple(traces), choose_replaced(seed, step, group_id, own_rows, count)
