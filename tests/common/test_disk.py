"""A full disk is waited for: real ones (a small tmpfs, where this machine may mount one) and /dev/full."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.common import disk
from tandem.common.disk import DiskFull
from tandem.common.run_folder import write_atomic
from tandem.common.telemetry import JsonLines, read_json_lines


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(disk, "_stop", threading.Event())


def meanwhile(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_records_wait_for_space_and_none_is_lost_or_cut(
    small_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    small = small_disk(2)
    path = small.folder / "metrics.jsonl"
    lines = JsonLines(path)
    written = []

    def write() -> None:
        for step in range(40):
            lines.write({"step": step, "text": "x" * 3000})
            written.append(step)

    lines.write({"step": -1, "text": ""})
    for _ in range(2):
        small.fill()
        before = len(written)
        writing = meanwhile(write)
        until(lambda: f"{path} can't be written, its disk is full" in caplog.text)
        # What others read meanwhile ends with a whole line.
        assert path.read_bytes().endswith(b"\n")
        assert len(written) < before + 40
        small.empty()
        writing.join(20)
        assert len(written) == before + 40
        caplog.clear()
    assert [record["step"] for record in read_json_lines(path)] == [-1, *range(40), *range(40)]


def test_the_wait_names_file_and_folder_and_ends_at_its_bound(
    small_disk: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_patience", 0.3)
    small = small_disk(2)
    path = small.folder / "checkpoints"
    small.fill()
    with pytest.raises(DiskFull, match="make room there and start again"):
        disk.await_room(path)
    assert f"{path} can't be written, its disk is full ({small.folder} has" in caplog.text


def test_a_process_that_is_to_end_waits_no_longer(small_disk: Any) -> None:
    small = small_disk(2)
    small.fill()
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            disk.await_room(small.folder)
        except DiskFull as error:
            waiting.append(error)

    thread = meanwhile(wait)
    disk.stop_waiting()
    thread.join(20)
    assert len(waiting) == 1


def test_a_file_that_can_not_be_replaced_is_left_as_it_was(small_disk: Any) -> None:
    small = small_disk(2)
    path = small.folder / "run.json"
    write_atomic(path, "before")
    small.fill()
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "x" * 100_000)
    assert path.read_text() == "before"
    assert {entry.name for entry in small.folder.iterdir()} == {"run.json", "filler"}


def test_a_device_without_space_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without a mount."""
    monkeypatch.setattr(disk, "_patience", 0.1)
    with open("/dev/full", "ab", buffering=0) as full, pytest.raises(DiskFull, match="/dev/full"):
        disk.append(full, b"a line\n", Path("/dev/full"))


def test_any_other_error_is_no_full_disk(tmp_path: Path) -> None:
    def refused() -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(PermissionError):
        disk.persist(tmp_path, refused)


PRINTS = """
import sys
from tandem.common import disk
disk.keep_streams()
for number in range(20000):
    print("line", number)
print("the end", file=sys.stderr)
"""


def test_a_process_whose_output_finds_no_space_goes_on() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "the end\n")


def test_what_could_not_be_logged_is_written_when_there_is_space(small_disk: Any) -> None:
    small = small_disk(2)
    small.fill()
    path = small.folder / "log"
    with open(path, "ab", buffering=0) as file:
        stream = disk._Patient(file.fileno())
        stream.write(b"while it was full\n")
        assert path.read_bytes() == b""
        small.empty()
        stream.write(b"afterwards\n")
    assert path.read_bytes() == b"while it was full\nafterwards\n"


def test_a_log_keeps_no_more_than_a_little_in_memory() -> None:
    with open("/dev/full", "ab", buffering=0) as full:
        stream = disk._Patient(full.fileno())
        for _ in range(100):
            stream.write(bytes(10_000))
        assert len(stream._held) <= disk.HELD
    reading, writing = os.pipe()
    stream2 = disk._Patient(writing)
    stream2._held += b"kept "
    stream2._lost = 7
    stream2.write(b"")
    assert os.read(reading, 4096) == b"kept (7 bytes are missing here: the disk was full)\n"
    os.close(reading)
    os.close(writing)


def test_a_pipe_that_does_not_block_gets_all_that_is_printed() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text = b"x" * 200_000
    writer = meanwhile(lambda: disk._Patient(writing).write(text))
    got = b""
    while len(got) < len(text):
        got += os.read(reading, 65536)
    writer.join(20)
    assert got == text
    os.close(reading)
    os.close(writing)
