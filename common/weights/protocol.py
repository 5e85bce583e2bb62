"""The messages about weights between a worker and the learner, over ZeroMQ with CURVE.

Workers pull: each says which version it holds, and is offered the newest one if that is another.
The learner has a ROUTER socket, the worker a DEALER::

    worker                             learner
      Ask(version held)      ──────►            once a second, and whenever something changes
                             ◄──────  Offer(round, manifest with every checksum, way)
      Ask(round, busy)       ──────►            it fits the engine; only a channel needs to hear it
                             ◄──────  Open(meeting point)     only if a channel carries the bytes
                             ◄══════  the bytes
      every checksum is right, and Redis says that no newer term has begun: the engine loads
      Ask(new version)       ──────►            or the old version and the problem

Until the engine begins to load, either side may give up a round, the worker by an Ask that names the
problem and the learner by Withdraw; the worker then still serves its old version. An Ask holds all that
matters of a worker's state, so a lost message costs a few seconds and leaves no round hanging.
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
"""The learner's role in the registry."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Ask(Record, frozen=True, kw_only=True):
    """Worker: I am alive, hold this version, and accept the newest one that I don't hold."""

    member: str
    """Member id of the worker."""
    version: Version | None
    """The version that it serves; None before the first load."""
    content: str
    """Content digest of that version; empty before the first load."""
    round: str
    """The last round that it was offered; empty before the first."""
    busy: bool
    """Whether it has accepted that round and hasn't finished it."""
    problem: str
    """Where and why that round failed, as in "verify: bucket 3 was damaged"; empty if it hasn't. The
    places are offer, fetch, verify, load, check and wait."""
    fetched: Seconds
    """Seconds from that round's offer until every checksum was right; 0 until the engine has loaded it."""
    paused: Seconds
    """Seconds in which the engine sampled nothing because of that load."""
    device: str
    """The GPU through which weights may pass over NCCL, as ``cuda:<uuid>``, or ``cpu``."""
    memory: str
    """The worker's :func:`~tandem.common.weights.shared_memory.shared_memory_name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What decides which ways a learner and a worker can use."""

    learner: str
    """:attr:`Ask.device` of the learner."""
    worker: str
    """:attr:`Ask.device` of the worker."""
    same_memory: bool
    """Whether the learner's buffer is in shared memory that the worker sees."""


class Offer(Record, frozen=True, kw_only=True):
    """Learner: this is the newest version, and you can get it this way."""

    round: str
    """Name of the transfer."""
    manifest: WeightManifest
    """The version on offer, with every checksum."""
    way: str
    """One of :data:`~tandem.common.weights.ways.WAYS`, or :data:`RENAME` if no bytes are needed."""
    place: str
    """Where the worker finds the bytes: a file in shared memory or a snapshot's folder. Empty if they
    come over a channel."""


RENAME = "none"
"""The way of a version whose content the worker already holds: only its name changes."""


class Meeting(Record, frozen=True, kw_only=True):
    """Where a process enters a channel, and with which rank."""

    host: str
    """Address of the meeting point."""
    port: Annotated[int, msgspec.Meta(gt=0, lt=65_536)]
    channel: str
    """Random name of the channel; key prefix at the meeting point."""
    rank: Count
    """Rank of the process; the learner's is 0."""
    world_size: Annotated[int, msgspec.Meta(gt=0, le=65_536)]
    """Number of ranks, including the learner."""

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"there is no rank {self.rank} in a channel of {self.world_size}")


class Open(Record, frozen=True, kw_only=True):
    """Learner: meet me here, in a channel for this version. Sent only to a worker that has accepted
    the offer."""

    round: str
    meeting: Meeting


class Withdraw(Record, frozen=True, kw_only=True):
    """Learner: the round is cancelled."""

    round: str
    reason: str
    """For people to read."""


Message = Ask | Offer | Open | Withdraw

_KINDS: dict[bytes, Any] = {cls.__name__.encode(): cls for cls in get_args(Message)}


def pack(message: Message) -> list[bytes]:
    """A message as two frames: its kind and its record."""
    return [type(message).__name__.encode(), encode(message)]


def unpack(frames: Sequence[bytes]) -> Message:
    """Reads a message from two frames.

    Raises:
        WireError: they aren't a valid message of this protocol.
    """
    if len(frames) != 2 or frames[0] not in _KINDS:
        first = bytes(frames[0][:40]) if frames else b""
        raise WireError(f"refused weight message: {len(frames)} frames beginning with {first!r}")
    message: Message = decode(frames[1], _KINDS[frames[0]])
    return message


def refusal(
    manifest: WeightManifest, *, run_id: str, term: int, held: Version | None
) -> str | None:
    """Why a version must not be accepted; None if it may be.

    Versions only go up, compared as (term, step). One of a past term is refused, so that a learner
    that was stopped and resumed can't move anybody back.

    Args:
        manifest: the version that is offered.
        run_id: the receiver's run.
        term: newest term that the receiver knows of.
        held: the version that the receiver serves.
    """
    offered = manifest.version
    if manifest.run_id != run_id:
        return f"version {offered} belongs to run {manifest.run_id}, this worker to run {run_id}"
    if offered.term < term:
        return f"version {offered} is of term {offered.term}, which is over: term {term} has begun"
    if held is not None and offered <= held:
        return f"version {offered} is not newer than {held}, which is served"
    return None


# Finding the learner.


class RegisteredMember(Protocol):
    """An entry of the registry: a member's id and what it publishes about itself."""

    @property
    def member(self) -> str: ...
    @property
    def info(self) -> Mapping[str, Any]: ...


class Registry(Protocol):
    """The part of :class:`tandem.replay.members.Members` that weights need."""

    def register(self, role: str, member: str, info: Mapping[str, Any]) -> object: ...
    def beat(self, member: str, updates: Mapping[str, Any] | None = None) -> object: ...
    def leave(self, member: str) -> object: ...
    def live(self, role: str) -> Sequence[RegisteredMember]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a process needs to know about its run to send or receive weights."""

    run_id: str
    member: str
    """Member id of the process."""
    registry: Registry
    """Where the learner announces itself and workers look for it."""
    client: CurveKeys
    """The run's client keys, which give access to the control socket."""


class LearnerAddress(Record, frozen=True, kw_only=True):
    """Where a learner serves its weights."""

    member: str
    """Member id of the learner."""
    term: int
    endpoint: str
    """ZeroMQ endpoint of its ROUTER."""
    public_key: str
    """CURVE key of the ROUTER; empty if it has none."""


def newest_learner(members: Iterable[RegisteredMember]) -> LearnerAddress | None:
    """The learner of the newest term; None if the registry has none.

    A killed learner stays in the registry until its heartbeat is overdue, so for a while there may
    be two, of which the newer term counts.

    Raises:
        WeightsError: there are learners' entries, but none is valid.
    """
    fields, found, wrong = LearnerAddress.__struct_fields__, [], None
    way_out = "its next heartbeat replaces it"
    for m in members:
        content = {name: m.info.get(name) for name in fields} | {"member": m.member}
        what = f"the address of {m.member} in the registry"
        try:
            found.append(read_record(LearnerAddress, content, what, WeightsError, way_out))
        except WeightsError as error:
            wrong = error
    if wrong is not None and not found:
        raise wrong
    return max(found, key=lambda address: address.term, default=None)
