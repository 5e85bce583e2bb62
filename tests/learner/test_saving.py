"""Checkpoints and exports on a disk that fills up: written whole once there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.common import disk
from tandem.learner.saving import size_of, write_with_room


class Ranks:
    """Stands in for the leader of so many ranks."""

    def __init__(self, count: int = 1) -> None:
        self.engine = SimpleNamespace(world_size=count)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(disk, "_stop", threading.Event())


def writer(small: Any, megabytes: int, tries: list[int]) -> Callable[[], None]:
    """Writes tensors of so many megabytes, as a checkpoint does."""

    def write() -> None:
        tries.append(disk.free_bytes(small.folder))
        folder = small.folder / "checkpoint"
        folder.mkdir(exist_ok=True)
        torch.save(torch.zeros(megabytes << 18), folder / "weights.pt")

    return write


def undo(small: Any) -> Callable[[], None]:
    return lambda: (small.folder / "checkpoint" / "weights.pt").unlink(missing_ok=True)


def test_nothing_is_written_before_there_is_room_for_all_of_it(
    small_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    small = small_disk(12)
    small.fill()
    tries: list[int] = []
    write = writer(small, 4, tries)
    thread = threading.Thread(
        target=lambda: write_with_room(small.folder, 4 << 20, Ranks(), write, undo(small)),  # type: ignore[arg-type]
        daemon=True,
    )
    thread.start()
    end = time.monotonic() + 20.0
    while "can't be written, its disk is full" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    small.empty()
    thread.join(20)
    assert len(tries) == 1
    assert tries[0] >= 4 << 20
    assert size_of(small.folder / "checkpoint") >= 4 << 20


def test_a_write_that_took_more_than_was_thought_is_made_again(
    small_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    small = small_disk(12)
    (small.folder / "filler").write_bytes(bytes(9 << 20))
    tries: list[int] = []
    write = writer(small, 6, tries)

    def fail_and_free() -> None:
        undo(small)()
        small.empty()

    write_with_room(small.folder, 1 << 20, Ranks(), write, fail_and_free)  # type: ignore[arg-type]
    assert len(tries) == 2
    assert "the disk was full in the middle of a write" in caplog.text
    assert size_of(small.folder / "checkpoint") >= 6 << 20


def test_several_ranks_and_other_errors_are_not_tried_again(small_disk: Any) -> None:
    small = small_disk(12)
    (small.folder / "filler").write_bytes(bytes(9 << 20))
    tries: list[int] = []
    with pytest.raises((OSError, RuntimeError)):
        write_with_room(
            small.folder,
            1 << 20,
            Ranks(2),  # type: ignore[arg-type]
            writer(small, 6, tries),
            undo(small),
        )
    small.empty()

    def broken() -> None:
        tries.append(0)
        raise RuntimeError("a tensor of another shape")

    with pytest.raises(RuntimeError, match="another shape"):
        write_with_room(small.folder, 1 << 20, Ranks(), broken, lambda: None)  # type: ignore[arg-type]
    assert len(tries) == 2
