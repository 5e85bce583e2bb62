"""Channels, and the one over gloo: the way between CPUs, and wherever NCCL can't go.

Both ends enter a channel at the same time, anew for each version; its ranks find each other at the
learner's :func:`meeting_point`. The channel over NCCL is in :mod:`.nccl`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from ..config import WeightsConfig
from ..errors import WeightsError
from ..sockets import free_listener, local_address
from .protocol import Meeting
from .shared_memory import StagedTensors

BYTES_PER_SECOND = 50e6
"""Slowest rate at which a bucket may arrive; gloo on loopback reached 130 to 560 MB/s."""
LEAST_BUCKET_SECONDS = 5.0
# torch's stubs leave out what is defined in C++.
_Gloo: Any = ProcessGroupGloo


def meeting_point(host: str, ports: range | None = None) -> TCPStore:
    """A new store at the learner, through which the ranks of one channel find each other.

    By default TCPStore listens on every address, so it is given a socket that is already bound.
    It has no credentials; its address and the channel's random name are sent only over CURVE,
    to workers that have accepted an offer. It stops listening once nobody refers to it.
    """
    listener = free_listener(host, ports)
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


def cut(staged: StagedTensors) -> list[torch.Tensor]:
    """A version's buckets, ``[n]`` uint8 each."""
    return [staged.buffer[bucket] for bucket in staged.layout.buckets]


class Channel(ABC):
    """One end of a channel, for one version: a process group of its own, separate from torch's default one.

    A call completes or raises :class:`~tandem.common.errors.WeightsError` by its deadline,
    ``weights.open_seconds`` to meet and ``weights.stage_seconds`` for the bytes, and then nothing is
    open any more. Calls release the GIL while they wait.

    Args:
        settings: the run's ``weights`` section.
        device: GPU through which buckets may pass.
    """

    def __init__(self, settings: WeightsConfig, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        # torch's stubs leave out what is defined in C++.
        self._group: Any = None

    def send(self, staged: StagedTensors, at: Meeting) -> None:
        """The learner's end: sends every bucket to every other rank."""
        self._carry("send", staged, at, lambda index: None)

    def receive(self, staged: StagedTensors, at: Meeting, arrived: Callable[[int], None]) -> None:
        """The worker's end: receives every bucket from rank 0.

        Args:
            staged: where the bytes go.
            at: where the ranks meet.
            arrived: called with the index of each bucket as soon as its bytes are there.
        """
        self._carry("receive", staged, at, arrived)

    def abort(self) -> None:
        """Called from another thread: ends a running call if the backend can. gloo can't: its wait ends at
        the deadline or when the other side closes, so callers leave such a thread behind."""
        return None

    def _address(self, at: Meeting) -> str:
        """The address of this host to which the channel is bound."""
        return local_address(self.settings.interface or "127.0.0.1", at.host)

    def _carry(
        self, verb: str, staged: StagedTensors, at: Meeting, done: Callable[[int], None]
    ) -> None:
        try:
            self._meet(at)
            for index in self._transfer(cut(staged), verb):
                done(index)
        finally:
            self._close()

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
            raise WeightsError(f"the {type(self).__name__} channel isn't open")
        if group.size() > 2:
            # A tree: rank 0 sends to some ranks, which pass the bytes on.
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            return group.broadcast([piece], options)
        if verb == "send":
            return group.send([piece], 1, tag)
        return group.recv([piece], 0, tag)

    def _close(self) -> None:
        """Closes the sockets."""
        self._group = None


class Gloo(Channel):
    """A gloo group, bound to one address; by default gloo listens on that of the host's name."""

    def _meet(self, at: Meeting) -> None:
        start = time.monotonic()
        end = start + self.settings.open_seconds
        store = enter(at, self.settings.open_seconds)
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=max(0.1, end - time.monotonic()))
        options._threads = 1
        options._devices = [_Gloo.create_device(hostname=self._address(at), lazy_init=False)]
        try:
            self._group = _Gloo(store, at.rank, at.world_size, options)
        except RuntimeError as error:
            raise WeightsError(
                f"the other side didn't enter the gloo channel within "
                f"{time.monotonic() - start:.1f} s: {first_line(error)}"
            ) from None

    def _transfer(self, pieces: Sequence[torch.Tensor], verb: str) -> Iterator[int]:
        deadline = time.monotonic() + self.settings.stage_seconds
        # All are posted at once, so that the wire stays busy.
        works = [self._begin(verb, piece, index) for index, piece in enumerate(pieces)]
        for index, work in enumerate(works):
            start, nbytes = time.monotonic(), pieces[index].numel()
            try:
                work.wait(timedelta(seconds=bucket_seconds(nbytes, deadline - start)))
            except RuntimeError as error:
                raise WeightsError(
                    f"gloo couldn't {verb} a bucket of {nbytes:,} bytes in "
                    f"{time.monotonic() - start:.1f} s: {first_line(error)}"
                ) from None
            yield index
