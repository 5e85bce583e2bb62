"""The ledger's rules as functions of values; the Lua scripts apply the same ones.

Symbols: B groups of a step, η the greatest staleness, J steps journalled, w the step of the
version that a worker holds, r the rank of a group: live ids (leased, expired, graded) before it.
An id is meant as its serial, its position counted over all passes; a time is in ms of one clock.

What a script does in one transition is a chain of these: ``lease`` asks :func:`next_to_lease`,
:func:`rank` and :func:`why_not_leased`, ``take`` asks :func:`asked_for` and :func:`cut`, and so on.
``tests/replay/test_model.py`` holds scripts and functions against each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from .mixing import choose_replaced, choose_traces

__all__ = [
    "MEMORY_SHARE",
    "SILENCE_MS",
    "Cut",
    "Limits",
    "Release",
    "age",
    "asked_for",
    "choose_replaced",
    "choose_traces",
    "commit_verdict",
    "counts_as_failed",
    "cut",
    "expected_step",
    "first_times",
    "goes_on",
    "has_no_more_rows",
    "is_expired",
    "is_fenced",
    "is_given_up",
    "is_stale",
    "memory_allows",
    "may_lease",
    "moved_on_by",
    "must_not_pass_over",
    "next_term",
    "next_to_lease",
    "rank",
    "reasserted",
    "renewed",
    "rows_let_go",
    "skipped",
    "step_needed",
    "waits_for",
    "why_not_durable",
    "why_not_leased",
    "window_allows",
]

MEMORY_SHARE = 0.75
"""Of ``maxmemory``, at which leases stop: the rest is for what is on its way."""
SILENCE_MS = 6000
"""Without a word of any member for so long, the server was stopped or out of reach."""
LEAST_VERDICTS = 2
"""Own samples with a verdict without which a group has no baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The settings of a run that the rules ask for."""

    groups_per_step: int
    """B."""
    max_staleness: int
    """η."""
    window: int = 1
    """Steps within which groups may be taken out of order; 1 = strict order."""
    late: str = "wait"
    """``wait`` or ``drop``: what a cut does about a lease that it would make too stale."""
    max_attempts: int = 5
    """Failed attempts with which a group is given up."""
    max_inflight: int = 4096
    """Greatest number of leases at a time."""
    steps: int = 0
    """Rows of the run; 0 where its groups end it."""
    total_groups: int = 0
    """Groups of the run; 0 where its steps end it."""
    lease_ms: int = 120_000
    """A lease that isn't renewed for so long expires."""
    group_deadline_ms: int = 1_800_000
    """Cap on one lease, renewals included."""
    group_bytes: int = 0
    """Worst case of one group's payload."""


# -- admission and lease -----------------------------------------------------------------------


def rank(serial: int, live: Iterable[int]) -> int:
    """r: live ids (leased, expired, graded) before this one.

    >>> rank(7, live={3, 5, 9})
    2
    """
    return sum(1 for other in live if other < serial)


def next_to_lease(returned: Collection[int], cursor: int) -> int:
    """The id that is leased next: what came back, lowest first, before new positions.

    >>> next_to_lease({8, 4}, cursor=9), next_to_lease((), cursor=9)
    (4, 9)
    """
    return min(returned, default=cursor)


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


def memory_allows(used: int, leased: int, group_bytes: int, maxmemory: int) -> bool:
    """Whether one more lease fits: waiting bytes and the worst case of all that is leased.

    >>> memory_allows(used=500, leased=1, group_bytes=100, maxmemory=1000)
    True
    >>> memory_allows(used=500, leased=2, group_bytes=100, maxmemory=1000)
    False
    """
    return maxmemory == 0 or used + (leased + 1) * group_bytes <= MEMORY_SHARE * maxmemory


def why_not_leased(
    limits: Limits,
    *,
    serial: int,
    is_new: bool,
    rank: int,
    leased: int,
    journalled: int,
    held_step: int,
    used: int = 0,
    maxmemory: int = 0,
) -> str:
    """Why the group that is next isn't leased to a worker that holds ``held_step``; "" if it is.

    Args:
        serial: of :func:`next_to_lease`; ``is_new`` unless it came back.
        rank: its rank.
        leased: leases there are.
        used: bytes in use of ``maxmemory`` (0 = no limit).
    """
    if leased >= limits.max_inflight:
        return "admission: inflight"
    if not memory_allows(used, leased, limits.group_bytes, maxmemory):
        return "admission: memory"
    if is_new and limits.total_groups and serial >= limits.total_groups:
        return "admission: every group of the run is leased"
    if limits.steps and expected_step(journalled, rank, limits.groups_per_step) > limits.steps:
        return "admission: the last step has its groups"
    if not may_lease(journalled, rank, limits.groups_per_step, held_step, limits.max_staleness):
        return "admission: staleness"
    return ""


