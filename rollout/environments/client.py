"""The worker's side of the environment servers: finds them, has episodes played, and hears what became of them.

Everything runs in the worker's asyncio loop. There is a DEALER to each live server; an episode goes to the
connected server that has its environment and the most free places. A server that closes its connection, or
isn't in the registry for a while, is lost: what it was playing is played again on another one, in a session of
its own. After an outage of Redis no server is in the registry until it has beaten once more, and while Redis takes no
heartbeats nobody is, so one that is connected is kept meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from ...common.errors import StoreError, TandemError, WireError
from ...common.plain import Count, reason
from ...common.records import Verdict
from ...common.sockets import CurveKeys, check_address, connect_dealer
from ...replay.members import Member, Members
from ..engine import Task
from .requests import (
    CancelRequest,
    EnvironmentTask,
    Limits,
    ModelClient,
    Request,
    RunRequest,
    request_frames,
)
from .wire import (
    Played,
    Reading,
    failed,
    read_answer,
    why_lost,
)

log = logging.getLogger("tandem.rollout")

ROLE = "environments"
"""Role of the servers in the registry."""
LOOK_SECONDS = 0.5
"""Time between two looks into the registry."""
RELINK_SECONDS = 10.0
"""A registered server that hasn't been connected for this long gets a new socket."""
MOST_ABSENCES = 20
"""Looks in a row, none of which failed, after which a connected server that wasn't in the registry, where others were,
is lost: about ten seconds."""
LEAVE_SECONDS = 3.0
"""A server that has handed an episode back because it is leaving gets no other for this long: until its beat and a look into the registry have
shown whether it is leaving."""
GRACE_SECONDS = 90.0
"""Time that a server has beyond an episode's deadline, for a process to be started before and ended after it."""
QUEUE_DEADLINES = 10.0
"""Number of deadlines for which an episode may wait at a server for a place."""


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What the registry says of one environment server."""

    member: str
    """Member id of the server."""
    endpoint: str
    """``tcp://host:port``."""
    public_key: str | None = None
    """CURVE key of the server; None if the run has no keys."""
    environments: tuple[str, ...] = ()
    """The environments that it plays."""
    slots: Count = 0
    """Number of episodes that it plays at a time; 0 while it is leaving."""
    busy: Count = 0
    """Number of those that it plays now."""


def address_of(member: Member) -> ServerAddress:
    """Reads a server's entry in the registry.

    Raises:
        WireError: it isn't a valid one.
    """
    try:
        found = msgspec.convert({**member.info, "member": member.member}, ServerAddress)
    except msgspec.ValidationError as error:
        raise WireError(f"refused the entry of {member.member}: {reason(error, 'info')}") from None
    check_address(found.member, found.endpoint, found.public_key)
    return found


def servers_in(members: Members) -> list[ServerAddress] | None:
    """The live servers in the registry, without those whose entries can't be read; None if no process at all is in it,
    as while Redis takes no heartbeats because it can't write.

    Raises:
        StoreError: Redis can't be reached.
    """
    live = members.live()
    if not live:
        return None
    found = []
    for member in live:
        if member.role != ROLE:
            continue
        try:
            found.append(address_of(member))
        except WireError as error:
            log.warning(str(error))
    return found


class _Lost(Exception):
    """The server of an episode is gone."""


