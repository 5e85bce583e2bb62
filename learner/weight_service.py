"""Serves published weights to the rollout workers: who gets which version, when and by what.

One thread owns the control socket and everything in this file; *links* (threads too) wait inside
the channels, and a *snapshotter* writes to disk. A worker that is slow, stopped or dead costs
its own transfer and nobody else's; where one channel serves several (``weights.topology=
broadcast``), it costs theirs, and the next is made without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ..common.config import WeightsConfig
from ..common.errors import TandemError, WeightsError, WireError
from ..common.records import Version
from ..common.weights.link import Job, Link
from ..common.weights.mailbox import Mailbox
from ..common.weights.manifest import WeightManifest, first_damage
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
from ..common.weights.segment import shared_memory_name
from ..common.weights.staging import Pin, StagingSlot, StagingSlots
from ..common.weights.states import ReceiverState
from ..common.weights.transport import (
    PULLED,
    Meeting,
    Transport,
    device_name,
    possible_transports,
)
from ..common.weights.waiting import Wait
from .snapshotter import Snapshotter
from .weight_peers import Gathering, Peer, Round, Served

log = logging.getLogger("tandem.learner.weights")

GATHER_SECONDS = 2.0
"""A broadcast waits so long for its members' ACKs, then goes on with those that came."""
JOIN_SECONDS = 0.05
"""Between two looks whether a broadcast that is under way has ended."""
FAILURES_EACH = 2
"""Failures with one transport after which ``auto`` tries a worker's next one."""


