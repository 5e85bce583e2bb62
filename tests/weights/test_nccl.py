"""The channel over NCCL without a GPU: in what order it asks streams, buffers and torch's group for what they do.

Streams, events and the group are imitated, and the bytes are real. What only GPUs can show is in ``test_gpus.py``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from tandem.common.config import WeightsConfig
from tandem.common.errors import WeightsError
from tandem.common.weights import nccl
from tandem.common.weights.gloo import meeting_point
from tandem.common.weights.manifest import plan
from tandem.common.weights.protocol import Meeting
from tandem.common.weights.shared_memory import StagedTensors, stage
from tandem.common.weights.transfers import Round, Transfers

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
    """The end of a communicator; :data:`wires` has what is on its way to each rank."""

    refuses = False

    def __init__(self, store: Any, rank: int, ranks: int, options: Any) -> None:
        self._rank, self._ranks, self.options = rank, ranks, options
        self.variable = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        self.posted_on: list[Stream] = []
        self.aborted, self.may_abort = threading.Event(), threading.Event()
        self.may_abort.set()
        groups.append(self)
        if self.refuses:
            raise RuntimeError("no GPUs found!")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    def send(self, pieces: list[torch.Tensor], rank: int, tag: int) -> Any:
        wires[rank].append(pieces[0].clone())
        return self._work()

    def recv(self, pieces: list[torch.Tensor], rank: int, tag: int) -> Any:
        if wires[self._rank]:
            pieces[0].copy_(wires[self._rank].pop(0))
        return self._work()

    def broadcast(self, pieces: list[torch.Tensor], options: Any) -> Any:
        if self._rank:
            return self.recv(pieces, 0, 0)
        for rank in range(1, self._ranks):
            self.send(pieces, rank, 0)
        return self._work()

    def abort(self) -> None:
        self.may_abort.wait(DEADLINE)
        self.aborted.set()

    def _work(self) -> Any:
        self.posted_on.append(GPU.current)
        # Of a group without a watchdog ``wait`` would block.
        return SimpleNamespace(block_current_stream=lambda: None)


groups: list[Group] = []
wires: defaultdict[int, list[torch.Tensor]] = defaultdict(list)


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
    wires.clear()
    GPU.allocated.clear()


@pytest.fixture
def point() -> TCPStore:
    """A meeting point to which all ranks have come."""
    made = meeting_point("127.0.0.1")
    for rank in range(3):
        PrefixStore("weights/a", made).set(f"here/{rank}", "")
    return made


def staged(content: torch.Tensor) -> StagedTensors:
    layout = plan([("weight", content.shape, content.dtype)], 1 << 20)
    made = stage(layout, ())
    made.tensors()[0][1].copy_(content)
    return made


def meeting(point: TCPStore, rank: int, ranks: int = 2) -> Meeting:
    return Meeting(host=point.host, port=point.port, channel="a", rank=rank, world_size=ranks)


def channel(**settings: Any) -> nccl.Nccl:
    return nccl.Nccl(WeightsConfig(**settings), torch.device("cpu"))


def send(point: TCPStore, *, ranks: int = 2, seconds: float = 0.5) -> None:
    """Sends :data:`SENT`; ``seconds`` is the deadline."""
    channel(stage_seconds=seconds).send(staged(SENT), meeting(point, 0, ranks))


def receive(
    point: TCPStore,
    arrived: Callable[[int], None] = lambda index: None,
    *,
    rank: int = 1,
    ranks: int = 2,
) -> torch.Tensor:
    """Receives a tensor like :data:`SENT`."""
    into = staged(torch.zeros_like(SENT))
    channel().receive(into, meeting(point, rank, ranks), arrived)
    return into.tensors()[0][1]


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


@pytest.mark.parametrize("before", [None, "0"])
@pytest.mark.parametrize("refuses", [False, True])
def test_torch_has_no_watchdog_for_a_channel_and_one_for_all_other_groups(
    before: str | None, refuses: bool, point: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the process down, at once or eight minutes later, when NCCL reports that another host's rank has died."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before or "")
    if before is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    monkeypatch.setattr(Group, "refuses", refuses)
    made = channel(open_seconds=7, stage_seconds=11)
    if refuses:
        with pytest.raises(WeightsError, match="no GPUs found"):
            made._meet(meeting(point, 0))
    else:
        made._meet(meeting(point, 0))
    assert groups[0].variable == "1"
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    # No wait of a transfer's own is longer.
    assert groups[0].options._timeout.total_seconds() >= 18


def test_a_channel_leaves_the_variable_as_it_was_before_others_that_open_beside_it(
    point: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Group):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if len(groups) == 1:
                inside.set()
                go_on.wait(DEADLINE)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Slow)
    meet = [partial(channel()._meet, meeting(point, 0)) for _ in range(2)]
    threads = [threading.Thread(target=one) for one in meet]
    threads[0].start()
    assert inside.wait(DEADLINE)
    threads[1].start()
    # Long enough for the second one to be made, if it didn't wait.
    threads[1].join(0.5)
    go_on.set()
    for thread in threads:
        thread.join(DEADLINE)
    assert [group.variable for group in groups] == ["1", "1"]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


@pytest.mark.parametrize("ranks", [2, 3])
def test_nobody_aborts_a_communicator_before_all_workers_have_everything(
    ranks: int, point: TCPStore
) -> None:
    """Between hosts NCCL itself may still have to send the last pieces when the sender's event occurs, and those of a
    worker that passes them on."""
    others = [threading.Thread(target=send, args=(point,), kwargs={"ranks": ranks, "seconds": 60})]
    others += [
        threading.Thread(target=receive, args=(point,), kwargs={"rank": rank, "ranks": ranks})
        for rank in range(1, ranks - 1)
    ]
    looked: list[int] = []

    def arrived(index: int) -> None:
        if index == 2:
            # Long enough for an abort that doesn't wait.
            others[-1].join(0.5)
            assert not any(group.aborted.is_set() for group in groups)
            looked.append(index)

    for rank, thread in enumerate(others, start=1):
        thread.start()
        # The next rank finds everything on its wire.
        while not all(len(wires[one]) == 3 * (one >= rank) for one in range(1, ranks)):
            thread.join(0.01)
    assert torch.equal(receive(point, arrived, rank=ranks - 1, ranks=ranks), SENT)
    assert looked
    for thread in others:
        thread.join(DEADLINE)
    assert all(group.aborted.wait(DEADLINE) for group in groups)


def test_a_channel_ends_by_its_deadline_if_a_worker_never_has_everything(point: TCPStore) -> None:
    send(point, seconds=0.5)
    assert groups[0].aborted.wait(DEADLINE)


def test_a_communicator_is_formed_only_when_all_ranks_are_there() -> None:
    """NCCL waits without a deadline for one that was killed before it came, and an abort doesn't end that."""
    empty = meeting_point("127.0.0.1")
    with pytest.raises(WeightsError, match="couldn't be opened: "):
        channel(open_seconds=0.3).send(staged(SENT), meeting(empty, 0))
    assert not groups[0].posted_on
    assert groups[0].aborted.wait(DEADLINE)
    there = [
        threading.Thread(target=end, args=(empty,), kwargs={"seconds": 60} if end is send else {})
        for end in (send, receive)
    ]
    for thread in there:
        thread.start()
    for thread in there:
        thread.join(DEADLINE)
    assert all(group.posted_on for group in groups[1:])


def test_a_round_that_all_workers_have_left_lets_the_learners_thread_go(tmp_path: Path) -> None:
    """It holds a buffer of the model's size meanwhile."""
    transfers = Transfers(WeightsConfig(), None, None, snapshots=tmp_path)  # type: ignore[arg-type]
    made = meeting_point("127.0.0.1")
    own = channel(open_seconds=100)
    at = meeting(made, 0)
    one = Round(offer=None, channel=own, meeting_point=made)  # type: ignore[arg-type]
    del made
    transfers._rounds.append(one)
    failed = threading.Event()

    def learner() -> None:
        with pytest.raises(WeightsError):
            own.send(staged(SENT), at)
        failed.set()

    threading.Thread(target=learner, daemon=True).start()
    while not groups:
        failed.wait(0.01)
    transfers._mind(one)
    assert failed.wait(DEADLINE)
