"""Buckets over gloo: CPU memory, TCP, one address."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from ..errors import WeightsError
from .meeting import enter, first_line
from .transport import Meeting, Transport, bucket_seconds, local_address

# torch's stubs leave out what is defined in C++.
_Gloo: Any = ProcessGroupGloo


class GlooTransport(Transport):
    """A process group of its own, apart from torch's default group and any other.

    Its device is bound to one address; without that gloo listens where the host's name
    points to.
    """

    name: ClassVar[str] = "gloo"

    def __init__(self, interface: str) -> None:
        super().__init__(interface)
        self._group: Any = None
        self._world_size = 0

    def open(self, meeting: Meeting, seconds: float) -> None:
        """Meets the other ranks."""
        start = time.monotonic()
        store = enter(meeting, seconds)
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=max(0.1, seconds - (time.monotonic() - start)))
        options._threads = 1
        address = local_address(self.interface, meeting.host)
        options._devices = [_Gloo.create_device(hostname=address, lazy_init=False)]
        try:
            self._group = _Gloo(store, meeting.rank, meeting.world_size, options)
        except RuntimeError as error:
            raise WeightsError(
                f"the other side didn't enter the gloo channel within "
                f"{time.monotonic() - start:.1f} s: {first_line(error)}"
            ) from None
        self._world_size = meeting.world_size

    def _opened(self) -> Any:
        if self._group is None:
            raise WeightsError("the gloo channel isn't open")
        return self._group

    def send(self, buckets: Sequence[torch.Tensor], seconds: float) -> None:
        """Sends to every other rank; all sends are posted at once, so the wire stays busy."""
        self._all(buckets, seconds, "send")

    def receive(self, buckets: Sequence[torch.Tensor], seconds: float) -> Iterator[int]:
        """Receives from rank 0."""
        yield from self._each(buckets, seconds, "receive")

    def _all(self, buckets: Sequence[torch.Tensor], seconds: float, verb: str) -> None:
        for _ in self._each(buckets, seconds, verb):
            pass

    def _each(self, buckets: Sequence[torch.Tensor], seconds: float, verb: str) -> Iterator[int]:
        group = self._opened()
        deadline = time.monotonic() + seconds
        if self._world_size > 2:
            # A tree: rank 0 sends each byte to some, who pass it on.
            options = _broadcast_from_0()
            works = [group.broadcast([bucket], options) for bucket in buckets]
        elif verb == "send":
            works = [group.send([bucket], 1, index) for index, bucket in enumerate(buckets)]
        else:
            works = [group.recv([bucket], 0, index) for index, bucket in enumerate(buckets)]
        for index, work in enumerate(works):
            _wait(work, buckets[index].numel(), deadline, verb)
            yield index

    def close(self) -> None:
        """Closes the sockets."""
        self._group = None


def _broadcast_from_0() -> Any:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _wait(work: torch.distributed.Work, nbytes: int, deadline: float, verb: str) -> None:
    start = time.monotonic()
    try:
        work.wait(timedelta(seconds=bucket_seconds(nbytes, deadline - start)))
    except RuntimeError as error:
        raise WeightsError(
            f"gloo couldn't {verb} a bucket of {nbytes:,} bytes in {time.monotonic() - start:.1f} s: "
            f"{first_line(error)}"
        ) from None
