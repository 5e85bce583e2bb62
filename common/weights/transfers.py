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
from ..errors import TandemError, WeightsError, WireError
from ..mailbox import Mailbox
from ..records import Version
from ..sockets import local_address
from ..waiting import Wait
from . import snapshot
from .gloo import Channel, meeting_point
from .manifest import WeightManifest
from .protocol import RENAME, Ask, Meeting, Message, Offer, Open, Pair, Withdraw, pack, unpack
from .shared_memory import shared_memory_name
from .staging import Published, StagingSlots
from .ways import WAYS, device_name, possible_ways

log = logging.getLogger("tandem.learner.weights")

LOOK_MS = 100
"""Longest time between two looks at what is due, in milliseconds."""
SILENT_SECONDS = 10.0
"""A worker that has been silent for this long is given up; it should ask once a second."""
FAILURES_EACH = 2
"""Failures in a row after which ``auto`` tries a worker's next way, and a worker is an alarm."""
LOST_SECONDS = 2.0
"""A worker that doesn't know of an offer this old never got it, since it asks once a second."""
GATHER_SECONDS = 2.0
"""A broadcast waits this long for a member to accept, then goes on with those that did."""
UNREAD = ("snapshot", RENAME)
"""Ways by which a worker reads none of the learner's buffers."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Shortest and longest pause between attempts with one worker or at a snapshot, in seconds; it doubles each time."""


