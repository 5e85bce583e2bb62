"""Checkpoints and exports on a disk that fills up: written whole once there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.common import disk
from tandem.common.errors import DataError
from tandem.common.records import Version
from tandem.common.run_folder import RunFolder
from tandem.learner.loop.saving import Saver, size_of, write_with_room
from tandem.learner.resume.checkpoints import Checkpoints


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


def saver(folder: Path, ranks: int, stage: int, loaded: list[Path], **state: Any) -> Saver:
    """One whose ranks only note what they load."""
    leader: Any = Ranks(ranks)
    leader.engine = SimpleNamespace(world_size=ranks, stage=stage)
    leader.load = loaded.append
    some: Any = SimpleNamespace()
    return Saver(
        RunFolder(folder),
        kept=2,
        leader=leader,
        ledger=some,
        source=some,
        clock=some,
        term=2,
        state=state,
    )


def save(folder: Path, form: str, **state: Any) -> Path:
    """A checkpoint of step 5 by two ranks."""

    def write(place: Path) -> None:
        (place / form).mkdir()
        (place / form / "part").write_text("weights")

    checkpoints = Checkpoints(RunFolder(folder).checkpoints)
    return checkpoints.save(Version(term=1, step=5), write, ranks=2, state=state).folder


@pytest.mark.parametrize(
    ("ranks", "stage", "said"),
    [
        (2, 1, []),
        (1, 0, ["2 ranks with ZeRO-1, and is now loaded by 1 rank with ZeRO-0"]),
        (2, 3, ["2 ranks with ZeRO-1, and is now loaded by 2 ranks with ZeRO-3"]),
    ],
)
def test_other_ranks_or_another_stage_are_told_in_one_line(
    ranks: int, stage: int, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = save(tmp_path, "policy", zero_stage=1)
    loaded: list[Path] = []
    with caplog.at_level("INFO", "tandem.learner"):
        assert saver(tmp_path, ranks, stage, loaded).load_newest(9) == 5
    assert loaded == [place]
    lines = [line for line in caplog.messages if "written by" in line]
    assert lines == [f"{place} was written by {one}" for one in said]


def test_a_checkpoint_of_an_earlier_version_wants_its_ranks(tmp_path: Path) -> None:
    place = save(tmp_path, "engine")
    loaded: list[Path] = []
    with pytest.raises(DataError, match=r"2 rank.* of an earlier .*: resume with learner.ranks=2"):
        saver(tmp_path, 1, 0, loaded).load_newest(9)
    assert loaded == []
    assert saver(tmp_path, 2, 1, loaded).load_newest(9) == 5
    assert loaded == [place]


def test_other_weights_of_the_reference_or_the_teacher_are_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    place = save(tmp_path, "policy", frozen={"base": "1", "teacher": "2"})
    loaded: list[Path] = []
    with pytest.raises(DataError, match=r"the weights in base, .* put them back, or start over"):
        saver(tmp_path, 2, 1, loaded, frozen={"base": "3"}).load_newest(5)
    assert not loaded
    # Another path was chosen on purpose, and one that isn't read any more is no matter.
    saver(tmp_path, 2, 1, loaded, frozen={"base": "1", "other": "4"}).load_newest(5)
    assert loaded == [place]


def test_a_checkpoint_that_says_nothing_of_the_reference_is_loaded(tmp_path: Path) -> None:
    place = save(tmp_path, "policy")
    loaded: list[Path] = []
    saver(tmp_path, 2, 1, loaded, frozen={"base": "1"}).load_newest(5)
    assert loaded == [place]


def test_latest_names_what_was_loaded_also_after_a_save_that_was_killed_before_it_said_so(
    tmp_path: Path,
) -> None:
    kept = save(tmp_path, "policy")
    latest = kept.parent / "LATEST"
    latest.write_text("step-00000003\n")
    assert saver(tmp_path, 2, 1, []).load_newest(9) == 5
    assert latest.read_text() == f"{kept.name}\n"
