"""Finds and ends whatever a process has started, however it tried to get away.

A process that forks twice and begins a session of its own is no longer a child of whoever started it, and
in no group that could be killed. But the kernel gives an orphan to its nearest ancestor that adopts them
(``PR_SET_CHILD_SUBREAPER``). A server's processes adopt theirs, so all descendants of one that lives are
below it; when it dies, they become children of the server, which knows whom it has started itself.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import psutil

MOST_ROUNDS = 50
"""Looks for processes that were forked while the others were being stopped."""


def end_tree(root: int) -> None:
    """Kills a child of this process, which hasn't been reaped, with all its descendants.

    They are stopped first, until no new one is found: what is stopped forks no more.
    """
    try:
        top = psutil.Process(root)
    except psutil.NoSuchProcess:
        return
    stopped: dict[int, psutil.Process] = {}
    for _ in range(MOST_ROUNDS):
        fresh = [one for one in (top, *_below(top)) if one.pid not in stopped]
        if not fresh:
            break
        for one in fresh:
            with contextlib.suppress(psutil.Error):
                one.suspend()
            stopped[one.pid] = one
    for one in reversed(stopped.values()):
        with contextlib.suppress(psutil.Error):
            one.kill()


def count_below(root: int) -> int:
    """Number of a process's descendants."""
    try:
        return len(_below(psutil.Process(root)))
    except psutil.NoSuchProcess:
        return 0


def _below(top: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(top.children(recursive=True))
    return []


class Family:
    """The children that this process has started itself; all others are orphans, and are ended.

    Children that there were before aren't touched. Everything that a server starts afterwards must be
    started with :meth:`start`.
    """

    def __init__(self) -> None:
        self._before = {child.pid for child in psutil.Process().children()}
        self._known: dict[int, subprocess.Popen[bytes]] = {}
        # Held while a child is started: before it is known it would look like an orphan.
        self._lock = threading.Lock()

    def start(self, make: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Starts a child."""
        with self._lock:
            process = make()
            self._known[process.pid] = process
            return process

    def end(self, process: subprocess.Popen[Any], seconds: float) -> bool:
        """Ends a child with all its descendants, and reaps it; False if it is still there after ``seconds``."""
        if process.returncode is None:
            end_tree(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        if process.returncode is None:
            return False
        with self._lock:
            self._known.pop(process.pid, None)
        self.sweep()
        return True

    def sweep(self) -> int:
        """Ends and reaps orphans; returns how many were still running."""
        ended = 0
        with self._lock:
            children = psutil.Process().children()
            for child in children:
                if child.pid in self._known or child.pid in self._before:
                    continue
                with contextlib.suppress(psutil.Error):
                    if child.status() != psutil.STATUS_ZOMBIE:
                        ended += 1
                        end_tree(child.pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        return ended
