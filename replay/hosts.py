"""The hosts of a run, and the meeting to which the head calls those on which ranks of the learner live.

Each supervisor enters its host among the members, with a heartbeat. The head, which is the only one that starts
the learner, writes one record: which hosts take part in which attempt, and where their ranks meet. The other
hosts follow it. Both travel through Redis, hence behind the run's password.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs, to_builtins

from ..common.errors import StoreError, TandemError
from ..common.plain import Record, read_record
from .connection import Store
from .ledger_records import WAY_OUT
from .members import Members
from .store import RunStore

log = logging.getLogger("tandem.replay")

ROLE = "host"
"""Their role in the registry."""
HEAD = "head"
"""What a head does there, in place of a role."""
KNOWN_SECONDS = 3600.0
"""A host that hasn't been heard of for longer is forgotten."""
EVERY_SECONDS = 1.0
"""Time between two heartbeats, and between two looks."""
TOLERATED_SECONDS = 5 * EVERY_SECONDS
"""A pause between two looks, or a jump of Redis' clock, that says nothing about the hosts' silence."""


class Failure(Record, frozen=True, kw_only=True):
    """How a rank of the learner has ended on its host."""

    attempt: int
    """The meeting to which it belonged."""
    process: str
    """Its name, such as ``learner-3``."""
    exit: int
    """Exit code; negative: the signal's number."""
    log: str
    """Its log on that host."""
    lines: str
    """The last lines of the log."""


class HostState(Record, frozen=True, kw_only=True):
    """What a host says about itself."""

    host: str
    """Name of the host."""
    address: str
    """The address from which it reaches the head."""
    pid: int
    """Process id of its supervisor."""
    role: str
    """What its processes do: rollout, reward, learner, environments, or :data:`HEAD`."""
    processes: int
    """Number of processes that it keeps running."""
    network: str = ""
    """Of the head: whose loopback addresses are its own (``network_name`` of ``common/sockets.py``)."""
    attempt: int = 0
    """Of a learner's host: the newest meeting that it has followed."""
    failed: Failure | None = None
    """How a rank of that meeting has ended here, if one has by itself."""
    leaving: bool = False
    """Whether it is draining; of the head: whether the run is."""


class Meeting(Record, frozen=True, kw_only=True):
    """Where the learner's ranks of one attempt meet."""

    attempt: int
    """Number of the attempt, which grows over the whole run."""
    address: str
    """Address of rank 0's store."""
    port: int
    """Its port."""
    hosts: list[str]
    """Member ids of the hosts in their order, the head first; empty: the attempt is over."""
    ranks: int
    """The learner's ranks on all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host as others see it."""

    member: str
    """Its member id."""
    state: HostState
    age: float
    """Seconds since its last heartbeat, by Redis ``TIME``."""

    def __str__(self) -> str:
        return f"{self.state.host} ({self.state.address}, last seen {self.age:.0f} s ago)"


def new_member(name: str | None = None) -> str:
    """A member id that no other start of a supervisor has, on this host or another one."""
    # A host name and a process id may come again: on a host whose old processes outlive their job, or in containers.
    return f"{name or socket.gethostname()}-{secrets.token_hex(3)}"


def read_state(info: Any, member: str) -> HostState:
    """Raises ``StoreError`` if it isn't one."""
    return read_record(HostState, info, f"the entry of {member} in the registry", StoreError)


def read_meeting(raw: bytes) -> Meeting:
    """Raises ``StoreError`` if it isn't one."""
    return read_record(Meeting, raw, "the learner's meeting in Redis", StoreError, WAY_OUT)


