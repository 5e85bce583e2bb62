"""The learner's end of the control socket: who is offered which version, when and by what way.

One thread owns the socket and everything in :class:`Transfers`; bytes are carried by :mod:`.couriers`.
A worker that is slow, stopped or dead fails only its own transfer. If several share a channel
(``weights.topology=broadcast``) it fails theirs too, and the next channel is opened without it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, assert_never

import zmq

from ..config import WeightsConfig
from ..errors import TandemError, WeightsError, WireError
from ..mailbox import Mailbox
from ..records import Version
from ..waiting import Wait
from .channel import Pair
from .couriers import Carried, Channel, Couriers, Sent, SnapshotFailed, SnapshotWritten
from .protocol import (
    RENAME,
    Ask,
    Loaded,
    Message,
    Offer,
    Open,
    Refused,
    Withdraw,
    pack,
    unpack,
)
from .shared_memory import SharedMemory, shared_memory_name
from .snapshot import Snapshot
from .staging import Pin, StagingSlot, StagingSlots
from .ways import WAYS, device_name, possible_ways

log = logging.getLogger("tandem.learner.weights")

FAILURES_EACH = 2
"""Failures by one way after which ``auto`` tries a worker's next one."""
LOST_SECONDS = 2.0
"""A worker that doesn't know of an offer this old never got it, since it asks once a second."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Shortest and longest pause between attempts with one worker; it doubles each time."""


@dataclass(frozen=True, slots=True)
class Published:
    """There is a newer version."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The learner is shutting down."""


