"""One head per folder that hosts share, whatever locks do: processes here give themselves other hosts' names."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.common.errors import HeldError, TandemError
from tandem.common.run_folder import RunFolder
from tandem.launch.host import head_term
from tandem.launch.host.head_term import HeadTerm

HOLD = """
import errno, os, socket, sys
from tandem.common.errors import TandemError
from tandem.common.run_folder import RunFolder
from tandem.launch.host import head_term
socket.gethostname = lambda: sys.argv[2]
head_term.BEAT_SECONDS, head_term.STALE_SECONDS, head_term.SILENT_SECONDS = 0.05, float(sys.argv[3]), 1
def cut_off(*_):
    raise OSError(errno.EIO, "cut off")
if sys.argv[4:] == ["cut-off"]:
    os.utime = cut_off
term = head_term.HeadTerm(RunFolder(sys.argv[1]))
try:
    print(term.take(), flush=True)
except TandemError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
sys.stdin.read()
term.release()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.make()
    return made


@pytest.fixture
def start(folder: RunFolder) -> Iterator[Start]:
    """Starts a process that takes the term under another host's name."""
    started: list[subprocess.Popen[str]] = []

    def do(host: str, stale: float = 1.0, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(folder.path), host, str(stale), *more]
        started.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield do
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_term, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(head_term, "STALE_SECONDS", 1.0)


def said(process: subprocess.Popen[str]) -> str:
    """Its first line: the number of its term, or why it got none."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_head_on_another_host_that_lives_is_named_and_a_scheduler_may_try_again(
    folder: RunFolder, start: Start, quick: None
):
    holder = start("node1")
    assert said(holder) == "1"
    with pytest.raises(HeldError, match=f"in use by process {holder.pid} on node1") as refused:
        HeadTerm(folder).take()
    assert refused.value.exit_code == 75
    assert holder.poll() is None


def test_what_was_released_is_taken_at_once(folder: RunFolder, start: Start):
    holder = start("node1")
    assert said(holder) == "1"
    holder.communicate("", timeout=10)
    term = HeadTerm(folder)
    assert term.take() == 2  # Within the test's deadline: nothing is waited for.
    term.release()


def test_a_killed_head_of_this_host_is_followed_at_once(folder: RunFolder, start: Start):
    holder = start(os.uname().nodename)
    assert said(holder) == "1"
    holder.kill()
    holder.wait()
    term = HeadTerm(folder)
    assert term.take() == 2
    term.release()


def test_a_head_that_shows_no_life_is_followed_and_ends_when_it_comes_to(
    folder: RunFolder, start: Start, quick: None
):
    (folder.redis / "redis.conf").write_text("")
    ledger = folder.redis / "appendonly.aof"
    ledger.write_text("before")
    holder = start("node1")
    assert said(holder) == "1"
    late = open(ledger, "a")  # noqa: SIM115 - its Redis, which still has the file open
    holder.send_signal(signal.SIGSTOP)
    term = HeadTerm(folder)
    assert term.take() == 2
    with late:
        late.write(" and too late")
    assert ledger.read_text() == "before"
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(10) == 75
    assert holder.stderr is not None
    assert "another host has taken over" in holder.stderr.read()
    term.release()


def test_a_head_that_was_stopped_for_long_goes_on_if_nobody_followed(
    folder: RunFolder, start: Start
):
    holder = start("node1")
    assert said(holder) == "1"
    file = folder.path / "head" / "000001.json"
    holder.send_signal(signal.SIGSTOP)
    os.utime(file, (0, 0))
    holder.send_signal(signal.SIGCONT)
    while file.stat().st_mtime == 0:
        assert holder.poll() is None
    holder.communicate("", timeout=10)
    assert holder.returncode == 0


def test_of_many_that_follow_a_dead_head_one_gets_its_term(folder: RunFolder, start: Start):
    first = start("node0")
    assert said(first) == "1"
    first.kill()
    first.wait()
    many = [start(f"node{n}") for n in range(1, 5)]
    answers = [said(process) for process in many]
    assert sum(answer == "2" for answer in answers) == 1
    assert all("in use by process" in answer for answer in answers if answer != "2")


def test_the_file_of_a_term_is_made_once(folder: RunFolder):
    path = folder.path / "head" / "000007.json"
    path.parent.mkdir()
    assert HeadTerm(folder)._make(path)
    inode = path.stat().st_ino
    assert not HeadTerm(folder)._make(path)
    assert path.stat().st_ino == inode
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_system_without_hard_links_is_told(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(TandemError, match=r"without hard links .* with run\.dir="):
        HeadTerm(folder).take()
    assert list((folder.path / "head").iterdir()) == []


def test_a_head_that_is_cut_off_from_the_folder_ends_by_itself(folder: RunFolder, start: Start):
    holder = start("node1", 1.0, "cut-off")
    assert said(holder) == "1"
    assert holder.wait(20) == 75


def test_a_copy_of_a_live_folder_is_free(folder: RunFolder, start: Start, tmp_path: Path):
    holder = start("node1")
    assert said(holder) == "1"
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(folder.path, copy.path)
    term = HeadTerm(copy)
    assert term.take() == 2
    term.release()
    assert holder.poll() is None


def test_a_folder_that_was_renamed_is_said_to_be(folder: RunFolder, start: Start, tmp_path: Path):
    holder = start("node1")
    assert said(holder) == "1"
    folder.path.rename(tmp_path / "renamed")
    assert holder.wait(20) == 75
    assert holder.stderr is not None
    assert f"{folder.path} was removed or renamed" in holder.stderr.read()