# -- time --------------------------------------------------------------------------------------


def first_times(now: int, limits: Limits) -> tuple[int, int]:
    """Deadline and group deadline of a lease given now."""
    return now + limits.lease_ms, now + limits.group_deadline_ms


def is_expired(deadline: int, now: int) -> bool:
    """Whether a lease may be given to the next worker."""
    return deadline <= now


def renewed(now: int, group_deadline: int, lease_ms: int) -> int | None:
    """The deadline of a lease renewed now; None where it can't be renewed any more.

    A grace of one lease time past the group's deadline lets a worker commit what finished.

    >>> [renewed(now, group_deadline=100, lease_ms=30) for now in (10, 110, 130)]
    [40, 130, None]
    """
    last = group_deadline + lease_ms
    return None if now >= last else min(now + lease_ms, last)


def moved_on_by(*, new_life: bool, silence_ms: int, lease_ms: int) -> int:
    """By how much all deadlines move on before one is judged: time in which nobody could renew.

    Args:
        new_life: the server was restarted since deadlines were last judged.
        silence_ms: since any member was heard of.

    >>> moved_on_by(new_life=False, silence_ms=5999, lease_ms=100)
    0
    >>> moved_on_by(new_life=True, silence_ms=6000, lease_ms=100)
    6100
    """
    return (lease_ms if new_life else 0) + (silence_ms if silence_ms >= SILENCE_MS else 0)


# -- attempts ----------------------------------------------------------------------------------


class Release(StrEnum):
    """Why a lease ended without a commit."""

    EXPIRED = "lease expired"
    PAST_DEADLINE = "past the group deadline"
    WORKER_DIED = "its worker died"
    REVOKED = "revoked: it would become too stale"
    RETURNED = "returned"
    FAILED = "failed"


def counts_as_failed(why: Release) -> bool:
    """Whether it counts towards ``max_attempts``: a drain and a revocation are no group's fault.

    An outage has no entry: deadlines move on over it, so that nothing expires.
    """
    return why not in (Release.RETURNED, Release.REVOKED)


def is_given_up(failures: int, max_attempts: int) -> bool:
    """Whether a group with so many failed attempts is rejected and listed."""
    return failures >= max_attempts


# -- commit ------------------------------------------------------------------------------------

Verdict = Literal["committed", "duplicate", "superseded", "rejected", "resend"]


def commit_verdict(
    attempt: int,
    *,
    live: tuple[str, int | None] | None,
    final: tuple[str, int, str] | None,
    verdicts: int,
    payload_is_there: bool,
) -> tuple[Verdict, str]:
    """What is said of a commit, and why where that is ``rejected``.

    All but ``resend`` are final: nobody sends such a commit again. An expired attempt that
    nobody has leased again still commits.

    Args:
        attempt: the lease that is committed.
        live: state (leased, admitted or graded) and newest attempt of a live group.
        final: of a group that was taken or rejected: its letter (T, D or R), the attempt that
            ended it, and the reason.
        verdicts: own samples with a verdict.

    >>> kept = {"final": None, "verdicts": 2, "payload_is_there": True}
    >>> commit_verdict(1, live=("admitted", 1), **kept)  # expired
    ('committed', '')
    >>> commit_verdict(1, live=("leased", 2), **kept)
    ('superseded', '')
    """
    if live is None:
        if final is None:
            return "rejected", "unknown"
        letter, finished, reason = final
        if letter == "R":
            return "rejected", reason
        return ("duplicate" if finished == attempt else "superseded"), ""
    state, newest = live
    if newest != attempt:
        return "superseded", ""
    if state == "graded":
        return "duplicate", ""
    if verdicts < LEAST_VERDICTS:
        return "rejected", "ungraded"
    return ("committed" if payload_is_there else "resend"), ""


# -- the cut of a step -------------------------------------------------------------------------


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


def asked_for(step: int, journalled: int) -> Literal["again", "next", "refused"]:
    """What ``take(step)`` asks for: a row as it was written, the next one, or neither."""
    if step <= journalled:
        return "again"
    return "next" if step == journalled + 1 else "refused"


def waits_for(unfinished: Collection[int], cursor: int) -> int:
    """Whom a cut without enough groups waits for: the lowest that is out, or the next new one."""
    return min(unfinished, default=cursor)