@dataclass(slots=True, eq=False)
class _Pending:
    """An episode at a server."""

    answer: asyncio.Future[Played]
    reading: Reading = field(default_factory=Reading)
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class _Link:
    """The DEALER to one server, with its monitor and the tasks that read both."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: ServerAddress,
        member: str,
        client: CurveKeys | None,
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.connected = False
        self.since = time.monotonic()
        self.back = 0.0
        """When it may get episodes again, after it has said that it is leaving."""
        self.absences = 0
        """Looks in a row that didn't find it in the registry; those that failed don't count."""
        self.pending: dict[str, _Pending] = {}
        self._changed = changed
        made: Any = connect_dealer(
            cast(Any, context),
            address.endpoint,
            # A socket that replaces another one must not be taken for it.
            identity=f"{member}/{secrets.token_hex(4)}",
            server_public=address.public_key,
            client=client,
            connect=False,
        )
        self._socket: zmq.asyncio.Socket = made
        # Before connecting, or the end of the handshake may be missed.
        self._monitor: Any = self._socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._socket.connect(address.endpoint)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._listen())]

    def plays(self, environment: str) -> bool:
        """Whether it takes episodes of that environment now."""
        return (
            self.connected
            and not self.absences
            and self.address.slots > 0
            and environment in self.address.environments
            and time.monotonic() >= self.back
        )

    @property
    def free(self) -> int:
        """Places that nobody has, as far as is known: a server counts its busy ones once a second."""
        return self.address.slots - max(self.address.busy, len(self.pending))

    async def send(self, request_id: str, request: Request) -> None:
        """Sends a request.

        Raises:
            _Lost: it can't be sent.
            WireError: it can't travel.
        """
        frames = request_frames(request_id, request)
        try:
            await self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise _Lost(f"{self.address.member} takes nothing: {error}") from None

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._read(frames)
            except WireError as error:
                log.warning(f"{self.address.member}: {error}")

    def _read(self, frames: list[bytes]) -> None:
        request_id, kind, data = read_answer(frames)
        pending = self.pending.get(request_id)
        if pending is None or pending.answer.done():
            return
        try:
            if kind == "delta":
                pending.reading.add(data)
                pending.begun.set()
            elif (why := why_lost(data)) is not None:
                if not why:
                    self.back = time.monotonic() + LEAVE_SECONDS
                how = f"handed it back: {why}" if why else "is leaving"
                pending.answer.set_exception(_Lost(f"{self.address.member} {how}"))
            else:
                pending.answer.set_result(pending.reading.finish(data))
        except WireError as error:
            pending.answer.set_result(failed(Verdict.ENV_FAILED, str(error)))

    async def _listen(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            self.connected = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.since = time.monotonic()
            if not self.connected:
                self.lose("closed its connection")
            self._changed()

    def lose(self, how: str) -> None:
        """Gives back every episode that the server has."""
        for pending in self.pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(_Lost(f"{self.address.member} {how}"))

    async def close(self) -> None:
        """Ends its tasks and closes both sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class EnvironmentClient:
    """Has episodes played by the run's environment servers.

    Args:
        member: this worker's member id.
        servers: returns the live servers in the registry, or None if nobody can be in it; called in a thread. If it
            raises a ``StoreError``, it is called again later.
        client: the run's client keys; None if the run has none.
        deadline: ``environments.episode_seconds``, the deadline of an episode that is being played.
        retries: how often an episode whose server was lost is played again.
        grace: see :data:`GRACE_SECONDS`.
    """

    def __init__(
        self,
        member: str,
        servers: Callable[[], Sequence[ServerAddress] | None],
        client: CurveKeys | None,
        *,
        deadline: float,
        retries: int,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self._member = member
        self._servers = servers
        self._client = client
        self._deadline = deadline + grace
        self._retries = retries
        self._context: zmq.asyncio.Context | None = None
        self._links: dict[str, _Link] = {}
        self._finder: asyncio.Task[None] | None = None
        self._change = asyncio.Event()
        self.lost = 0
        """Number of times that an episode's server was lost."""

    async def start(self) -> None:
        """Looks for servers; the first look is over when it returns."""
        self._context = zmq.asyncio.Context()
        await self._look()
        self._finder = asyncio.create_task(self._find())

    async def close(self) -> None:
        """Closes all connections; episodes that are under way are lost."""
        if self._finder is not None:
            self._finder.cancel()
            await asyncio.gather(self._finder, return_exceptions=True)
        for link in self._links.values():
            link.lose("isn't needed any more")
            await link.close()
        self._links = {}
        if self._context is not None:
            # Also closes what a look that was interrupted has left open.
            self._context.destroy(linger=0)
            self._context = None

    def knows(self, environment: str) -> bool:
        """Whether a live server has it."""
        return any(environment in link.address.environments for link in self._links.values())

    def slots(self, environment: str) -> int:
        """Free places of the live servers that have it."""
        return sum(max(0, link.free) for link in self._links.values() if link.plays(environment))

    async def play(
        self,
        task: Task,
        *,
        base_url: str,
        api_key: str,
        model: str,
        limits: Mapping[str, int],
        on_retry: Callable[[], tuple[str, str]],
    ) -> Played:
        """Has one episode played. A failure is a result; being cancelled ends the episode at its server.

        Args:
            task: the environment and the row.
            base_url: URL of its session.
            api_key: key of its session.
            model: name of the model that the session's endpoint serves.
            limits: ``turns``, ``calls`` and ``observation_tokens``.
            on_retry: opens another session for an episode that is played again; returns its URL and key.
        """
        why = ""
        for attempt in range(self._retries + 1):
            if attempt:
                base_url, api_key = on_retry()
            try:
                run = RunRequest(
                    task_data=EnvironmentTask(environment=task.environment, row=dict(task.row)),
                    client=ModelClient(type="train", base_url=base_url, api_key=api_key),
                    model=model,
                    limits=Limits(**limits),
                )
                link = await self._server(task.environment)
                return await self._play(link, run)
            except _Lost as lost:
                self.lost += 1
                why = str(lost)
                log.warning(f"an episode of {task.environment} has lost its server: {why}")
            except TimeoutError:
                return failed(
                    Verdict.ENV_FAILED,
                    f"no live environment server has {task.environment!r}: there was none for "
                    f"{self._deadline:.0f} s",
                )
            except WireError as error:
                return failed(Verdict.ENV_FAILED, str(error))
        return failed(Verdict.ENV_FAILED, f"its server was lost {self._retries + 1} times: {why}")

    async def _play(self, link: _Link, run: RunRequest) -> Played:
        request_id = uuid.uuid4().hex
        pending = _Pending(asyncio.get_running_loop().create_future())
        link.pending[request_id] = pending
        answered = False
        try:
            await link.send(request_id, run)
            begun = asyncio.ensure_future(pending.begun.wait())
            try:
                await asyncio.wait(
                    (begun, pending.answer),
                    timeout=QUEUE_DEADLINES * self._deadline,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                begun.cancel()
            if not pending.answer.done() and not pending.begun.is_set():
                return failed(
                    Verdict.ENV_FAILED,
                    f"{link.address.member} had no free place for "
                    f"{QUEUE_DEADLINES * self._deadline:.0f} s: raise environments.episodes or "
                    f"environments.servers",
                )
            try:
                async with asyncio.timeout(self._deadline):
                    played = await pending.answer
            except TimeoutError:
                return failed(
                    Verdict.ENV_TIMEOUT,
                    f"{link.address.member} didn't end the episode within {self._deadline:.0f} s",
                )
            answered = True
            return played
        except _Lost:
            answered = True  # There is nobody to tell.
            raise
        finally:
            link.pending.pop(request_id, None)
            if pending.answer.done() and not pending.answer.cancelled():
                pending.answer.exception()  # Looked at, so that nobody warns of it.
            if not answered:
                cancel = CancelRequest(request_id=request_id)
                with contextlib.suppress(_Lost, WireError):
                    await link.send(uuid.uuid4().hex, cancel)

    async def _server(self, environment: str) -> _Link:
        """The connected server with the most free places.

        Raises:
            TimeoutError: there has been none.
        """
        async with asyncio.timeout(self._deadline):
            while True:
                links = [link for link in self._links.values() if link.plays(environment)]
                if links:
                    return max(links, key=lambda link: link.free)
                self._change.clear()
                await self._change.wait()

    # The registry.

    async def _find(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
                failing = False
            except StoreError as error:
                if not failing:
                    log.warning(f"the registry can't be read, servers stay as they are: {error}")
                failing = True
            except TandemError as error:
                log.warning(f"a look for environment servers failed: {error}")

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._servers)
        if found is None:
            # Those that were missed before everybody was aren't gone either.
            for link in self._links.values():
                link.absences = 0
            self._change.set()
            return
        wanted = {address.member: address for address in found}
        now = time.monotonic()
        for member, link in list(self._links.items()):
            address = wanted.get(member)
            if address is None:
                link.absences += 1
                if link.connected and link.absences < MOST_ABSENCES:
                    continue
                how = "left the registry"
            elif _place(address) != _place(link.address):
                how = "moved"
            elif not link.connected and now - link.since > RELINK_SECONDS:
                how = "can't be reached"
            else:
                link.address, link.absences = address, 0
                continue
            del self._links[member]
            link.lose(how)
            await link.close()
        assert self._context is not None
        for member, address in wanted.items():
            if member not in self._links:
                self._links[member] = _Link(
                    self._context, address, self._member, self._client, self._change.set
                )
        self._change.set()


def _place(address: ServerAddress) -> tuple[str, str | None]:
    return address.endpoint, address.public_key
