"""Whether the run's disk is full, as the supervisor sees it: it says so, and for how long it waits.

The processes wait for space each by itself (:mod:`tandem.common.disk`), and their logs lie on the
disk that is full. So it is the supervisor that tells of it, that starts nothing again meanwhile,
and that ends the run where there is no space for too long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ...common import disk

LOOK_SECONDS = 1.0
"""Between two looks."""


class DiskWatch:
    """One folder's disk.

    Args:
        folder: of the run.
        patience: seconds without space after which the run is to drain.
        say: tells the user.
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
        """A file couldn't be written: the next look is a close one."""
        self._suspect = path
        self._looked = -LOOK_SECONDS

    def full(self) -> bool:
        """Whether the disk is full; looks at most once a second, and tells of each change."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return self._since is not None
        self._looked = now
        doubtful = self._since is not None or self._suspect is not None or self._looks_full()
        is_full = doubtful and not disk.has_room(self._folder)
        if is_full and self._since is None:
            self._since = now
            self._say(f"{self._said()}: the run waits for space, {self._patience:.0f} s at most")
        elif not is_full and self._since is not None:
            self._say(
                f"there is space again in {self._shown} after {now - self._since:.0f} s: the run "
                f"goes on"
            )
            self._since = None
        self._suspect = None
        return is_full

    def overdue(self) -> str:
        """Why the run must end: there has been no space for too long. Empty where it needn't."""
        if not self.full() or self._since is None:
            return ""
        waited = time.monotonic() - self._since
        if waited < self._patience:
            return ""
        return (
            f"{self._said()}, for {waited:.0f} s (launch.full_disk_seconds={self._patience:g}): "
            f"make room, and the same command goes on from the last checkpoint"
        )

    def _said(self) -> str:
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
            found = os.statvfs(self._folder)
        except OSError:
            return False
        no_files = found.f_files > 0 and found.f_favail == 0
        return found.f_bavail * found.f_frsize < disk.ROOM or no_files
