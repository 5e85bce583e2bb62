"""What the weight service knows of each worker, and of each transfer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..common.records import Version
from ..common.weights.link import Link
from ..common.weights.manifest import WeightManifest
from ..common.weights.protocol import Staged
from ..common.weights.staging import Pin
from ..common.weights.states import Backoff
from ..common.weights.waiting import Wait


@dataclass(slots=True, kw_only=True)
class Served:
    """What the last transfer to a worker took."""

    version: Version
    """Which version."""
    transport: str
    """By what; ``none`` where only its name changed."""
    nbytes: int
    """Bytes sent."""
    seconds: float
    """From PREPARE to STAGED."""
    paused: float
    """Seconds in which the engine sampled nothing on account of it."""
    arrived: float
    """From the end of the copy out of the model to STAGED."""
    late: float
    """From the end of the copy out of the model to COMMITTED."""

    def told(self) -> dict[str, Any]:
        """For reports."""
        return {
            "version": [self.version.term, self.version.step],
            "transport": self.transport,
            "seconds": round(self.seconds, 6),
            "gb_per_second": round(self.nbytes / max(self.seconds, 1e-9) / 1e9, 4),
            "pause_seconds": round(self.paused, 6),
            "arrival_seconds": round(self.arrived, 6),
            "latency_seconds": round(self.late, 6),
        }


@dataclass(slots=True, kw_only=True)
class Gathering:
    """A broadcast in the making, or under way."""

    id: str
    """Round id of all its members."""
    version: Version
    """What is sent."""
    transport: str
    """By what."""
    until: float
    """``monotonic`` at which it goes on with those that are there."""
    members: dict[bytes, str | None] = field(default_factory=dict)
    """Channel that each member holds, as its ACK says; None before that."""
    link: Link | None = None
    """Its channel, once bytes are under way."""


@dataclass(slots=True, kw_only=True)
class Round:
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
    """``perf_counter`` at the end of the copy; 0 where the worker began before it."""
    wait: Wait
    """What the worker should do next."""
    begun: float = field(default_factory=time.perf_counter)
    """``perf_counter`` at PREPARE."""
    staged: float = 0.0
    """Seconds from PREPARE to STAGED; 0 before that."""
    arrived: float = 0.0
    """Seconds from the end of the copy out of the model to STAGED."""
    unknown: int = 0
    """HAVEs since PREPARE that don't know of it."""
    over: int = 0
    """HAVEs that know of it and say that it is over."""
    acknowledged: bool = False
    """ACK came."""
    told: Staged | None = None
    """STAGED, where it came before the learner had the checksums to compare."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """One life of one worker."""

    identity: bytes
    """ZeroMQ's name of it: member id and incarnation."""
    member: str
    """Member id."""
    device: str
    """Where it stages."""
    transports: tuple[str, ...]
    """What it can do."""
    memory: str
    """The shared memory that it sees."""
    silent_seconds: float
    """Silence after which it is given up."""
    version: Version | None = None
    """What it serves."""
    content: str = ""
    """Content digest of what it serves."""
    idle: bool = True
    """It could begin a round."""
    round: Round | None = None
    """The transfer under way."""
    link: Link | None = None
    """Its channel."""
    failures: int = 0
    """Rounds that failed; they decide on the transport that ``auto`` takes."""
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
