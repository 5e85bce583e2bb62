"""Buckets over gloo: CPU memory, TCP, one address."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from ..errors import WeightsError
from ..sockets import local_address
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

# torch's stubs leave out what is defined in C++.
_Gloo: Any = ProcessGroupGloo


class Gloo(Way):
    """A process group of its own, apart from torch's default group and any other.

    Its device is bound to one address; without that gloo listens where the host's name
    points to.
    """

    name: ClassVar[str] = "gloo"
    is_channel: ClassVar[bool] = True

    def __init__(self, interface: str, device: torch.device) -> None:
        super().__init__(interface, device)
        self._group: Any = None
        self._world_size = 0

    @classmethod
    def obstacle(cls, pair: Pair) -> str:
        """There is none."""
        return ""

    def offer(self, parcel: Parcel, at: Meeting | str, seconds: float) -> str:
        """Sends to every other rank; all sends are posted at once, so the wire stays busy."""
        self._meet(at)
        for _ in self._transfer(parcel.pieces, seconds, "send"):
            pass
        return ""

    def fetch(
        self, manifest: WeightManifest, at: Meeting | str, own: OwnBuffer, seconds: float
    ) -> Arrival:
        """Receives from rank 0."""
        buffer, segment = own(manifest.total_bytes)
        self._meet(at)
        full = self._transfer(cut(buffer, manifest.layout), seconds, "receive")
        return Arrival(buffer=buffer, segment=segment, full=full)

    def close(self) -> None:
        """Closes the sockets."""
        self._group = None

    def _meet(self, at: Meeting | str) -> None:
        assert isinstance(at, Meeting)
        start = time.monotonic()
        store = enter(at)
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=max(0.1, at.seconds - (time.monotonic() - start)))
        options._threads = 1
        address = local_address(self.interface, at.host)
        options._devices = [_Gloo.create_device(hostname=address, lazy_init=False)]
        try:
            self._group = _Gloo(store, at.rank, at.world_size, options)
        except RuntimeError as error:
            raise WeightsError(
                f"the other side didn't enter the gloo channel within "
                f"{time.monotonic() - start:.1f} s: {first_line(error)}"
            ) from None
        self._world_size = at.world_size

    def _transfer(self, pieces: Sequence[torch.Tensor], seconds: float, verb: str) -> Iterator[int]:
        group = self._group
        deadline = time.monotonic() + seconds
        if self._world_size > 2:
            # A tree: rank 0 sends each byte to some, who pass it on.
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            works = [group.broadcast([piece], options) for piece in pieces]
        elif verb == "send":
            works = [group.send([piece], 1, index) for index, piece in enumerate(pieces)]
        else:
            works = [group.recv([piece], 0, index) for index, piece in enumerate(pieces)]
        for index, work in enumerate(works):
            _wait(work, pieces[index].numel(), deadline, verb)
            yield index


def _wait(work: torch.distributed.Work, nbytes: int, deadline: float, verb: str) -> None:
    start = time.monotonic()
    try:
        work.wait(timedelta(seconds=bucket_seconds(nbytes, deadline - start)))
    except RuntimeError as error:
        raise WeightsError(
            f"gloo couldn't {verb} a bucket of {nbytes:,} bytes in {time.monotonic() - start:.1f} s: "
            f"{first_line(error)}"
        ) from None
