"""The learner's threads that carry bytes: one for each channel and one for snapshots."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..config import WeightsConfig
from ..errors import TandemError
from ..records import Version
from ..sockets import local_address
from .channel import MeetingPoint, Parcel, Way
from .manifest import WeightManifest
from .protocol import Meeting, Offer
from .snapshot import Snapshot
from .staging import Pin, StagingSlots
from .ways import WAYS, MakeWay

GATHER_SECONDS = 2.0
"""A broadcast waits this long for its members to accept, then goes on with those that did."""


@dataclass(slots=True, kw_only=True, eq=False)
class Channel:
    """Carries one version to one worker, or to several at once."""

    offer: Offer
    """The offer that all its members received."""
    pin: Pin
    """Holds the buffer until everything is sent."""
    until: float
    """``monotonic`` time at which a broadcast goes on with the members that have accepted."""
    end: Way | None = None
    """The learner's end, once the channel is open."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A channel has sent all bytes, or has failed."""

    channel: Channel
    problem: str


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A version is on disk."""

    manifest: WeightManifest
    place: str


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """A version couldn't be written to disk."""

    problem: str


Carried = Sent | SnapshotWritten | SnapshotFailed


class Couriers:
    """Starts channels and snapshots for one thread, and posts the end of each.

    Args:
        snapshots: folder in which snapshots are written.
        post: called with the end of each channel and snapshot.
    """

    def __init__(
        self,
        *,
        settings: WeightsConfig,
        slots: StagingSlots,
        make_way: MakeWay,
        snapshots: Path,
        post: Callable[[Carried], None],
    ) -> None:
        self._settings = settings
        self._slots = slots
        self._make_way = make_way
        self._interface = local_address(settings.interface)
        self._snapshots = str(snapshots)
        self._post = post
        self._snapshot_due: tuple[Pin, Version] | None = None
        self._snapshot_writing: Version | None = None
        self.channels: dict[str, Channel] = {}
        """Channels by their round, each until everything is sent or nobody waits for it."""

    # Channels.

    def channel_for(self, offer: Offer, pin: Pin) -> Channel:
        """The channel for a worker's offer. With ``weights.topology=broadcast`` that is the channel
        of other workers with the same offer, if it isn't open yet."""
        for channel in self.channels.values() if self._settings.topology == "broadcast" else ():
            theirs = channel.offer
            if channel.end is None and (theirs.way, theirs.manifest) == (offer.way, offer.manifest):
                return channel
        until = time.monotonic() + min(GATHER_SECONDS, self._settings.open_seconds)
        channel = Channel(offer=offer, pin=pin.again(), until=until)
        self.channels[offer.round] = channel
        return channel

    def place(self, way: str, parcel: Parcel) -> str:
        """Where a worker finds a version; empty for a channel, which opens once the worker accepts."""
        if WAYS[way].is_channel:
            return ""
        return self._make_way(way, self._settings, self._slots.device).offer(parcel, "")

    def open(self, channel: Channel, members: int) -> list[Meeting]:
        """Starts sending to ``members`` workers; returns the meeting for each of them.

        Raises:
            TandemError: the channel can't be created.
        """
        try:
            point = MeetingPoint(self._interface)
            channel.end = self._make_way(channel.offer.way, self._settings, self._slots.device)
        except (RuntimeError, OSError) as error:
            raise TandemError(f"the weight channel can't be created: {error}") from None
        name = secrets.token_hex(8)
        own, *theirs = (
            Meeting(
                host=point.host,
                port=point.port,
                channel=name,
                rank=rank,
                world_size=1 + members,
            )
            for rank in range(1 + members)
        )
        arguments = (channel, channel.end, point, own)
        threading.Thread(
            target=self._carry, args=arguments, name="weights-channel", daemon=True
        ).start()
        return theirs

    def leave(self, channel: Channel) -> None:
        """Drops a channel that nobody waits for any more. A thread that is still waiting in it ends at its
        deadline, or when the other side closes, and keeps the slot pinned until then."""
        self.channels.pop(channel.offer.round, None)
        if channel.end is None:
            channel.pin.release()
        else:
            channel.end.abort()

    def _carry(self, channel: Channel, end: Way, point: MeetingPoint, meeting: Meeting) -> None:
        problem = ""
        try:
            end.offer(channel.pin.slot.parcel(channel.offer.manifest.version), meeting)
        except Exception as error:  # noqa: BLE001 - whatever it is, the pin has to be released
            problem = str(error) or type(error).__name__
        finally:
            end.close()
            point.close()
            channel.pin.release()
        self._post(Sent(channel, problem))

    # Snapshots.

    def ask_for_snapshot(self) -> None:
        """Has the newest version written, in place of any requested earlier and not begun yet."""
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
        """Called once the previous snapshot is written or has failed."""
        due, self._snapshot_due = self._snapshot_due, None
        self._snapshot_writing = due[1] if due is not None else None
        if due is not None:
            # A disk may be slow.
            threading.Thread(
                target=self._write_snapshot, args=due, name="weights-snapshot", daemon=True
            ).start()

    def _write_snapshot(self, pin: Pin, version: Version) -> None:
        try:
            way = self._make_way(Snapshot.name, self._settings, self._slots.device)
            parcel = pin.slot.parcel(version)
            self._post(SnapshotWritten(parcel.manifest, way.offer(parcel, self._snapshots)))
        except (TandemError, RuntimeError, OSError) as error:
            self._post(SnapshotFailed(str(error)))
        finally:
            pin.release()
