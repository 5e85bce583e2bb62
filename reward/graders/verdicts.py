"""Verdicts of comparisons: cached, asked for once while in flight, and counted with their costs.

What a grader process has decided is kept, timeouts included, so that a group with eight copies of a
text that hangs costs one deadline. A crash isn't kept: it isn't the text's own doing, and the next
attempt may succeed.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from ...common.records import Verdict
from .grader_processes import GraderProcesses
from .requests import Outcome

CACHED_VERDICTS = 1 << 18
"""Entries of the verdict cache; one takes about 150 bytes."""
RECENT_SECONDS = 60.0
"""Period over which the shares of hangs and crashes are counted."""

Found = Callable[[Verdict, float, bool], None]
"""(verdict, seconds in the grader, whether another text's verdict was used)."""


class Recent:
    """Shares of the last minute's requests that ended badly."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, Verdict | None]] = deque()
        self._counts: Counter[Verdict | None] = Counter()
        self.total = 0
        """Number of requests that have ended since the start."""

    def add(self, failure: Verdict | None) -> None:
        """Records how a request ended."""
        self._ends.append((time.monotonic(), failure))
        self._counts[failure] += 1
        self.total += 1
        self.forget()

    def forget(self) -> None:
        """Drops what is older than a minute."""
        now = time.monotonic()
        while self._ends and now - self._ends[0][0] > RECENT_SECONDS:
            self._counts[self._ends.popleft()[1]] -= 1

    def __len__(self) -> int:
        return len(self._ends)

    def share(self, *failures: Verdict) -> float:
        """Share of the recent requests that ended in one of these ways; 0 if there were none."""
        return sum(self._counts[failure] for failure in failures) / max(1, len(self._ends))


class Verdicts:
    """Asks grader processes whether two answers are equal.

    Args:
        counts: counters of cache hits and the like.
        recent: record of how requests ended.
    """

    def __init__(self, processes: GraderProcesses, counts: Counter[str], recent: Recent) -> None:
        self._processes = processes
        self._counts = counts
        self._recent = recent
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._asked: dict[bytes, list[Found]] = {}
        self._seconds = 0.0
        self._waited = 0.0
        self._longest_wait = 0.0

    def ask(self, answer: str, gold: str, found: Found) -> None:
        """Looks in the cache, then among the questions in flight, then asks a grader process."""
        key = hashlib.blake2b(
            f"{len(answer)}:{answer}{gold}".encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            self._counts["cache_hits"] += 1
            found(cached, 0.0, True)
            return
        waiting = self._asked.get(key)
        if waiting is not None:
            self._counts["coalesced"] += 1
            waiting.append(found)
            return
        self._counts["to_process"] += 1
        self._asked[key] = [found]

        def finish(outcome: Outcome) -> None:
            self.cost(outcome)
            if outcome.failure is not Verdict.CRASHED:
                self._cache[key] = outcome.verdict
                while len(self._cache) > CACHED_VERDICTS:
                    self._cache.popitem(last=False)
            for index, ask in enumerate(self._asked.pop(key)):
                ask(outcome.verdict, outcome.seconds, index > 0)

        self._processes.submit("compare", [answer, gold], finish)

    def cost(self, outcome: Outcome) -> None:
        """Adds what a request cost to the statistics."""
        self._seconds += outcome.seconds
        self._waited += outcome.waited
        self._longest_wait = max(self._longest_wait, outcome.waited)
        self._recent.add(outcome.failure)

    def forget(self) -> None:
        """Empties the cache."""
        self._cache.clear()

    def stats(self) -> dict[str, float]:
        """Seconds and sizes; the longest wait is the longest since the last call."""
        longest, self._longest_wait = self._longest_wait, 0.0
        return {
            "grade_seconds": self._seconds,
            "queue_wait_seconds": self._waited,
            "longest_queue_wait": longest,
            "cache_size": len(self._cache),
        }
