"""Weights as a file in shared memory: right, private, and gone afterwards, whatever happens."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.common.errors import WeightsError
from tandem.rollout import handover


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "places", lambda: (tmp_path,))


def tensors() -> list[tuple[str, torch.Tensor]]:
    flat = torch.arange(24, dtype=torch.float32)
    return [
        ("half", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        ("turned", flat.view(4, 6).t()),
        ("part", flat[3:9].view(2, 3)),
        ("none", torch.empty(0, 5)),
    ]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("tandem-weights-*"))


def test_another_reader_sees_the_same_tensors(tmp_path: Path) -> None:
    with handover.handed_over(tensors()) as path:
        read = load_file(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read.keys() == {name for name, _ in tensors()}
    for name, tensor in tensors():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert files(tmp_path) == []


def test_an_error_while_it_is_used_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), handover.handed_over(tensors()):
        raise RuntimeError("the reader failed")
    assert files(tmp_path) == []


def test_weights_without_room_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr(handover.shutil, "disk_usage", lambda _: Full)
    with pytest.raises(WeightsError, match=r"4,\d\d\d bytes (?s:.*)shm-size"):
        with handover.handed_over([("big", torch.zeros(1024))]):
            pass
    assert files(tmp_path) == []


def test_a_file_of_a_killed_process_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    held = (
        "import pathlib, sys, time, torch\n"
        "from tandem.rollout import handover\n"
        f"handover.places = lambda: (pathlib.Path({str(tmp_path)!r}),)\n"
        "with handover.handed_over([('a', torch.ones(3))]):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert handover.remove_left_behind() == 0
        assert len(files(tmp_path)) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert handover.remove_left_behind() == 1
        assert files(tmp_path) == []
    finally:
        process.kill()
        process.wait()