Event = Published | Stop | Carried


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One version on its way to one worker."""

    offer: Offer
    """The offer that the worker received."""
    pin: Pin
    """Holds the version's buffer."""
    published: float
    """``perf_counter`` at the end of the copy out of the model."""
    wait: Wait
    """What the worker should do next."""
    channel: Channel | None
    """The channel that carries the bytes; None for other ways."""
    begun: float = field(default_factory=time.perf_counter)
    """``perf_counter`` at the offer."""
    taken_up: bool = False
    """Whether the worker has accepted the offer."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """One life of one worker."""

    identity: bytes
    """Its ZeroMQ identity: member id and a random name for this life."""
    ask: Ask
    """Its last Ask."""
    silence: Wait
    """Restarted whenever it is heard."""
    version: Version | None = None
    """The version that it serves."""
    content: str = ""
    """Content digest of that version."""
    transfer: Transfer | None = None
    """The transfer to it that is under way."""
    failures: int = 0
    """Number of failed transfers, by which ``auto`` chooses the way."""
    next_try: float = 0.0
    """``monotonic`` time before which nothing is offered."""
    pause: float = FIRST_PAUSE
    """Seconds until the next attempt after a failure."""
    last: dict[str, Any] | None = None
    """Figures of the last transfer, for reports."""

    @property
    def member(self) -> str:
        """Member id."""
        return self.ask.member

    @property
    def idle(self) -> bool:
        """Whether it could accept an offer now."""
        return self.transfer is None and not self.ask.busy and time.monotonic() >= self.next_try


class Transfers:
    """Offers published versions to the workers that hold another one.

    Args:
        member: the learner's member id.
        router: bound control socket; closed by :meth:`serve`.
        silent_seconds: silence after which a worker is given up.
    """

    def __init__(
        self,
        *,
        run_id: str,
        member: str,
        settings: WeightsConfig,
        slots: StagingSlots,
        router: zmq.Socket[bytes],
        mailbox: Mailbox[Event],
        couriers: Couriers,
        silent_seconds: float,
    ) -> None:
        self._run_id = run_id
        self._member = member
        self._settings = settings
        self._slots = slots
        self._router = router
        self._mailbox = mailbox
        self._couriers = couriers
        self._silent_seconds = silent_seconds
        self._peers: dict[bytes, Peer] = {}
        self._last_snapshot: SnapshotWritten | None = None
        self._snapshot_step = -1
        self._stopping = False

        self._latency = 0.0
        self._counts = dict.fromkeys(
            ("rounds", "committed", "failed", "refused", "bytes", "snapshots", "broadcasts"), 0
        )

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and each live worker's version and last transfer."""
        peers = list(self._peers.copy().values())
        return {
            **self._counts,
            "members": {
                p.member: [p.version.term, p.version.step] if p.version else None for p in peers
            },
            "transfers": {p.member: p.last for p in peers if p.last is not None},
            "latency_seconds": self._latency,
        }

    def serve(self) -> None:
        """Serves until Stop is posted."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._mailbox.fd, zmq.POLLIN)
        try:
            while not self._stopping:
                ready = dict(poller.poll(int(self._pause() * 1000) + 1))
                if self._mailbox.fd in ready:
                    for event in self._mailbox.take():
                        self._on_event(event)
                self._read()
                self._look()
        finally:
            for peer in self._peers.values():
                if peer.transfer is not None:
                    reason = f"{self._member} is shutting down"
                    self._send(peer, Withdraw(round=peer.transfer.offer.round, reason=reason))
            for channel in list(self._couriers.channels.values()):
                self._couriers.leave(channel)
            # The last messages should leave before the socket is closed.
            self._router.close(linger=200)

    def _pause(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        times = [now + 1.0]
        if self._settings.topology == "broadcast":
            channels = self._couriers.channels.values()
            times += [channel.until for channel in channels if channel.end is None]
        for peer in self._peers.values():
            times.append(peer.silence.next_look)
            if peer.transfer is not None:
                times.append(peer.transfer.wait.next_look)
            elif self._behind(peer) and not peer.ask.busy:
                times.append(peer.next_try)
        return max(0.0, min(times) - now)

    def _behind(self, peer: Peer) -> bool:
        newest = self._slots.newest
        return newest is not None and peer.version != newest

    def _look(self) -> None:
        """Checks deadlines and makes offers."""
        for peer in list(self._peers.values()):
            if peer.silence.expired(log.warning):
                reason = f"silent for {peer.silence.seconds:.1f} s (stopped or dead)"
                if peer.transfer is not None:
                    reason += f" while it should {peer.transfer.wait.what}"
                self._forget(peer, reason)
                log.warning(f"{peer.member}: {reason}; it is served again once it answers")
            elif peer.transfer is not None and peer.transfer.wait.expired(log.warning):
                self._fail(peer, str(peer.transfer.wait))
        for peer in list(self._peers.values()):
            if peer.idle and self._behind(peer):
                self._offer(peer)
        for channel in list(self._couriers.channels.values()):
            self._mind(channel)

    # What comes in.

    def _on_event(self, event: Event) -> None:
        match event:
            case Published():
                # `_look` makes the offers.
                newest, every = self._slots.newest, self._settings.snapshot_every
                # Several versions may have been published since the last event.
                if every and newest and newest.step // every > self._snapshot_step // every:
                    self._snapshot_step = newest.step
                    self._couriers.ask_for_snapshot()
            case Stop():
                self._stopping = True
            case Sent(channel, problem):
                self._couriers.channels.pop(channel.offer.round, None)
                if problem:
                    for peer in self._members_of(channel):
                        self._fail(peer, problem)
            case SnapshotWritten():
                self._last_snapshot = event
                self._counts["snapshots"] += 1
                self._couriers.write_next_snapshot()
                for peer in self._peers.values():
                    peer.next_try = min(peer.next_try, time.monotonic())
            case SnapshotFailed(problem):
                log.warning(problem)
                self._couriers.write_next_snapshot()
                for peer in self._peers.values():
                    if peer.transfer is None and self._behind(peer):
                        peer.failures += 1
                        self._postpone(peer)
            case _:
                assert_never(event)

    def _read(self) -> None:
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
            self._on_message(identity, message)

    def _on_message(self, identity: bytes, message: Message) -> None:
        if isinstance(message, Ask):
            self._on_ask(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            # Its next Ask comes within a second and begins anew.
            return
        peer.silence.restart()
        transfer = peer.transfer
        if transfer is None or message.round != transfer.offer.round:
            return
        match message:
            case Loaded():
                self._on_loaded(peer, transfer, message)
            case Refused(stage=stage, reason=reason):
                self._counts["refused"] += 1
                self._fail(peer, f"{peer.member} refused at {stage}: {reason}", tell=False)
            case Offer() | Open() | Withdraw():
                log.warning(f"{peer.member} sent a {type(message).__name__}: only learners do")
            case _:
                assert_never(message)

    def _send(self, peer: Peer, message: Message) -> None:
        try:
            self._router.send_multipart([peer.identity, *pack(message)], zmq.NOBLOCK)
        except zmq.Again:
            # Its queue is full, so it reads nothing and will miss its deadline.
            log.debug(f"{peer.member} accepts no messages")

    def _on_ask(self, identity: bytes, ask: Ask) -> None:
        if ask.run_id != self._run_id:
            log.warning(f"{ask.member} belongs to run {ask.run_id}: ignored")
            return
        peer = self._peers.get(identity)
        if peer is None:
            for other in list(self._peers.values()):
                if other.member == ask.member:
                    self._forget(other, "a newer process of that name has joined")
            silence = Wait(ask.member, "say that it is alive", self._silent_seconds)
            peer = self._peers[identity] = Peer(identity=identity, ask=ask, silence=silence)
            log.info(f"{peer.member} joined with version {ask.version or 'none'}")
        peer.ask = ask
        peer.silence.restart()
        transfer = peer.transfer
        if transfer is not None and ask.round != transfer.offer.round:
            if time.perf_counter() - transfer.begun > LOST_SECONDS:
                self._fail(peer, f"{peer.member} didn't get the offer")
        elif transfer is not None and not ask.busy:
            self._settle(peer, transfer, ask.version)
        elif transfer is not None and not transfer.taken_up:
            transfer.taken_up = True
            if transfer.channel is None:
                self._expect_loaded(peer, transfer)
            else:
                # Its own deadline starts when the channel opens.
                transfer.wait = Wait(peer.member, "wait", self._settings.open_seconds)
        if peer.transfer is None:
            peer.version = ask.version
            peer.content = ask.content

    # A transfer's beginning.

    def _offer(self, peer: Peer) -> None:
        pinned = self._slots.pin_newest(begin=False)
        if pinned is None:
            return
        pin, version, published = pinned
        try:
            offer = self._best_offer(peer, pin.slot, version)
        except (WeightsError, RuntimeError) as error:
            self._postpone(peer)
            log.warning(f"{peer.member} can't be sent version {version}: {error}")
            offer = None
        if offer is None:
            pin.release()
            return
        pin.slot.started = True
        self._counts["rounds"] += 1
        channel = None
        if offer.way in WAYS and WAYS[offer.way].is_channel:
            channel = self._couriers.channel_for(offer, pin)
            offer = channel.offer
        what = f"acknowledge version {offer.manifest.version}"
        wait = Wait(peer.member, what, self._settings.open_seconds)
        peer.transfer = Transfer(
            offer=offer, pin=pin, published=published, wait=wait, channel=channel
        )
        self._send(peer, offer)

    def _best_offer(self, peer: Peer, slot: StagingSlot, version: Version) -> Offer | None:
        """An offer by the best way that hasn't failed too often; None if the bytes aren't ready yet."""
        memory = shared_memory_name()
        pair = Pair(
            sender=device_name(self._slots.device),
            receiver=peer.ask.device,
            same_memory=slot.segment is not None and bool(memory) and memory == peer.ask.memory,
        )
        possible = possible_ways(self._settings.transport, pair, peer.ask.ways)
        way = possible[peer.failures // FAILURES_EACH % len(possible)]
        if way == Snapshot.name:
            written = self._last_snapshot
            if written is None or written.manifest.version != version:
                self._couriers.ask_for_snapshot()
            if written is None or (peer.version and written.manifest.version <= peer.version):
                # It is offered when the snapshot has been written.
                peer.next_try = time.monotonic() + 1.0
                return None
            # If the disk is slower than the learner, this isn't the newest version.
            manifest, place = written.manifest, written.place
        else:
            parcel = slot.parcel(version)
            manifest, place = parcel.manifest, self._couriers.place(way, parcel)
        if manifest.content == peer.content:
            way, place = RENAME, ""
        name = f"{manifest.version}/{self._counts['rounds'] + 1}"
        return Offer(round=name, manifest=manifest, way=way, place=place)

    def _expect_loaded(self, peer: Peer, transfer: Transfer, more: float = 0.0) -> None:
        what = f"fetch, check and load version {transfer.offer.manifest.version}"
        seconds = more + self._settings.stage_seconds + self._settings.commit_seconds
        transfer.wait = Wait(peer.member, what, seconds)

    def _members_of(self, channel: Channel) -> list[Peer]:
        """The workers that were offered this channel and haven't failed."""
        peers = self._peers.values()
        return [p for p in peers if p.transfer is not None and p.transfer.channel is channel]

    def _mind(self, channel: Channel) -> None:
        """Opens a channel once all its members have accepted the offer or their time is up."""
        members = self._members_of(channel)
        late = [p for p in members if p.transfer is not None and not p.transfer.taken_up]
        if channel.end is None and late and len(members) > 1 and time.monotonic() >= channel.until:
            for peer in late:
                version = channel.offer.manifest.version
                who = f"{peer.member} didn't acknowledge version {version}"
                self._fail(peer, f"{who} in time for the broadcast")
            members, late = self._members_of(channel), []
        if not members:
            self._couriers.leave(channel)
        elif channel.end is None and not late:
            self._open(channel, members)

    def _open(self, channel: Channel, members: list[Peer]) -> None:
        try:
            meetings = self._couriers.open(channel, len(members))
        except TandemError as error:
            self._couriers.leave(channel)
            for peer in members:
                self._fail(peer, str(error))
            return
        self._counts["broadcasts"] += len(members) > 1
        for peer, meeting in zip(members, meetings, strict=True):
            assert peer.transfer is not None
            self._expect_loaded(peer, peer.transfer, self._settings.open_seconds)
            self._send(peer, Open(round=channel.offer.round, meeting=meeting))

    # A transfer's end.

    def _on_loaded(self, peer: Peer, transfer: Transfer, message: Loaded) -> None:
        manifest, way = transfer.offer.manifest, transfer.offer.way
        peer.version = message.version
        peer.content = manifest.content
        peer.transfer = None
        peer.pause = FIRST_PAUSE
        peer.failures -= peer.failures % FAILURES_EACH
        peer.next_try = 0.0
        transfer.pin.release()
        self._latency = time.perf_counter() - transfer.published
        self._counts["committed"] += 1
        nbytes = manifest.total_bytes if way != RENAME else 0
        self._counts["bytes"] += nbytes
        arrived = transfer.begun - transfer.published + message.fetched
        peer.last = {
            "version": [message.version.term, message.version.step],
            "transport": way,
            "seconds": round(message.fetched, 6),
            "gb_per_second": round(nbytes / max(message.fetched, 1e-9) / 1e9, 4),
            "pause_seconds": round(message.paused, 6),
            "arrival_seconds": round(arrived, 6),
            "latency_seconds": round(self._latency, 6),
        }

    def _settle(self, peer: Peer, transfer: Transfer, version: Version | None) -> None:
        """Ends a transfer if the worker's message about its end was lost."""
        if version is not None and version == transfer.offer.manifest.version:
            lost = Loaded(
                round=transfer.offer.round, version=version, fetched=0.0, seconds=0.0, paused=0.0
            )
            self._on_loaded(peer, transfer, lost)
        else:
            reason = f"{peer.member} has given it up; its message about that was lost"
            self._fail(peer, reason, tell=False)

    def _postpone(self, peer: Peer) -> float:
        pause = peer.pause
        peer.pause = min(LONGEST_PAUSE, pause * 2)
        peer.next_try = time.monotonic() + pause
        return pause

    def _fail(self, peer: Peer, reason: str, *, tell: bool = True) -> None:
        """Ends a transfer without success; the worker is served again after a pause."""
        transfer, peer.transfer = peer.transfer, None
        if transfer is None:
            return
        # A worker that refused has stopped reading; one that was given up may still be.
        transfer.pin.release(retire=tell and transfer.offer.way == SharedMemory.name)
        self._counts["failed"] += 1
        peer.failures += 1
        if tell:
            self._send(peer, Withdraw(round=transfer.offer.round, reason=reason[:1000]))
        pause = self._postpone(peer)
        log.warning(
            f"{peer.member} stays on {peer.version or 'no version'}, not "
            f"{transfer.offer.manifest.version}: {reason}; again in {pause:.1f} s"
        )

    def _forget(self, peer: Peer, reason: str) -> None:
        self._fail(peer, reason)
        self._peers.pop(peer.identity, None)
