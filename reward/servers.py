"""Questions to servers: queued, batched, sent by threads, retried, and given up.

Everything but the sending itself happens in the owner's thread, which calls :meth:`Servers.poll`; no
grader waits along. The life of a question::

    ask -> (equal to an answered one: its answer)
        -> queued -> sent with others -> answered -> its score
             ^           |
             |           +-> refused, late, nonsense -> waits (back-off) --+--> given up after `retries`
             +-------------------------------------------------------------+

A deadline counts from the sending of a request, not from the question's arrival, so that a burst that has
to wait doesn't time out. At the deadline the connection is shut down, whatever it is doing. If a
server refuses a batch (a text that is too long for it), and at the last attempt, each question goes alone,
so that one bad text costs its batch nothing.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import queue
import random
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import TandemError
from ..common.records import Verdict
from .components.asking import Asking, Question
from .exchange import Exchange, ExchangeError
from .graders.verdicts import Recent

logger = logging.getLogger("tandem.reward")

FIRST_PAUSE = 0.5
"""Seconds before the second attempt; each further pause is twice as long."""
LONGEST_PAUSE = 30.0
"""Greatest pause in seconds, also if a server asks for more (Retry-After)."""
KEPT_ANSWERS = 1 << 16
"""Answers that are kept for equal questions."""
TOLD = 100
"""Different failures that the log shows."""
SILENT_SECONDS = 60.0
"""Time without any answer after which a person should look."""
ALARM_SHARE = 0.05
"""Share of the last minute's questions that may fail before a person should look."""
ENOUGH = 20
"""Questions below which a share says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What became of a question."""

    score: float | None
    """None if there is no answer."""
    failure: str
    """Why there is none, in one line."""
    seconds: float
    """From asking to the end."""


Done = Callable[[Answered], None]


@dataclass(slots=True, eq=False)
class _Asked:
    question: Question
    key: bytes
    done: list[Done]
    arrived: float
    attempts: int = 0
    alone: bool = False


@dataclass(slots=True, eq=False)
class _Attempt:
    """One request under way."""

    exchange: Exchange
    asked: list[_Asked]
    due: float
    over: bool = False
    """Whether nobody waits for its answer any more."""


@dataclass(slots=True)
class _Result:
    attempt: _Attempt
    scores: list[float] | None
    error: ExchangeError | None = None


