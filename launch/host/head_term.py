"""The head's term: one supervisor per run folder, also where hosts share the folder and locks can't be trusted.

``flock(2)`` tells the processes of one host apart. On a file system that hosts share it may bind one host alone, or
nobody, and a scheduler whose daemon has died starts a job again while its old processes live on. So the
holder also has a file ``head/<term>.json`` in the run's folder, which nothing but ``link(2)`` makes: of two that
want a term, one gets it. Its holder touches it every few seconds.

A newcomer takes the next term at once if the file says that it was released, or if its holder was a process of
this host that is gone. From another host's file it keeps away as long as that is being touched, by the change of its
time alone: no two clocks are compared. If it isn't touched for :data:`STALE_SECONDS`, the newcomer takes the next
term, removes the file, and goes on with a copy of the ledger's folder: whatever an old Redis has yet to write
goes into files that nobody reads. (The journal's own terms do the same for an old learner.)

A holder whose file is gone, or who couldn't touch it for :data:`SILENT_SECONDS`, ends at once; all of its processes
end with it (:mod:`tandem.launch.lifeline`). It does so before a newcomer may take over.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NoReturn

import psutil

from ...common.errors import HeldError, TandemError
from ...common.plain import read_object
from ...common.run_folder import RunFolder, replace_folder, write_atomic

BEAT_SECONDS = 3.0
"""Time between two touches of the file."""
SILENT_SECONDS = 20
"""A holder that couldn't touch its file for so long ends."""
STALE_SECONDS = 45.0
"""A file that wasn't touched for so long is taken for a dead holder's."""
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""System errors of a file system that knows no hard links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Who holds a term: host, pid and start, since pids and names of jobs come again."""

    host: str
    boot: str
    """Identifies the start of the host's kernel, which tells hosts of one name apart."""
    pid: int
    started: float
    """Start time of the process, in seconds since the epoch."""
    job: str
    """The scheduler's name for its job; empty without one. For people alone."""
    place: str
    """Path of the folder."""
    inode: int
    """Number of the file, which a copy of the folder doesn't have."""
    released: bool = False
    """Whether it has left the folder in good order."""

    @classmethod
    def own(cls, place: Path) -> Head:
        """This process."""
        return cls(
            host=socket.gethostname(),
            boot=_boot_id(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            place=os.path.realpath(place),
            inode=0,
        )

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"

    def is_gone(self) -> bool:
        """Whether it was a process of this host that has ended."""
        if (self.host, self.boot) != (socket.gethostname(), _boot_id()):
            return False
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) <= 2
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True


class Before(Enum):
    """What became of the term before."""

    FREE = "its holder has left, or has ended"
    STALE = "its holder shows no sign of life"
    CHANGED = "there is another file to look at"


