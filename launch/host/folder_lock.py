"""One owner per run folder: a file lock that the supervisor holds and redis-server inherits.

The lock is ``flock(2)`` on ``<folder>/lock``, so it ends with the last process that has the file
open, however that process ends. The file's content only tells a person which process that is. The
lock also leads to a redis-server that outlived its supervisor; it is ended before the folder
changes hands, since two servers must never write one append-only file. Between hosts that share the folder, and
on a file system without locks, :mod:`.head_term` does the same.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...common.errors import HeldError, TandemError
from ...common.run_folder import RunFolder, try_lock
from .head_term import HeadTerm

END_SECONDS = 10.0
"""Time in which a process ends by SIGTERM, and after that by SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that a lock file names."""

    pid: int
    started: float
    """Start time of that process in seconds since the epoch, since pids are reused."""

    @classmethod
    def of(cls, pid: int) -> Holder:
        """The holder for the running process ``pid``."""
        return cls(pid=pid, started=psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """The process, if it is still running and is the same one."""
        try:
            process = psutil.Process(self.pid)
            # The start time is derived from the boot time, which NTP may shift a little.
            if abs(process.create_time() - self.started) > 2:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.Error:
            return None


class FolderLock:
    """The lock of one folder.

    Args:
        folder: the folder.
        named_with: how a user names another one.
    """

    def __init__(self, folder: RunFolder, named_with: str = "run.dir=…") -> None:
        self._folder = folder
        self._named_with = named_with
        self._term = HeadTerm(folder, named_with)
        self._descriptor: int | None = None
        self._content: dict[str, object] = {}

    def take(self, deadline: float = 5.0) -> None:
        """Takes the lock, ending a redis-server that a killed supervisor left behind.

        Raises:
            HeldError: a live process holds the lock, here or on another host; the message names its pid.
            TandemError: a process holds it that can't be named.
        """
        try:
            descriptor = os.open(self._folder.lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            raise TandemError(
                f"{self._folder.path} was moved by another process just now: start again"
            ) from None
        end = time.monotonic() + deadline
        ended_server = False
        while not try_lock(descriptor):
            content = _read(descriptor)
            host = content.get("host")
            elsewhere = host not in (None, socket.gethostname())
            owner = _holder(content, "supervisor")
            if elsewhere or (owner is not None and owner.process() is not None):
                os.close(descriptor)
                raise HeldError(
                    f"{self._folder.path} is in use by process {owner.pid if owner else '?'}"
                    f"{f' on {host}' if elsewhere else ''} (`tandem stop` or Ctrl-C there "
                    f"ends it), or name another folder: {self._named_with}"
                )
            server = _holder(content, "redis")
            if not ended_server and server is not None:
                ended_server = end_process(server)
                end = time.monotonic() + deadline
            if time.monotonic() > end:
                os.close(descriptor)
                raise TandemError(
                    f"{self._folder.lock} is locked by a process that it doesn't name: "
                    f"`fuser {self._folder.lock}` does; end that one, then start again"
                )
            time.sleep(0.05)
        try:
            self._term.take()
        except BaseException:
            os.close(descriptor)
            raise
        # Its lock would have told of it on a file system that has any.
        content = _read(descriptor)
        server = _holder(content, "redis")
        here = content.get("host") == socket.gethostname()
        if here and server is not None and _has_open(server.pid, self._folder.lock):
            end_process(server)
        self._descriptor = descriptor
        me = Holder.of(os.getpid())
        self._content = {
            "host": socket.gethostname(),
            "taken": time.time(),
            "supervisor": {"pid": me.pid, "started": me.started},
        }
        self._write()

    def fileno(self) -> int:
        """The descriptor to pass on to redis-server (``pass_fds``)."""
        assert self._descriptor is not None, "take() comes first"
        return self._descriptor

    def name_redis(self, pid: int) -> None:
        """Notes the pid of the server that inherited the lock."""
        holder = Holder.of(pid)
        self._content["redis"] = {"pid": holder.pid, "started": holder.started}
        self._write()

    def release_term(self) -> None:
        """Lets go of the head's term alone, before the folder is moved."""
        self._term.release()

    def release(self) -> None:
        """Closes the file; the lock ends when redis-server has closed it too."""
        if self._descriptor is not None:
            self._term.release()
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self) -> None:
        text = json.dumps(self._content).encode() + b"\n"
        os.ftruncate(self.fileno(), 0)
        os.pwrite(self.fileno(), text, 0)


def supervisor_of(folder: RunFolder) -> int | None:
    """Pid of the live supervisor of a folder on this host, or None."""
    content = _content(folder)
    if content.get("host") != socket.gethostname():
        return None
    owner = _holder(content, "supervisor")
    if owner is None or owner.process() is None or not _has_open(owner.pid, folder.lock):
        return None
    return owner.pid


def taken_at(folder: RunFolder) -> float:
    """When the lock of a folder was taken last, in seconds since the epoch; 0 if it doesn't say."""
    taken = _content(folder).get("taken")
    return taken if isinstance(taken, float) else 0.0


def supervisor_elsewhere(folder: RunFolder) -> str:
    """The supervisor on another host that a folder's lock names, as ``process 7 on node3``; empty if it names none.

    Whether that process lives can't be seen from here.
    """
    content = _content(folder)
    host, owner = content.get("host"), _holder(content, "supervisor")
    if owner is None or not isinstance(host, str) or host == socket.gethostname():
        return ""
    return f"process {owner.pid} on {host}"


def _content(folder: RunFolder) -> dict[str, object]:
    """What a folder's lock says; empty if there is none."""
    try:
        descriptor = os.open(folder.lock, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has this very file open: in a copied folder it names the original's owner."""
    try:
        wanted = path.stat()
        held = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return True  # Another system, or another user's process: the lock file is believed.
    for descriptor in held:
        try:
            status = descriptor.stat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


def _read(descriptor: int) -> dict[str, object]:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return {}  # Its holder is just writing it, or was killed before it could.
    return content if isinstance(content, dict) else {}


def _holder(content: dict[str, object], name: str) -> Holder | None:
    entry = content.get(name)
    if not isinstance(entry, dict):
        return None
    pid, started = entry.get("pid"), entry.get("started")
    if type(pid) is not int or not 0 < pid < 2**31 or not isinstance(started, int | float):
        return None
    return Holder(pid=pid, started=float(started))


def end_process(holder: Holder) -> bool:
    """Ends a process by SIGTERM, then SIGKILL; returns whether it was there."""
    process = holder.process()
    if process is None:
        return False
    try:
        process.terminate()
        process.wait(END_SECONDS)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)
    except psutil.Error:
        pass  # It ended by itself in between.
    return True
