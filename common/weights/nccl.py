"""Weights over NCCL: the way between GPUs."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..config import WeightsConfig
from ..errors import WeightsError
from ..sockets import interface_of
from ..waiting import Wait
from .gloo import Channel, bucket_seconds, enter, first_line
from .protocol import Meeting, Pair

log = logging.getLogger("tandem.weights")

POLL_SECONDS = 0.001
IN_FLIGHT = 2
"""Number of buckets on a GPU at a time: one is sent while the next is copied."""
UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"
"""torch reads it when a group is made, which then has no watchdog thread."""
_environment = threading.Lock()


def await_event(event: torch.cuda.Event, wait: Wait) -> None:
    """Polls an event, since CUDA offers no wait with a deadline.

    Raises:
        WeightsError: the event didn't occur by the deadline.
    """
    while not event.query():
        if wait.expired(log.warning):
            raise WeightsError(str(wait))
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Groups that are made meanwhile have no watchdog.

    When NCCL reports that a rank on another host has died, the watchdog takes the process down: at once, or with
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` after eight minutes, by the monitor of the default group. It also has a
    timeout of its own.
    """
    with _environment:
        before = os.environ.get(UNWATCHED)
        os.environ[UNWATCHED] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[UNWATCHED]
            else:
                os.environ[UNWATCHED] = before


def obstacle(pair: Pair) -> str:
    """Why a pair can't use NCCL: two ranks of one communicator can't share a GPU."""
    if "cpu" not in (pair.learner, pair.worker) and pair.learner != pair.worker:
        return ""
    return (
        f"needs a GPU on each side and not the same one; the learner is on {pair.learner}, the "
        f"worker on {pair.worker}: set weights.transport=auto"
    )


class Nccl(Channel):
    """An NCCL communicator on a side stream.

    NCCL can wait forever inside a kernel, and doesn't notice when a peer on the same host dies
    (NVIDIA/nccl#279). So nothing here synchronises with it: an event on the side stream is queried
    until the deadline, after which the communicator is aborted in a thread of its own, because an
    abort may hang too (NVIDIA/nccl#863). torch's watchdog, which would end the process when a peer on another host
    dies, doesn't watch this group. NCCL is bound to the channel's interface, unless the
    variable ``NCCL_SOCKET_IFNAME`` names one; it reads that once in a process.
    """

    def __init__(self, settings: WeightsConfig, device: torch.device) -> None:
        super().__init__(settings, device)
        # Made with the group.
        self._stream: Any = None
        self._copies: Any = None
        self._store: Any = None
        self._buffers: list[torch.Tensor] = []

    def abort(self) -> None:
        """Aborts the communicator in a daemon thread; returns at once."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(
                target=self._abort, args=(group,), name="nccl-abort", daemon=True
            ).start()

    def _abort(self, group: Any) -> None:
        """Aborts a communicator; then its buffers may go."""
        try:
            group.abort()
        except RuntimeError as error:
            log.warning(f"an NCCL channel couldn't be aborted: {first_line(error)}")
        # Until then a kernel of NCCL's may use the buffers, which the allocator would give to somebody else.
        self._stream.synchronize()
        self._buffers = []

    def _close(self) -> None:
        self.abort()

    def _meet(self, at: Meeting) -> None:
        """Meets the other ranks. The communicator forms at the first transfer, which nothing ends if one doesn't come."""
        deadline = time.monotonic() + self.settings.open_seconds
        # NCCL takes a bare name for a prefix. A learner's process has set it before its ranks met.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(self._address(at))}")
        self._store = enter(at, self.settings.open_seconds)
        # torch for CPUs has none.
        from torch.distributed import ProcessGroupNCCL

        self._stream = torch.cuda.Stream(self.device)
        self._copies = torch.cuda.Stream(self.device)
        options = ProcessGroupNCCL.Options()
        # Longer than any wait for an operation here; only torch's own wait for an abort is bounded by it.
        seconds = self.settings.open_seconds + self.settings.stage_seconds
        options._timeout = timedelta(seconds=seconds)
        options.is_high_priority_stream = False
        try:
            with _unwatched():
                self._group = ProcessGroupNCCL(self._store, at.rank, at.world_size, options)
            self._store.set(f"here/{at.rank}", "")
            left = max(0.1, deadline - time.monotonic())
            ranks = [f"here/{rank}" for rank in range(at.world_size)]
            self._store.wait(ranks, timedelta(seconds=left))
        except RuntimeError as error:
            raise WeightsError(
                f"the NCCL channel couldn't be opened: {first_line(error)}"
            ) from None

    def _transfer(self, pieces: Sequence[torch.Tensor], verb: str) -> Iterator[int]:
        """Passes the pieces through two buffers of GPU memory in turn: one is sent or received while
        the other is copied from or to the host's memory."""
        deadline = time.monotonic() + self.settings.stage_seconds
        most = max(piece.numel() for piece in pieces)
        # The allocator takes memory that was freed on the same stream, of which queued kernels may still make use. On
        # a thread's first stream those would be the training thread's, for which the side streams don't wait.
        with self._on(self._copies):
            buffers = [
                torch.empty(most, dtype=torch.uint8, device=self.device)
                for _ in range(min(IN_FLIGHT, len(pieces)))
            ]
        self._buffers = buffers
        self._stream.wait_stream(self._copies)
        passages = [
            buffers[index % IN_FLIGHT][: piece.numel()] for index, piece in enumerate(pieces)
        ]
        # Copies have a stream of their own, so that waiting for one doesn't mean waiting for another rank.
        under_way: list[torch.cuda.Event] = []
        for index in range(len(pieces) + IN_FLIGHT):
            if index >= IN_FLIGHT:
                done = index - IN_FLIGHT
                self._await(under_way[done], pieces[done].numel(), deadline)
                if verb == "receive":
                    with self._on(self._copies):
                        pieces[done].copy_(passages[done])
                yield done
            if index < len(pieces):
                if verb == "send":
                    with self._on(self._copies):
                        passages[index].copy_(pieces[index])
                under_way.append(self._post(verb, passages[index]))
        self._await_workers(verb, most, deadline)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def _post(self, verb: str, passage: torch.Tensor) -> torch.cuda.Event:
        """Begins to send or receive a bucket; returns the event that marks its end."""
        event = torch.cuda.Event()
        with self._on(self._stream):
            # Orders the side stream after NCCL's own. It doesn't block the host, as `wait` would.
            self._begin(verb, passage, 0).block_current_stream()
            event.record(self._stream)
        return event

    def _await(self, event: torch.cuda.Event, nbytes: int, deadline: float) -> None:
        seconds = bucket_seconds(nbytes, deadline - time.monotonic())
        try:
            await_event(event, Wait("NCCL", f"carry a bucket of {nbytes:,} bytes", seconds))
        except WeightsError:
            self.abort()
            raise

    def _await_workers(self, verb: str, most: int, deadline: float) -> None:
        """Returns once every worker has everything, or is too late, which its own transfer's deadline is for.

        Between hosts NCCL may still hold the last pieces when a rank's event occurs, and would lose them with the
        communicator.
        """
        group = self._group
        if group is None:
            return
        seconds = bucket_seconds(IN_FLIGHT * most, deadline - time.monotonic())
        with contextlib.suppress(RuntimeError):
            if verb == "receive":
                self._store.set(f"arrived/{group.rank()}", "")
            workers = [f"arrived/{rank}" for rank in range(1, group.size())]
            self._store.wait(workers, timedelta(seconds=seconds))