class WeightService:
    """The learner's end of all transfers.

    Args:
        run_id: of the run.
        member: member id of the learner.
        settings: the run's ``weights`` section.
        slots: the versions to serve.
        router: bound control socket; closed by :meth:`serve`.
        mailbox: wakes the service; ``("newest",)`` after a publication, ``("stop",)`` at the end.
        transports: makes a transport by name and interface.
        interface: address that channels bind.
        snapshot_folder: where snapshots lie.
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
        mailbox: Mailbox[tuple[Any, ...]],
        transports: Callable[[str, str], Transport],
        interface: str,
        snapshot_folder: Path,
        silent_seconds: float,
    ) -> None:
        self._run_id = run_id
        self._member = member
        self._settings = settings
        self._slots = slots
        self._router = router
        self._mailbox = mailbox
        self._transports = transports
        self._interface = interface
        self._silent_seconds = silent_seconds
        self._peers: dict[bytes, Peer] = {}
        self._rounds = 0
        self._meeting: MeetingPoint | None = None
        self._gathering: Gathering | None = None
        self._snapshots = Snapshotter(mailbox, snapshot_folder, run_id)
        self._last_snapshot: tuple[WeightManifest, Path] | None = None
        self._stopping = False

        self.served = threading.Condition()
        """Guards :attr:`held`, and is notified when it changes."""
        self.held: dict[str, Version | None] = {}
        """What each live worker holds."""
        self.last: dict[str, Served] = {}
        """Each live worker's last transfer."""
        self.latency = 0.0
        """From the end of the last copy to the last COMMITTED of that version, seconds."""
        self.counts = {
            "rounds": 0,
            "committed": 0,
            "failed": 0,
            "refused": 0,
            "bytes": 0,
            "snapshots": 0,
            "broadcasts": 0,
        }

    def serve(self) -> None:
        """Until a stop is posted."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._mailbox.fd, zmq.POLLIN)
        try:
            while not self._stopping:
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
            self._snapshots.stop()
            # The last messages should leave before the socket is closed.
            self._router.close(linger=200)

    def _pause(self) -> float:
        """Seconds until something is due."""
        now = time.monotonic()
        times = [now + 1.0]
        if self._gathering is not None:
            times.append(self._gathering.until)
        for peer in self._peers.values():
            times.append(peer.silence.next_look)
            if peer.round is not None:
                times.append(peer.round.wait.next_look)
            elif self._behind(peer):
                times.append(peer.next_try)
        return max(0.0, min(times) - now)

    def _behind(self, peer: Peer) -> bool:
        newest = self._slots.newest
        return newest is not None and peer.version != newest

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
        due = [
            peer
            for peer in self._peers.values()
            if peer.round is None
            and peer.idle
            and time.monotonic() >= peer.next_try
            and self._behind(peer)
        ]
        for peer in due:
            self._begin(peer)
        if self._gathering is not None:
            self._mind(self._gathering)

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

    def _send(self, peer: Peer, message: Message) -> None:
        try:
            self._router.send_multipart([peer.identity, *pack(message)], zmq.NOBLOCK)
        except zmq.Again:
            # Its queue is full, so it reads nothing; its deadline will say so.
            log.debug(f"{peer.member} takes no messages")

    def _on_stop(self) -> None:
        self._stopping = True

    def _on_begun(self, pin: Pin, version: Version) -> None:
        """A version is on its way into a segment: who has it mapped may read along."""
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.round is not None or not peer.idle or now < peer.next_try:
                continue
            try:
                if self._transport_for(peer, pin) != "shared_memory":
                    continue
                manifest, place = pin.slot.outline_of(self._run_id, version), pin.slot.place()
            except (WeightsError, RuntimeError):
                continue  # Once the version is there it is tried again, and told.
            pin.slot.started = True
            self._prepare(
                peer,
                pin.again(),
                manifest,
                "shared_memory",
                place=place,
                counted_from=pin.slot.counted_from,
            )
        pin.release()

    def _on_broken_off(self, slot: StagingSlot) -> None:
        for peer in self._peers.values():
            if peer.round is not None and peer.round.pin.slot is slot:
                version = peer.round.manifest.version
                self._fail(peer, f"version {version} wasn't copied to its end", drop_link=True)

    def _on_newest(self) -> None:
        for peer in self._peers.values():
            current = peer.round
            if current is not None and current.told is not None:
                self._on_staged(peer, current, current.told)
            elif current is not None and current.acknowledged:
                self._take_checksums(peer, current)
        # `_look` begins the rounds.
        every = self._settings.snapshot_every
        newest = self._slots.newest
        if every and newest is not None and newest.step % every == 0:
            self._ask_for_snapshot()

    def _on_have(self, identity: bytes, message: Have) -> None:
        if message.run_id != self._run_id:
            log.warning(f"{message.member} belongs to run {message.run_id}: ignored")
            return
        peer = self._peers.get(identity)
        if peer is None:
            for other in list(self._peers.values()):
                if other.member == message.member:
                    self._forget(other, "a newer process of that name has joined")
            peer = Peer(
                identity=identity,
                member=message.member,
                device=message.device,
                transports=message.transports,
                memory=message.memory,
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
        elif peer.round is not None and peer.idle:
            # It says how a round ended before its next HAVE, or close behind it.
            peer.round.over += 1
            if peer.round.over >= 2:
                self._settle(peer, peer.round, message.version)
        if peer.round is None:
            peer.version = message.version
            peer.content = message.content
        self._note_held(peer)

    def _note_held(self, peer: Peer) -> None:
        with self.served:
            self.held[peer.member] = peer.version
            self.served.notify_all()

    # A round: PREPARE.

    def _begin(self, peer: Peer) -> None:
        pinned = self._slots.pin_newest(begin=False)
        if pinned is None:
            return
        pin, version, published = pinned
        place = ""
        try:
            transport = self._transport_for(peer, pin)
            if transport == "shared_memory":
                manifest = pin.slot.outline_of(self._run_id, version)
            else:
                manifest = pin.slot.manifest_of(self._run_id, version, on_host=transport != "nccl")
            bytes_follow = manifest.is_outline or peer.content != manifest.content
            if not bytes_follow:
                transport = "none"
            if transport == "shared_memory":
                place = pin.slot.place()
            elif transport == "snapshot":
                written = self._last_snapshot
                if written is None or written[0].version != version:
                    self._ask_for_snapshot()
                if written is None or (peer.version and written[0].version <= peer.version):
                    # Its round begins when the snapshot is there.
                    peer.next_try = time.monotonic() + 1.0
                    pin.release()
                    return
                # Where versions follow faster than the disk takes them it isn't the newest.
                manifest, path = written
                version, place = manifest.version, str(path)
        except (WeightsError, RuntimeError) as error:
            pin.release()
            self._postpone(peer)
            log.warning(f"{peer.member} can't be sent version {version}: {error}")
            return
        together = bytes_follow and not place and self._settings.topology == "broadcast"
        if together and not self._may_join(transport, version):
            # It is in the next one.
            peer.next_try = time.monotonic() + JOIN_SECONDS
            pin.release()
            return
        pin.slot.started = True
        gathering = None
        if together:
            gathering = self._gathering
            if gathering is None:
                gathering = Gathering(
                    id=f"{version}/{self._rounds + 1}",
                    version=version,
                    transport=transport,
                    until=time.monotonic() + min(GATHER_SECONDS, self._settings.open_seconds),
                )
                self._gathering = gathering
            gathering.members[peer.identity] = None
        self._prepare(
            peer,
            pin,
            manifest,
            transport,
            bytes_follow=bytes_follow,
            place=place,
            published=published,
            round_id=gathering.id if gathering is not None else "",
        )

    def _prepare(
        self,
        peer: Peer,
        pin: Pin,
        manifest: WeightManifest,
        transport: str,
        *,
        bytes_follow: bool = True,
        place: str = "",
        counted_from: int = -1,
        published: float = 0.0,
        round_id: str = "",
    ) -> None:
        version = manifest.version
        self._rounds += 1
        self.counts["rounds"] += 1
        peer.round = Round(
            id=round_id or f"{version}/{self._rounds}",
            manifest=manifest,
            transport=transport,
            bytes_follow=bytes_follow,
            pin=pin,
            published=published,
            wait=Wait(peer.member, f"acknowledge version {version}", self._settings.open_seconds),
        )
        self._send(
            peer,
            Prepare(
                round=peer.round.id,
                manifest=manifest,
                transport=transport,
                bytes_follow=bytes_follow,
                place=place,
                counted_from=counted_from,
            ),
        )

    def _take_checksums(self, peer: Peer, current: Round) -> None:
        """Fills an outline in, if all bytes are there."""
        if not current.manifest.is_outline or current.pin.slot.version is None:
            return
        try:
            version = current.manifest.version
            current.manifest = current.pin.slot.manifest_of(self._run_id, version)
        except (WeightsError, RuntimeError) as error:
            self._fail(peer, str(error), drop_link=True)

    def _transport_for(self, peer: Peer, pin: Pin) -> str:
        memory = shared_memory_name()
        possible = possible_transports(
            self._settings.transport,
            sender=device_name(pin.slot.buffer.device),
            receiver=peer.device,
            offered=peer.transports,
            same_memory=pin.slot.is_shared and bool(memory) and memory == peer.memory,
        )
        if not possible:
            raise WeightsError(f"it can only do {', '.join(peer.transports) or 'nothing'}")
        return possible[peer.failures // FAILURES_EACH % len(possible)]

    # A round: its bytes.

    def _on_ack(self, peer: Peer, current: Round, message: Ack) -> None:
        version = current.manifest.version
        if not current.bytes_follow or current.transport in PULLED:
            what = f"fetch and check version {version}" if current.bytes_follow else "check it"
            current.wait = Wait(peer.member, what, self._settings.stage_seconds)
            # The worker takes its own meanwhile. Not before the ACK: who sums on after a send keeps
            # ZeroMQ's thread off this core, and PREPARE from leaving.
            current.acknowledged = True
            self._take_checksums(peer, current)
            return
        gathering = self._gathering
        if gathering is not None and current.id == gathering.id:
            if gathering.link is None:
                gathering.members[peer.identity] = message.channel
                # Its own deadline begins when the others are there.
                current.wait = Wait(peer.member, "wait", self._settings.open_seconds)
            return
        link = peer.link
        if link is None or not message.channel or link.channel != message.channel:
            self._drop_link(peer)
            link = self._open([peer], current)
            if link is None:
                return
        else:
            self._expect_staged(peer, current)
        link.put(Job(current.id, None, current.pin.again(), self._settings.stage_seconds))

    def _open(self, peers: list[Peer], current: Round) -> Link | None:
        """Begins a channel to these workers; None where that failed, and with it their rounds."""
        settings = self._settings
        try:
            if self._meeting is None:
                self._meeting = MeetingPoint(self._interface)
            transport = self._transports(current.transport, self._interface)
        except (TandemError, RuntimeError, OSError) as error:
            for peer in peers:
                self._fail(peer, f"no channel could be made: {error}", drop_link=True)
            return None
        link = Link(self._mailbox, frozenset(peer.identity for peer in peers), transport)
        meeting = Meeting(
            host=self._meeting.host,
            port=self._meeting.port,
            channel=link.channel,
            rank=0,
            world_size=1 + len(peers),
        )
        for rank, peer in enumerate(peers, start=1):
            peer.link = link
            self._send(
                peer,
                Open(
                    round=current.id,
                    channel=link.channel,
                    transport=current.transport,
                    host=meeting.host,
                    port=meeting.port,
                    rank=rank,
                    world_size=meeting.world_size,
                ),
            )
            if peer.round is not None:
                peer.round.wait = Wait(peer.member, "open a weight channel", settings.open_seconds)
        link.put(Job(current.id, meeting, None, settings.open_seconds))
        return link

    def _expect_staged(self, peer: Peer, current: Round) -> None:
        what = f"receive and check version {current.manifest.version}"
        current.wait = Wait(peer.member, what, self._settings.stage_seconds)

    def _on_opened(self, link: Link, round_id: str) -> None:
        for peer in self._linked(link):
            if peer.round is not None and peer.round.id == round_id:
                self._expect_staged(peer, peer.round)

    def _on_link_failed(self, link: Link, round_id: str, reason: str) -> None:
        for peer in self._linked(link):
            self._drop_link(peer)
            if peer.round is not None and peer.round.id == round_id:
                self._fail(peer, reason, drop_link=True)

    def _linked(self, link: Link) -> list[Peer]:
        peers = [self._peers.get(identity) for identity in link.members]
        return [peer for peer in peers if peer is not None and peer.link is link]

    # A round of several: weights.topology=broadcast.

    def _may_join(self, transport: str, version: Version) -> bool:
        gathering = self._gathering
        return gathering is None or (
            gathering.link is None
            and gathering.transport == transport
            and gathering.version == version
        )

    def _mind(self, gathering: Gathering) -> None:
        """Begins to send once all have acknowledged or their time is up; ends when all have it."""
        rounds = {
            identity: peer
            for identity in gathering.members
            if (peer := self._peers.get(identity)) is not None
            and peer.round is not None
            and peer.round.id == gathering.id
        }
        if gathering.link is not None:
            # Bytes are under way until every member has told of them.
            if not any(p.round is not None and not p.round.staged for p in rounds.values()):
                self._gathering = None
            return
        here = [p for identity, p in rounds.items() if gathering.members[identity] is not None]
        if len(here) < len(rounds) and time.monotonic() < gathering.until:
            return
        for identity, peer in rounds.items():
            if gathering.members[identity] is None:
                who = f"{peer.member} didn't acknowledge version {gathering.version}"
                self._fail(peer, f"{who} in time for the broadcast", drop_link=True)
        if not here:
            self._gathering = None
            return
        current = here[0].round
        assert current is not None
        members = frozenset(peer.identity for peer in here)
        link = here[0].link
        channels = {gathering.members[identity] for identity in members}
        if link is None or link.members != members or channels != {link.channel}:
            for peer in here:
                self._drop_link(peer)
            link = self._open(here, current)
        else:
            for peer in here:
                if peer.round is not None:
                    self._expect_staged(peer, peer.round)
        if link is None:
            self._gathering = None
            return
        gathering.link = link
        self.counts["broadcasts"] += 1
        link.put(Job(current.id, None, current.pin.again(), self._settings.stage_seconds))

    # Snapshots.

    def _ask_for_snapshot(self) -> None:
        pinned = self._slots.pin_newest()
        if pinned is not None:
            pin, version, _ = pinned
            self._snapshots.ask(pin, version)

    def _on_snapshot(self, manifest: WeightManifest, path: Path) -> None:
        self._last_snapshot = (manifest, path)
        self.counts["snapshots"] += 1
        for peer in self._peers.values():
            peer.next_try = min(peer.next_try, time.monotonic())

    def _on_no_snapshot(self, problem: str) -> None:
        log.warning(problem)
        for peer in self._peers.values():
            if peer.round is None and self._behind(peer):
                peer.failures += 1
                self._postpone(peer)

    # A round: its end.

    def _on_staged(self, peer: Peer, current: Round, message: Staged) -> None:
        self._take_checksums(peer, current)
        if peer.round is not current:
            return
        manifest = current.manifest
        if manifest.is_outline:
            # It read along, and was told of the last byte before this thread was.
            current.told = message
            return
        if message.digest != manifest.digest:
            problem = first_damage(manifest, message.checksums)
            problem = problem or f"its manifest has digest {message.digest}"
            self._fail(peer, f"{peer.member} staged something else: {problem}", drop_link=True)
            return
        if not current.staged:
            # Else it repeats itself, because no COMMIT has come.
            now = time.perf_counter()
            current.staged = now - current.begun
            current.published = current.published or current.pin.slot.published
            current.arrived = now - current.published
        what = f"commit version {manifest.version}"
        current.wait = Wait(peer.member, what, self._settings.commit_seconds)
        self._send(peer, Commit(round=current.id, run_id=self._run_id, version=manifest.version))

    def _on_committed(self, peer: Peer, current: Round, message: Committed) -> None:
        peer.version = message.version
        peer.content = current.manifest.content
        peer.round = None
        peer.idle = True
        peer.backoff.reset()
        peer.failures -= peer.failures % FAILURES_EACH
        peer.next_try = 0.0
        current.pin.release()
        self.latency = time.perf_counter() - current.published
        self.counts["committed"] += 1
        nbytes = current.manifest.total_bytes if current.bytes_follow else 0
        self.counts["bytes"] += nbytes
        self.last[peer.member] = Served(
            version=message.version,
            transport=current.transport,
            nbytes=nbytes,
            seconds=current.staged,
            paused=message.paused,
            arrived=current.arrived,
            late=self.latency,
        )
        self._note_held(peer)

    def _settle(self, peer: Peer, current: Round, version: Version | None) -> None:
        """Ends a round of whose end the worker's word was lost."""
        if version is not None and version == current.manifest.version:
            told = Committed(round=current.id, version=version, seconds=0.0)
            self._on_committed(peer, current, told)
        else:
            reason = f"{peer.member} has given it up; its word of that was lost"
            self._fail(peer, reason, drop_link=True, tell=False)

    def _on_refused(self, peer: Peer, message: Refused) -> None:
        self.counts["refused"] += 1
        peer.idle = True
        reason = f"{peer.member} refused at {message.stage}: {message.reason}"
        self._fail(peer, reason, drop_link=message.stage not in ("prepare", "commit"), tell=False)

    def _postpone(self, peer: Peer) -> float:
        pause = peer.backoff.next()
        peer.next_try = time.monotonic() + pause
        return pause

    def _fail(self, peer: Peer, reason: str, *, drop_link: bool, tell: bool = True) -> None:
        """Ends a round without success; the worker is served again after a pause."""
        current, peer.round = peer.round, None
        if drop_link:
            self._drop_link(peer)
        if current is None:
            return
        # Whoever refused reads no more; of whoever was given up nothing is known.
        current.pin.release(retire=tell and current.transport == "shared_memory")
        self.counts["failed"] += 1
        peer.failures += 1
        if tell:
            self._send(peer, Abort(round=current.id, reason=reason[:1000]))
        pause = self._postpone(peer)
        log.warning(
            f"{peer.member} stays on {peer.version or 'no version'}, not "
            f"{current.manifest.version}: {reason}; again in {pause:.1f} s"
        )

    def _forget(self, peer: Peer, reason: str) -> None:
        self._fail(peer, reason, drop_link=True)
        self._drop_link(peer)
        self._peers.pop(peer.identity, None)
        with self.served:
            self.held.pop(peer.member, None)
            self.last.pop(peer.member, None)
            self.served.notify_all()

    def _drop_link(self, peer: Peer) -> None:
        link, peer.link = peer.link, None
        if link is not None:
            link.leave()
