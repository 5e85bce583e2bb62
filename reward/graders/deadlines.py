"""The deadline of a request: wall time that is extended while the machine starves the grader.

Wall time alone would be unjust on a machine with more work than its cores can do: a right answer
that takes half a second to compute would time out beside ten busy neighbours. CPU time alone never
ends a request that sleeps. So a request is killed at its deadline if its grader has had a quarter of
it, running or asleep, and after three deadlines at the latest. The time that it didn't have is the
time that it waited for a core, which the kernel counts per process. Time that the graders of one
pool take from each other extends nothing: with more of them busy than there are cores, the quarter
is a quarter of their fair share, so that K hangs on N graders last at most ``ceil(K / N)`` deadlines
wherever nobody else uses the machine.

A loop or a sleep with a core of its own, one with ten neighbours on it, and one that hardly ever runs:

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
quarter of the default 3 s is 1.5 times what the slowest right answer of our facts takes to compute."""
LONGEST = 3.0
"""Number of deadlines after which a request is ended in any case: on a machine where a grader gets
less than a twelfth of a core, it matters more that the pool goes on than that the last right answer counts."""
LOOK_AGAIN = 0.05
"""Time between two checks of a request whose deadline was extended."""
SLOW = 1 / 8
"""Share of its deadline after which a request counts as holding up its grader (see :func:`relief`)."""


def is_over(*, elapsed: float, waited: float, deadline: float, fair: float) -> bool:
    """Whether a request has used up its time.

    Args:
        elapsed: seconds of wall time since its dispatch.
        waited: seconds of these during which its grader waited for a core.
        deadline: the request's deadline, in seconds.
        fair: share of a core that the graders leave each other (:func:`fair_share`).
    """
    if elapsed < deadline:
        return False
    return elapsed >= LONGEST * deadline or elapsed - waited >= SHARE * fair * deadline


def fair_share(busy: int, cores: int) -> float:
    """Share of a core that each of ``busy`` graders can have at most."""
    return min(1.0, cores / max(1, busy))


def relief(count: int) -> int:
    """Number of graders beyond ``count`` that may stand in for those held by slow requests: half as many.

    K hangs that arrive together would hold all N graders for ``ceil(K / N)`` deadlines, with the good
    requests behind them. Each extra grader saves the good ones one deadline; too many would take the
    cores away from them.
    """
    return (count + 1) // 2


class InLine:
    """How long one process has waited for a core since it started (Linux only).

    Read from ``/proc/PID/schedstat`` of its first thread (a grader has no other), in nanoseconds: time
    run, time waited, turns. If it can't be read the answer is 0, and the deadline is plain wall time.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Seconds waited until now."""
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 128, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            # The process has ended, or the kernel was built without these counts.
            return 0.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
