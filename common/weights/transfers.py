"""The learner's end of the control socket: who is offered which version, when and by what way.

One thread owns the socket and everything in :class:`Transfers`; other threads post calls to it. Each
channel has a thread that carries its bytes, and so has the snapshot that is being written. A worker
that is slow, stopped or dead fails only its own transfer. If several share a channel
(``weights.topology=broadcast``) it fails theirs too, and the next channel is opened without it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
from torch.distributed import TCPStore

from ..config import WeightsConfig
from ..errors import WeightsError, WireError
from ..mailbox import Mailbox
from ..sockets import local_address
from ..waiting import Wait
from .channel import Pair, Way, meeting_point
from .manifest import WeightManifest
from .protocol import RENAME, Ask, Meeting, Message, Offer, Open, Withdraw, pack, unpack
from .shared_memory import SharedMemory, shared_memory_name
from .snapshot import Snapshot
from .staging import Pin, StagingSlots
from .ways import WAYS, device_name, possible_ways

log = logging.getLogger("tandem.learner.weights")

LOOK_MS = 100
"""Longest time between two looks at what is due, in milliseconds."""
SILENT_SECONDS = 10.0
"""A worker that has been silent for this long is given up; it should ask once a second."""
FAILURES_EACH = 2
"""Failures in a row after which ``auto`` tries a worker's next way."""
LOST_SECONDS = 2.0
"""A worker that doesn't know of an offer this old never got it, since it asks once a second."""
GATHER_SECONDS = 2.0
"""A broadcast waits this long for a member to accept, then goes on with those that did."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Shortest and longest pause between attempts with one worker, in seconds; it doubles each time."""


Result = tuple[WeightManifest, str] | str
"""What a way's thread ends with: a version and where workers find it, or what went wrong."""