class HeadTerm:
    """The term of one run folder; taken under the folder's lock.

    Args:
        folder: the folder.
        named_with: how a user names another one.
    """

    def __init__(self, folder: RunFolder, named_with: str = "run.dir=…") -> None:
        self._run = folder
        self._named_with = named_with
        self._folder = folder.path / "head"
        self._path: Path | None = None
        self._own = Head.own(folder.path)
        self._ended = threading.Event()
        self._beaten = threading.Event()

    def take(self) -> int:
        """Takes the next term, and keeps it until :meth:`release`; returns its number.

        Raises:
            HeldError: another process holds the folder, and is alive.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        while True:
            newest = _newest(self._folder)
            before = Before.FREE if newest is None else self._became_of(newest)
            term = 1 if newest is None else _number(newest) + 1
            path = self._folder / f"{term:06}.json"
            if before is not Before.CHANGED and self._make(path):
                break
        for older in self._folder.glob("[0-9]*.json"):
            if _number(older) < term:
                older.unlink(missing_ok=True)
        if before is Before.STALE:
            copy_ledger(self._run)
        self._path = path
        self._ended.clear()
        for body in (self._beat, self._watch):
            threading.Thread(target=body, args=(path,), name="head", daemon=True).start()
        return term

    def release(self) -> None:
        """Leaves the folder to whoever comes next."""
        if self._path is None:
            return
        path, self._path = self._path, None
        self._ended.set()
        try:
            if path.exists():
                write_atomic(path, json.dumps(asdict(replace(self._own, released=True))))
        except OSError:
            pass  # A full disk, or a folder that is gone: whoever comes next sees that this process has ended.

    def _became_of(self, path: Path) -> Before:
        """Waits until it is known whether the file's holder is out of the way.

        Raises:
            HeldError: its holder is alive.
        """
        head, touched = _read(path), _touched(path)
        if touched is None:
            return Before.CHANGED
        if head is not None and (head.released or head.is_gone() or self._is_copied(head, path)):
            return Before.FREE
        if head is not None and (head.host, head.boot) == (self._own.host, self._own.boot):
            raise self._held(head)
        print(
            f"{self._run.path} was last used by {head or 'another host'}: {STALE_SECONDS:.0f} s are waited for a sign "
            f"of life from there",
            file=sys.stderr,
            flush=True,
        )
        end = time.monotonic() + STALE_SECONDS
        while time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 3)
            now = _touched(path)
            if now is None:
                return Before.CHANGED
            if now != touched:
                head = _read(path)
                if head is not None and head.released:
                    return Before.FREE
                raise self._held(head)
        return Before.STALE

    def _is_copied(self, head: Head, path: Path) -> bool:
        """Whether the file is a copy, whose holder has another folder."""
        # Neither alone says so: a shared folder may have several paths, and some file systems change the numbers.
        return head.place != self._own.place and head.inode != path.stat().st_ino

    def _make(self, path: Path) -> bool:
        """Makes the file of a term with its whole content; False if somebody else has it.

        Raises:
            TandemError: the file system has no hard links.
        """
        whole = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with open(whole, "x") as file:
                self._own = replace(self._own, inode=os.fstat(file.fileno()).st_ino)
                json.dump(asdict(self._own), file)
            os.link(whole, path)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise TandemError(
                f"{self._run.path} is on a file system without hard links ({error.strerror}), by which one head of a "
                f"run keeps others away: name a folder on another file system with {self._named_with}"
            ) from None
        finally:
            whole.unlink(missing_ok=True)

    def _held(self, head: Head | None) -> HeldError:
        return HeldError(
            f"{self._run.path} is in use by {head or 'another host'}, which is alive: `tandem stop` or Ctrl-C there "
            f"ends it, or name another folder: {self._named_with}"
        )

    def _beat(self, path: Path) -> None:
        while not self._ended.is_set():
            try:
                # Opening asks the server of a shared file system, which a cached name doesn't.
                os.close(os.open(path, os.O_RDONLY))
                os.utime(path)
            except FileNotFoundError:
                if self._ended.is_set():
                    return
                if not self._folder.exists():
                    self._end(
                        f"{self._run.path} was removed or renamed: a run needs its folder under this name"
                    )
                self._end(f"{path} is gone: another host has taken over the run")
            except OSError:
                pass  # `_watch` counts how long nothing goes through; a full disk stops no touch.
            else:
                self._beaten.set()
            self._ended.wait(BEAT_SECONDS)

    def _watch(self, path: Path) -> None:
        silent = 0
        while not self._ended.wait(1.0):
            # Counted and not timed: a process that was stopped itself first gets to touch the file again.
            silent = 0 if self._beaten.is_set() else silent + 1
            self._beaten.clear()
            if silent > SILENT_SECONDS:
                self._end(
                    f"{path} couldn't be touched for {silent} s, so another host may take over"
                )

    def _end(self, why: str) -> NoReturn:
        print(f"tandem: {why}; this process and all that it has started end now", file=sys.stderr)
        sys.stderr.flush()
        os._exit(HeldError.exit_code)


def copy_ledger(folder: RunFolder) -> None:
    """Puts a copy in the place of the files of the run's own Redis, if it has one.

    Raises:
        TandemError: they can't be copied.
    """
    if not (folder.redis / "redis.conf").exists():
        return  # Somebody else's Redis, which has one state for all.
    staging = folder.path / ".redis.copy"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        shutil.copytree(folder.redis, staging)
        replace_folder(staging, folder.redis)
    except (OSError, shutil.Error) as error:
        raise TandemError(
            f"the ledger in {folder.redis}, to which another host may still write, can't be copied ({error}): make "
            f"room there, then start again"
        ) from None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else 0


def _newest(folder: Path) -> Path | None:
    return max(folder.glob("[0-9]*.json"), key=_number, default=None)


def _touched(path: Path) -> int | None:
    """Its time, fresh from the server of a shared file system; None if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _read(path: Path) -> Head | None:
    """Who holds it; None if the file is gone, or damaged."""
    try:
        content = read_object(path.read_bytes(), str(path), TandemError)
        return Head(
            host=str(content["host"]),
            boot=str(content["boot"]),
            pid=int(content["pid"]),
            started=float(content["started"]),
            job=str(content["job"]),
            place=str(content["place"]),
            inode=int(content["inode"]),
            released=content["released"] is True,
        )
    except (OSError, TandemError, KeyError, TypeError, ValueError):
        return None
