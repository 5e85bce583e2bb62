"""The control messages of a weight transfer, over ZeroMQ with CURVE.

One round, ROUTER at the learner, DEALER at the rollout worker::

    worker                        learner
      HAVE(version)      ──────►            whenever it connects, commits, and once a second
                         ◄──────  PREPARE(round, manifest)
      ACK(channel)       ──────►            manifest fits the engine; names its open channel
                         ◄──────  OPEN(meeting point)        only where no channel is open
                         ◄══════  buckets, over the channel; or the worker fetches them itself
      STAGED(digest)     ──────►            every checksum was right, or the learner compares it
                         ◄──────  COMMIT
      COMMITTED(seconds) ──────►            the engine serves the new version

Either side may give a round up before the engine begins to load: REFUSED by the worker,
ABORT by the learner. The worker then still serves its old version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import WireError
from ..records import Version
from ..wire import decode, encode, register
from .manifest import WeightManifest


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Have:
    """Worker: I am alive and hold this version."""

    run_id: str
    """The run."""
    member: str
    """Member id of the worker."""
    incarnation: str
    """Random name of this life of the worker."""
    version: Version | None
    """What it serves; None before the first commit."""
    content: str
    """Content digest of what it serves; empty where there is none."""
    state: str
    """Its :class:`~tandem.common.weights.states.ReceiverState`."""
    round: str
    """Last round that it was offered; empty where there was none."""
    transports: tuple[str, ...]
    """Transports that it can open, best first."""
    device: str
    """Where it stages: ``cpu`` or ``cuda:<uuid>``."""
    memory: str = ""
    """Names the shared memory that it sees:
    :func:`~tandem.common.weights.segment.shared_memory_name`."""


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Learner: this is the version that I would send you."""

    round: str
    """Names the transfer."""
    manifest: WeightManifest
    """What would be sent."""
    transport: str
    """By which transport."""
    bytes_follow: bool
    """False for a re-stamp: the worker holds this content already."""
    place: str = ""
    """Where the worker finds the bytes: a file in shared memory, or a snapshot's folder. Empty
    where they come over a channel."""
    counted_from: int = -1
    """Shared memory that is still being filled: what its count was before this version's first
    byte, so the bytes that are there are those counted since. -1 where all are there."""

    def __post_init__(self) -> None:
        if not -1 <= self.counted_from < 1 << 62:
            raise ValueError(f"a segment's count can't be {self.counted_from}")


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Worker: it fits my engine."""

    round: str
    """Of the PREPARE."""
    channel: str
    """The channel that it holds open; empty where one must be opened."""


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Learner: meet me here for a new channel. Sent only after an ACK."""

    round: str
    """Of the PREPARE."""
    channel: str
    """Random name of the channel and key prefix at the meeting point."""
    transport: str
    """Transport to open."""
    host: str
    """Address of the meeting point."""
    port: int
    """Port of the meeting point."""
    rank: int
    """The worker's rank; the learner's is 0."""
    world_size: int
    """Ranks of the channel."""

    def __post_init__(self) -> None:
        if not (0 < self.port < 65536 and 0 <= self.rank < self.world_size <= 65536):
            raise ValueError(
                f"rank {self.rank} of {self.world_size} can't meet at port {self.port}"
            )


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Worker: I hold every byte, and every checksum is right, or is yours to compare."""

    round: str
    """Of the PREPARE."""
    digest: str
    """Of the manifest that it checked against, or filled in where it was an outline."""
    checksums: tuple[int, ...] = ()
    """The worker's own, one a bucket, where PREPARE brought an outline."""


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Learner: serve it."""

    round: str
    """Of the PREPARE."""
    run_id: str
    """The run."""
    version: Version
    """Of the manifest; its term is checked once more."""


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Worker: the engine serves it."""

    round: str
    """Of the PREPARE."""
    version: Version
    """What it serves now."""
    seconds: float
    """From COMMIT until the engine served it."""
    paused: float = 0.0
    """Seconds of these in which it sampled nothing on account of it."""

    def __post_init__(self) -> None:
        for seconds in (self.seconds, self.paused):
            if not 0.0 <= seconds < math.inf:
                raise ValueError(f"a load can't take {seconds} s")


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Worker: I gave the round up and still serve my old version."""

    round: str
    """Of the PREPARE."""
    stage: str
    """Where: prepare, open, receive, verify or commit."""
    reason: str
    """For a person."""


@register
@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Learner: the round is off."""

    round: str
    """Of the PREPARE."""
    reason: str
    """For a person."""


Message = Have | Prepare | Ack | Open | Staged | Commit | Committed | Refused | Abort

_KINDS: dict[bytes, Any] = {
    cls.__name__.encode(): cls
    for cls in (Have, Prepare, Ack, Open, Staged, Commit, Committed, Refused, Abort)
}


def pack(message: Message) -> list[bytes]:
    """A message as two frames: its kind and its record."""
    return [type(message).__name__.encode(), encode(message)]


def unpack(frames: Sequence[bytes]) -> Message:
    """Reads two frames.

    Raises:
        WireError: they aren't one valid message of this protocol.
    """
    if len(frames) != 2 or frames[0] not in _KINDS:
        first = bytes(frames[0][:40]) if frames else b""
        raise WireError(f"refused weight message: {len(frames)} frames beginning with {first!r}")
    message: Message = decode(frames[1], _KINDS[frames[0]])
    return message