class Hosts:
    """Reads the hosts and the meeting, and writes the meeting."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._members = Members(store)

    def live(self, within: float = KNOWN_SECONDS) -> list[Host]:
        """Hosts that were heard of within so many seconds, sorted by member id; damaged entries are left out."""
        found = []
        for member in self._members.live(ROLE, within):
            try:
                state = read_state(dict(member.info), member.member)
            except StoreError as error:
                log.warning(str(error))
                continue
            found.append(Host(member=member.member, state=state, age=member.age))
        return found

    def meeting(self) -> Meeting | None:
        """The newest meeting; None before the first.

        Raises:
            StoreError: Redis is away, or the record is damaged.
        """
        raw = self._store.call("get", self._store.key("meeting"))
        if raw is None:
            return None
        return read_meeting(raw)

    def forget_heads(self) -> None:
        """Removes what earlier starts of the head have left, by the head alone."""
        for host in self.live():
            if host.state.role == HEAD:
                self._members.leave(host.member)

    def call(self, meeting: Meeting, deadline: float) -> None:
        """Writes the meeting, by the head alone.

        Raises:
            StoreError: Redis didn't answer within ``deadline`` seconds.
        """
        text = json.dumps(structs.asdict(meeting))
        self._store.put("meeting", text, deadline=deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a host has last seen of the run."""

    hosts: tuple[Host, ...]
    meeting: Meeting | None
    run_state: str
    """running, draining, finished or failed."""
    moment: float
    """``time.monotonic()`` of the look."""

    def host(self, member: str) -> Host | None:
        """A host by its member id."""
        return next((host for host in self.hosts if host.member == member), None)

    @property
    def head(self) -> Host | None:
        """The head; of several, an earlier start may have left its entry, the one heard of last."""
        heads = [host for host in self.hosts if host.state.role == HEAD]
        return min(heads, key=lambda host: host.age, default=None)


def _clock_jumped(last: Look, hosts: Sequence[Host], now: float) -> bool:
    """Whether Redis' clock, by which hosts have their ages, was put forward after the last look: a host has aged
    by more than the time (``monotonic``) since then."""
    most = now - last.moment + TOLERATED_SECONDS
    before = {host.member: host.age for host in last.hosts}
    return any(host.age - before.get(host.member, host.age) > most for host in hosts)


class HostLink:
    """A thread that keeps this host's heartbeat and looks at the others, so that its supervisor never waits.

    Args:
        store: the run's; the thread's own from now on, apart from short calls.
        member: this host's member id.
        state: what it says about itself.
    """

    def __init__(self, store: Store, member: str, state: HostState) -> None:
        self.member = member
        self.hosts = Hosts(store)
        self._members = Members(store)
        self._runs = RunStore(store)
        self._state = state
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._look: Look | None = None
        self._began = self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def start(self) -> None:
        """Begins; the first look comes soon."""
        self._began = self._since = time.monotonic()
        self._thread.start()

    @property
    def look(self) -> Look | None:
        """The newest look; None before the first."""
        return self._look

    @property
    def silence(self) -> float:
        """Seconds since Redis was last heard."""
        look = self._look
        return time.monotonic() - (self._began if look is None else look.moment)

    def is_lost(self, host: Host, seconds: float) -> bool:
        """Whether a host has been silent for so long, counting only time in which Redis could be asked and its
        clock ran evenly."""
        return host.age > seconds and time.monotonic() - self._since > seconds

    def say(self, **changes: Any) -> None:
        """Changes what this host says about itself; it is told at once."""
        with self._lock:
            self._state = structs.replace(self._state, **changes)
        self._wake.set()

    def stop(self, *, leave: bool) -> None:
        """Ends the thread; with ``leave`` the host takes its entry back, if Redis answers in time."""
        self._ending.set()
        self._wake.set()
        if not self._thread.is_alive():
            return
        # While Redis is away the thread waits for it, and is left behind.
        self._thread.join(2 * EVERY_SECONDS if self.silence < 2 * EVERY_SECONDS else 0.0)
        if leave and not self._thread.is_alive() and self.silence < 2 * EVERY_SECONDS:
            try:
                self._members.leave(self.member, deadline=2 * EVERY_SECONDS)
            except TandemError as error:
                log.debug(f"leaving: {error}")

    def _run(self) -> None:
        registered = False
        while not self._ending.is_set():
            self._wake.clear()
            try:
                info = to_builtins(self._state)
                if registered:
                    self._members.beat(self.member, info)
                else:
                    self._members.register(ROLE, self.member, info)
                    registered = True
                hosts, meeting = tuple(self.hosts.live()), self.hosts.meeting()
                state = self._runs.state()
            except TandemError as error:
                # Whoever needs an answer looks at `silence`.
                log.debug(f"hosts: {error}")
            else:
                now = time.monotonic()
                last = self._look
                if last is None or now - last.moment > TOLERATED_SECONDS:
                    # Redis was away, so that nobody's heartbeat was taken down.
                    self._since = now
                elif _clock_jumped(last, hosts, now):
                    # Hosts seem to have been silent for as long as that until their next heartbeat.
                    self._since = now
                self._look = Look(hosts=hosts, meeting=meeting, run_state=state, moment=now)
            self._wake.wait(EVERY_SECONDS)