class Server:
    """The questions of one component to its server. Not thread-safe: it has one owner.

    Args:
        name: the component's name.
        asking: whom to ask, and how.
        counts: counters, which several components may share.
        wake: called from other threads when :meth:`poll` has something to do.
    """

    def __init__(
        self, name: str, asking: Asking, counts: Counter[str], wake: Callable[[], None]
    ) -> None:
        self.name = name
        self.asking = asking
        self._counts = counts
        self._wake = wake
        self._address = asking.address.at(asking.api.path)
        self._queue: deque[_Asked] = deque()
        self._later: list[tuple[float, int, _Asked]] = []
        self._number = 0
        self._open: dict[bytes, _Asked] = {}
        self._kept: OrderedDict[bytes, float] = OrderedDict()
        self._attempts: list[_Attempt] = []
        self._tasks: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._results: deque[_Result] = deque()
        self._threads = 0
        self._busy = 0
        self._recent = Recent()
        self._failing_since: float | None = None
        self._failed_since = 0
        self._last = ""
        self._told: set[str] = set()

    @property
    def longest(self) -> float:
        """Seconds that a question may take once it is sent."""
        tries = self.asking.retries + 1
        return tries * self.asking.seconds + sum(_pause(n) for n in range(1, tries))

    @property
    def in_flight(self) -> int:
        """Questions without an outcome."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Questions that wait to be sent."""
        return len(self._queue) + len(self._later)

    @property
    def recent(self) -> Recent:
        """How the last minute's questions ended."""
        return self._recent

    def ask(self, question: Question, done: Done) -> None:
        """Asks one question; ``done`` is called at once for a known answer, or from :meth:`poll`."""
        key = hashlib.blake2b(json.dumps(question).encode(), digest_size=16).digest()
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._counts["judge_cached"] += 1
            done(Answered(score=kept, failure="", seconds=0.0))
            return
        if (known := self._open.get(key)) is not None:
            self._counts["judge_cached"] += 1
            known.done.append(done)
            return
        asked = _Asked(question, key, [done], time.monotonic())
        self._open[key] = asked
        self._queue.append(asked)
        # It is sent by the next poll, together with those that are asked until then.
        self._wake()

    def next_deadline(self) -> float | None:
        """The ``time.monotonic`` at which :meth:`poll` has something to do without a wake-up."""
        due = [attempt.due for attempt in self._attempts]
        if self._later:
            due.append(self._later[0][0])
        return min(due, default=None)

    def poll(self, now: float) -> None:
        """Takes results, ends what is late, and sends what is due."""
        while self._results:
            result = self._results.popleft()
            self._busy -= 1
            if result.attempt.over:
                continue
            self._end(result.attempt)
            if result.scores is not None:
                self._answered(result.attempt, result.scores, now)
            else:
                assert result.error is not None
                self._failed(result.attempt, result.error, now)
        for attempt in [one for one in self._attempts if now >= one.due]:
            attempt.exchange.abort()
            self._end(attempt)
            late = ExchangeError(f"no complete answer within {self.asking.seconds:g} s")
            self._failed(attempt, late, now)
        while self._later and self._later[0][0] <= now:
            self._queue.append(heapq.heappop(self._later)[2])
        self._send(now)

    def trouble(self, now: float) -> str:
        """What a person should look at, in one line; empty if nothing is wrong."""
        self._recent.forget()
        where = f"the {self.name} at {self.asking.address.url}"
        since = self._failing_since
        # Without a failure in the last minute or a question that is as old, it only wasn't asked.
        waits = any(now - asked.arrived >= SILENT_SECONDS for asked in self._open.values())
        if since is not None and now - since >= SILENT_SECONDS and (waits or len(self._recent)):
            return (
                f"{where} has answered nothing for {now - since:.0f} s ({self._failed_since:,} "
                f"questions failed, the last: {self._last}), and their samples leave the baseline: "
                f"start it again, or stop the run, name another params.url, and start the run "
                f"again: it resumes"
            )
        share = self._recent.share(Verdict.JUDGE_FAILED)
        if len(self._recent) >= ENOUGH and share > ALARM_SHARE:
            return (
                f"{share:.0%} of the last minute's questions to {where} failed (the last: "
                f"{self._last}), and their samples leave the baseline"
            )
        return ""

    def close(self) -> None:
        """Ends what is under way; nothing more is answered."""
        for attempt in self._attempts:
            attempt.over = True
            attempt.exchange.abort()
        for _ in range(self._threads):
            self._tasks.put(None)

    # --- the owner's side ----------------------------------------------------------------------

    def _end(self, attempt: _Attempt) -> None:
        attempt.over = True
        self._attempts.remove(attempt)

    def _answered(self, attempt: _Attempt, scores: Sequence[float], now: float) -> None:
        self._failing_since, self._failed_since = None, 0
        for asked, score in zip(attempt.asked, scores, strict=True):
            self._kept[asked.key] = score
            if len(self._kept) > KEPT_ANSWERS:
                self._kept.popitem(last=False)
            self._recent.add(None)
            self._finish(asked, Answered(score=score, failure="", seconds=now - asked.arrived))

    def _failed(self, attempt: _Attempt, error: ExchangeError, now: float) -> None:
        if self._failing_since is None:
            self._failing_since = now
        self._last = str(error)
        if len(attempt.asked) > 1 and not error.again:
            for asked in attempt.asked:
                asked.alone = True
            self._queue.extend(attempt.asked)
            return
        for asked in attempt.asked:
            asked.attempts += 1
            if error.again and asked.attempts <= self.asking.retries:
                self._counts["judge_retries"] += 1
                asked.alone = asked.attempts == self.asking.retries
                # Not all at once: what failed together would come back together.
                share = random.uniform(0.0, 0.25)
                pause = _pause(asked.attempts)
                asked_for = min(LONGEST_PAUSE, error.after + share * pause)
                due = now + max(pause * (1.0 - share), asked_for)
                self._number += 1
                heapq.heappush(self._later, (due, self._number, asked))
                continue
            self._give_up(asked, error, now)

    def _give_up(self, asked: _Asked, error: ExchangeError, now: float) -> None:
        self._counts["judge_failures"] += 1
        self._failed_since += 1
        self._recent.add(Verdict.JUDGE_FAILED)
        failure = str(error)
        if failure not in self._told and len(self._told) < TOLD:
            self._told.add(failure)
            logger.warning(
                f"reward component {self.name}: {self.asking.address.url}: {failure} "
                f"(given up after {asked.attempts} attempt(s); the sample leaves the baseline)"
            )
        self._finish(asked, Answered(score=None, failure=failure, seconds=now - asked.arrived))

    def _finish(self, asked: _Asked, answered: Answered) -> None:
        del self._open[asked.key]
        self._counts["judge_asked"] += 1
        self._counts["judge_seconds"] += answered.seconds  # type: ignore[assignment]
        for done in asked.done:
            done(answered)

    def _send(self, now: float) -> None:
        while self._queue and self._busy < self.asking.parallel:
            batch = [self._queue.popleft()]
            while (
                self._queue
                and len(batch) < self.asking.batch
                and not (batch[0].alone or self._queue[0].alone)
            ):
                batch.append(self._queue.popleft())
            body = self.asking.request([asked.question for asked in batch])
            exchange = Exchange(address=self._address, body=body, seconds=self.asking.seconds)
            attempt = _Attempt(exchange, batch, now + self.asking.seconds)
            self._attempts.append(attempt)
            self._busy += 1
            if self._busy > self._threads:
                self._threads += 1
                name = f"{self.name}-{self._threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._tasks.put(attempt)

    # --- the threads' side ---------------------------------------------------------------------

    def _work(self) -> None:
        while (attempt := self._tasks.get()) is not None:
            self._results.append(self._result(attempt))
            self._wake()

    def _result(self, attempt: _Attempt) -> _Result:
        try:
            answer = attempt.exchange.run()
            return _Result(attempt, self.asking.read(answer, len(attempt.asked)))
        except ExchangeError as error:
            return _Result(attempt, None, error)
        except TandemError as error:
            return _Result(attempt, None, ExchangeError(str(error), again=False))
        except Exception as error:
            # The question must end, whatever went wrong, and its thread must go on.
            logger.exception(f"reward component {self.name}")
            return _Result(attempt, None, ExchangeError(f"{type(error).__name__}: {error}"))


