"""Watches the run's disk for the supervisor: says when it is full, and how long the run will wait.

Each process waits for space by itself (:mod:`tandem.common.disk`), but its log is on the full disk.
So the supervisor is the one that tells the user, that restarts nothing in the meantime, and that
ends the run when there has been no space for too long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ....common import disk

LOOK_SECONDS = 1.0
"""Time between two checks."""


class DiskWatch:
    """Watches the disk of one folder.

    Args:
        folder: the run's folder.
        patience: seconds without space after which the run is drained.
        say: prints a line for the user.
        shown: the folder as the user would type it.
    """

    def __init__(
        self, folder: Path, patience: float, say: Callable[[str], None], shown: str
    ) -> None:
        self._folder = folder
        self._patience = patience
        self._say = say
        self._shown = shown
        self._looked = -LOOK_SECONDS
        self._suspect: Path | None = None
        self._since: float | None = None

    def suspect(self, path: Path) -> None:
        """Notes that a file couldn't be written, so that the next check tries to write."""
        self._suspect = path
        self._looked = -LOOK_SECONDS

    def full(self) -> bool:
        """Whether the disk is full; checks at most once a second and reports each change."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return self._since is not None
        self._looked = now
        doubtful = self._since is not None or self._suspect is not None or self._looks_full()
        is_full = doubtful and not disk.has_room(self._folder)
        if is_full and self._since is None:
            self._since = now
            self._say(f"{self._problem()}: the run waits for space, {self._patience:.0f} s at most")
        elif not is_full and self._since is not None:
            self._say(
                f"there is space again in {self._shown} after {now - self._since:.0f} s: the run "
                f"goes on"
            )
            self._since = None
        self._suspect = None
        return is_full

    def overdue(self) -> str:
        """Why the run must end because it has had no space for too long; empty while it needn't end."""
        if not self.full() or self._since is None:
            return ""
        waited = time.monotonic() - self._since
        if waited < self._patience:
            return ""
        return (
            f"{self._problem()}, for {waited:.0f} s (launch.full_disk_seconds={self._patience:g}): "
            f"make room, and the same command goes on from the last checkpoint"
        )

    def _problem(self) -> str:
        free = disk.free_bytes(self._folder) / 1e6
        file = self._suspect or self._folder / "journal.jsonl"
        others = ", redis/, checkpoints/ and logs/" if self._suspect is None else ""
        name = file.relative_to(self._folder) if file.is_relative_to(self._folder) else file
        return (
            f"the disk is full: {name}{others} in {self._shown} can't be written ({free:,.1f} MB "
            f"free)"
        )

    def _looks_full(self) -> bool:
        try:
            stat = os.statvfs(self._folder)
        except OSError:
            return False
        no_files = stat.f_files > 0 and stat.f_favail == 0
        return stat.f_bavail * stat.f_frsize < disk.ROOM or no_files