def has_no_more_rows(step: int, steps: int, ended: bool) -> bool:
    """Whether a run that was ended, or whose last row is before this step, cuts no more."""
    return ended or 0 < steps < step


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What becomes of the groups at ``take(J + 1)``."""

    stale: tuple[int, ...] = ()
    """Swept: too old. They are rejected even where no row comes of it."""
    row: tuple[int, ...] = ()
    """Ids of the row, ascending; empty where none is written."""
    short: bool = False
    """The last row of a run that is set in passes, with fewer than B."""
    revoked: tuple[int, ...] = ()
    """Leases that go back because the row passes over them for too long."""
    held_by: str = ""
    """Why there is no row: ``groups``, ``window`` or ``staleness``."""
    waits_for: int = -1
    """Whom it waits for, where there is no row."""
    ended: bool = False
    """No row will ever come."""


def cut(
    limits: Limits,
    *,
    step: int,
    graded: Mapping[int, int | None],
    leased: Mapping[int, int],
    returned: Set[int],
    cursor: int,
    ended: bool = False,
) -> Cut:
    """The sweep and the cut of the next step.

    Args:
        graded: id -> step of its oldest own token, None without one.
        leased: id -> step that its worker held when it was leased.
        returned: ids that came back.
        cursor: first id never leased.
        ended: the run was ended.

    Example: with B = 2, η = 1 and a window of 2 steps, row 2 passes over 4, which was leased to
    a worker with step 0. After it J is 2 and 4 has the rank 0, so J + ⌊r/B⌋ − w = 2 > η: it
    would be too old in row 3.

    >>> limits = Limits(groups_per_step=2, max_staleness=1, window=2, late="drop")
    >>> row = cut(limits, step=2, graded={5: 0, 6: 1}, leased={4: 0}, returned=set(), cursor=7)
    >>> row.row, row.revoked
    ((5, 6), (4,))
    """
    size, bound = limits.groups_per_step, limits.max_staleness
    if has_no_more_rows(step, limits.steps, ended):
        return Cut(ended=True)
    stale = tuple(sorted(s for s, oldest in graded.items() if is_stale(step, oldest, bound)))
    fresh = sorted(graded.keys() - set(stale))
    row = tuple(fresh[:size])
    out = sorted(leased.keys() | returned)
    if len(row) < size:
        if out or not 0 < limits.total_groups <= cursor:
            return Cut(stale=stale, held_by="groups", waits_for=waits_for(out, cursor))
        return Cut(stale=stale, row=row, short=bool(row), ended=not row)
    passed = [serial for serial in out if serial < row[-1]]
    if not window_allows(len(passed), size, limits.window):
        return Cut(stale=stale, held_by="window", waits_for=passed[0])
    late = tuple(
        serial
        for place, serial in enumerate(passed)
        if serial in leased and must_not_pass_over(step - 1, place, size, leased[serial], bound)
    )
    if late and limits.late == "wait":
        return Cut(stale=stale, held_by="staleness", waits_for=late[0])
    return Cut(stale=stale, row=row, revoked=late)


# -- after the step ----------------------------------------------------------------------------


def why_not_durable(step: int, journalled: int, taken: Collection[int]) -> str:
    """Why a checkpoint of this step can't be what is kept; "" if it can.

    Args:
        taken: steps whose groups are taken and not trained.
    """
    if step > journalled:
        return f"only {journalled} rows are written"
    first = min(taken, default=step + 1)
    return f"step {first} is not confirmed" if first <= step else ""


def rows_let_go(trimmed: int, checkpoint: int, quarantined: Set[int]) -> tuple[int, ...]:
    """Rows that go, with their payloads, once the oldest kept checkpoint is at ``checkpoint``.

    What is quarantined stays for a person to look at.

    >>> rows_let_go(trimmed=2, checkpoint=5, quarantined={4})
    (3, 5)
    """
    return tuple(n for n in range(trimmed + 1, checkpoint + 1) if n not in quarantined)


def goes_on(limits: Limits, journalled: int, cursor: int) -> bool:
    """Whether a run that ended goes on with these settings: they have more steps or groups."""
    return limits.steps > journalled or limits.total_groups > cursor


# -- terms and the journal ---------------------------------------------------------------------


def next_term(held: int, journal: int) -> int:
    """The term of a learner that starts: greater than the ledger's and than its journal's."""
    return max(held, journal) + 1


def is_fenced(held: int, term: int) -> bool:
    """Whether a write of a learner is refused.

    A term greater than the ledger's is refused as well: Redis has then lost its newest writes,
    and the ledger must be repaired from the journal first, which a new term begins with.
    """
    return term != held


def reasserted(
    step: int, journalled: int, same: bool
) -> Literal["known", "lost", "gap", "another history"]:
    """What a row of the journal is to Redis, whose own row of that step is the ``same`` or not."""
    if step > journalled:
        return "lost" if step == journalled + 1 else "gap"
    return "known" if same else "another history"


def skipped(cursor: int, serial: int) -> tuple[int, ...]:
    """New ids before one that a reasserted row holds: they are admitted, so that none is lost.

    >>> skipped(3, 5), skipped(6, 5)
    ((3, 4), ())
    """
    return tuple(range(cursor, serial))
