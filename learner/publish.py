"""Publishes weights: copies them out in under a millisecond, then serves them behind the step.

Threads beside the training step's: *service* talks to the workers, one *link* per worker
waits inside its channel, *announce* keeps the registry entry alive. A worker that is slow,
stopped or dead costs its own link and nobody else's.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import zmq

from ..common.config import Config
from ..common.errors import DeadlineError, StoreError, TandemError, WeightsError, WireError
from ..common.records import Version
from ..common.run_folder import JoinInfo
from ..common.sockets import Authenticator, CurveKeys, bind_router, new_keys
from ..common.weights.directory import ROLE, LearnerAddress, Registry
from ..common.weights.link import Job, Link
from ..common.weights.mailbox import Mailbox
from ..common.weights.manifest import Layout, WeightManifest, plan
from ..common.weights.meeting import MeetingPoint
from ..common.weights.protocol import (
    Abort,
    Ack,
    Commit,
    Committed,
    Have,
    Message,
    Open,
    Prepare,
    Refused,
    Staged,
    pack,
    unpack,
)
from ..common.weights.staging import Pin, StagingSlot
from ..common.weights.states import Backoff, ReceiverState
from ..common.weights.transport import (
    Meeting,
    Transport,
    choose_transport,
    device_name,
    local_address,
    make_transport,
)
from ..common.weights.waiting import Wait

if TYPE_CHECKING:
    from ..replay.connection import Store

log = logging.getLogger("tandem.learner.weights")

BEAT_SECONDS = 2.0
"""Between two beats of the registry entry."""
SILENT_SECONDS = 10.0
"""A worker that says HAVE once a second and wasn't heard for so long is given up."""


