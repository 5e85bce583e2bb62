"""The ledger's rules as functions of values; the Lua scripts apply the same ones.

Symbols: B groups of a step, η the greatest staleness, J steps journalled, w the step of the
version that a worker holds, r the rank of a group: live ids (leased, expired, graded) before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .mixing import choose_replaced, choose_traces

__all__ = [
    "age",
    "checkpoint_is_due",
    "choose_replaced",
    "choose_traces",
    "expected_step",
    "is_stale",
    "leases_stop",
    "may_lease",
    "must_not_pass_over",
    "place_behind",
    "step_needed",
    "window_allows",
]

PLACE = 2.0**-20
"""Between two groups that were put back."""


LEASES_STOP_SHARE = 0.75
"""Share of ``maxmemory`` that leases may fill, the worst case of those out included."""
RETAINED_SHARE = 0.2
"""Share of ``maxmemory`` that the samples since the newest checkpoint may fill. Two checkpoints are
kept, hence twice as much in all, which leaves room below the share at which leases stop."""


def leases_stop(used: int, leased: int, group_bytes: int, maxmemory: int) -> bool:
    """Whether Redis is too full for one more lease; never where it has no limit. All in bytes."""
    if maxmemory <= 0:
        return False
    return used + (leased + 1) * group_bytes > LEASES_STOP_SHARE * maxmemory


def checkpoint_is_due(since_checkpoint: int, maxmemory: int) -> bool:
    """Whether the samples trained since the newest checkpoint, in bytes, ask for another at once.

    Redis keeps them for a resume; what only a checkpoint frees must not fill it.
    """
    return maxmemory > 0 and since_checkpoint > RETAINED_SHARE * maxmemory


def expected_step(journalled: int, rank: int, groups_per_step: int) -> int:
    """The latest step that a group of this rank is taken in, if order is kept.

    >>> expected_step(journalled=4, rank=9, groups_per_step=8)
    6
    """
    return journalled + rank // groups_per_step + 1


def may_lease(
    journalled: int, rank: int, groups_per_step: int, held_step: int, max_staleness: int
) -> bool:
    """Admission: J + ⌊r/B⌋ − w ≤ η.

    The group will be taken in step n = J + ⌊r/B⌋ + 1 at the latest, where its oldest token,
    sampled by version w or a newer one, has the age n − 1 − w.
    """
    return journalled + rank // groups_per_step - held_step <= max_staleness


def step_needed(journalled: int, rank: int, groups_per_step: int, max_staleness: int) -> int:
    """The least version step that a worker must hold to be leased a group of this rank."""
    return journalled + rank // groups_per_step - max_staleness


def age(step: int, oldest_token_step: int) -> int:
    """Staleness of a group at a step, in steps: n − 1 − (step of its oldest token)."""
    return step - 1 - oldest_token_step


def is_stale(step: int, oldest_token_step: int | None, max_staleness: int) -> bool:
    """Whether the sweep of a step rejects a graded group. Without own tokens it has no age."""
    return oldest_token_step is not None and age(step, oldest_token_step) > max_staleness


def window_allows(unfinished_before_last: int, groups_per_step: int, window: int) -> bool:
    """Whether a cut may pass over so many unfinished ids that come before its last one.

    A window of 1 step is strict order: none.
    """
    return unfinished_before_last <= (window - 1) * groups_per_step


def must_not_pass_over(
    journalled: int, unfinished_rank: int, groups_per_step: int, held_step: int, max_staleness: int
) -> bool:
    """Whether a cut that passes over a leased group would make it too stale.

    After the cut the group's rank is its rank among the unfinished ids alone, and J is one more;
    admission must still hold for the version that it was leased to.
    """
    return not may_lease(journalled + 1, unfinished_rank, groups_per_step, held_step, max_staleness)


def place_behind(cursor: int, places: Iterable[float]) -> float:
    """Where a dead letter that is put back stands among the groups on their way.

    Groups are ordered by their serials. One that is put back comes behind all of them, and before
    the next that was never leased (the cursor): in front, it would raise the ranks of groups that
    were leased by their old ones, and these would become too old.

    >>> 7 < place_behind(cursor=8, places=[5, 7]) < place_behind(8, [5, 7, 7.5]) < 8
    True
    """
    return max([cursor - 1, *places]) + PLACE
