"""The reward pool: takes groups over ZeroMQ, grades them, commits them, and answers.

One thread and one loop over three things to hear: the ROUTER, the graders' descriptor and
signals. A slow answer holds up its own group only: groups are answered in the order in which
they are done, and every commit of a turn goes to Redis in one batch. Nothing that a worker sent
is lost here: it keeps a group until the ledger's receipt for it, and sends again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket as sockets_of_the_system
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import zmq

from ..common import disk, wire
from ..common.config import Config
from ..common.errors import StoreError, WireError
from ..common.memory import keep_freed
from ..common.records import Group, GroupReceipt, GroupSubmission
from ..common.run_folder import JoinInfo, RunFolder
from ..common.sockets import (
    Authenticator,
    bind_router,
    is_loopback,
    new_keys,
    own_address,
    reachable,
)
from ..common.telemetry import Clock
from ..common.waiting import Wait
from ..replay.connection import Store, connect
from ..replay.ledger import Ledger
from ..replay.members import Members
from ..replay.store import RunStore
from .alarm import alarm
from .graders.requests import Restart
from .grading import Grader

logger = logging.getLogger("tandem.reward")

BEAT_SECONDS = 1.0
"""Between heartbeats, which carry the statistics."""
MESSAGES_PER_TURN = 64
"""Submissions read before what is graded is committed."""
GROUPS_IN_FLIGHT = 1_024
"""Groups being graded, beyond which no more are read: they wait at their senders."""
KEPT_BYTES = 256 << 20
"""Memory that is kept for later groups."""
LINGER_MS = 2_000
"""Time for the last receipts to leave when the pool does."""
READ_SECONDS = 0.3
"""Time that workers have to read their last receipts: a DEALER drops what it hasn't read of a connection that closes
(``ZMQ_IMMEDIATE``), and its worker would wait for them until it asks again."""
ALARM_SECONDS = 60.0
"""Between two warnings of an alarm that goes on."""

Sender = tuple[list[bytes], int]
"""(routing frames, request id) of whom to answer."""


@dataclass(slots=True)
class _Work:
    """One group in the pool's hands and all who wait for it (a worker may send twice)."""

    arrived: float
    senders: list[Sender] = field(default_factory=list)


