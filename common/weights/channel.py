"""The interface of a way to carry weights, and what the ways over a channel share: gloo and NCCL.

Each way is one class: :meth:`Way.obstacle` says whether a pair can use it, :meth:`Way.offer` is the
learner's end and :meth:`Way.fetch` the worker's. A channel is a process group, whose ranks find each
other at the learner's :func:`meeting_point`.
"""

from __future__ import annotations

import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from ..config import WeightsConfig
from ..errors import WeightsError
from .manifest import Layout, WeightManifest
from .protocol import Meeting

log = logging.getLogger("tandem.weights")

POLL_SECONDS = 0.001
BYTES_PER_SECOND = 50e6
"""Slowest rate at which a bucket may arrive; gloo on loopback reached 130 to 560 MB/s."""
LEAST_BUCKET_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What decides which ways a learner and a worker can use."""

    sender: str
    """The learner's GPU through which weights may pass, as ``cuda:<uuid>``, or ``cpu``."""
    receiver: str
    """The same for the worker."""
    same_memory: bool
    """Whether the learner's buffer is in shared memory that the worker sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One version as the learner hands it to a way."""

    manifest: WeightManifest
    buffer: torch.Tensor
    """``[total_bytes]`` uint8 in the host's memory."""
    segment: str
    """Path of the buffer's file in shared memory; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One version on its way into a worker."""

    buffer: torch.Tensor
    """``[total_bytes]`` uint8 in the host's memory."""
    segment: str
    """Path of the buffer's file in shared memory; empty if it has none."""
    full: Iterable[int]
    """Indices of the buckets in order, each yielded as soon as its bytes have arrived."""


OwnBuffer = Callable[[int], tuple[torch.Tensor, str]]
"""Takes a number of bytes; gives a buffer of the worker's own and its path in shared memory, or ``""``."""


class Way(ABC):
    """One end of one way; all its calls come from one thread.

    A call completes or raises :class:`~tandem.common.errors.WeightsError` by its deadline,
    ``weights.stage_seconds`` for the bytes; after an error the object is closed and not used again.
    Calls release the GIL while they wait.

    Args:
        settings: the run's ``weights`` section.
        device: GPU through which buckets may pass.
    """

    name: ClassVar[str]
    """The way's name in ``weights.transport``."""
    is_channel: ClassVar[bool] = False
    """Whether both ends have to meet and take part at the same time, anew for each version."""

    def __init__(self, settings: WeightsConfig, device: torch.device) -> None:
        self.settings = settings
        self.device = device

    @classmethod
    def obstacle(cls, pair: Pair) -> str:
        """Why a pair can't use this way, and what to do instead; empty if it can."""
        return ""

    @abstractmethod
    def offer(self, parcel: Parcel, at: Meeting | str) -> str:
        """The learner's end: makes a version available, or sends it.

        Args:
            parcel: the version.
            at: the meeting of a channel, or the folder of snapshots; otherwise empty.

        Returns:
            What the worker's :meth:`fetch` needs to know; empty for a channel.
        """

    @abstractmethod
    def fetch(self, manifest: WeightManifest, at: Meeting | str, own: OwnBuffer) -> Arrival:
        """The worker's end; the caller checks the buckets.

        Args:
            manifest: the version's manifest.
            at: the meeting of a channel, otherwise what :meth:`offer` returned.
            own: called by ways that need memory for the bytes.
        """

    def close(self) -> None:
        """Frees all resources; safe to call twice."""
        return None

    def abort(self) -> None:
        """Called from another thread: ends a running call if the backend can.

        gloo can't: its wait ends at the deadline or when the other side closes, so callers
        leave such a thread behind and carry on without it.
        """
        return None


# Channels.


def meeting_point(host: str) -> TCPStore:
    """A new store at the learner, through which the ranks of one channel find each other.

    By default TCPStore listens on every address, so it is given a socket that is already bound.
    It has no credentials; its address and the channel's random name are sent only over CURVE,
    to workers that have accepted an offer. It stops listening once nobody refers to it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    return TCPStore(
        host,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(seconds=10),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def enter(meeting: Meeting, seconds: float) -> PrefixStore:
    """Connects to a channel's meeting point.

    Raises:
        WeightsError: the meeting point couldn't be reached in time.
    """
    start = time.monotonic()
    try:
        store = TCPStore(
            meeting.host,
            meeting.port,
            None,
            is_master=False,
            timeout=timedelta(seconds=max(0.1, seconds)),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise WeightsError(
            f"the weight channel's meeting point {meeting.host}:{meeting.port} couldn't be reached "
            f"within {time.monotonic() - start:.1f} s: {first_line(error)}"
        ) from None
    return PrefixStore(f"weights/{meeting.channel}", store)


def first_line(error: BaseException) -> str:
    """The first line of a message, since torch appends C++ stack traces."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def bucket_seconds(nbytes: int, left: float) -> float:
    """Seconds that one bucket may take when ``left`` remain until the transfer's own deadline."""
    return max(0.05, min(left, max(LEAST_BUCKET_SECONDS, nbytes / BYTES_PER_SECOND)))


def cut(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The buckets of a flat buffer."""
    return [buffer[bucket] for bucket in layout.buckets]


class ProcessGroupWay(Way):
    """A channel that is a process group of its own, separate from torch's default group."""

    is_channel: ClassVar[bool] = True

    def __init__(self, settings: WeightsConfig, device: torch.device) -> None:
        super().__init__(settings, device)
        # torch's stubs leave out what is defined in C++.
        self._group: Any = None

    def offer(self, parcel: Parcel, at: Meeting | str) -> str:
        """Sends every bucket to every other rank."""
        assert isinstance(at, Meeting)
        self._meet(at)
        for _ in self._transfer(cut(parcel.buffer, parcel.manifest.layout), "send"):
            pass
        return ""

    def fetch(self, manifest: WeightManifest, at: Meeting | str, own: OwnBuffer) -> Arrival:
        """Receives every bucket from rank 0."""
        assert isinstance(at, Meeting)
        buffer, segment = own(manifest.layout.total_bytes)
        self._meet(at)
        full = self._transfer(cut(buffer, manifest.layout), "receive")
        return Arrival(buffer=buffer, segment=segment, full=full)

    @abstractmethod
    def _meet(self, at: Meeting) -> None:
        """Creates the group within ``weights.open_seconds``."""

    @abstractmethod
    def _transfer(self, pieces: Sequence[torch.Tensor], verb: str) -> Iterator[int]:
        """Sends or receives pieces, each ``[n]`` uint8, and yields each one's index when it is done."""

    def _begin(self, verb: str, piece: torch.Tensor, tag: int) -> Any:
        """Begins to send or receive a piece."""
        group = self._group
        if group is None:
            raise WeightsError(f"the {self.name} channel isn't open")
        if group.size() > 2:
            # A tree: rank 0 sends to some ranks, which pass the bytes on.
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            return group.broadcast([piece], options)
        if verb == "send":
            return group.send([piece], 1, tag)
        return group.recv([piece], 0, tag)
