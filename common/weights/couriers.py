"""The learner's threads that carry bytes: one for each channel, one for a snapshot."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..config import WeightsConfig
from ..errors import TandemError
from ..records import Version
from .channel import Meeting, MeetingPoint, Way
from .manifest import WeightManifest
from .protocol import Open
from .snapshot import Snapshot
from .staging import Pin, StagingSlots
from .ways import MakeWay

GATHER_SECONDS = 2.0
"""A broadcast waits so long for its members to take the offer up, then goes on with those that did."""


@dataclass(slots=True, kw_only=True, eq=False)
class Channel:
    """Carries one version to one worker, or to several at once."""

    round: str
    """Of all its members' transfers."""
    manifest: WeightManifest
    """What is sent."""
    way: str
    """By what."""
    pin: Pin
    """Holds the buffer until all is sent."""
    until: float
    """``monotonic`` at which a broadcast goes on with the members that are there."""
    members: set[bytes]
    """Workers that were made the offer."""
    ready: set[bytes] = field(default_factory=set)
    """Those that have taken it up."""
    end: Way | None = None
    """The learner's end, once it is open."""

    def waits_for(self, active: set[bytes]) -> bool:
        """Whether it isn't opened yet for the sake of a member that may still take the offer up."""
        patient = len(self.members) == 1 or time.monotonic() < self.until
        return patient and not active <= self.ready


@dataclass(frozen=True, slots=True)
class Sent:
    """All bytes have left over a channel, or it has failed."""

    channel: Channel
    problem: str


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A version lies on the disk."""

    manifest: WeightManifest
    place: str


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """It doesn't."""

    problem: str


Carried = Sent | SnapshotWritten | SnapshotFailed


class Couriers:
    """Begins channels and snapshots; each tells of its end through the mailbox. For one thread.

    Args:
        run_id: of the run.
        settings: the run's ``weights`` section.
        slots: where versions lie.
        make_way: makes one end of a way.
        interface: address that channels bind.
        snapshot_folder: where snapshots lie.
        post: takes what has been carried.
    """

    def __init__(
        self,
        *,
        run_id: str,
        settings: WeightsConfig,
        slots: StagingSlots,
        make_way: MakeWay,
        interface: str,
        snapshot_folder: Path,
        post: Callable[[Carried], None],
    ) -> None:
        self._run_id = run_id
        self._settings = settings
        self._slots = slots
        self._make_way = make_way
        self._interface = interface
        self._snapshot_folder = snapshot_folder
        self._post = post
        self._snapshot_due: tuple[Pin, Version] | None = None
        self._snapshot_writing: Version | None = None
        self.channels: dict[str, Channel] = {}
        """By their round; each is in it until all is sent or nobody waits for it."""

    # Channels.

    def join(
        self, identity: bytes, round_id: str, manifest: WeightManifest, way: str, pin: Pin
    ) -> Channel:
        """The channel by which a worker is to get a version: with ``weights.topology=broadcast``
        that of others who are offered the same, where nothing has been sent yet."""
        for channel in self.channels.values() if self._settings.topology == "broadcast" else ():
            if channel.end is None and (channel.way, channel.manifest) == (way, manifest):
                channel.members.add(identity)
                return channel
        channel = self.channels[round_id] = Channel(
            round=round_id,
            manifest=manifest,
            way=way,
            pin=pin.again(),
            until=time.monotonic() + min(GATHER_SECONDS, self._settings.open_seconds),
            members={identity},
        )
        return channel

    def open(self, channel: Channel, members: list[bytes]) -> dict[bytes, Open]:
        """Begins to send to these members, who are to be told where to meet.

        Raises:
            TandemError: no channel can be made.
        """
        try:
            point = MeetingPoint(self._interface)
            channel.end = self._make_way(channel.way, self._interface, self._slots.device)
        except (RuntimeError, OSError) as error:
            raise TandemError(f"no channel can be made: {error}") from None
        meeting = Meeting(
            host=point.host,
            port=point.port,
            channel=secrets.token_hex(8),
            rank=0,
            world_size=1 + len(members),
            seconds=self._settings.open_seconds,
        )
        arguments = (channel, channel.end, point, meeting)
        threading.Thread(
            target=self._carry, args=arguments, name="weights-channel", daemon=True
        ).start()
        return {
            identity: Open(
                round=channel.round,
                channel=meeting.channel,
                host=meeting.host,
                port=meeting.port,
                rank=rank,
                world_size=meeting.world_size,
            )
            for rank, identity in enumerate(members, start=1)
        }

    def leave(self, channel: Channel) -> None:
        """Nobody waits for its bytes any more. A thread that waits inside ends with its deadline, or
        when the other side closes; until then it keeps the slot pinned."""
        self.channels.pop(channel.round, None)
        if channel.end is None:
            channel.pin.release()
        else:
            channel.end.abort()

    def _carry(self, channel: Channel, end: Way, point: MeetingPoint, meeting: Meeting) -> None:
        problem = ""
        try:
            parcel = channel.pin.slot.parcel(self._run_id, channel.manifest.version)
            end.offer(parcel, meeting, self._settings.stage_seconds)
        except (TandemError, RuntimeError) as error:
            problem = str(error)
        end.close()
        point.close()
        channel.pin.release()
        self._post(Sent(channel, problem))

    # Snapshots.

    def ask_for_snapshot(self) -> None:
        """Of the newest version. Latest wins: one that isn't begun when another is asked for isn't
        written."""
        pinned = self._slots.pin_newest()
        if pinned is None:
            return
        pin, version, _ = pinned
        if version == self._snapshot_writing:
            pin.release()
            return
        if self._snapshot_due is not None:
            self._snapshot_due[0].release()
        self._snapshot_due = (pin, version)
        if self._snapshot_writing is None:
            self.write_next_snapshot()

    def write_next_snapshot(self) -> None:
        """Once the one before is written, or has failed."""
        due, self._snapshot_due = self._snapshot_due, None
        self._snapshot_writing = due[1] if due is not None else None
        if due is not None:
            # A disk may take its time.
            threading.Thread(
                target=self._write_snapshot, args=due, name="weights-snapshot", daemon=True
            ).start()

    def _write_snapshot(self, pin: Pin, version: Version) -> None:
        try:
            way = self._make_way(Snapshot.name, self._interface, self._slots.device)
            parcel = pin.slot.parcel(self._run_id, version)
            place = way.offer(parcel, str(self._snapshot_folder), self._settings.stage_seconds)
            self._post(SnapshotWritten(parcel.manifest, place))
        except (TandemError, RuntimeError, OSError) as error:
            self._post(SnapshotFailed(str(error)))
        finally:
            pin.release()
