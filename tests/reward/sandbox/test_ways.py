"""The ways into a sandbox: what ends with it, and the installations in which it is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import psutil
import pytest

from tandem.reward.sandbox import sandbox

STAYS = """
import ctypes, os, time
# Neither the end of its parent nor a signal to its group is to reach it or what it starts.
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
os.setsid()
os.fork()
time.sleep(432)
"""
RUNNER = f"""
import sys
from tandem.reward.sandbox import sandbox
(box,) = (way for way in sandbox.WAYS if way.how == sys.argv[1])
print(box.run(["-I", "-c", {STAYS!r}], b"", b"", sandbox.Limits(seconds=60.0)))
"""
"""Runs the program in the sandbox that its argument names."""


def staying() -> list[psutil.Process]:
    """The processes of :data:`STAYS`, without those of bubblewrap that lead to them."""
    command = [sys.executable, "-I", "-c", STAYS]
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == command]


@pytest.fixture
def tidy() -> Iterator[None]:
    """Ends what should have ended by itself."""
    yield
    for process in staying():
        process.kill()


def test_a_program_that_leaves_its_parent_and_session_ends_at_its_deadline(
    box: sandbox.Box, tidy: None, make: Any
) -> None:
    ran = box.run(["-I", "-c", STAYS], b"", b"", sandbox.Limits(seconds=1.0))
    assert ran.timed_out
    make.until(lambda: not staying(), "the end of a program past its deadline")


def test_a_program_that_leaves_its_parent_and_session_ends_with_a_killed_runner(
    box: sandbox.Box, tidy: None, make: Any
) -> None:
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, box.how])
    try:
        make.until(lambda: len(staying()) >= 2, "a program that has forked")
    finally:
        runner.kill()
        runner.wait()
    make.until(lambda: not staying(), "the end of a program whose runner was killed")


def test_process_1_is_none_of_the_processes_that_a_program_may_have() -> None:
    box = sandbox.WAYS[0]
    if problem := sandbox.probe(box):
        pytest.skip(problem)
    forks = """
import os, time
for number in range(1, 20):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except BlockingIOError:
        print(number, flush=True)
        break
"""
    ran = box.run(["-I", "-c", forks], b"", b"", sandbox.Limits(seconds=10.0))
    assert ran.output == b"8\n"


def test_a_signal_of_the_program_is_told_by_the_status(box: sandbox.Box) -> None:
    kill = "import os, signal\nos.kill(1, signal.SIGINT)\nos.kill(os.getpid(), signal.SIGKILL)"
    assert box.run(["-I", "-c", kill], b"", b"", sandbox.Limits(seconds=10.0)).status == 137


@pytest.mark.parametrize("above", [0, 1], ids=["the environment", "a folder above it"])
def test_an_environment_behind_a_link_is_found(
    box: sandbox.Box, above: int, tmp_path: Path
) -> None:
    """As with ``.venv -> /scratch/venv``, or ``/home -> /nfs/home``."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("Python isn't in an environment")
    linked = [Path(sys.prefix), *Path(sys.prefix).parents][above]
    (tmp_path / "link").symlink_to(linked)
    python = tmp_path / "link" / Path(sys.executable).relative_to(linked)
    ran = subprocess.run(
        [python, "-c", RUNNER.replace(repr(STAYS), repr("print(6 * 7)")), box.how],
        capture_output=True,
        text=True,
    )
    assert "output=b'42\\n'" in ran.stdout, ran


def test_bubblewrap_starts_with_its_set_user_id_bit_and_its_program_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    box = sandbox.WAYS[-1]
    if problem := sandbox.probe(box):
        pytest.skip(problem)
    # Says whether the kernel would heed the bit of what it executes, then executes bubblewrap.
    first = tmp_path / "bwrap"
    first.write_text(f'#!/bin/sh\ngrep NoNewPrivs /proc/self/status\nexec {which("bwrap")} "$@"\n')
    first.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = "import ctypes\nprint('inside:', ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"
    ran = box.run(["-I", "-c", program], b"", b"", sandbox.Limits(seconds=10.0))
    assert ran.output.split() == [b"NoNewPrivs:", b"0", b"inside:", b"1"]