def _pause(attempts: int) -> float:
    """Seconds after so many failed attempts."""
    return float(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempts - 1)))


@dataclass(slots=True)
class Servers:
    """All servers that the components of one reward ask, behind one descriptor."""

    counts: Counter[str]
    """Counters of questions, failures, retries and seconds."""
    asked: dict[str, Server] = field(default_factory=dict)
    """By component."""
    _ends: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def __post_init__(self) -> None:
        for end in self._ends:
            end.setblocking(False)

    def add(self, name: str, asking: Asking) -> None:
        """Adds a component."""
        self.asked[name] = Server(name, asking, self.counts, self._wake)

    def _wake(self) -> None:
        try:
            self._ends[1].send(b"x")
        except OSError:
            pass  # Enough wake-ups are waiting already, or nobody listens any more.

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`poll` has something to do (deadlines aside)."""
        return self._ends[0].fileno()

    def next_deadline(self) -> float | None:
        """The ``time.monotonic`` at which :meth:`poll` must be called even without an event."""
        due = [d for server in self.asked.values() if (d := server.next_deadline()) is not None]
        return min(due, default=None)

    def poll(self) -> None:
        """Handles what has happened since the last call."""
        try:
            while len(self._ends[0].recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass
        now = time.monotonic()
        for server in self.asked.values():
            server.poll(now)

    @property
    def in_flight(self) -> int:
        """Questions without an outcome."""
        return sum(server.in_flight for server in self.asked.values())

    @property
    def ended(self) -> int:
        """Attempts and questions that have ended since the start."""
        return int(self.counts["judge_asked"] + self.counts["judge_retries"])

    @property
    def longest(self) -> float:
        """Seconds that the slowest legitimate question may take."""
        return max((server.longest for server in self.asked.values()), default=0.0)

    def check_keys(self) -> None:
        """Looks whether all keys are there.

        Raises:
            ConfigError: one is missing.
        """
        for server in self.asked.values():
            server.asking.address.headers()

    def trouble(self) -> str:
        """What a person should look at, in one line; empty if nothing is wrong."""
        now = time.monotonic()
        return "; ".join(t for server in self.asked.values() if (t := server.trouble(now)))

    def stats(self) -> dict[str, Any]:
        """Figures of all servers together; empty if no component asks one."""
        if not self.asked:
            return {}
        names = ("judge_asked", "judge_cached", "judge_failures", "judge_retries", "judge_seconds")
        recents = [server.recent for server in self.asked.values()]
        return {
            **{name: self.counts[name] for name in names},
            "judge_waiting": sum(server.waiting for server in self.asked.values()),
            "judge_in_flight": self.in_flight,
            "judge_share": max(recent.share(Verdict.JUDGE_FAILED) for recent in recents),
        }

    def close(self) -> None:
        """Ends everything that is under way."""
        for server in self.asked.values():
            server.close()
        for end in self._ends:
            end.close()
