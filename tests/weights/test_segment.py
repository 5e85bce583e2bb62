"""Weights in shared memory: right, private, and gone afterwards, whatever happens."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.common.errors import WeightsError
from tandem.common.weights import shared_memory as segment
from tandem.common.weights.manifest import read_layout
from tandem.common.weights.shared_memory import Memory, Segment, map_segment, remove_left_behind
from tandem.rollout.vllm.vllm_weights import handed_over


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "places", lambda: (tmp_path,))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("tandem-weights-*"))


def test_a_reader_sees_what_is_written_before_and_after_it_maps(tmp_path: Path) -> None:
    written = Segment(8192)
    assert not written.buffer.any()
    written.buffer[17] = 5
    read = map_segment(written.path, 8192)
    written.buffer[4100] = 6
    assert (int(read[17]), int(read[4100])) == (5, 6)
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o600


def test_a_reader_that_writes_changes_nothing_for_others() -> None:
    written = Segment(4096)
    read = map_segment(written.path, 4096)
    read[0] = 9
    assert int(written.buffer[0]) == 0


def test_a_mapping_outlives_the_file_and_its_creator(tmp_path: Path) -> None:
    written = Segment(4096)
    written.buffer.fill_(3)
    read = map_segment(written.path, 4096)
    written.close()
    del written
    assert files(tmp_path) == []
    assert read.eq(3).all()


def test_only_segments_of_the_right_size_are_mapped(tmp_path: Path) -> None:
    written = Segment(4096)
    with pytest.raises(WeightsError, match="not the 8,192 of weights"):
        map_segment(written.path, 8192)
    with pytest.raises(WeightsError, match="can't be read"):
        map_segment(tmp_path / "tandem-weights-gone.buffer", 4096)
    with pytest.raises(WeightsError, match="isn't a place"):
        map_segment("/etc/passwd", 4096)
    link = tmp_path / "tandem-weights-link.buffer"
    link.symlink_to(written.path)
    with pytest.raises(WeightsError, match="can't be read"):
        map_segment(link, 4096)


def test_another_users_file_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Segment(4096)
    uid = os.getuid()
    monkeypatch.setattr(segment.os, "getuid", lambda: uid + 1)
    with pytest.raises(WeightsError, match="isn't this user's"):
        map_segment(written.path, 4096)


def test_tensors_handed_over_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    flat = torch.arange(24, dtype=torch.float32)
    tensors = [
        ("half", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        ("turned", flat.view(4, 6).t()),
        ("part", flat[3:9].view(2, 3)),
        ("none", torch.empty(0, 5)),
    ]
    with handed_over(tensors) as place:
        read = dict(Memory().map(place.path, read_layout(place.layout)).tensors())
    assert list(read) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert files(tmp_path) == []


def test_an_error_while_it_is_used_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), handed_over([("a", torch.ones(3))]):
        raise RuntimeError("the reader failed")
    assert files(tmp_path) == []


def test_weights_without_room_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr(segment.shutil, "disk_usage", lambda _: Full)
    with pytest.raises(WeightsError, match=r"4,096 bytes (?s:.*)shm-size"):
        Segment(4096)
    assert files(tmp_path) == []


def test_a_file_of_a_killed_process_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    held = (
        "import pathlib, time\n"
        "from tandem.common.weights import shared_memory as segment\n"
        f"kept = segment.Segment(4096, [pathlib.Path({str(tmp_path)!r})])\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert remove_left_behind() == 0
        assert len(files(tmp_path)) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert remove_left_behind() == 1
        assert files(tmp_path) == []
    finally:
        process.kill()
        process.wait()
