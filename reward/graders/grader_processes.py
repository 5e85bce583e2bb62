"""Grader processes seen from the dispatcher: dispatch, deadlines, deaths and replacements.

This is one single-threaded state machine without a thread of its own. Its one descriptor
(:meth:`GraderProcesses.fileno`) goes into the owner's poller; :meth:`GraderProcesses.poll` then
does what is due. The life of a slot::

    starting -> idle <-> busy -> (dead: replaced by a new slot)

A request's deadline counts from its dispatch to a grader, not from its arrival, so that a burst of
requests that have to wait doesn't time out. A grader past its deadline
(:mod:`tandem.reward.graders.deadlines` has the rule) is killed; its request is ``timeout`` at once, and
the others go on. A request whose grader died is tried once more, then it is ``crashed``. While slow
requests hold graders and others wait, up to half as many extra graders stand in; they end when they
are no longer needed.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...common.cores import usable_cores
from ...common.errors import ConfigError, TandemError, WireError
from ...common.records import Verdict
from .deadlines import LONGEST, LOOK_AGAIN, SLOW, InLine, fair_share, is_over, relief
from .pipes import (
    Crash,
    Done,
    Exited,
    Failed,
    Idle,
    Raised,
    Ready,
    Refused,
    Spawned,
    checked_result,
)
from .requests import Outcome, Request, Restart, Slot
from .zygote import EXIT_CRASH, EXIT_MEMORY
from .zygote_link import ZygoteLink

logger = logging.getLogger("tandem.reward")

RECYCLE_AFTER = 5_000
"""Requests after which a grader is replaced (sympy's caches only grow)."""
RECYCLE_SHARE = 0.5
"""Share of the memory limit; a grader that ever used this much is replaced."""
START_SECONDS = 60.0
"""How long the zygote may take to import math-verify."""
TELL_SECONDS = 60.0
"""Least time between two warnings of starved graders."""
MOST_TOLD = 100
"""Number of different errors of functions that are logged."""
MAX_FAILED_STARTS = 3
"""Number of zygotes that may die in a row before they grade anything; then the pool gives up."""


class GraderProcesses:
    """``count`` graders behind one warm zygote. Not thread-safe: it has one owner.

    Args:
        count: number of graders.
        deadline: seconds for a request that has no deadline of its own.
        memory_mb: address-space limit of a grader, MiB.
        on_restart: called with every :class:`Restart`.
        functions: import paths of the user's own functions, which the zygote imports.
        sandbox: if set, the processes are runners of code in a sandbox of that kind (``auto``, …).

    Raises:
        TandemError: from :meth:`poll`, if graders can't be started at all.
    """

    def __init__(
        self,
        count: int,
        *,
        deadline: float,
        memory_mb: int,
        on_restart: Callable[[Restart], None] | None = None,
        functions: Sequence[str] = (),
        sandbox: str | None = None,
    ) -> None:
        self.count = count
        self.deadline = deadline
        self.memory_mb = memory_mb
        self.limits: list[str] = []
        """What the kernel grants in addition to rlimits: no network, no new privileges."""
        self._on_restart = on_restart
        self._functions = list(functions)
        self._sandbox = sandbox
        self._role = "grader" if sandbox is None else "runner"
        self._selector = selectors.EpollSelector()
        self._queue: deque[Request] = deque()
        self._slots: dict[int, Slot] = {}
        self._dying: set[int] = set()
        self._next_slot = 0
        self._zygote: ZygoteLink | None = None
        self._ready = False
        self._failed_starts = 0
        self._failed_graders = 0
        self._failure = ""
        self._lacks_parser = False
        # Every sandbox may use up its own memory, so there are never more than requested.
        self._relief = relief(count) if sandbox is None else 0
        self._cores = usable_cores()
        self._warned_starved = -math.inf
        self._told: set[str] = set()

    # --- what the owner calls ----------------------------------------------------------------

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`poll` has something to do (deadlines aside)."""
        return self._selector.fileno()

    @property
    def in_flight(self) -> int:
        """Number of requests that have no outcome yet."""
        return len(self._queue) + sum(s.request is not None for s in self._slots.values())

    @property
    def queued(self) -> int:
        """Number of requests that wait for a grader."""
        return len(self._queue)

    def pids(self) -> list[int]:
        """Process ids of the live graders."""
        return [s.pid for s in self._slots.values() if s.pid and s.state in ("idle", "busy")]

    @property
    def _zygote_role(self) -> str:
        return "zygote" if self._sandbox is None else "runner zygote"

    @property
    def zygote_pid(self) -> int | None:
        """Process id of the zygote; None while it isn't running."""
        return self._zygote.pid if self._zygote is not None else None

    def start(self) -> None:
        """Starts the zygote, if it isn't running; returns at once."""
        if self._zygote is None:
            self._start_zygote()

    def submit(
        self,
        kind: str,
        payload: list[Any],
        done: Callable[[Outcome], None],
        *,
        deadline: float | None = None,
    ) -> None:
        """Queues one request; ``done`` is called from a later :meth:`poll`.

        Args:
            kind: ``compare``, ``function`` or ``code``.
            payload: plain data for the zygote's handler of that kind.
            done: gets the outcome.
            deadline: seconds from dispatch; None = the graders' own.
        """
        self.start()
        if deadline is None:
            deadline = self.deadline
        self._queue.append(Request(kind, payload, deadline, done, time.monotonic()))
        self._dispatch()

    def next_deadline(self) -> float | None:
        """The ``time.monotonic`` at which :meth:`poll` must be called even without an event."""
        busy = [s.request for s in self._slots.values() if s.request and s.state == "busy"]
        times = [request.due for request in busy]
        if self._queue and self._relief:
            now = time.monotonic()
            times += [at for r in busy if (at := r.dispatched + SLOW * r.deadline) > now]
        if self._zygote is not None and not self._ready:
            times.append(self._zygote.started + START_SECONDS)
        return min(times, default=None)

    def poll(self, timeout: float = 0.0) -> None:
        """Waits up to ``timeout`` seconds for events, and does everything that is due."""
        due = self.next_deadline()
        if due is not None:
            timeout = min(timeout, max(0.0, due - time.monotonic()))
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._hear_zygote()
            else:
                self._hear_grader(key.data)
        # Deadlines come after replies: a reply that arrived while nobody looked is not a timeout.
        self._enforce()
        self._dispatch()
        self._fill()
        self._thin()

    def close(self) -> None:
        """Ends graders and zygote, and reaps the zygote."""
        for slot in list(self._slots.values()):
            self._forget(slot)
        self._stop_zygote()
        self._selector.close()

    # --- the zygote --------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        self._zygote = ZygoteLink(
            {
                "memory_mb": self.memory_mb,
                "parent": os.getpid(),
                "functions": self._functions,
                "sandbox": self._sandbox,
            }
        )
        self._ready = False
        self._selector.register(self._zygote, selectors.EVENT_READ, None)

    def _stop_zygote(self) -> int:
        """Ends the zygote; returns its exit status, 0 if there was none."""
        zygote, self._zygote = self._zygote, None
        self._ready = False
        if zygote is None:
            return 0
        self._selector.unregister(zygote)
        return zygote.close()

    def _hear_zygote(self) -> None:
        if self._zygote is None:
            return
        heard, alive = self._zygote.hear()
        for message in heard:
            match message:
                case Refused():
                    self._stop_zygote()
                    raise ConfigError(message.why)
                case Ready():
                    self._ready = True
                    self.limits = list(message.limits)
                    self._fill()
                case Spawned():
                    slot = self._slots.get(message.slot)
                    if slot is not None:
                        slot.pid, slot.in_line = message.pid, InLine(message.pid)
                case Exited():
                    self._grader_exited(message.slot, message.pid, message.status)
                case Failed():
                    self._failure = message.why
                    self._lacks_parser = "math_verify" in message.why or "sympy" in message.why
        if not alive:
            self._zygote_died()

    def _zygote_died(self) -> None:
        assert self._zygote is not None
        pid, code = self._zygote.pid, self._stop_zygote()
        if self._lacks_parser:
            raise TandemError(
                f"graders can't start: {self._failure}: install math-verify with "
                f"`pip install 'tandem-rl[reward]'`"
            )
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise TandemError(
                f"graders can't start: the zygote ended {self._failed_starts} times in a row "
                f"(last exit status {code}) {self._failure}"
            )
        self._count(self._zygote_role, pid, _how_it_ended(code))
        self._dying.clear()
        for slot in list(self._slots.values()):
            request = slot.request
            self._forget(slot)
            if request is not None:
                self._again(request)
        # Whoever got an outcome may have asked more, which has started it.
        self.start()

    # --- graders -----------------------------------------------------------------------------

    def _wanted(self) -> int:
        """How many graders there may be: one more for each that a slow request holds, up to the relief."""
        now = time.monotonic()
        slow = sum(s.is_slow(now) for s in self._slots.values())
        return self.count + min(self._relief, slow)

    def _thin(self) -> None:
        """Ends idle graders that stood in for others; a grader ends itself when its socket closes."""
        surplus = len(self._slots) - self.count
        if surplus > 0 and not self._queue and (surplus := len(self._slots) - self._wanted()) > 0:
            idle = [slot for slot in self._slots.values() if slot.state in ("idle", "starting")]
            for slot in idle[-surplus:]:
                self._forget(slot)
                self._dying.add(slot.number)

    def _fill(self) -> None:
        """Starts graders until there are as many as there should be."""
        wanted = self._wanted() if self._queue else self.count
        while self._ready and self._zygote is not None and len(self._slots) < wanted:
            channel = self._zygote.spawn(self._next_slot)
            if channel is None:
                return
            slot = Slot(self._next_slot, channel)
            self._next_slot += 1
            self._slots[slot.number] = slot
            self._selector.register(channel, selectors.EVENT_READ, slot)

    def _dispatch(self) -> None:
        if not self._queue:
            return
        for slot in list(self._slots.values()):
            if not self._queue:
                return
            if slot.state != "idle":
                continue
            request = self._queue.popleft()
            request.dispatched = time.monotonic()
            request.due = request.dispatched + request.deadline
            slot.state, slot.request = "busy", request
            slot.stood = slot.in_line.seconds() if slot.in_line is not None else 0.0
            try:
                request.send(slot.channel)
            except (BrokenPipeError, ConnectionResetError, BlockingIOError):
                # It has died since we last looked; its closed socket will show it, and the request is kept.
                logger.debug("grader %d was gone at dispatch", slot.pid)

    def _hear_grader(self, slot: Slot) -> None:
        if self._slots.get(slot.number) is not slot:
            return
        try:
            reply = slot.hear()
            if reply is None:
                return
            result = None
            if isinstance(reply, Done) and slot.request is not None:
                result = checked_result(slot.request.kind, slot.request.payload, reply.result)
        except EOFError:
            # The zygote reports how it ended; until then the slot keeps its request.
            self._selector.unregister(slot.channel)
            slot.state = "gone"
            slot.since = time.monotonic()
            return
        except WireError as error:
            logger.warning("grader %d is replaced: %s", slot.pid, error)
            request = slot.request
            self._replace(slot, "garbled")
            if request is not None:
                request.reason = str(error)
                self._again(request)
            return
        if isinstance(reply, Idle):
            slot.state, slot.was_ready, slot.resident_kib = "idle", True, reply.resident_kib
            return
        if isinstance(reply, Crash):
            slot.last_words = reply.traceback
            return
        request, slot.request = slot.request, None
        slot.served += 1
        self._failed_starts = self._failed_graders = 0
        grown = (reply.resident_kib - slot.resident_kib) * 1024
        slot.state = "idle"
        if slot.served >= RECYCLE_AFTER or grown > RECYCLE_SHARE * (self.memory_mb << 20):
            self._replace(slot, "recycled")
        if request is None:
            return
        if isinstance(reply, Raised):
            request.reason = _last_line(reply.traceback)
            # A function that is broken raises for every text, and its traceback says at which line.
            if reply.traceback not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(reply.traceback)
                logger.warning(f"{self._role} {slot.pid}: a request raised:\n{reply.traceback}")
            self._again(request)
        else:
            request.finish(None, result)

    def _grader_exited(self, number: int, pid: int, status: int) -> None:
        if number in self._dying:
            self._dying.discard(number)
            return
        slot = self._slots.get(number)
        if slot is None:
            return
        if slot.state not in ("gone", "starting") and slot.request is not None:
            # Its reply may still be unread in the socket.
            self._hear_grader(slot)
        request = slot.request
        self._forget(slot)
        reason = "memory" if status == EXIT_MEMORY else _how_it_ended(status)
        if status == EXIT_CRASH:
            reason = f"crashed: {_last_line(slot.last_words)}"
            logger.warning("%s %d crashed:\n%s", self._role, pid, slot.last_words)
        self._count(self._role, pid, reason)
        if not slot.was_ready:
            self._failed_graders += 1
            if self._failed_graders >= MAX_FAILED_STARTS * self.count:
                more = f"raise reward.memory_mb={self.memory_mb}"
                other = reason.startswith("crashed") and "MemoryError" not in reason
                raise TandemError(
                    f"graders can't start: {self._failed_graders} died in a row before their first request "
                    f"(last: {reason}); {'its traceback is in the log' if other else more}"
                )
        if request is not None:
            request.reason = reason
            if status == EXIT_MEMORY:
                request.finish(Verdict.MEMORY)
            elif status == -signal.SIGXCPU:
                request.finish(Verdict.TIMEOUT)
            else:
                self._again(request)
        self._fill()

    def _enforce(self) -> None:
        now = time.monotonic()
        for slot in list(self._slots.values()):
            request = slot.request
            if slot.state == "busy" and request is not None and now >= request.due:
                self._judge(slot, request, now)
            elif slot.state == "starting" and now - slot.since > START_SECONDS:
                self._replace(slot, "never ready")
        zygote = self._zygote
        if zygote is not None and not self._ready and now - zygote.started > START_SECONDS:
            self._failure = (
                f"since it still imported after {START_SECONDS:g} s "
                f"({', '.join(['math-verify', *self._functions])}): let the modules of your functions "
                f"do less when they are imported, or start fewer processes beside the pool"
            )
            zygote.kill()

    def _judge(self, slot: Slot, request: Request, now: float) -> None:
        """Ends a request at its deadline, or checks again when its grader may have had its time."""
        # Its reply may be unread in the socket, because whoever polls was held up.
        self._hear_grader(slot)
        if slot.request is not request or slot.state != "busy":
            return
        elapsed, deadline = now - request.dispatched, request.deadline
        if slot.parts and elapsed < LONGEST * deadline:
            # Most of its reply may have waited for whoever polls.
            request.due = now + LOOK_AGAIN
            return
        waited = slot.in_line.seconds() - slot.stood if slot.in_line is not None else 0.0
        busy = sum(other.state == "busy" for other in self._slots.values())
        fair = fair_share(busy, self._cores)
        if is_over(elapsed=elapsed, waited=waited, deadline=deadline, fair=fair):
            self._replace(slot, "deadline")
            request.finish(Verdict.TIMEOUT)
            return
        self._starved(slot, elapsed, waited)
        request.due = now + LOOK_AGAIN

    def _starved(self, slot: Slot, elapsed: float, waited: float) -> None:
        """Warns of starved graders, once a minute."""
        now = time.monotonic()
        if now - self._warned_starved < TELL_SECONDS:
            return
        self._warned_starved = now
        logger.warning(
            f"{self._role} {slot.pid} had {1 - waited / elapsed:.0%} of a core in the "
            f"{elapsed:.1f} s of its deadline, which is put off: other processes have the machine; "
            f"run fewer of them beside the pool, or give the pool a machine of its own"
        )

    def _replace(self, slot: Slot, reason: str) -> None:
        """Kills a grader; the new one starts before the zygote has reaped it."""
        self._forget(slot)
        self._dying.add(slot.number)
        self._count(self._role, slot.pid, reason)
        if self._zygote is not None:
            self._zygote.end(slot.number)
        self._fill()

    def _forget(self, slot: Slot) -> None:
        self._slots.pop(slot.number, None)
        if slot.channel.fileno() >= 0:
            if slot.state != "gone":
                self._selector.unregister(slot.channel)
            slot.channel.close()
        if slot.in_line is not None:
            slot.in_line.close()

    def _again(self, request: Request) -> None:
        request.attempts += 1
        if request.attempts > 1:
            request.finish(Verdict.CRASHED)
        else:
            self._queue.appendleft(request)

    def _count(self, kind: str, pid: int, reason: str) -> None:
        restart = Restart(kind=kind, pid=pid, time=time.time(), reason=reason)
        if reason != "recycled":
            logger.info("%s %d is gone (%s) and is replaced", kind, pid, reason)
        if self._on_restart is not None:
            self._on_restart(restart)


def _last_line(traceback: str) -> str:
    return traceback.strip().rpartition("\n")[2][:200]


def _how_it_ended(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
