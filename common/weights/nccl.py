"""Buckets over NCCL, from GPU to GPU. Needs a GPU of its own on each side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions

from ..errors import WeightsError
from .channel import (
    Arrival,
    Meeting,
    OwnBuffer,
    Pair,
    Parcel,
    Way,
    bucket_seconds,
    cut,
    enter,
    first_line,
)
from .manifest import WeightManifest

POLL_SECONDS = 0.002
IN_FLIGHT = 2
"""Buckets that lie on a GPU at one time: one is sent while the next is copied."""


class Nccl(Way):
    """A process group of its own, on a side stream.

    NCCL can wait without end inside a kernel, and doesn't see a peer on the same host die
    (NVIDIA/nccl#279). So nothing here synchronises with it: an event on the side stream is queried
    until the deadline, and then the communicator is aborted in a thread of its own, because an
    abort may hang too (NVIDIA/nccl#863). ``NCCL_SOCKET_IFNAME`` binds it to an interface.
    """

    name: ClassVar[str] = "nccl"
    is_channel: ClassVar[bool] = True

    def __init__(self, interface: str, device: torch.device) -> None:
        super().__init__(interface, device)
        self._group: Any = None
        self._world_size = 0
        self._stream: torch.cuda.Stream | None = None
        self._copies: torch.cuda.Stream | None = None
        self._passages: list[torch.Tensor] = []

    @classmethod
    def obstacle(cls, pair: Pair) -> str:
        """Two ranks of one NCCL communicator can't share a GPU."""
        if "cpu" not in (pair.sender, pair.receiver) and pair.sender != pair.receiver:
            return ""
        return (
            f"needs a GPU on each side and not the same one; the learner is on {pair.sender}, the "
            f"worker on {pair.receiver}: set weights.transport=auto"
        )

    def offer(self, parcel: Parcel, at: Meeting | str, seconds: float) -> str:
        """Sends to every other rank."""
        deadline = time.monotonic() + seconds
        self._meet(at)
        under_way: list[torch.cuda.Event] = []
        for index, piece in enumerate(parcel.pieces):
            if index >= IN_FLIGHT:
                self._await(under_way[index - IN_FLIGHT], piece.numel(), deadline)
            passage = self._passage(index, piece.numel())
            # On a stream of its own: a copy that waits for it waits for no other rank.
            with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
                passage.copy_(piece)
            under_way.append(self._post("send", passage))
        for event, piece in zip(under_way[-IN_FLIGHT:], parcel.pieces[-IN_FLIGHT:], strict=True):
            self._await(event, piece.numel(), deadline)
        return ""

    def fetch(
        self, manifest: WeightManifest, at: Meeting | str, own: OwnBuffer, seconds: float
    ) -> Arrival:
        """Receives from rank 0, through a GPU into the host's memory."""
        deadline = time.monotonic() + seconds
        buffer, segment = own(manifest.total_bytes)
        self._meet(at)
        full = self._received(cut(buffer, manifest.layout), deadline)
        return Arrival(buffer=buffer, segment=segment, full=full)

    def close(self) -> None:
        """Gives the communicator up."""
        self.abort()

    def abort(self) -> None:
        """Aborts the communicator in a daemon thread; returns at once."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="nccl-abort", daemon=True).start()

    def _received(self, pieces: Sequence[torch.Tensor], deadline: float) -> Iterator[int]:
        under_way: list[torch.cuda.Event] = []
        for index, piece in enumerate(pieces):
            for ahead in range(len(under_way), min(index + IN_FLIGHT, len(pieces))):
                passage = self._passage(ahead, pieces[ahead].numel())
                under_way.append(self._post("recv", passage))
            self._await(under_way[index], piece.numel(), deadline)
            with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
                piece.copy_(self._passage(index, piece.numel()))
            yield index

    def _meet(self, at: Meeting | str) -> None:
        """Meets the other ranks. The communicator forms at the first transfer."""
        assert isinstance(at, Meeting)
        if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            raise WeightsError(
                "weights.transport=nccl needs a GPU and a torch with NCCL; this process has none: "
                "set weights.transport=gloo"
            )
        from torch.distributed import ProcessGroupNCCL

        store = enter(at)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(1.0, at.seconds))
        options.is_high_priority_stream = False
        try:
            self._group = ProcessGroupNCCL(store, at.rank, at.world_size, options)
        except RuntimeError as error:
            raise WeightsError(
                f"the NCCL channel couldn't be opened: {first_line(error)}"
            ) from None
        self._stream = torch.cuda.Stream(self.device)
        self._copies = torch.cuda.Stream(self.device)
        self._world_size = at.world_size

    def _passage(self, index: int, nbytes: int) -> torch.Tensor:
        """The piece of GPU memory through which a bucket passes."""
        slot = index % IN_FLIGHT
        while len(self._passages) <= slot:
            self._passages.append(torch.empty(0, dtype=torch.uint8, device=self.device))
        if self._passages[slot].numel() < nbytes:
            self._passages[slot] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._passages[slot][:nbytes]

    def _post(self, verb: str, passage: torch.Tensor) -> torch.cuda.Event:
        """Begins to send or receive a bucket; returns what says that it has ended."""
        if self._group is None or self._stream is None:
            raise WeightsError("the NCCL channel isn't open")
        event = torch.cuda.Event()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if self._world_size > 2:
                options = BroadcastOptions()
                options.rootRank, options.rootTensor = 0, 0
                work = self._group.broadcast([passage], options)
            elif verb == "send":
                work = self._group.send([passage], 1, 0)
            else:
                work = self._group.recv([passage], 0, 0)
            # Orders the side stream after NCCL's own; it doesn't block the host.
            work.wait()
            event.record(self._stream)
        return event

    def _await(self, event: torch.cuda.Event, nbytes: int, deadline: float) -> None:
        limit = time.monotonic() + bucket_seconds(nbytes, deadline - time.monotonic())
        while not event.query():
            if time.monotonic() > limit:
                self.abort()
                raise WeightsError(
                    f"NCCL didn't carry a bucket of {nbytes:,} bytes in time; the communicator is "
                    f"given up"
                )
            # A CUDA event can't be waited for with a deadline; this sleep ends with the bucket.
            time.sleep(POLL_SECONDS)