class Pool:
    """The loop; :func:`main` gives it its connections."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        grader: Grader,
        ledger: Ledger,
        *,
        beat: Callable[[dict[str, object]], None],
        drain_seconds: float,
    ) -> None:
        self._router = router
        self._grader = grader
        self._ledger = ledger
        self._beat = beat
        self._drain_seconds = drain_seconds
        self._work: dict[tuple[str, int, str], _Work] = {}
        self._done: deque[tuple[tuple[str, int, str], Group]] = deque()
        self._counts: Counter[str] = Counter()
        self._clock = Clock()
        self._seconds = 0.0
        self._drain: Wait | None = None
        self._alarmed = -ALARM_SECONDS
        self._answered = -READ_SECONDS

    def stop(self) -> None:
        """Accept nothing more, finish what is in flight, end."""
        if self._drain is None:
            self._drain = Wait("graders", "end", self._drain_seconds)

    def run(self, wake: int) -> None:
        """Serves until :meth:`stop`; ``wake`` is a descriptor that signals make readable."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._grader.fileno(), zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        listening = True
        next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                with self._clock.doing("report"):
                    self._beat(self._stats())
            full = len(self._work) >= GROUPS_IN_FLIGHT
            if listening and (self._drain or full):
                poller.unregister(self._router)
                listening = False
            elif not listening and not self._drain and not full:
                poller.register(self._router, zmq.POLLIN)
                listening = True
            if self._drain:
                if not self._work:
                    time.sleep(max(0.0, self._answered + READ_SECONDS - now))
                    return
                self._drain.what = f"finish {len(self._work)} groups"
                if self._drain.expired(logger.warning):
                    logger.warning(
                        f"leaving with {len(self._work)} groups ungraded after "
                        f"{self._drain_seconds:.0f} s: their workers send them again"
                    )
                    return
            due = self._grader.next_deadline()
            until = next_beat if due is None else min(next_beat, due)
            with self._clock.doing("wait/groups" if not self._work else "wait/graders"):
                events = dict(poller.poll(int(max(0.0, until - now) * 1000) + 1))
            if wake in events:
                os.read(wake, 4096)
            if self._router in events and not self._drain:
                with self._clock.doing("grade"):
                    self._receive()
            if self._grader.fileno() in events or (due is not None and time.monotonic() >= due):
                with self._clock.doing("grade"):
                    self._grader.pump()
            if self._done:
                with self._clock.doing("commit"):
                    self._commit()

    def _receive(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            route, data = [frame.bytes for frame in frames[:-1]], frames[-1].buffer
            try:
                submission = wire.decode(data, GroupSubmission)
                group = submission.group
                # A group that the ledger can't have leased would spoil its whole batch.
                self._ledger.order.serial(group.group_id)
            except (WireError, StoreError, ValueError) as error:
                self._counts["refused"] += 1
                logger.warning(f"a submission of {len(data):,} bytes from {_who(route)}: {error}")
                continue
            self._counts["received"] += 1
            key = (group.group_id, group.attempt, group.worker)
            work = self._work.get(key)
            if work is not None:
                # Sent again while we grade it: one grading and one commit answer both.
                work.senders.append((route, submission.request_id))
                continue
            self._work[key] = _Work(time.monotonic(), [(route, submission.request_id)])
            self._grader.begin_group(
                group,
                lambda graded, key=key: self._done.append((key, graded)),  # type: ignore[misc]
            )

    def _commit(self) -> None:
        batch = list(self._done)
        self._done.clear()
        receipts = self._ledger.commit_many([group for _, group in batch])
        now = self._answered = time.monotonic()
        for (key, group), receipt in zip(batch, receipts, strict=True):
            work = self._work.pop(key)
            self._counts[receipt.result.value] += 1
            self._counts["groups"] += 1
            self._counts["samples"] += len(group.samples)
            self._seconds += now - work.arrived
            for route, request_id in work.senders:
                answer = GroupReceipt(
                    request_id=request_id,
                    group_id=group.group_id,
                    attempt=group.attempt,
                    result=receipt.result,
                    detail=receipt.detail,
                )
                try:
                    self._router.send_multipart([*route, wire.encode(answer)], zmq.NOBLOCK)
                except zmq.Again:
                    logger.warning(f"{_who(route)} doesn't take its receipts; it will ask again")

    def _stats(self) -> dict[str, object]:
        graded = self._grader.stats()
        warning = alarm(graded, self._grader.last_error, self._grader.servers_trouble)
        now = time.monotonic()
        if warning and now - self._alarmed > ALARM_SECONDS:
            self._alarmed = now
            logger.warning(warning)
        return {
            **{f"pool/{name}": count for name, count in self._counts.items()},
            **{f"grader/{name}": value for name, value in graded.items()},
            "alarm": warning,
            "pool/in_hand": len(self._work),
            "pool/group_seconds": self._seconds,
            "clock": self._clock.take(),
        }


def _who(route: list[bytes]) -> str:
    return route[0].decode("utf-8", "replace")[:80] if route else "nobody"


def load(config: Config) -> None:
    """Loads nothing more: this module has imported what :func:`main` needs."""


def main(join: JoinInfo, config: Config, *, name: str, folder: RunFolder | None) -> int:
    """Runs one reward pool until SIGTERM, or until the run has ended.

    Args:
        join: the run.
        config: as Redis has it.
        name: member id.
        folder: unused; a pool needs nothing of the run's folder.

    Returns:
        0 after a drain.

    Raises:
        TandemError: the canary failed, graders can't start, or Redis is gone.
    """
    del folder
    keep_freed(KEPT_BYTES)
    with Grader(config.reward) as grader:
        # Importing math-verify takes a second of its process; meanwhile we connect.
        grader.warm()
        store = connect(join, name=name)
        try:
            _serve(join, config, store, grader, name)
        finally:
            store.close()
    return 0


def _serve(join: JoinInfo, config: Config, store: Store, grader: Grader, name: str) -> None:
    run, members = RunStore(store), Members(store)
    ledger = Ledger(store, name)
    client = run.curve_client()
    grader.canary()
    logger.info(
        f"canary passed with {config.reward.graders} graders ({', '.join(grader.limits) or 'rlimits only'})"
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = Authenticator(context, client.public)
    keys = new_keys()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    own = own_address(config.launch.bind, config.facing(join.host))
    router, bound = bind_router(context, own, keys, config.launch.port_range)
    router.setsockopt(zmq.LINGER, LINGER_MS)
    host = sockets_of_the_system.gethostname()
    restarts: list[Restart] = []
    grader.on_restart = restarts.append
    ended = 0

    def beat(stats: dict[str, object]) -> None:
        nonlocal ended
        members.beat(name, {"in_hand": stats["pool/in_hand"]})
        run.report(
            name,
            {"role": "reward", "pid": os.getpid(), "host": host, "time": time.time(), **stats},
        )
        while restarts:
            restart = restarts.pop(0)
            run.count_restart(name, f"{restart.kind} {restart.pid}: {restart.reason}")
        # A pool that was started by hand has no supervisor to tell it.
        ended = ended + 1 if run.state() in ("finished", "failed") else 0
        if ended > 2:
            pool.stop()

    pool = Pool(
        # Half of the run's time, so that what is left can still be told to the workers.
        router,
        grader,
        ledger,
        beat=beat,
        drain_seconds=config.launch.drain_seconds / 2,
    )

    def on_term(number: int, frame: FrameType | None) -> None:
        disk.stop_waiting()
        pool.stop()

    before = signal.signal(signal.SIGTERM, on_term)
    before_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    try:
        endpoint = reachable(bound, join.host, join.port)
        members.register(
            "reward",
            name,
            {
                "endpoint": endpoint,
                "public_key": keys.public,
                "pid": os.getpid(),
                "host": host,
                "grader": grader.name,
            },
        )
        if not is_loopback(config.launch.bind):
            logger.info(f"bound beyond loopback at {endpoint}, with CURVE keys")
        pool.run(wake_read)
        members.leave(name)
    finally:
        signal.set_wakeup_fd(before_wake)
        signal.signal(signal.SIGTERM, before)
        authenticator.stop()
        router.close()
        context.term()
        os.close(wake_read)
        os.close(wake_write)
