"""What a worker and the learner say to each other about weights, over ZeroMQ with CURVE.

A worker pulls: it says which version it holds, and is offered the newest one where that is another.
ROUTER at the learner, DEALER at the worker::

    worker                             learner
      Ask(version held)      ──────►            once a second, and whenever something changes
                             ◄──────  Offer(round, manifest with every checksum, way)
      Ask(round)             ──────►            it fits the engine
                             ◄──────  Open(meeting point)     where a channel carries the bytes
                             ◄══════  the bytes
      every checksum is right, Redis says that the learner's term goes on: the engine loads
      Loaded(version)        ──────►

Either side may give a round up until the engine begins to load: the worker says Refused, the learner
Withdraw. The worker then still serves its old version. Ask says all that matters of a worker's state,
so that a message that is lost costs seconds and no round hangs on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, get_args

import msgspec

from ..errors import WeightsError, WireError
from ..plain import Count, Record, read_record
from ..records import Version
from ..sockets import CurveKeys
from ..wire import decode, encode
from .manifest import WeightManifest

ROLE = "learner"
"""The role under which a learner announces itself in the registry."""

Port = Annotated[int, msgspec.Meta(gt=0, lt=65_536)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Ask(Record, frozen=True, kw_only=True):
    """Worker: I am alive, hold this version, and take the newest one that I don't hold."""

    run_id: str
    """The run."""
    member: str
    """Member id of the worker."""
    version: Version | None
    """What it serves; None before the first load."""
    content: str
    """Content digest of what it serves; empty where there is none."""
    round: str
    """Last round that it was offered; empty where there was none."""
    busy: bool
    """It has taken that round up, and it isn't over."""
    ways: tuple[str, ...]
    """Ways by which it can get weights."""
    device: str
    """The GPU through which weights may pass, as ``cuda:<uuid>``, or ``cpu``."""
    memory: str
    """Names the shared memory that it sees:
    :func:`~tandem.common.weights.shared_memory.shared_memory_name`."""


class Offer(Record, frozen=True, kw_only=True):
    """Learner: this is the newest version, to be had in this way."""

    round: str
    """Names the transfer."""
    manifest: WeightManifest
    """What is offered, with every checksum."""
    way: str
    """One of :data:`~tandem.common.weights.ways.WAYS`; :data:`RENAME` where no bytes are needed."""
    place: str
    """Where the worker finds the bytes: a file in shared memory, or a snapshot's folder. Empty
    where they come over a channel."""


RENAME = "none"
"""The way of a version whose content the worker holds already: it only takes the new name."""


class Meeting(Record, frozen=True, kw_only=True):
    """Where and as whom a process enters a channel."""

    host: str
    """Address of the meeting point."""
    port: Port
    """Port of the meeting point."""
    channel: str
    """Random name of the channel; key prefix at the meeting point."""
    rank: Count
    """Rank of the process; the learner's is 0."""
    world_size: Annotated[int, msgspec.Meta(gt=0, le=65_536)]
    """Ranks, the learner's among them."""

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"there is no rank {self.rank} in a channel of {self.world_size}")


class Open(Record, frozen=True, kw_only=True):
    """Learner: meet me here, in a channel for this version. Sent only to a worker that has taken the
    offer up."""

    round: str
    """Round of the offer."""
    meeting: Meeting
    """Where."""


class Loaded(Record, frozen=True, kw_only=True):
    """Worker: the engine serves it."""

    round: str
    """Round of the offer."""
    version: Version
    """What it serves now."""
    fetched: Seconds
    """Seconds from the offer until every checksum was right."""
    seconds: Seconds
    """Seconds from then on until the engine served it."""
    paused: Seconds
    """Seconds of these in which it sampled nothing on account of it."""


class Refused(Record, frozen=True, kw_only=True):
    """Worker: I gave the round up and still serve my old version."""

    round: str
    """Round of the offer."""
    stage: str
    """Where: offer, fetch, verify, load or wait."""
    reason: str
    """For a person."""


class Withdraw(Record, frozen=True, kw_only=True):
    """Learner: the round is off."""

    round: str
    """Round of the offer."""
    reason: str
    """For a person."""


Message = Ask | Offer | Open | Loaded | Refused | Withdraw

_KINDS: dict[bytes, Any] = {cls.__name__.encode(): cls for cls in get_args(Message)}


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


def refusal(
    *, run_id: str, term: int, held: Version | None, offered_run: str, offered: Version
) -> str | None:
    """Why a version may not be taken up; None where it may.

    Versions only go up, compared as (term, step); a term that is over is refused, so that a
    learner that was stopped and goes on can't move anybody back.

    Args:
        run_id: the receiver's run.
        term: newest term that the receiver knows of.
        held: what the receiver serves.
    """
    if offered_run != run_id:
        return f"version {offered} belongs to run {offered_run}, this worker to run {run_id}"
    if offered.term < term:
        return f"version {offered} is of term {offered.term}, which is over: term {term} has begun"
    if held is not None and offered <= held:
        return f"version {offered} is not newer than {held}, which is served"
    return None


# Where the learner is to be found.


class RegisteredMember(Protocol):
    """An entry of the registry: who it is, and what it tells of itself."""

    @property
    def member(self) -> str: ...
    @property
    def info(self) -> Mapping[str, Any]: ...


class Registry(Protocol):
    """What is needed of :class:`tandem.replay.members.Members`."""

    def register(self, role: str, member: str, info: Mapping[str, Any]) -> object: ...
    def beat(self, member: str, updates: Mapping[str, Any] | None = None) -> object: ...
    def leave(self, member: str) -> object: ...
    def live(self, role: str) -> Sequence[RegisteredMember]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a process needs of its run to send or receive weights."""

    run_id: str
    """The run."""
    member: str
    """Member id of the process."""
    registry: Registry
    """Where the learner announces itself and workers look for it."""
    client: CurveKeys
    """The run's client keys: they open the control socket."""


class LearnerAddress(Record, frozen=True, kw_only=True):
    """Where a learner serves its weights."""

    member: str
    """Member id of the learner."""
    term: int
    """Term of the learner."""
    endpoint: str
    """ZeroMQ endpoint of its ROUTER."""
    public_key: str
    """CURVE key of the ROUTER; empty where it has none."""

    def info(self) -> dict[str, Any]:
        """As it stands in the registry."""
        return {name: getattr(self, name) for name in _ANNOUNCED}


_ANNOUNCED = ("term", "endpoint", "public_key")


def newest_learner(members: Iterable[RegisteredMember]) -> LearnerAddress | None:
    """The learner of the newest term; None where none announces itself.

    A killed learner stands in the registry until its heartbeat is overdue, so for a while
    there may be two: the term decides.

    Raises:
        WeightsError: no entry is of that form, but one that should be; it hides no other.
    """
    found, wrong = [], None
    for m in members:
        if not m.info.get("endpoint") or m.info.get("term") is None:
            continue
        try:
            found.append(
                read_record(
                    LearnerAddress,
                    {"member": m.member} | {name: m.info.get(name) for name in _ANNOUNCED},
                    f"the address of {m.member} in the registry",
                    WeightsError,
                    "its next heartbeat replaces it",
                )
            )
        except WeightsError as error:
            wrong = error
    if wrong is not None and not found:
        raise wrong
    return max(found, key=lambda address: address.term, default=None)
