"""The rules of a step's cut: which groups form its row, which are dropped, and what it waits for.

The symbols are those of :mod:`tandem.replay.rules.leases`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from ...common.objectives.keys import EQUAL_REWARDS
from .leases import Limits, may_lease

NO_PLACES: Mapping[int, float] = MappingProxyType({})


def age(step: int, oldest_token_step: int) -> int:
    """Staleness of a group at a step, in steps: n − 1 − (step of its oldest token)."""
    return step - 1 - oldest_token_step


def is_stale(step: int, oldest_token_step: int | None, max_staleness: int) -> bool:
    """Whether the sweep of a step rejects a graded group; a group without own tokens has no age."""
    return oldest_token_step is not None and age(step, oldest_token_step) > max_staleness


def window_allows(unfinished_before_last: int, groups_per_step: int, window: int) -> bool:
    """Whether a cut may pass over this many unfinished ids that come before its last one.

    A window of 1 step is strict order: none may be passed over.
    """
    return unfinished_before_last <= (window - 1) * groups_per_step


def must_not_pass_over(
    journalled: int, unfinished_rank: int, groups_per_step: int, held_step: int, max_staleness: int
) -> bool:
    """Whether a leased group would become too stale if a cut passed over it.

    After the cut the group's rank is its rank among the unfinished ids only, and J is one more;
    admission must still hold for the version that it was leased to.
    """
    return not may_lease(journalled + 1, unfinished_rank, groups_per_step, held_step, max_staleness)


def has_no_signal(
    rewards: Sequence[float],
    of_traces: Sequence[float | None],
    means: tuple[float, float] | None = None,
) -> bool:
    """Whether all rows of a group have one reward, so that none has an advantage over the others, or their mean is
    out of bounds.

    Args:
        rewards: of its own samples with a verdict. Of a group without any it isn't said.
        of_traces: rewards of its expert rows. Of a reward that isn't known (None) it isn't said.
        means: least and greatest mean of all of them that a group may have; None = any.
    """
    known = [reward for reward in of_traces if reward is not None]
    if not rewards or len(known) < len(of_traces):
        return False
    if max([*rewards, *known]) - min([*rewards, *known]) <= EQUAL_REWARDS:
        return True
    mean = (sum(rewards) + sum(known)) / (len(rewards) + len(known))
    return means is not None and not (means[0] - EQUAL_REWARDS <= mean <= means[1] + EQUAL_REWARDS)


def asked_for(step: int, journalled: int) -> Literal["again", "next", "refused"]:
    """What ``take(step)`` asks for: an existing row again, the next one, or something refused."""
    if step <= journalled:
        return "again"
    return "next" if step == journalled + 1 else "refused"


def has_no_more_rows(step: int, steps: int, ended: bool) -> bool:
    """Whether a run that was ended, or whose last row is before this step, cuts no more rows."""
    return ended or 0 < steps < step


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What happens to the groups at ``take(J + 1)``."""

    stale: tuple[int, ...] = ()
    """Ids that the sweep rejects as too old, even if no row is written."""
    no_signal: tuple[int, ...] = ()
    """Ids that are left out since they would teach nothing, even if no row is written."""
    row: tuple[int, ...] = ()
    """Ids of the row, ascending; empty if none is written."""
    short: bool = False
    """Whether it is the last row of a run that is set in passes, with fewer than B groups."""
    revoked: tuple[int, ...] = ()
    """Leases that are taken back, since the row passes over them and they would become too stale."""
    held_by: str = ""
    """Why there is no row: ``groups``, ``window`` or ``staleness``."""
    waits_for: int = -1
    """The id that it waits for if there is no row."""
    ended: bool = False
    """Whether no row will ever come."""


def cut(
    limits: Limits,
    *,
    step: int,
    graded: Mapping[int, int | None],
    leased: Mapping[int, int],
    returned: Collection[int],
    cursor: int,
    places: Mapping[int, float] = NO_PLACES,
    ended: bool = False,
    no_signal: Collection[int] = (),
    left_out: int = 0,
) -> Cut:
    """The sweep and the cut of the next step.

    Args:
        graded: id -> step of its oldest own token, None without one.
        leased: id -> step that its worker held when it was leased.
        returned: ids that came back.
        cursor: first id never leased.
        places: positions of ids that were put back, see :func:`~tandem.replay.rules.leases.place_behind`;
            any other id's position is its own number.
        ended: whether the run was ended.
        no_signal: graded ids that would teach nothing (:func:`has_no_signal`). Only those go that a cut may
            come to whatever becomes of the unfinished groups, so that in strict order the same ones go
            however fast each worker is.
        left_out: how many of them have gone since the last row.

    Example: with B = 2, η = 1 and a window of 2 steps, row 2 passes over 4, which was leased to
    a worker with step 0. After it J is 2 and 4 has the rank 0, so J + ⌊r/B⌋ − w = 2 > η: it
    would be too old in row 3.

    >>> limits = Limits(groups_per_step=2, max_staleness=1, window=2, late="drop")
    >>> row = cut(limits, step=2, graded={5: 0, 6: 1}, leased={4: 0}, returned=(), cursor=7)
    >>> row.row, row.revoked
    ((5, 6), (4,))
    """

    def place(serial: int) -> float:
        return places.get(serial, serial)

    size, bound = limits.groups_per_step, limits.max_staleness
    if has_no_more_rows(step, limits.steps, ended):
        return Cut(ended=True)
    stale = tuple(sorted(s for s, oldest in graded.items() if is_stale(step, oldest, bound)))
    out = sorted({*leased, *returned}, key=place)
    kept: list[int] = []
    gone: list[int] = []
    for serial in sorted(graded.keys() - set(stale), key=place):
        if len(kept) == size:
            break
        goes = serial in no_signal and left_out + len(gone) < limits.dynamic_sampling
        if goes:
            # Counted for these alone, since a plan makes thousands of cuts.
            before = sum(place(other) < place(serial) for other in out)
            goes = window_allows(before, size, limits.window)
        (gone if goes else kept).append(serial)
    swept = Cut(stale=stale, no_signal=tuple(gone))
    row = tuple(sorted(kept))
    if len(row) < size:
        if out or not 0 < limits.total_groups <= cursor:
            return replace(swept, held_by="groups", waits_for=out[0] if out else cursor)
        return replace(swept, row=row, short=bool(row), ended=not row)
    passed = [serial for serial in out if place(serial) < place(kept[-1])]
    if not window_allows(len(passed), size, limits.window):
        return replace(swept, held_by="window", waits_for=passed[0])
    late = tuple(
        serial
        for rank, serial in enumerate(passed)
        if serial in leased and must_not_pass_over(step - 1, rank, size, leased[serial], bound)
    )
    if late and limits.late == "wait":
        return replace(swept, held_by="staleness", waits_for=late[0])
    return replace(swept, row=row, revoked=late)