def pause_after(failures: int) -> float:
    """Seconds until the next attempt after one more failure than these."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 10))


@dataclass(slots=True, kw_only=True, eq=False)
class Round:
    """Workers that get one version over one channel; without ``broadcast`` it is a single one."""

    offer: Offer
    """The offer that all its members received."""
    channel: Channel | None = None
    """The learner's end, once the channel is open."""
    meeting_point: TCPStore | None = None
    """Listens while the channel is open."""


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One version on its way to one worker."""

    offer: Offer
    published: Published | None
    """The version, pinned; None if the worker reads no buffer of the learner's (:data:`UNREAD`)."""
    since: float
    """``perf_counter`` when the version was published."""
    wait: Wait
    """What the worker should do next."""
    round: Round | None
    """Whose channel carries the bytes; None for other ways."""
    begun: float = field(default_factory=time.perf_counter)
    """``perf_counter`` at the offer."""
    taken_up: bool = False
    """Whether the worker has accepted the offer."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """One life of one worker."""

    identity: bytes
    """The ZeroMQ identity: the member id and a random name for this life."""
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
    obstacle: str = ""
    """What keeps new versions from it: no way to offer them, or why the last of several attempts has failed."""
    last: dict[str, Any] | None = None
    """Figures of the last transfer, for reports."""


class Transfers:
    """Offers published versions to the workers that hold another one.

    Args:
        router: bound control socket.
        snapshots: folder in which snapshots are written.
        ports: ``launch.ports``, of which meeting points take theirs.
    """

    def __init__(
        self,
        settings: WeightsConfig,
        slots: StagingSlots,
        router: zmq.Socket[bytes],
        *,
        snapshots: Path,
        ports: range | None = None,
    ) -> None:
        self._settings = settings
        self._ports = ports
        self._slots = slots
        self._router = router
        self._snapshots = snapshots
        self._interface = local_address(settings.interface or "127.0.0.1")
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._stopping = False
        self._peers: dict[bytes, Peer] = {}
        self._rounds: list[Round] = []
        self._counts = dict.fromkeys(("committed", "failed", "bytes", "snapshots", "broadcasts"), 0)

        self._snapshot: WeightManifest | None = None
        """The newest snapshot's."""
        self._snapshot_since = 0.0
        """``perf_counter`` when the newest snapshot's version was published."""
        self._rewritten: Version | None = None
        """The version whose snapshot a worker couldn't read, so that it is written once more."""
        self._snapshot_failures = 0
        """Number of snapshots in a row that couldn't be written."""
        self._next_snapshot = 0.0
        """``monotonic`` time before which ``snapshot_every`` has none written."""
        self._is_writing = False

    # For other threads.

    def wake(self) -> None:
        """There is a newer version."""
        self._mailbox.post(lambda: None)

    def stop(self) -> None:
        """Ends :meth:`serve` at its next look."""
        self._stopping = True

    def stats(self) -> dict[str, Any]:
        """Counters since the start, each live worker's version and last transfer, and what keeps any from new ones."""
        peers = list(self._peers.copy().values())
        held = {p.member: p.ask.version for p in peers}
        return {
            **self._counts,
            "superseded": self._slots.superseded,
            "buffers": len(self._slots),
            "buffer_bytes": self._slots.nbytes,
            "members": {who: [v.term, v.step] if v else None for who, v in held.items()},
            "transfers": {p.member: p.last for p in peers if p.last is not None},
            "alarm": "; ".join(
                f"{p.member} can't be sent new weights: {p.obstacle}" for p in peers if p.obstacle
            ),
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
            reason = "the learner is shutting down"
            for peer in self._peers.values():
                if peer.transfer is not None:
                    self._send(peer, Withdraw(round=peer.transfer.offer.round, reason=reason))
            for channel in [one.channel for one in self._rounds if one.channel is not None]:
                channel.abort()
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
        for one in list(self._rounds):
            self._mind(one)
        # Several versions may have been published since the last look.
        written = -1 if self._snapshot is None else self._snapshot.version.step
        is_due = every and newest and newest.step // every > written // every
        if is_due and time.monotonic() >= self._next_snapshot:
            self._write_snapshot()

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
        peer = self._peers.get(identity)
        if peer is None:
            for other in list(self._peers.values()):
                if other.member == message.member:
                    self._forget(other, "a newer process of that name has joined")
            who = message.member
            silence = Wait(who, "say that it is alive", SILENT_SECONDS)
            peer = Peer(identity=identity, member=who, ask=message, silence=silence)
            self._peers[identity] = peer
            log.info(f"{who} joined with version {message.version or 'none'}")
        peer.ask = message
        peer.silence.restart()
        if message.version == self._slots.newest:
            peer.obstacle = ""
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
            if offer.way == "snapshot":
                self._doubt(offer, ask.problem)
            self._fail(peer, f"{peer.member} refused at {ask.problem}", tell=False)
        elif not transfer.taken_up:
            transfer.taken_up = True
            seconds = self._settings.stage_seconds + self._settings.commit_seconds
            if transfer.round is not None:
                seconds += self._settings.open_seconds
            what = f"fetch, check and load version {offer.manifest.version}"
            transfer.wait = Wait(peer.member, what, seconds)

    # A transfer's beginning.

    def _offer(self, peer: Peer) -> None:
        published = self._slots.pin()
        if published is None:
            return
        try:
            offer = self._best_offer(peer, published)
        except (WeightsError, RuntimeError) as error:
            self._postpone(peer)
            before, peer.obstacle, offer = peer.obstacle, str(error), None
            if peer.obstacle != before:
                log.warning(f"{peer.member} can't be sent version {published.version}: {error}")
        if offer is None:
            self._slots.release(published.slot)
            return
        is_newest = offer.manifest.version == published.version
        since = published.since if is_newest else self._snapshot_since
        published.started |= is_newest
        pinned: Published | None = published
        if offer.way in UNREAD:
            self._slots.release(published.slot)
            pinned = None
        shared, seconds = None, self._settings.open_seconds
        if offer.way in WAYS and WAYS[offer.way].channel is not None:
            shared = self._round_of(offer)
            offer = shared.offer
            if self._settings.topology == "broadcast":
                seconds = min(seconds, GATHER_SECONDS)
        wait = Wait(peer.member, f"acknowledge version {offer.manifest.version}", seconds)
        peer.transfer = Transfer(
            offer=offer, published=pinned, since=since, wait=wait, round=shared
        )
        self._send(peer, offer)

    def _best_offer(self, peer: Peer, published: Published) -> Offer | None:
        """An offer by the best way that hasn't failed too often; None if the bytes aren't ready yet."""
        held, memory, staged = peer.ask.version, shared_memory_name(), published.slot.staged
        pair = Pair(
            learner=device_name(self._slots.device),
            worker=peer.ask.device,
            same_memory=bool(staged.path and memory) and memory == peer.ask.memory,
        )
        possible = possible_ways(self._settings.transport, pair)
        way = possible[peer.way % len(possible)]
        if way == "snapshot":
            written = self._snapshot
            if written is None or written.version != published.version:
                self._write_snapshot()
            if written is None or (held and written.version <= held):
                # It is offered when the snapshot has been written.
                peer.next_try = time.monotonic() + 1.0
                return None
            # If the disk is slower than the learner, this isn't the newest version.
            manifest, place = written, str(self._snapshots / str(written.version))
        else:
            # A channel opens once the worker has accepted.
            manifest = self._slots.manifest(published)
            place = staged.path if WAYS[way].channel is None else ""
        if manifest.content == peer.ask.content:
            way, place = RENAME, ""
        name = f"{manifest.version}/{secrets.token_hex(4)}"
        return Offer(round=name, manifest=manifest, way=way, place=place)

    # Channels.

    def _round_of(self, offer: Offer) -> Round:
        """The round for a worker's offer. With ``weights.topology=broadcast`` that is the round of other
        workers with the same offer, if its channel isn't open yet."""
        for one in self._rounds if self._settings.topology == "broadcast" else ():
            theirs = one.offer
            if one.channel is None and (theirs.way, theirs.manifest) == (offer.way, offer.manifest):
                return one
        self._rounds.append(Round(offer=offer))
        return self._rounds[-1]

    def _members_of(self, one: Round) -> list[tuple[Peer, Transfer]]:
        """The workers that were made this offer and haven't failed."""
        under_way = [(peer, peer.transfer) for peer in self._peers.values() if peer.transfer]
        return [each for each in under_way if each[1].round is one]

    def _mind(self, one: Round) -> None:
        """Opens a channel once all its members have accepted the offer; leaves it when none is left."""
        members = self._members_of(one)
        if not members:
            self._rounds.remove(one)
            # A thread that waits there for ranks is done waiting.
            one.meeting_point = None
            if one.channel is not None:
                # Its thread may wait until its deadline, and keeps the slot pinned until then.
                one.channel.abort()
        elif one.channel is None and all(transfer.taken_up for _, transfer in members):
            self._open(one, members)

    def _open(self, one: Round, members: list[tuple[Peer, Transfer]]) -> None:
        """Starts sending, and sends each member the meeting point."""
        kind, published = WAYS[one.offer.way].channel, members[0][1].published
        assert kind is not None
        assert published is not None
        try:
            point = one.meeting_point = meeting_point(self._interface, self._ports)
            channel = one.channel = kind(self._settings, self._slots.device)
        except (TandemError, RuntimeError, OSError) as error:
            # TandemError: all ports of launch.ports are in use.
            self._on_sent(one, f"the weight channel can't be created: {error}")
            return
        own = Meeting(
            host=point.host,
            port=point.port,
            channel=secrets.token_hex(8),
            rank=0,
            world_size=1 + len(members),
        )
        self._slots.pin(published)
        send = partial(channel.send, published.slot.staged, own)
        self._in_thread("weights-channel", published, send, partial(self._on_sent, one))
        self._counts["broadcasts"] += len(members) > 1
        for rank, (peer, transfer) in enumerate(members, start=1):
            transfer.wait.restart()
            meeting = msgspec.structs.replace(own, rank=rank)
            self._send(peer, Open(round=one.offer.round, meeting=meeting))

    def _on_sent(self, one: Round, problem: str) -> None:
        """A channel has sent all bytes, or has failed."""
        one.meeting_point = None
        if one in self._rounds:
            self._rounds.remove(one)
        if problem:
            for peer, _ in self._members_of(one):
                self._fail(peer, problem)

    def _in_thread(
        self,
        name: str,
        published: Published,
        work: Callable[[], object],
        then: Callable[[str], None],
    ) -> None:
        """Does something with a pinned version in a thread of its own, and releases the version.

        Args:
            name: the thread's.
            then: called afterwards in the service's thread, with what went wrong.
        """

        def run() -> None:
            problem = ""
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the version has to be released
                problem = str(error) or type(error).__name__
            finally:
                self._slots.release(published.slot)
            self._mailbox.post(partial(then, problem))

        threading.Thread(target=run, name=name, daemon=True).start()

    # Snapshots.

    def _write_snapshot(self) -> None:
        """Has the newest version written, unless another one is being written. A disk may be slow."""
        published = self._slots.pin() if not self._is_writing else None
        if published is None:
            return
        published.started = True
        self._is_writing = True
        # What is offered while this one is written is the newest so far, which is kept.
        offers = [peer.transfer.offer for peer in self._peers.values() if peer.transfer is not None]
        being_read = {Path(offer.place).name for offer in offers if offer.way == "snapshot"}

        def write() -> None:
            manifest = self._slots.manifest(published)
            snapshot.write(manifest, published.slot.staged, self._snapshots, being_read)

        then = partial(self._on_snapshot, published)
        self._in_thread("weights-snapshot", published, write, then)

    def _doubt(self, offer: Offer, problem: str) -> None:
        """Has a snapshot written once more that is lost, or damaged as a worker found. A worker that alone sees no such
        folder wouldn't see the next one either."""
        version, written = offer.manifest.version, self._snapshot
        bad = problem.startswith("verify:") or not snapshot.is_there(offer.place)
        if bad and written is not None and written.version == version != self._rewritten:
            self._snapshot, self._rewritten = None, version

    def _on_snapshot(self, published: Published, problem: str) -> None:
        """A version is on disk, or couldn't be written."""
        self._is_writing = False
        if problem:
            log.warning(problem)
            self._next_snapshot = time.monotonic() + pause_after(self._snapshot_failures)
            self._snapshot_failures += 1
            for peer in self._peers.values():
                if peer.transfer is None and peer.ask.version != self._slots.newest:
                    self._postpone(peer)
            return
        self._snapshot = self._slots.manifest(published)
        self._snapshot_since = published.since
        self._snapshot_failures = 0
        self._counts["snapshots"] += 1
        for peer in self._peers.values():
            peer.next_try = min(peer.next_try, time.monotonic())

    # A transfer's end.

    def _on_loaded(self, peer: Peer, transfer: Transfer) -> None:
        manifest, way, ask = transfer.offer.manifest, transfer.offer.way, peer.ask
        peer.transfer = None
        peer.failures = 0
        peer.next_try = 0.0
        peer.obstacle = ""
        if transfer.published is not None:
            self._slots.release(transfer.published.slot)
        nbytes = manifest.layout.total_bytes if way != RENAME else 0
        self._counts["committed"] += 1
        self._counts["bytes"] += nbytes
        peer.last = {
            "version": [manifest.version.term, manifest.version.step],
            "transport": way,
            "seconds": round(ask.fetched, 6),
            "gb_per_second": round(nbytes / max(ask.fetched, 1e-9) / 1e9, 4),
            "pause_seconds": round(ask.paused, 6),
            "arrival_seconds": round(transfer.begun - transfer.since + ask.fetched, 6),
            "latency_seconds": round(time.perf_counter() - transfer.since, 6),
        }

    def _fail(self, peer: Peer, reason: str, *, tell: bool = True) -> None:
        """Ends a transfer without success; the worker is served again after a pause."""
        transfer, peer.transfer = peer.transfer, None
        if transfer is None:
            return
        if transfer.published is not None:
            # A worker that refused has stopped reading; one that was given up may still be.
            retire = tell and transfer.offer.way == "shared_memory"
            self._slots.release(transfer.published.slot, retire=retire)
        self._counts["failed"] += 1
        if tell:
            self._send(peer, Withdraw(round=transfer.offer.round, reason=reason[:1000]))
        pause = self._postpone(peer)
        if peer.failures >= FAILURES_EACH:
            peer.obstacle = reason
        log.warning(
            f"{peer.member} stays on {peer.ask.version or 'no version'}, not "
            f"{transfer.offer.manifest.version}: {reason}; again in {pause:.1f} s"
        )

    def _postpone(self, peer: Peer) -> float:
        """Counts a failure; returns the seconds until the next attempt."""
        pause = pause_after(peer.failures)
        peer.failures += 1
        peer.way += peer.failures % FAILURES_EACH == 0
        peer.next_try = time.monotonic() + pause
        return pause

    def _forget(self, peer: Peer, reason: str) -> None:
        self._fail(peer, reason)
        self._peers.pop(peer.identity, None)
