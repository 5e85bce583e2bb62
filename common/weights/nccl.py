"""Buckets over NCCL: GPU memory to GPU memory. Needs a GPU of its own on each side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions

from ..errors import WeightsError
from .meeting import enter, first_line
from .transport import Meeting, Transport, bucket_seconds

POLL_SECONDS = 0.002


class NcclTransport(Transport):
    """A process group of its own, on a side stream.

    NCCL can wait without end inside a kernel, and doesn't see a peer on the same host die
    (NVIDIA/nccl#279). So nothing here synchronises: an event on the side stream is queried
    until the deadline, and then the communicator is aborted in a thread of its own, because an
    abort may hang too (NVIDIA/nccl#863). ``NCCL_SOCKET_IFNAME`` binds it to an interface.
    """

    name: ClassVar[str] = "nccl"

    def __init__(self, interface: str) -> None:
        super().__init__(interface)
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._world_size = 0

    def open(self, meeting: Meeting, seconds: float) -> None:
        """Meets the other ranks. The communicator forms at the first transfer."""
        if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            raise WeightsError(
                "weights.transport=nccl needs a GPU and a torch with NCCL; this process has none: "
                "set weights.transport=gloo"
            )
        from torch.distributed import ProcessGroupNCCL

        store = enter(meeting, seconds)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(1.0, seconds))
        options.is_high_priority_stream = False
        try:
            self._group = ProcessGroupNCCL(store, meeting.rank, meeting.world_size, options)
        except RuntimeError as error:
            raise WeightsError(
                f"the NCCL channel couldn't be opened: {first_line(error)}"
            ) from None
        self._stream = torch.cuda.Stream()
        self._world_size = meeting.world_size

    def send(self, buckets: Sequence[torch.Tensor], seconds: float) -> None:
        """Sends to every other rank."""
        deadline = time.monotonic() + seconds
        for bucket in buckets:
            self._transfer("send", bucket, 1, deadline)

    def receive(self, buckets: Sequence[torch.Tensor], seconds: float) -> Iterator[int]:
        """Receives from rank 0."""
        deadline = time.monotonic() + seconds
        for index, bucket in enumerate(buckets):
            self._transfer("recv", bucket, 0, deadline)
            yield index

    def _transfer(self, verb: str, bucket: torch.Tensor, rank: int, deadline: float) -> None:
        if self._group is None or self._stream is None:
            raise WeightsError("the NCCL channel isn't open")
        limit = time.monotonic() + bucket_seconds(bucket.numel(), deadline - time.monotonic())
        event = torch.cuda.Event()
        with torch.cuda.device(bucket.device), torch.cuda.stream(self._stream):
            if self._world_size > 2:
                options = BroadcastOptions()
                options.rootRank, options.rootTensor = 0, 0
                work = self._group.broadcast([bucket], options)
            else:
                work = (self._group.send if verb == "send" else self._group.recv)([bucket], rank, 0)
            # Orders the side stream after NCCL's own; it doesn't block the host.
            work.wait()
            event.record(self._stream)
        while not event.query():
            if time.monotonic() > limit:
                self.abort()
                raise WeightsError(
                    f"NCCL didn't {verb} a bucket of {bucket.numel():,} bytes in time; the "
                    f"communicator is given up"
                )
            # A CUDA event can't be waited for with a deadline; this sleep ends with the bucket.
            time.sleep(POLL_SECONDS)

    def abort(self) -> None:
        """Aborts the communicator in a daemon thread; returns at once."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="nccl-abort", daemon=True).start()

    def close(self) -> None:
        """Gives the communicator up."""
        self.abort()
