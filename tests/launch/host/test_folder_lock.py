"""One owner per run folder, and no server that outlives its owner unseen."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tandem.common.errors import TandemError
from tandem.common.run_folder import RunFolder
from tandem.launch.host.folder_lock import FolderLock, supervisor_of

HOLD = """
import os, subprocess, sys
from tandem.common.run_folder import RunFolder
from tandem.launch.host.folder_lock import FolderLock
lock = FolderLock(RunFolder(sys.argv[1]))
lock.take()
server = subprocess.Popen(["sleep", "600"], pass_fds=[lock.fileno()], stdout=subprocess.DEVNULL)
lock.name_redis(server.pid)
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.make()
    return made


@pytest.fixture
def owner(folder: RunFolder):
    """Another process that holds the lock, with a server that inherited it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    yield process, server
    process.kill()
    process.communicate()
    if server.is_running():
        server.kill()


@pytest.fixture(params=[None, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with locks, and several without."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    if request.param is not None:
        monkeypatch.setattr(fcntl, "flock", refused)


@pytest.mark.usefixtures("locks")
def test_a_second_owner_is_refused_and_told_the_pid(folder: RunFolder, owner) -> None:
    process, _ = owner
    with pytest.raises(TandemError, match=f"in use by process {process.pid}"):
        FolderLock(folder).take()
    assert supervisor_of(folder) == process.pid


@pytest.mark.usefixtures("locks")
def test_a_server_that_outlived_its_owner_is_ended(folder: RunFolder, owner) -> None:
    process, server = owner
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert supervisor_of(folder) is None
    lock = FolderLock(folder)
    lock.take()
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert supervisor_of(folder) == os.getpid()
    lock.release()


def test_an_unnamed_holder_is_waited_for_then_told(folder: RunFolder, owner) -> None:
    process, _ = owner
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    folder.lock.write_text("")
    with pytest.raises(TandemError, match="fuser"):
        FolderLock(folder).take(deadline=0.1)


def test_a_released_lock_can_be_taken_again(folder: RunFolder) -> None:
    first = FolderLock(folder)
    first.take()
    first.release()
    second = FolderLock(folder)
    second.take(deadline=0.1)
    second.release()


@pytest.mark.usefixtures("locks")
def test_the_copy_of_a_live_runs_folder_has_no_owner(folder: RunFolder, owner) -> None:
    process, server = owner
    copy = RunFolder(folder.path.with_name("copy"))
    shutil.copytree(folder.path, copy.path)
    assert supervisor_of(copy) is None
    assert supervisor_of(folder) == process.pid
    lock = FolderLock(copy)
    lock.take(deadline=0.1)
    assert supervisor_of(copy) == os.getpid()
    assert server.is_running()
    lock.release()


def test_a_file_system_that_fails_otherwise_is_told(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"):
        FolderLock(folder).take()
