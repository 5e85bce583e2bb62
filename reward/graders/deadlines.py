"""When a request has had its time: a deadline of wall time that a starved machine puts off.

The wall alone is unjust on a machine that has more to do than its cores can: a right answer that
takes half a second of computing would be a time-out behind ten busy neighbours. CPU time alone
never ends what sleeps, and gives four loops on two cores twice their deadline. So::

    elapsed < deadline                                  go on
    elapsed >= deadline, had >= SHARE * fair * deadline killed: it had its chance
    elapsed >= deadline, had less                       put off: others have the machine
    elapsed >= LONGEST * deadline                       killed, whatever it had

``had`` is the time that the grader ran or slept: all but the time that it stood in line for a
core, which the kernel counts by process. ``fair`` is what the graders left each other meanwhile:
``1`` up to as many of them as there are cores, then ``cores / busy``. A grader that is left a
quarter of what it could have had is killed at its deadline to the millisecond, so ``ceil(K / N)``
deadlines still bound K hangs on N graders wherever the machine isn't starved. On one that is, hangs
soon use up the pool's :class:`Patience`; then ``HURRIED`` stands for ``SHARE``.

A loop or a sleep with a core of its own, one with ten neighbours on it, and one that never gets on:

>>> kills(elapsed=3.0, waited=0.1, deadline=3.0, fair=1.0)
True
>>> kills(elapsed=3.0, waited=2.7, deadline=3.0, fair=1.0)
False
>>> kills(elapsed=9.0, waited=8.8, deadline=3.0, fair=1.0)
True
"""

from __future__ import annotations

import os

SHARE = 1 / 4
"""Of a deadline that a grader must have had, less what the other graders took from it. A quarter
of the default 3 s is half as much again as the slowest right answer of our facts computes."""
HURRIED = 1 / 16
"""The same where the pool's patience is at an end: what good requests take, and few hangs don't get."""
LONGEST = 3.0
"""Deadlines of wall time after which a request is ended even so: on a machine where a grader gets
less than a twelfth of a core, a pool that goes on is worth more than the last right answer."""
LOOK_AGAIN = 0.05
"""Least seconds between two looks at a request whose deadline was put off."""
RECOVERY_SECONDS = 30.0
"""In which one more deadline may be put off, whatever became of those before."""
SLOW = 1 / 8
"""Of its deadline: a request that runs for longer holds its grader up (see :func:`relief`)."""


def kills(
    *, elapsed: float, waited: float, deadline: float, fair: float, share: float = SHARE
) -> bool:
    """Whether a request has had its time.

    Args:
        elapsed: seconds of wall time since its dispatch.
        waited: seconds of them that its grader stood in line for a core.
        deadline: the request's, in seconds.
        fair: share of a core that the graders leave each other (:func:`fair_share`).
        share: of the deadline that its grader must have had.
    """
    if elapsed < deadline:
        return False
    return elapsed >= LONGEST * deadline or share * fair * deadline <= elapsed - waited


def fair_share(busy: float, cores: int) -> float:
    """Share of a core that ``busy`` graders (on average) can have at most."""
    return min(1.0, cores / max(1.0, busy))


def relief(count: int) -> int:
    """Graders beyond ``count`` that may stand in for those that slow requests hold: half as many.

    K hangs that arrive together would hold all N graders for ``ceil(K / N)`` deadlines, with the
    good requests behind them. Each grader more is one deadline more for the good ones; too many
    would take the cores from them.
    """
    return (count + 1) // 2


class Patience:
    """How many deadlines may be put off: hangs use it up, and answers that come late earn it back.

    A starved machine has no time for texts that hang either: each would cost it up to
    ``LONGEST`` deadlines. So there is some to begin with, more for each late answer, and a little
    with time.

    Args:
        count: graders.
        now: ``time.monotonic``.
    """

    def __init__(self, count: int, now: float) -> None:
        self._most = 2.0 * count
        self._left = max(2.0, float(count))
        self._since = now

    def take(self, now: float) -> bool:
        """Whether one more deadline may be put off; then it counts as put off for nothing."""
        self._left = min(self._most, self._left + (now - self._since) / RECOVERY_SECONDS)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def earn(self) -> None:
        """One that was put off has been answered."""
        self._left = min(self._most, self._left + 2.0)


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class Busy:
    """How many graders were busy, on average since a moment: the area under their number."""

    def __init__(self) -> None:
        self._level = 0
        self._since = 0.0
        self._area = 0.0

    def note(self, now: float, level: int) -> None:
        """So many are busy from now on."""
        self._area, self._since, self._level = self.area(now), now, level

    def area(self, now: float) -> float:
        """Grader-seconds until now; the difference of two is what happened between them."""
        return self._area + self._level * (now - self._since)


class InLine:
    """How long one process has stood in line for a core, ever; Linux alone tells.

    ``/proc/PID/schedstat`` of its first thread (a grader has no other), in nanoseconds: ran, stood
    in line, turns. Where it can't be read the answer is 0, and the deadline is of wall time alone.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Now."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            # It has ended, or the kernel was built without these counts.
            return 0.0

    def close(self) -> None:
        """Gives the descriptor back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
