"""When a request has had its time: a deadline of wall time that a starved machine puts off.

The wall alone is unjust on a machine that has more to do than its cores can: a right answer that
takes half a second of computing would be a time-out behind ten busy neighbours. CPU time alone
never ends what sleeps. So a request is killed at its deadline if its grader has had a quarter of
it, running or asleep, and after three deadlines at the latest. What it lacked is what it stood in
line for a core, which the kernel counts by process. What the graders of one pool take from each
other puts nothing off: with more of them busy than there are cores, the quarter is one of their
share, so that ``ceil(K / N)`` deadlines bound K hangs on N graders wherever nobody else has the
machine.

A loop or a sleep with a core of its own, one with ten neighbours on it, and one that never gets on:

>>> is_over(elapsed=3.0, waited=0.1, deadline=3.0, fair=1.0)
True
>>> is_over(elapsed=3.0, waited=2.7, deadline=3.0, fair=1.0)
False
>>> is_over(elapsed=9.0, waited=8.8, deadline=3.0, fair=1.0)
True
"""

from __future__ import annotations

import os

SHARE = 1 / 4
"""Share of a deadline that a grader must have had, less what the other graders took from it. A
quarter of the default 3 s is half as much again as the slowest right answer of our facts computes."""
LONGEST = 3.0
"""Deadlines of wall time after which a request is ended even so: on a machine where a grader gets
less than a twelfth of a core, a pool that goes on is worth more than the last right answer."""
LOOK_AGAIN = 0.05
"""Seconds between two looks at a request whose deadline was put off."""
SLOW = 1 / 8
"""Share of its deadline after which a request holds its grader up (see :func:`relief`)."""


def is_over(*, elapsed: float, waited: float, deadline: float, fair: float) -> bool:
    """Whether a request has had its time.

    Args:
        elapsed: seconds of wall time since its dispatch.
        waited: seconds of them that its grader stood in line for a core.
        deadline: the request's, in seconds.
        fair: share of a core that the graders leave each other (:func:`fair_share`).
    """
    if elapsed < deadline:
        return False
    return elapsed >= LONGEST * deadline or elapsed - waited >= SHARE * fair * deadline


def fair_share(busy: int, cores: int) -> float:
    """Share of a core that each of ``busy`` graders can have at most."""
    return min(1.0, cores / max(1, busy))


def relief(count: int) -> int:
    """Graders beyond ``count`` that may stand in for those that slow requests hold: half as many.

    K hangs that arrive together would hold all N graders for ``ceil(K / N)`` deadlines, with the
    good requests behind them. Each grader more is one deadline more for the good ones; too many
    would take the cores from them.
    """
    return (count + 1) // 2


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


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
        """Seconds in line until now."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            # It has ended, or the kernel was built without these counts.
            return 0.0

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