class WeightPublisher:
    """Serves the newest version to every live worker that holds another one.

    ``publish`` returns once the weights are copied into a flat staging buffer; training goes on
    while it is sent. Latest wins: a version that a newer one overtakes before anybody began
    to receive it is skipped and counted. A worker that joins, comes back or failed is served
    whenever it asks, whether or not training goes on.

    Args:
        store: the run's store; registry and client key are read through it.
        join: names the run.
        config: the run's.
        term: this learner's.
        member: member id of this learner.
        dtype: of floating-point tensors on the wire, which is the engine's; None = that of
            ``model.dtype``.
        registry: in place of the store's.
        client: the run's client keys, in place of the store's.
        transports: makes a transport by name and interface.
        silent_seconds: silence after which a worker is given up.
    """

    def __init__(
        self,
        store: Store | None,
        join: JoinInfo,
        config: Config,
        term: int,
        member: str,
        *,
        dtype: torch.dtype | None = None,
        registry: Registry | None = None,
        client: CurveKeys | None = None,
        transports: Callable[[str, str], Transport] = make_transport,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._run_id = join.run_id
        self._settings = config.weights
        self._term = term
        self._member = member
        self._dtype: torch.dtype = (
            dtype if dtype is not None else getattr(torch, config.model.dtype)
        )
        self._registry = registry if registry is not None else _registry_of(store)
        self._client = client if client is not None else _client_of(store)
        self._transports = transports
        self._silent_seconds = silent_seconds
        self._bind = config.launch.bind
        self._interface = local_address(config.weights.interface)

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[tuple[Any, ...]] = Mailbox()
        self._stopping = threading.Event()
        # Guards slots, the newest version and `_held`; `publish` holds it for microseconds.
        self._lock = threading.Lock()
        self._served = threading.Condition(self._lock)
        self._layout: Layout | None = None
        self._device = torch.device("cpu")
        self._slots: list[StagingSlot] = []
        self._newest: StagingSlot | None = None
        self._last: Version | None = None
        self._held: dict[str, Version | None] = {}
        self._counts = {
            "published": 0,
            "superseded": 0,
            "rounds": 0,
            "committed": 0,
            "failed": 0,
            "refused": 0,
            "bytes": 0,
        }
        self._copy_seconds = 0.0
        self._latency = 0.0

        # Owned by the service thread.
        self._peers: dict[bytes, _Peer] = {}
        self._rounds = 0
        self._meeting: MeetingPoint | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._authenticator: Authenticator | None = None
        self._address: LearnerAddress | None = None
        self._threads: list[threading.Thread] = []

    # Public.

    def start(self) -> None:
        """Binds the control socket, announces it in the registry and begins to serve."""
        keys = new_keys()
        self._authenticator = Authenticator(self._context, self._client.public)
        self._router, endpoint = bind_router(self._context, self._bind, keys)
        self._address = LearnerAddress(
            member=self._member, term=self._term, endpoint=endpoint, public_key=keys.public
        )
        self._registry.register(ROLE, self._member, self._info())
        for name, target in (
            ("weights-service", self._serve),
            ("weights-announce", self._announce),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def publish(self, version: Version, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies a version out of the model and returns; it is served in the background.

        Args:
            version: newer than the last one.
            parameters: (name, tensor) in the same order every time, each tied parameter once.
                Each tensor is read before the next is asked for, so that it may be a gather's.

        Raises:
            WeightsError: the version isn't newer, or names, order or shapes aren't those of
                the first publication.
        """
        start = time.perf_counter()
        self._check_newer(version)
        if self._layout is None:
            parameters = self._lay_out(parameters)
        slot = self._take_slot()
        try:
            self._copy(slot, parameters)
        except BaseException:
            with self._lock:
                slot.pins -= 1
            raise
        if self._device.type == "cuda":
            slot.copied = torch.cuda.Event()
            slot.copied.record()
        with self._lock:
            self._count_superseded()
            slot.pins -= 1
            slot.version = version
            slot.published = time.perf_counter()
            self._newest = slot
            self._last = version
            self._counts["published"] += 1
            self._copy_seconds = slot.published - start
        self._mailbox.post(("newest",))

    def restamp(self, version: Version) -> None:
        """Gives the newest weights a newer version: a step that changed nothing (LEDGER, quarantine).

        Workers that hold them only change the version; others are sent the bytes.

        Raises:
            WeightsError: nothing was published yet, or the version isn't newer.
        """
        self._check_newer(version)
        with self._lock:
            if self._newest is None:
                raise WeightsError(
                    f"version {version} would re-stamp weights, but none are published"
                )
            self._count_superseded()
            self._newest.version = version
            self._newest.started = False
            self._newest.published = time.perf_counter()
            self._last = version
            self._counts["published"] += 1
        self._mailbox.post(("newest",))

    def wait_served(self, version: Version, deadline: float, at_least: int = 1) -> None:
        """Waits until so many live workers hold ``version`` or a newer one.

        Raises:
            DeadlineError: not within ``deadline`` seconds; names who doesn't hold it.
        """
        end = time.monotonic() + deadline
        told = False
        with self._served:
            while True:
                behind = {m: v for m, v in self._held.items() if v is None or v < version}
                if len(self._held) - len(behind) >= at_least:
                    return
                who = ", ".join(f"{m} (holds {v or 'none'})" for m, v in sorted(behind.items()))
                who = who or "a rollout worker to connect"
                left = end - time.monotonic()
                if left <= 0 or self._stopping.is_set():
                    raise DeadlineError(
                        f"version {version} wasn't served to {at_least} worker(s) within "
                        f"{deadline:.0f} s; waited for {who}"
                    )
                if not told and left <= deadline / 2:
                    told = True
                    log.warning(f"waiting for {who} to hold version {version}")
                self._served.wait(min(left, deadline / 2))

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the last times, for metrics.

        ``copy_seconds``: of the training thread, last publication. ``latency_seconds``: from
        the end of the last copy to the last COMMITTED of that version.
        """
        with self._lock:
            return {
                **self._counts,
                "buffers": len(self._slots),
                "members": {m: [v.term, v.step] if v else None for m, v in self._held.items()},
                "copy_seconds": self._copy_seconds,
                "latency_seconds": self._latency,
            }

    def close(self) -> None:
        """Calls rounds off, leaves the registry and closes; waits at most some seconds."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._mailbox.post(("stop",))
        for thread in self._threads:
            thread.join(timeout=5.0)
        try:
            self._registry.leave(self._member)
        except StoreError as error:
            log.warning(f"left without taking {self._member} out of the registry: {error}")
        with self._served:
            self._served.notify_all()
        if not any(thread.is_alive() for thread in self._threads):
            self._mailbox.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()

    # Copying, in the training thread.

    def _check_newer(self, version: Version) -> None:
        if version.term != self._term:
            raise WeightsError(f"version {version} isn't of this learner's term {self._term}")
        if self._last is not None and version <= self._last:
            raise WeightsError(
                f"version {version} isn't newer than {self._last}: versions only go up"
            )

    def _count_superseded(self) -> None:
        if self._newest is not None and not self._newest.started:
            self._counts["superseded"] += 1

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _lay_out(
        self, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Plans the buffer from the first publication."""
        if isinstance(parameters, list | tuple):
            items = list(parameters)
        else:
            # A gather's tensors are gone once the next is asked for, and the size of the
            # buffer is known only at the end: this once they are copied twice.
            items = [(n, t.detach().to(self._wire_dtype(t), copy=True)) for n, t in parameters]
        self._layout = plan(
            ((n, t.shape, self._wire_dtype(t)) for n, t in items),
            self._settings.bucket_mb << 20,
        )
        if self._settings.transport != "gloo":
            self._device = items[0][1].device
        return items

    def _take_slot(self) -> StagingSlot:
        """A buffer that nobody reads, pinned once.

        Two are enough unless a worker is slow enough to hold an old version's while others
        have gone on; then there is one more for each such version.
        """
        assert self._layout is not None
        with self._lock:
            free = [s for s in self._slots if s.pins == 0]
            slot = next((s for s in free if s is not self._newest), None)
            if slot is None and len(self._slots) >= 2 and free:
                # Nobody has begun to read the newest: it may be overwritten.
                slot = free[0]
                self._count_superseded()
                self._newest = None
            if slot is not None:
                for spare in [s for s in free if s is not self._newest and s is not slot]:
                    # Left over from when a worker was slow.
                    self._slots.remove(spare)
                slot.reset()
                slot.pins += 1
                return slot
        slot = StagingSlot(self._layout, self._device)
        slot.pins += 1
        with self._lock:
            self._slots.append(slot)
            count = len(self._slots)
        if count > 3:
            log.warning(f"{count} staging buffers are held: slow workers pin old versions")
        return slot

    def _copy(self, slot: StagingSlot, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        count = 0
        with torch.no_grad():
            for name, tensor in parameters:
                expected, view = slot.tensors[count] if count < len(slot.tensors) else ("", None)
                if view is None or name != expected or tensor.shape != view.shape:
                    raise WeightsError(
                        f"parameter {count} is {name} {list(tensor.shape)}; the first publication "
                        f"had {expected or 'no more'} {list(view.shape) if view is not None else ''}"
                    )
                view.copy_(tensor, non_blocking=slot.buffer.is_cuda)
                count += 1
        if count != len(slot.tensors):
            raise WeightsError(f"{slot.tensors[count][0]} is missing: only {count} parameters came")

    # Announcing.

    def _info(self) -> dict[str, Any]:
        assert self._address is not None
        return {
            **self._address.info(),
            "run_id": self._run_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

    def _announce(self) -> None:
        failing = False
        while not self._stopping.wait(BEAT_SECONDS):
            try:
                self._registry.beat(self._member, self._info())
                failing = False
            except StoreError as error:
                if not failing:
                    log.warning(f"the registry can't be reached, trying again: {error}")
                failing = True

    # Serving.

    def _serve(self) -> None:
        assert self._router is not None
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._mailbox.fd, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = dict(poller.poll(int(self._pause() * 1000) + 1))
                if self._mailbox.fd in ready:
                    for item in self._mailbox.take():
                        getattr(self, f"_on_{item[0]}")(*item[1:])
                self._read()
                self._look()
        finally:
            for peer in self._peers.values():
                if peer.round is not None:
                    reason = f"{self._member} is shutting down"
                    self._send(peer, Abort(round=peer.round.id, reason=reason))
                self._drop_link(peer)
            # The last messages should leave before the socket is closed.
            self._router.close(linger=200)

    def _pause(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        times = [now + 1.0]
        for peer in self._peers.values():
            times.append(peer.silence.next_look)
            if peer.round is not None:
                times.append(peer.round.wait.next_look)
            elif self._behind(peer):
                times.append(peer.next_try)
        return max(0.0, min(times) - now)

    def _behind(self, peer: _Peer) -> bool:
        newest = self._newest
        return newest is not None and peer.version != newest.version

    def _look(self) -> None:
        """Deadlines, and rounds that may begin."""
        for peer in list(self._peers.values()):
            if peer.silence.expired(log):
                reason = f"not heard of for {peer.silence.seconds:.1f} s (stopped or dead)"
                if peer.round is not None:
                    reason += f" while it should {peer.round.wait.what}"
                self._forget(peer, reason)
                log.warning(f"{peer.member}: {reason}; it is served again when it speaks")
                continue
            if peer.round is not None and peer.round.wait.expired(log):
                self._fail(peer, str(peer.round.wait), drop_link=True)
            if (
                peer.round is None
                and peer.idle
                and time.monotonic() >= peer.next_try
                and self._behind(peer)
            ):
                self._begin(peer)

    def _read(self) -> None:
        assert self._router is not None
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = unpack(frames)
            except WireError as error:
                log.warning(f"from {identity[:80]!r}: {error}")
                continue
            if isinstance(message, Have):
                self._on_have(identity, message)
                continue
            peer = self._peers.get(identity)
            if peer is None:
                # Its HAVE follows within a second and begins anew.
                continue
            peer.heard()
            if peer.round is None or getattr(message, "round", "") != peer.round.id:
                continue
            if isinstance(message, Ack):
                self._on_ack(peer, peer.round, message)
            elif isinstance(message, Staged):
                self._on_staged(peer, peer.round, message)
            elif isinstance(message, Committed):
                self._on_committed(peer, peer.round, message)
            elif isinstance(message, Refused):
                self._on_refused(peer, message)
            else:
                log.warning(
                    f"{peer.member} sent a {type(message).__name__}, which only learners send"
                )

    def _send(self, peer: _Peer, message: Message) -> None:
        assert self._router is not None
        try:
            self._router.send_multipart([peer.identity, *pack(message)], zmq.NOBLOCK)
        except zmq.Again:
            # Its queue is full, so it reads nothing; its deadline will say so.
            log.debug(f"{peer.member} takes no messages")

    def _on_stop(self) -> None:
        pass

    def _on_newest(self) -> None:
        # `_look` begins the rounds.
        pass

    def _on_have(self, identity: bytes, message: Have) -> None:
        if message.run_id != self._run_id:
            log.warning(f"{message.member} belongs to run {message.run_id}: ignored")
            return
        peer = self._peers.get(identity)
        if peer is None:
            for other in list(self._peers.values()):
                if other.member == message.member:
                    self._forget(other, "a newer process of that name has joined")
            peer = _Peer(
                identity=identity,
                member=message.member,
                device=message.device,
                transports=message.transports,
                silent_seconds=self._silent_seconds,
            )
            self._peers[identity] = peer
            log.info(f"{peer.member} joined with version {message.version or 'none'}")
        peer.heard()
        peer.idle = message.state == ReceiverState.IDLE
        if peer.round is not None and message.round != peer.round.id:
            # HAVEs are a second apart: the second that doesn't know of the round was sent
            # after the PREPARE should have arrived.
            peer.round.unknown += 1
            if peer.round.unknown >= 2:
                self._fail(peer, f"{peer.member} didn't get PREPARE", drop_link=True)
        if peer.round is None:
            peer.version = message.version
            peer.content = message.content
        self._note_held(peer)

    def _note_held(self, peer: _Peer) -> None:
        with self._served:
            self._held[peer.member] = peer.version
            self._served.notify_all()

    def _begin(self, peer: _Peer) -> None:
        with self._lock:
            slot = self._newest
            if slot is None or slot.version is None:
                return
            slot.pins += 1
            slot.started = True
            version = slot.version
            published = slot.published
        pinned = Pin(slot, self._lock)
        try:
            transport = choose_transport(
                self._settings.transport,
                sender=device_name(self._device),
                receiver=peer.device,
                offered=peer.transports,
            )
            manifest = slot.manifest_of(self._run_id, version)
        except (WeightsError, RuntimeError) as error:
            pinned.release()
            self._postpone(peer)
            log.warning(f"{peer.member} can't be sent version {version}: {error}")
            return
        self._rounds += 1
        self._counts["rounds"] += 1
        peer.round = _Round(
            id=f"{version}/{self._rounds}",
            manifest=manifest,
            transport=transport,
            bytes_follow=peer.content != manifest.content,
            pin=pinned,
            published=published,
            wait=Wait(peer.member, f"acknowledge version {version}", self._settings.open_seconds),
        )
        self._send(
            peer,
            Prepare(
                round=peer.round.id,
                manifest=manifest,
                transport=transport,
                bytes_follow=peer.round.bytes_follow,
            ),
        )

    def _on_ack(self, peer: _Peer, current: _Round, message: Ack) -> None:
        version = current.manifest.version
        settings = self._settings
        if not current.bytes_follow:
            current.wait = Wait(peer.member, f"check version {version}", settings.stage_seconds)
            return
        link = peer.link
        if link is None or not message.channel or link.channel != message.channel:
            self._drop_link(peer)
            try:
                if self._meeting is None:
                    self._meeting = MeetingPoint(self._interface)
                transport = self._transports(current.transport, self._interface)
            except (TandemError, RuntimeError, OSError) as error:
                self._fail(peer, f"no channel could be made: {error}", drop_link=True)
                return
            link = Link(self._mailbox, peer.identity, transport)
            peer.link = link
            meeting = Meeting(
                host=self._meeting.host,
                port=self._meeting.port,
                channel=link.channel,
                rank=0,
                world_size=2,
            )
            self._send(
                peer,
                Open(
                    round=current.id,
                    channel=link.channel,
                    transport=current.transport,
                    host=meeting.host,
                    port=meeting.port,
                    rank=1,
                    world_size=meeting.world_size,
                ),
            )
            current.wait = Wait(peer.member, "open a weight channel", settings.open_seconds)
            link.put(Job(current.id, meeting, None, settings.open_seconds))
        else:
            self._expect_staged(peer, current)
        link.put(Job(current.id, None, current.pin.again(), settings.stage_seconds))

    def _expect_staged(self, peer: _Peer, current: _Round) -> None:
        what = f"receive and check version {current.manifest.version}"
        current.wait = Wait(peer.member, what, self._settings.stage_seconds)

    def _on_opened(self, identity: bytes, round_id: str) -> None:
        peer = self._peers.get(identity)
        if peer is not None and peer.round is not None and peer.round.id == round_id:
            self._expect_staged(peer, peer.round)

    def _on_link_failed(self, identity: bytes, link: Link, round_id: str, reason: str) -> None:
        peer = self._peers.get(identity)
        if peer is None or peer.link is not link:
            return
        self._drop_link(peer)
        if peer.round is not None and peer.round.id == round_id:
            self._fail(peer, reason, drop_link=True)

    def _on_staged(self, peer: _Peer, current: _Round, message: Staged) -> None:
        manifest = current.manifest
        if message.digest != manifest.digest:
            self._fail(peer, f"{peer.member} staged digest {message.digest}", drop_link=True)
            return
        what = f"commit version {manifest.version}"
        current.wait = Wait(peer.member, what, self._settings.commit_seconds)
        self._send(peer, Commit(round=current.id, run_id=self._run_id, version=manifest.version))

    def _on_committed(self, peer: _Peer, current: _Round, message: Committed) -> None:
        peer.version = message.version
        peer.content = current.manifest.content
        peer.round = None
        peer.idle = True
        peer.backoff.reset()
        peer.next_try = 0.0
        current.pin.release()
        self._latency = time.perf_counter() - current.published
        self._counts["committed"] += 1
        if current.bytes_follow:
            self._counts["bytes"] += current.manifest.total_bytes
        self._note_held(peer)

    def _on_refused(self, peer: _Peer, message: Refused) -> None:
        self._counts["refused"] += 1
        peer.idle = True
        reason = f"{peer.member} refused at {message.stage}: {message.reason}"
        self._fail(peer, reason, drop_link=message.stage not in ("prepare", "commit"), tell=False)

    def _postpone(self, peer: _Peer) -> float:
        pause = peer.backoff.next()
        peer.next_try = time.monotonic() + pause
        return pause

    def _fail(self, peer: _Peer, reason: str, *, drop_link: bool, tell: bool = True) -> None:
        """Ends a round without success; the worker is served again after a pause."""
        current, peer.round = peer.round, None
        if drop_link:
            self._drop_link(peer)
        if current is None:
            return
        current.pin.release()
        self._counts["failed"] += 1
        if tell:
            self._send(peer, Abort(round=current.id, reason=reason[:1000]))
        pause = self._postpone(peer)
        log.warning(
            f"{peer.member} stays on {peer.version or 'no version'}, not "
            f"{current.manifest.version}: {reason}; again in {pause:.1f} s"
        )

    def _forget(self, peer: _Peer, reason: str) -> None:
        self._fail(peer, reason, drop_link=True)
        self._drop_link(peer)
        self._peers.pop(peer.identity, None)
        with self._served:
            self._held.pop(peer.member, None)
            self._served.notify_all()

    def _drop_link(self, peer: _Peer) -> None:
        if peer.link is not None:
            peer.link.leave()
            peer.link = None


@dataclass(slots=True, kw_only=True)
class _Round:
    """One transfer under way."""

    id: str
    """Names it on the wire."""
    manifest: WeightManifest
    """What is sent."""
    transport: str
    """By what."""
    bytes_follow: bool
    """False for a re-stamp."""
    pin: Pin
    """Holds the buffer."""
    published: float
    """``perf_counter`` at the end of the copy."""
    wait: Wait
    """What the worker should do next."""
    unknown: int = 0
    """HAVEs since PREPARE that don't know of it."""


@dataclass(slots=True, kw_only=True)
class _Peer:
    """One life of one worker."""

    identity: bytes
    """ZeroMQ's name of it: member id and incarnation."""
    member: str
    """Member id."""
    device: str
    """Where it stages."""
    transports: tuple[str, ...]
    """What it can open."""
    silent_seconds: float
    """Silence after which it is given up."""
    version: Version | None = None
    """What it serves."""
    content: str = ""
    """Content digest of what it serves."""
    idle: bool = True
    """It could begin a round."""
    round: _Round | None = None
    """The transfer under way."""
    link: Link | None = None
    """Its channel."""
    next_try: float = 0.0
    """``monotonic`` before which no round begins."""
    backoff: Backoff = field(default_factory=Backoff)
    """Pauses after failures."""
    silence: Wait = field(init=False)
    """Since it was last heard."""

    def __post_init__(self) -> None:
        self.heard()

    def heard(self) -> None:
        """It spoke."""
        self.silence = Wait(self.member, "say that it is alive", self.silent_seconds)


def _registry_of(store: Store | None) -> Registry:
    from ..replay.members import Members

    return Members(cast("Store", store))


def _client_of(store: Store | None) -> CurveKeys:
    from ..replay.store import RunStore

    return RunStore(cast("Store", store)).curve_client()
