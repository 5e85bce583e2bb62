"""What carries the buckets: one small interface, one file per backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import WeightsError
from .address import local_address as local_address
from .segment import shared_memory_name

BYTES_PER_SECOND = 50e6
"""Slowest rate at which a bucket may come; gloo on loopback was seen at 130 to 560 MB/s."""
LEAST_BUCKET_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and as whom a member enters a channel."""

    host: str
    """Address of the meeting point."""
    port: int
    """Its port."""
    channel: str
    """Random name of the channel; key prefix at the meeting point."""
    rank: int
    """0 is the sender."""
    world_size: int
    """Ranks, the sender included."""


PULLED = ("shared_memory", "snapshot")
"""Transports without a channel: PREPARE names a place, and the worker fetches from there."""


class Transport(ABC):
    """One channel between the learner (rank 0) and the ranks of one engine.

    All calls of a channel come from one thread. A call either completes or raises
    :class:`~tandem.common.errors.WeightsError` by its deadline; after that the channel is of no
    use and is closed. Calls release the GIL while they wait.
    """

    name: ClassVar[str]
    """As in ``weights.transport``."""

    def __init__(self, interface: str) -> None:
        self.interface = interface

    @abstractmethod
    def open(self, meeting: Meeting, seconds: float) -> None:
        """Meets the other ranks within ``seconds``."""

    @abstractmethod
    def send(self, buckets: Sequence[torch.Tensor], seconds: float) -> None:
        """Rank 0: sends uint8 tensors to every other rank within ``seconds``."""

    @abstractmethod
    def receive(self, buckets: Sequence[torch.Tensor], seconds: float) -> Iterator[int]:
        """Other ranks: fills the tensors in order, yielding the index of each as it is full."""

    @abstractmethod
    def close(self) -> None:
        """Frees the channel; safe to call twice."""

    def abort(self) -> None:
        """From another thread: ends a call under way where the backend can.

        gloo can't: its wait ends at the deadline or when the other side closes, so callers
        leave such a thread behind and go on without it.
        """
        return None


def bucket_seconds(nbytes: int, left: float) -> float:
    """Seconds that one bucket may take, with ``left`` until the transfer's own deadline."""
    return max(0.05, min(left, max(LEAST_BUCKET_SECONDS, nbytes / BYTES_PER_SECOND)))


def _gloo(interface: str) -> Transport:
    from .gloo import GlooTransport

    return GlooTransport(interface)


def _nccl(interface: str) -> Transport:
    from .nccl import NcclTransport

    return NcclTransport(interface)


TRANSPORTS: dict[str, Callable[[str], Transport]] = {"gloo": _gloo, "nccl": _nccl}


def make_transport(name: str, interface: str) -> Transport:
    """A closed channel of the named backend.

    Raises:
        WeightsError: an unknown name.
    """
    factory = TRANSPORTS.get(name)
    if factory is None:
        raise WeightsError(f"unknown transport {name!r} (known: {', '.join(TRANSPORTS)})")
    return factory(interface)


def possible_transports(
    setting: str, *, sender: str, receiver: str, offered: Sequence[str], same_memory: bool
) -> tuple[str, ...]:
    """Which transports a pair can use, the best first.

    Args:
        setting: ``weights.transport``.
        sender: device of the learner's buffer, ``cpu`` or ``cuda:<uuid>``.
        receiver: the same of the worker.
        offered: what the worker can do.
        same_memory: the learner's buffer lies in shared memory that the worker sees.

    Raises:
        WeightsError: the setting asks for what the pair can't do.

    >>> gpus = {"sender": "cuda:a", "offered": ("nccl", "shared_memory", "gloo")}
    >>> possible_transports("auto", receiver="cuda:b", same_memory=True, **gpus)
    ('nccl', 'shared_memory', 'gloo')
    >>> possible_transports("auto", receiver="cuda:a", same_memory=False, **gpus)
    ('gloo',)
    """
    # Two ranks of one NCCL communicator can't share a GPU.
    apart = "cpu" not in (sender, receiver) and sender != receiver
    if setting == "auto":
        able = {"nccl": apart, "shared_memory": same_memory, "gloo": True, "snapshot": True}
        return tuple(name for name, can in able.items() if can and name in offered)
    if setting not in offered:
        raise WeightsError(
            f"weights.transport={setting}, but the worker can only do {', '.join(offered)}"
        )
    if setting == "nccl" and not apart:
        raise WeightsError(
            f"weights.transport=nccl needs a GPU on each side and not the same one; the learner "
            f"is on {sender}, the worker on {receiver}: set weights.transport=auto"
        )
    if setting == "shared_memory" and not same_memory:
        raise WeightsError(
            "weights.transport=shared_memory, but learner and worker don't see the same /dev/shm "
            "(two hosts, two containers without --ipc=host, two users) or it has no room: set "
            "weights.transport=auto"
        )
    return (setting,)


def device_name(device: torch.device) -> str:
    """``cpu``, or ``cuda:<uuid>``, which tells GPUs apart across processes."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def offered_transports(device: torch.device) -> tuple[str, ...]:
    """What a process that stages on ``device`` can do, best first."""
    found = ("shared_memory", "gloo", "snapshot") if shared_memory_name() else ("gloo", "snapshot")
    if device.type == "cuda" and torch.distributed.is_nccl_available():
        return ("nccl", *found)
    return found
