"""Main memory as the kernel counts it, and errors that say that there is none left."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tandem.common import memory
from tandem.common.errors import OutOfMemoryError
from tandem.common.memory import (
    KEPT,
    Peaks,
    begin_again,
    is_out_of_memory,
    kills,
    resident,
    telling_parts,
    what_was_asked,
)

BLOCK = 96 << 20
"""Over the greatest size that glibc takes from its heap, so that it is given back at once."""
GROUPS = 4 << 20
"""As large as some large groups."""


@pytest.mark.parametrize(
    ("own", "files", "bound"),
    [
        # As a container sees itself.
        ("0::/", {"memory.max": "1048576"}, 1 << 20),
        # The smallest of its group's and of those above it.
        ("0::/a/b", {"a/memory.max": "4096", "a/b/memory.max": "max"}, 4096),
        ("0::/a/b", {"a/memory.max": "8192", "a/b/memory.max": "4096"}, 4096),
        # Version 1, and version 2 beside it.
        ("4:memory:/x\n0::/", {"memory/x/memory.limit_in_bytes": "8192"}, 8192),
        ("4:cpu:/x\n0::/a", {"unified/a/memory.max": "4096", "memory/memory.max": "1"}, 4096),
        # What version 1 has where there is no bound.
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/", {}, None),
    ],
)
def test_control_groups_bound_the_memory_that_there_is(
    tmp_path: Path, own: str, files: dict[str, str], bound: int | None
) -> None:
    listed = tmp_path / "cgroup"
    listed.write_text(own + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    there = psutil.virtual_memory().total if bound is None else bound
    assert memory.total(listed, tmp_path) == there


@pytest.mark.skipif(not begin_again(), reason="the kernel's mark can't be set back here")
def test_a_peak_is_seen_once_and_then_begins_again() -> None:
    peaks = Peaks()
    before = resident()
    bytearray(b"x") * BLOCK
    assert before + 0.9 * BLOCK < peaks.take() < before + 1.5 * BLOCK
    assert peaks.take() < before + 0.5 * BLOCK


def test_where_the_mark_can_not_be_set_back_only_a_new_height_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "nowhere" / "clear_refs")
    peaks = Peaks()
    # Higher than whatever other tests of this process have held.
    size = memory.greatest() - resident() + BLOCK
    bytearray(b"x") * size
    high = peaks.take()
    assert high > resident() + 0.5 * BLOCK
    assert peaks.take() < high - 0.5 * BLOCK


def test_real_failures_of_allocation_are_known() -> None:
    torch = pytest.importorskip("torch")
    asked = 1 << 55
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(asked, dtype=torch.uint8)
    assert is_out_of_memory(of_torch.value)
    assert what_was_asked(of_torch.value) == f"{asked:,} bytes"
    with pytest.raises(MemoryError) as of_python:
        bytearray(asked)
    assert is_out_of_memory(of_python.value)
    assert is_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    )


def test_what_a_gpu_was_asked_for_is_told() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
    assert what_was_asked(RuntimeError(said)) == "2.00 GiB"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("out of memory"), OSError(2, "no file")]
)
def test_other_errors_are_none_of_them(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_parts_are_told_with_the_error_and_other_errors_pass() -> None:
    with pytest.raises(OutOfMemoryError) as told, telling_parts(lambda: {"weights": 3 << 30}):
        raise MemoryError("Unable to allocate 7 GiB")
    assert str(told.value).startswith("no memory is left for this process: it asked for")
    assert told.value.asked == "Unable to allocate 7 GiB"
    assert "weights 3 GB" in str(told.value)
    with pytest.raises(KeyError), telling_parts(dict):
        raise KeyError("x")


def test_kills_are_added_up_from_every_counter(tmp_path: Path) -> None:
    listed = tmp_path / "cgroup"
    listed.write_text("4:memory:/x\n3:cpu:/x\n0::/a\n")
    before = kills(listed, tmp_path)
    # Those of the group above may be another container's.
    for file in ("memory/x/memory.oom_control", "a/memory.events", "memory.events"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("oom 9\noom_kill 100\n")
    assert before + 200 <= kills(listed, tmp_path) < before + 300


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what other C libraries do differs")
def test_memory_that_is_kept_is_not_cleared_again() -> None:
    code = (
        "import resource\n"
        "from tandem.common.memory import keep_freed\n"
        "assert not {kept} or keep_freed()\n"
        "block = b'x'\n"
        "for turn in range(12):\n"
        "    if turn == 4: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    blocks = [block * {size} for _ in range(6)]\n"
        "    del blocks\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )

    def faults(kept: bool, size: int, environment: Mapping[str, str]) -> int:
        program = [sys.executable, "-c", code.format(kept=kept, size=size)]
        given = {**os.environ, **environment}
        return int(subprocess.check_output(program, timeout=60, env=given))

    # A page has 4,096 bytes, or more where the kernel has larger ones.
    assert faults(True, BLOCK // 6, {}) < 100 < faults(False, BLOCK // 6, {})
    # What other programs, such as redis-server, are told.
    assert faults(False, GROUPS, KEPT) < 100 < faults(False, GROUPS, {})
