"""The processes in which a server has episodes played: started, timed, killed, and used again.

The life of a process::

    starting -> idle <-> playing -> ended

It goes back to ``idle`` only after a clean episode. At a deadline, after an exception, and after anything
that it shouldn't have sent, it is ended with everything that it has started. Nothing gets away by forking:
each process is the parent of its orphaned descendants, so that they are found by walking down from it, and
the server is the parent of whatever outlives a process (:mod:`.descendants`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.records import Verdict
from .descendants import Family, count_below
from .pipes import Play
from .process import Bounds, EpisodeFailed, Figures, Host, NotStarted
from .wire import (
    Played,
    brief,
)

log = logging.getLogger("tandem.environments")

MOST_DESCENDANTS = 64
"""Processes that an environment may leave running between two episodes."""
FRESH_SECONDS = 60.0
"""Age from which an unlocked folder of a server is one that was left behind."""
USERS = range(57_000, 61_000)
"""Users that root's processes become, one each. They own no files, and are within the ids of a container."""


class Hosts:
    """All processes of a server, for all environments whose episodes are played in processes of ours.

    Args:
        use: form, target and parameters of each environment.
        bounds: the deadlines.
        places: greatest number of processes.
        path: folders that are added at the end of their import path.
    """

    def __init__(
        self,
        use: Mapping[str, Mapping[str, Any]],
        bounds: Bounds,
        places: int,
        path: Sequence[str] = (),
    ) -> None:
        self._use = dict(use)
        self._bounds = bounds
        self._places = places
        self._path = list(path)
        self.family = Family()
        self.figures = Figures()
        self._folder = ServerFolder()
        self._idle: list[Host] = []
        self._all: set[Host] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._users = random.randrange(len(USERS))

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._all)

    async def check(self, name: str) -> None:
        """Starts a process for an environment, which then waits for its first episode.

        Raises:
            NotStarted: its environment can't be loaded.
        """
        host = await self._start(name)
        self._idle.append(host)
        if host.why_root:
            log.warning(f"environment {name} is played as root: {brief(host.why_root)}")

    async def play(self, name: str, play: Play) -> Played:
        """Has an episode played in a process of its own.

        Raises:
            EpisodeFailed: it failed.
        """
        try:
            host = await self._take(name)
        except NotStarted as error:
            raise EpisodeFailed(Verdict.ENV_RESET, brief(str(error))) from None
        clean = False
        try:
            played = await host.play(play)
            clean = await asyncio.to_thread(count_below, host.pid) <= MOST_DESCENDANTS
            return played
        except EpisodeFailed as error:
            kinds = self.figures.killed
            kinds[error.verdict.value] = kinds.get(error.verdict.value, 0) + 1
            raise
        finally:
            if clean and host in self._all:
                self._idle.append(host)
            else:
                await self._end(host)

    async def close(self) -> None:
        """Ends all processes."""
        self._idle.clear()
        await asyncio.gather(*(self._end(host) for host in list(self._all)), *self._ending)
        await asyncio.to_thread(self.family.sweep)
        self._folder.remove()

    async def _take(self, name: str) -> Host:
        for host in reversed(self._idle):
            if host.name == name:
                self._idle.remove(host)
                if host.is_alive():
                    return host
                await self._end(host)
        while len(self._all) >= self._places and self._idle:
            # Another environment's: the one that has waited longest.
            await self._end(self._idle.pop(0))
        return await self._start(name)

    async def _start(self, name: str) -> Host:
        self._users = (self._users + 1) % len(USERS)
        user = USERS[self._users] if os.geteuid() == 0 else None
        host = Host(
            name,
            self._use[name],
            self._bounds,
            self._folder.path,
            user,
            self._path,
            self.family,
        )
        self._all.add(host)
        self.figures.started += 1
        try:
            await host.start()
        except BaseException:
            await self._end(host)
            raise
        return host

    async def _end(self, host: Host) -> None:
        """Ends a process; goes on even if the caller is cancelled meanwhile."""
        task = asyncio.create_task(host.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._all.discard(host)
        await asyncio.shield(task)


class ServerFolder:
    """The temporary folder of a server, which holds those of its processes; left by a server that was killed,
    it is removed by the next one."""

    PREFIX = "tandem-environments-"

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        for left in base.glob(f"{self.PREFIX}*"):
            with contextlib.suppress(OSError):
                # A newer one may be about to be locked.
                if time.time() - left.stat().st_mtime > FRESH_SECONDS:
                    self._remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=self.PREFIX))
        self._lock = self._locked(self.path)
        # Its processes may be other users, who may pass through but not look around.
        self.path.chmod(0o711)

    def remove(self) -> None:
        """Removes it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_if_left(self, folder: Path) -> None:
        if (lock := self._locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    @staticmethod
    def _locked(folder: Path) -> int | None:
        """A descriptor that holds the folder's lock; None if another process holds it."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor
