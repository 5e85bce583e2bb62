"""The channel over NCCL without a GPU: in what order it asks streams, buffers and torch's group for what they do.

Streams, events and the group are imitated, and the bytes are real. What only GPUs can show is in ``test_gpus.py``.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tandem.common.config import WeightsConfig
from tandem.common.errors import WeightsError
from tandem.common.weights import nccl
from tandem.common.weights.gloo import meeting_point
from tandem.common.weights.manifest import plan
from tandem.common.weights.protocol import Meeting
from tandem.common.weights.shared_memory import StagedTensors, stage

DEADLINE = 20.0
"""For every wait, seconds."""
SENT = torch.arange(3 << 18, dtype=torch.float32)
"""Three buckets of a megabyte."""


class Stream:
    """A stream whose work is done at once."""

    def __init__(self, device: object = None) -> None:
        self.after: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other)

    def synchronize(self) -> None:
        pass


class Event:
    """An event that occurs when the last operation before it on the stream has ended."""

    def record(self, stream: Stream) -> None:
        self._ended: Callable[[], bool] = GPU.ended

    def query(self) -> bool:
        return self._ended()


class GPU:
    """What is current on this thread, and what has happened."""

    default = Stream()
    current: Stream = default
    ended: Callable[[], bool] = lambda: True
    allocated: list[tuple[Stream, weakref.ref[torch.Tensor]]] = []  # noqa: RUF012 - a fixture empties it


class Group:
    """The end of a communicator. What it sends is copied to ``wire``, and what it receives from there."""

    def __init__(self, store: Any, rank: int, ranks: int, options: Any) -> None:
        self.store, self.ranks, self.options = store, ranks, options
        self.wire: list[torch.Tensor] = []
        self.posted_on: list[Stream] = []
        self.aborted, self.may_abort = threading.Event(), threading.Event()
        self.may_abort.set()
        groups.append(self)

    def size(self) -> int:
        return self.ranks

    def send(self, pieces: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.wire.append(pieces[0].clone())
        return self._work()

    def recv(self, pieces: list[torch.Tensor], rank: int, tag: int) -> Any:
        if self.wire:
            pieces[0].copy_(self.wire.pop(0))
        return self._work()

    def abort(self) -> None:
        self.may_abort.wait(DEADLINE)
        self.aborted.set()

    def _work(self) -> Any:
        self.posted_on.append(GPU.current)
        return SimpleNamespace(wait=lambda: None)


groups: list[Group] = []


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, GPU.current = GPU.current, stream
        yield
        GPU.current = before

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        made = torch.zeros(*arguments, **options)
        GPU.allocated.append((GPU.current, weakref.ref(made)))
        return made

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(GPU, "ended", lambda: True)
    monkeypatch.setattr(nccl.torch, "empty", empty)
    Group.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    groups.clear()
    GPU.allocated.clear()


@pytest.fixture
def point() -> TCPStore:
    return meeting_point("127.0.0.1")


def staged(content: torch.Tensor) -> StagedTensors:
    layout = plan([("weight", content.shape, content.dtype)], 1 << 20)
    made = stage(layout, ())
    made.tensors()[0][1].copy_(content)
    return made


def meeting(point: TCPStore, rank: int, ranks: int = 2) -> Meeting:
    return Meeting(host=point.host, port=point.port, channel="a", rank=rank, world_size=ranks)


def channel(**settings: Any) -> nccl.Nccl:
    return nccl.Nccl(WeightsConfig(**settings), torch.device("cpu"))


def send(point: TCPStore, **settings: Any) -> None:
    channel(**settings).send(staged(SENT), meeting(point, 0))


def receive(point: TCPStore, arrived: Callable[[int], None] = lambda index: None) -> StagedTensors:
    """Receives what :data:`SENT` is."""
    into = staged(torch.zeros_like(SENT))
    channel(stage_seconds=1).receive(into, meeting(point, 1), arrived)
    return into


@pytest.mark.parametrize("end", [send, receive])
def test_buffers_are_memory_of_the_side_streams(
    end: Callable[[TCPStore], object], point: TCPStore
) -> None:
    """A new thread's current stream is the training thread's. Memory of that stream may be in use by its queued
    kernels, for which no side stream waits."""
    end(point)
    assert len(GPU.allocated) == 2
    (owner, _), (other, _) = GPU.allocated
    assert owner is other
    assert owner is not GPU.default
    # NCCL's own stream waits for the one on which a bucket is posted.
    for stream in groups[0].posted_on:
        assert stream is owner or owner in stream.after


def test_buffers_stay_until_the_abort_of_a_failed_transfer_has_taken_effect(
    point: TCPStore,
) -> None:
    """NCCL's kernel writes to them until then, whoever has them."""

    def damaged(index: int) -> None:
        groups[0].may_abort.clear()
        raise WeightsError("a checksum is wrong")

    with pytest.raises(WeightsError, match="a checksum is wrong"):
        receive(point, damaged)
    gc.collect()
    assert all(made() is not None for _, made in GPU.allocated)
    groups[0].may_abort.set()
    for thread in threading.enumerate():
        if thread.name == "nccl-abort":
            thread.join(DEADLINE)
    gc.collect()
    assert all(made() is None for _, made in GPU.allocated)