@dataclass(slots=True, kw_only=True, eq=False)
class Channel:
    """Carries one version to one worker, or to several at once."""

    offer: Offer
    """The offer that all its members received."""
    end: Way | None = None
    """The learner's end, once the channel is open."""
    meeting_point: TCPStore | None = None
    """Listens while the channel is open."""


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One version on its way to one worker."""

    offer: Offer
    pin: Pin
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
    member: str
    ask: Ask
    silence: Wait
    """Restarted whenever it is heard."""
    transfer: Transfer | None = None
    way: int = 0
    """Which of its ways ``auto`` uses, modulo their number."""
    failures: int = 0
    """Number of attempts that have failed since the last success."""
    next_try: float = 0.0
    """``monotonic`` time before which nothing is offered."""
    last: dict[str, Any] | None = None
    """Figures of the last transfer, for reports."""


class Transfers:
    """Offers published versions to the workers that hold another one.

    Args:
        router: bound control socket.
        snapshots: folder in which snapshots are written.
        silent_seconds: silence after which a worker is given up.
    """

    def __init__(
        self,
        run_id: str,
        member: str,
        settings: WeightsConfig,
        slots: StagingSlots,
        router: zmq.Socket[bytes],
        *,
        snapshots: Path,
        silent_seconds: float,
    ) -> None:
        self._run_id = run_id
        self._member = member
        self._settings = settings
        self._slots = slots
        self._router = router
        self._snapshots = str(snapshots)
        self._silent_seconds = silent_seconds
        self._interface = local_address(settings.interface)
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._stopping = False
        self._peers: dict[bytes, Peer] = {}
        self._channels: list[Channel] = []
        self._counts = dict.fromkeys(("committed", "failed", "bytes", "snapshots", "broadcasts"), 0)

        self._snapshot: tuple[WeightManifest, str] | None = None
        self._snapshot_step = -1
        self._snapshot_wanted = False
        self._snapshot_begun = False

    # For other threads.

    def wake(self) -> None:
        """There is a newer version."""
        self._mailbox.post(lambda: None)

    def stop(self) -> None:
        """Ends :meth:`serve` at its next look."""
        self._stopping = True

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and each live worker's version and last transfer."""
        peers = list(self._peers.copy().values())
        held = {p.member: p.ask.version for p in peers}
        return {
            **self._counts,
            "members": {who: [v.term, v.step] if v else None for who, v in held.items()},
            "transfers": {p.member: p.last for p in peers if p.last is not None},
        }

    # The thread.

    def serve(self) -> None:
        """Serves workers until :meth:`stop`."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._mailbox.fd, zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(LOOK_MS)
                for call in self._mailbox.take():
                    call()
                self._read()
                self._look()
        finally:
            reason = f"{self._member} is shutting down"
            for peer in self._peers.values():
                if peer.transfer is not None:
                    self._send(peer, Withdraw(round=peer.transfer.offer.round, reason=reason))
            for end in [channel.end for channel in self._channels if channel.end is not None]:
                end.abort()
            # The last messages should leave before the socket is closed.
            self._router.close(linger=200)
            self._mailbox.close()

    def _look(self) -> None:
        """Checks deadlines, makes offers, and begins what has become possible."""
        for peer in list(self._peers.values()):
            if peer.silence.expired(log.warning):
                reason = f"silent for {peer.silence.seconds:.1f} s (stopped or dead)"
                if peer.transfer is not None:
                    reason += f" while it should {peer.transfer.wait.what}"
                self._forget(peer, reason)
                log.warning(f"{peer.member}: {reason}; it is served again once it answers")
            elif peer.transfer is not None and peer.transfer.wait.expired(log.warning):
                self._fail(peer, str(peer.transfer.wait))
        newest, every = self._slots.newest, self._settings.snapshot_every
        for peer in self._peers.values():
            idle = peer.transfer is None and not peer.ask.busy
            if idle and peer.ask.version != newest and time.monotonic() >= peer.next_try:
                self._offer(peer)
        for channel in list(self._channels):
            self._mind(channel)
        # Several versions may have been published since the last look.
        if every and newest and newest.step // every > self._snapshot_step // every:
            self._snapshot_step = newest.step
            self._snapshot_wanted = True
        if self._snapshot_wanted and not self._snapshot_begun:
            self._begin_snapshot()

    # Messages.

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

    def _send(self, peer: Peer, message: Message) -> None:
        try:
            self._router.send_multipart([peer.identity, *pack(message)], zmq.NOBLOCK)
        except zmq.Again:
            # Its queue is full, so it reads nothing and will miss its deadline.
            log.debug(f"{peer.member} accepts no messages")

    def _on_message(self, identity: bytes, message: Message) -> None:
        if not isinstance(message, Ask):
            log.warning(f"{identity[:80]!r} sent a {type(message).__name__}: only learners do")
            return
        if message.run_id != self._run_id:
            log.warning(f"{message.member} belongs to run {message.run_id}: ignored")
            return
        peer = self._peers.get(identity)
        if peer is None:
            for other in list(self._peers.values()):
                if other.member == message.member:
                    self._forget(other, "a newer process of that name has joined")
            who = message.member
            silence = Wait(who, "say that it is alive", self._silent_seconds)
            peer = Peer(identity=identity, member=who, ask=message, silence=silence)
            self._peers[identity] = peer
            log.info(f"{who} joined with version {message.version or 'none'}")
        peer.ask = message
        peer.silence.restart()
        if peer.transfer is not None:
            self._on_progress(peer, peer.transfer)

    def _on_progress(self, peer: Peer, transfer: Transfer) -> None:
        """Compares a worker's last Ask with the transfer to it."""
        ask, offer = peer.ask, transfer.offer
        if ask.version == offer.manifest.version:
            self._on_loaded(peer, transfer)
        elif ask.round != offer.round:
            if time.perf_counter() - transfer.begun > LOST_SECONDS:
                self._fail(peer, f"{peer.member} didn't get the offer")
        elif not ask.busy:
            self._fail(peer, f"{peer.member} refused at {ask.problem}", tell=False)
        elif not transfer.taken_up:
            transfer.taken_up = True
            seconds = self._settings.stage_seconds + self._settings.commit_seconds
            if transfer.channel is not None:
                seconds += self._settings.open_seconds
            what = f"fetch, check and load version {offer.manifest.version}"
            transfer.wait = Wait(peer.member, what, seconds)

    # A transfer's beginning.

    def _offer(self, peer: Peer) -> None:
        pin = self._slots.pin_newest()
        if pin is None:
            return
        try:
            offer = self._best_offer(peer, pin)
        except (WeightsError, RuntimeError) as error:
            self._postpone(peer)
            log.warning(f"{peer.member} can't be sent version {pin.version}: {error}")
            offer = None
        if offer is None:
            self._slots.release(pin)
            return
        pin.slot.started = True
        channel, seconds = None, self._settings.open_seconds
        if offer.way in WAYS and WAYS[offer.way].is_channel:
            channel = self._channel_for(offer)
            offer = channel.offer
            if self._settings.topology == "broadcast":
                seconds = min(seconds, GATHER_SECONDS)
        wait = Wait(peer.member, f"acknowledge version {offer.manifest.version}", seconds)
        peer.transfer = Transfer(offer=offer, pin=pin, wait=wait, channel=channel)
        self._send(peer, offer)

    def _best_offer(self, peer: Peer, pin: Pin) -> Offer | None:
        """An offer by the best way that hasn't failed too often; None if the bytes aren't ready yet."""
        held, memory = peer.ask.version, shared_memory_name()
        pair = Pair(
            sender=device_name(self._slots.device),
            receiver=peer.ask.device,
            same_memory=pin.slot.segment is not None and bool(memory) and memory == peer.ask.memory,
        )
        possible = possible_ways(self._settings.transport, pair)
        way = possible[peer.way % len(possible)]
        if way == Snapshot.name:
            written = self._snapshot
            if written is None or written[0].version != pin.version:
                self._snapshot_wanted = True
            if written is None or (held and written[0].version <= held):
                # It is offered when the snapshot has been written.
                peer.next_try = time.monotonic() + 1.0
                return None
            # If the disk is slower than the learner, this isn't the newest version.
            manifest, place = written
        else:
            parcel = pin.parcel()
            manifest = parcel.manifest
            # A channel opens once the worker has accepted.
            place = "" if WAYS[way].is_channel else self._end(way).offer(parcel, "")
        if manifest.content == peer.ask.content:
            way, place = RENAME, ""
        name = f"{manifest.version}/{secrets.token_hex(4)}"
        return Offer(round=name, manifest=manifest, way=way, place=place)

    def _end(self, way: str) -> Way:
        return WAYS[way](self._settings, self._slots.device)

    # Channels.

    def _channel_for(self, offer: Offer) -> Channel:
        """The channel for a worker's offer. With ``weights.topology=broadcast`` that is the channel
        of other workers with the same offer, if it isn't open yet."""
        for channel in self._channels if self._settings.topology == "broadcast" else ():
            theirs = channel.offer
            if channel.end is None and (theirs.way, theirs.manifest) == (offer.way, offer.manifest):
                return channel
        channel = Channel(offer=offer)
        self._channels.append(channel)
        return channel

    def _members_of(self, channel: Channel) -> list[tuple[Peer, Transfer]]:
        """The workers that were offered this channel and haven't failed."""
        under_way = [(peer, peer.transfer) for peer in self._peers.values() if peer.transfer]
        return [each for each in under_way if each[1].channel is channel]

    def _mind(self, channel: Channel) -> None:
        """Opens a channel once all its members have accepted the offer; leaves it when none is left."""
        members = self._members_of(channel)
        if not members:
            self._channels.remove(channel)
            if channel.end is not None:
                # Its thread may wait until its deadline, and keeps the slot pinned until then.
                channel.end.abort()
        elif channel.end is None and all(transfer.taken_up for _, transfer in members):
            self._open(channel, members)

    def _open(self, channel: Channel, members: list[tuple[Peer, Transfer]]) -> None:
        """Starts sending, and tells each member where to meet."""
        try:
            point = channel.meeting_point = meeting_point(self._interface)
            channel.end = self._end(channel.offer.way)
        except (RuntimeError, OSError) as error:
            self._on_sent(channel, f"the weight channel can't be created: {error}")
            return
        own = Meeting(
            host=point.host,
            port=point.port,
            channel=secrets.token_hex(8),
            rank=0,
            world_size=1 + len(members),
        )
        pin = self._slots.pin_again(members[0][1].pin)
        self._carry("weights-channel", channel.end, pin, own, partial(self._on_sent, channel))
        self._counts["broadcasts"] += len(members) > 1
        for rank, (peer, transfer) in enumerate(members, start=1):
            transfer.wait.restart()
            meeting = msgspec.structs.replace(own, rank=rank)
            self._send(peer, Open(round=channel.offer.round, meeting=meeting))

    def _on_sent(self, channel: Channel, result: Result) -> None:
        """A channel has sent all bytes, or has failed."""
        channel.meeting_point = None
        if channel in self._channels:
            self._channels.remove(channel)
        if isinstance(result, str):
            for peer, _ in self._members_of(channel):
                self._fail(peer, result)

    def _carry(
        self, name: str, end: Way, pin: Pin, at: Meeting | str, then: Callable[[Result], None]
    ) -> None:
        """Hands a version to a way in a thread of its own, and releases it.

        Args:
            name: the thread's.
            then: called afterwards in the service's thread.
        """

        def run() -> None:
            try:
                parcel = pin.parcel()
                result: Result = (parcel.manifest, end.offer(parcel, at))
            except Exception as error:  # noqa: BLE001 - whatever it is, the pin has to be released
                result = str(error) or type(error).__name__
            finally:
                end.close()
                self._slots.release(pin)
            self._mailbox.post(partial(then, result))

        threading.Thread(target=run, name=name, daemon=True).start()

    # Snapshots.

    def _begin_snapshot(self) -> None:
        """Has the newest version written, unless it is on disk already. A disk may be slow."""
        self._snapshot_wanted = False
        pin = self._slots.pin_newest()
        if pin is None:
            return
        if self._snapshot is not None and self._snapshot[0].version == pin.version:
            self._slots.release(pin)
            return
        pin.slot.started = True
        self._snapshot_begun = True
        end = self._end(Snapshot.name)
        self._carry("weights-snapshot", end, pin, self._snapshots, self._on_snapshot)

    def _on_snapshot(self, result: Result) -> None:
        """A version is on disk, or couldn't be written."""
        self._snapshot_begun = False
        if isinstance(result, str):
            log.warning(result)
            for peer in self._peers.values():
                if peer.transfer is None and peer.ask.version != self._slots.newest:
                    self._postpone(peer)
            return
        self._snapshot = result
        self._counts["snapshots"] += 1
        for peer in self._peers.values():
            peer.next_try = min(peer.next_try, time.monotonic())

    # A transfer's end.

    def _on_loaded(self, peer: Peer, transfer: Transfer) -> None:
        manifest, way, ask = transfer.offer.manifest, transfer.offer.way, peer.ask
        peer.transfer = None
        peer.failures = 0
        peer.next_try = 0.0
        self._slots.release(transfer.pin)
        nbytes = manifest.layout.total_bytes if way != RENAME else 0
        self._counts["committed"] += 1
        self._counts["bytes"] += nbytes
        published = transfer.pin.published
        peer.last = {
            "version": [manifest.version.term, manifest.version.step],
            "transport": way,
            "seconds": round(ask.fetched, 6),
            "gb_per_second": round(nbytes / max(ask.fetched, 1e-9) / 1e9, 4),
            "pause_seconds": round(ask.paused, 6),
            "arrival_seconds": round(transfer.begun - published + ask.fetched, 6),
            "latency_seconds": round(time.perf_counter() - published, 6),
        }

    def _fail(self, peer: Peer, reason: str, *, tell: bool = True) -> None:
        """Ends a transfer without success; the worker is served again after a pause."""
        transfer, peer.transfer = peer.transfer, None
        if transfer is None:
            return
        # A worker that refused has stopped reading; one that was given up may still be.
        retire = tell and transfer.offer.way == SharedMemory.name
        self._slots.release(transfer.pin, retire=retire)
        self._counts["failed"] += 1
        if tell:
            self._send(peer, Withdraw(round=transfer.offer.round, reason=reason[:1000]))
        pause = self._postpone(peer)
        log.warning(
            f"{peer.member} stays on {peer.ask.version or 'no version'}, not "
            f"{transfer.offer.manifest.version}: {reason}; again in {pause:.1f} s"
        )

    def _postpone(self, peer: Peer) -> float:
        """Counts a failure; returns the seconds until the next attempt."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(peer.failures, 10))
        peer.failures += 1
        peer.way += peer.failures % FAILURES_EACH == 0
        peer.next_try = time.monotonic() + pause
        return pause

    def _forget(self, peer: Peer, reason: str) -> None:
        self._fail(peer, reason)
        self._peers.pop(peer.identity, None)
