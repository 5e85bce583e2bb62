"""The ledger's rules as functions of values; the Lua scripts apply the same ones.

Symbols: B groups of a step, η the greatest staleness, J steps journalled, w the step of the
version that a worker holds, r the rank of a group: live ids (leased, expired, graded) before it.
An id is meant as its serial, its position counted over all passes; a time is in ms of one clock.

What a script does in one transition is a chain of these: ``lease`` asks :func:`next_to_lease`,
:func:`rank` and :func:`why_not_leased`, ``commit`` asks :func:`commit_verdict`, and so on. The rules of
``take`` are in :mod:`tandem.replay.rules.cutting`.
``tests/replay/test_model.py`` holds scripts and functions against each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ...common.config.groups import LEASES_STOP_SHARE

PLACE = 2.0**-20
"""Between two groups that were put back."""
RETAINED_SHARE = 0.2
"""Share of ``maxmemory`` that the samples since the newest checkpoint may fill. Two checkpoints are
kept, hence twice as much in all, which leaves room below the share at which leases stop."""
SILENCE_MS = 6000
"""Without a word of any member for so long, the server was stopped or out of reach."""


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
    group_size: int = 1
    """G."""
    dynamic_sampling: int = 0
    """Groups without a signal that a row may leave out."""
    mean_rewards: tuple[float, float] | None = None
    """Bounds of a group's mean reward, beyond which it counts as one of them; None = any mean."""
    seed: int = 0
    """The run's seed, which keys what :func:`~tandem.replay.rules.mixing.mix` draws."""
    traces_when: str = "always"
    """``always`` or ``all_failed``: when traces are rows of their groups."""
    least_verdicts: int = 2
    """Own samples with a verdict without which a group teaches nothing: 2 where its rows are
    compared with each other, 1 where they aren't."""


# -- admission and lease -----------------------------------------------------------------------


def rank(place: float, live: Iterable[float]) -> int:
    """r: places of live ids (leased, expired, graded) before this one's.

    An id is at its own number, unless it was put back: see :func:`place_behind`.

    >>> rank(7, live={3, 5, 9})
    2
    """
    return sum(1 for other in live if other < place)


def next_to_lease(returned: Mapping[int, float], cursor: int) -> int:
    """The id that is leased next: what came back (id -> place), in its order, before new ones.

    >>> next_to_lease({8: 8, 4: 4}, cursor=9), next_to_lease({}, cursor=9)
    (4, 9)
    """
    return min(returned, key=lambda serial: returned[serial], default=cursor)


def place_behind(cursor: int, places: Iterable[float]) -> float:
    """The place of a dead letter that is put back, among the groups on their way.

    Groups are ordered by their serials. One that is put back comes behind all of them, and before
    the next that was never leased (the cursor): in front, it would raise the ranks of groups that
    were leased by their old ones, and these would become too old.

    >>> 7 < place_behind(cursor=8, places=[5, 7]) < place_behind(8, [5, 7, 7.5]) < 8
    True
    """
    return max([cursor - 1, *places]) + PLACE


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
    if leases_stop(used, leased, limits.group_bytes, maxmemory):
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


def counts_as_failed(why: Release, *, moved: bool = False) -> bool:
    """Whether it counts towards ``max_attempts``: a drain, a revocation or an outage isn't the group's fault.

    Args:
        why: how the lease ended.
        moved: whether it hasn't been renewed since deadlines last moved on (see :func:`moved_on_by`), so
            that its worker may have ended in an outage.
    """
    if why in (Release.EXPIRED, Release.WORKER_DIED):
        return not moved
    return why not in (Release.RETURNED, Release.REVOKED)


def is_given_up(failures: int, max_attempts: int) -> bool:
    """Whether a group with this number of failed attempts is rejected and listed."""
    return failures >= max_attempts


# -- commit ------------------------------------------------------------------------------------

Verdict = Literal["committed", "duplicate", "superseded", "rejected", "resend"]


def commit_verdict(
    attempt: int,
    *,
    live: tuple[str, int | None] | None,
    final: tuple[str, int, str] | None,
    verdicts: int,
    least_verdicts: int,
    payload_is_there: bool,
) -> tuple[Verdict, str]:
    """The verdict on a commit, and the reason if it is ``rejected``.

    All but ``resend`` are final: nobody sends such a commit again. An expired attempt that
    nobody has leased again still commits.

    Args:
        attempt: the lease that is committed.
        live: state (leased, admitted or graded) and newest attempt of a live group.
        final: of a group that was taken or rejected: its letter (T, D or R), the attempt that
            ended it, and the reason.
        verdicts: own samples with a verdict; ``least_verdicts``: see :class:`Limits`.

    >>> kept = {"final": None, "verdicts": 2, "least_verdicts": 2, "payload_is_there": True}
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
    if verdicts < least_verdicts:
        return "rejected", "ungraded"
    return ("committed" if payload_is_there else "resend"), ""


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


def why_not_retried(*, ended: str | None, steps: int, journalled: int, last_is_short: bool) -> str:
    """Why no dead letter can be put back: no row would take it; "" if one will.

    Args:
        ended: why the run was ended, if it was.
        last_is_short: the newest row is the short one that ends a run of passes, and no group is left
            for a later one, as there would be once the run has more passes.
    """
    if ended is not None:
        return ended
    if 0 < steps <= journalled or last_is_short:
        return f"its last row, {journalled}, is written"
    return ""


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
    step: int, journalled: int, *, same: bool, elsewhere: bool
) -> Literal["known", "lost", "gap", "another history"]:
    """How a row of the journal relates to what Redis has. Only a ``lost`` row is written.

    Args:
        same: Redis's own row of that step is the same, or was let go.
        elsewhere: one of its groups is in another row of Redis.
    """
    if step <= journalled:
        return "known" if same else "another history"
    if step > journalled + 1:
        return "gap"
    return "another history" if elsewhere else "lost"


def skipped(cursor: int, serial: int) -> tuple[int, ...]:
    """New ids before one that a reasserted row holds: they are admitted, so that none is lost.

    >>> skipped(3, 5), skipped(6, 5)
    ((3, 4), ())
    """
    return tuple(range(cursor, serial))
