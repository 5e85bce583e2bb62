"""Checkpoints as folders that are there whole or not at all.

``checkpoints/step-00000050/``: DeepSpeed's files below ``engine/``, and ``state.json`` with the
step, the version, the position in the journal and the size of every file. A folder is written
beside, synced and renamed; ``LATEST`` names the newest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import DataError
from ..common.plain import damaged, fits, read_object
from ..common.records import Version
from ..common.run_folder import write_atomic
from .engine import replace_folder, sync_tree

log = logging.getLogger("tandem.learner")

PREFIX = "step-"
STATE = "state.json"
LATEST = "LATEST"
_KINDS = {"term": int, "step": int, "ranks": int, "state": dict, "files": dict}
WAY_OUT = "remove this checkpoint, and an older one is resumed from"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint on disk."""

    folder: Path
    """Where it lies."""
    version: Version
    """Of its weights; its step is the position in the journal."""
    ranks: int
    """Ranks that wrote it."""
    state: dict[str, Any]
    """What else was put into ``state.json``."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: ``checkpoints/`` of the run.
        kept: Newest so many are kept, at least 2.
    """

    def __init__(self, folder: Path, kept: int = 2) -> None:
        self.folder = folder
        self.kept = max(2, kept)
        folder.mkdir(parents=True, exist_ok=True)

    def all(self) -> list[Checkpoint]:
        """Whole ones, oldest first; damaged ones are logged and left out."""
        found = []
        for path in sorted(self.folder.glob(f"{PREFIX}*")):
            try:
                found.append(read(path))
            except DataError as error:
                log.warning(f"left out a checkpoint: {error}")
        return sorted(found, key=lambda c: c.version.step)

    def newest(self) -> Checkpoint | None:
        """The newest whole one."""
        return max(self.all(), key=lambda c: c.version.step, default=None)

    def save(
        self,
        version: Version,
        write: Callable[[Path], None],
        *,
        ranks: int,
        state: dict[str, Any],
        may_finish: Callable[[], None] | None = None,
    ) -> Checkpoint:
        """Writes a checkpoint and lets go of the oldest ones.

        Args:
            version: Of the weights.
            write: Writes the engine's files into a folder; returns when all ranks have.
            ranks: How many.
            state: Plain data to keep with it.
            may_finish: Called before the new one is put in place; raises where a newer learner
                has taken over.
        """
        staging = self.staging(version)
        write(staging)
        sizes = {
            str(path.relative_to(staging)): path.stat().st_size
            for path in sorted(staging.rglob("*"))
            if path.is_file()
        }
        content = {
            "term": version.term,
            "step": version.step,
            "ranks": ranks,
            "state": state,
            "files": sizes,
        }
        write_atomic(staging / STATE, json.dumps(content, indent=1) + "\n")
        sync_tree(staging)
        if may_finish is not None:
            may_finish()
        place = self.folder / f"{PREFIX}{version.step:08d}"
        replace_folder(staging, place)
        write_atomic(self.folder / LATEST, place.name + "\n")
        self._let_go(version.step)
        return read(place)

    def staging(self, version: Version) -> Path:
        """An empty folder to write into."""
        place = self.folder / f".{PREFIX}{version.step:08d}.tmp"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def oldest_step(self) -> int:
        """Step of the oldest kept; 0 without one."""
        return min((c.version.step for c in self.all()), default=0)

    def clean(self) -> None:
        """Removes what an interrupted write has left."""
        for path in self.folder.glob(".*"):
            if path.is_dir() and (path.name.endswith((".tmp", ".old"))):
                shutil.rmtree(path, ignore_errors=True)

    def _let_go(self, newest: int) -> None:
        everything = self.all()
        # Above the newest: of a line of history that was given up.
        behind = [c for c in everything if c.version.step <= newest]
        for checkpoint in behind[: -self.kept] + [c for c in everything if c.version.step > newest]:
            # Renamed first, so that what is being removed is never taken for a checkpoint.
            doomed = checkpoint.folder.with_name(f".{checkpoint.folder.name}.old")
            os.replace(checkpoint.folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def read(folder: Path) -> Checkpoint:
    """A checkpoint's description.

    Raises:
        DataError: it isn't whole.
    """
    try:
        data = (folder / STATE).read_bytes()
    except OSError as error:
        raise DataError(f"{folder} has no readable {STATE}: {error}") from None
    content = read_object(data, f"{folder}/{STATE}", DataError, WAY_OUT)
    for name, kind in _KINDS.items():
        if not fits(content.get(name), kind):
            raise damaged(
                f"{folder}/{STATE}",
                f"has {name}={str(content.get(name))[:60]!r}, no {kind.__name__}",
                DataError,
                WAY_OUT,
            )
    try:
        version = Version(term=content["term"], step=content["step"])
    except ValueError as error:
        raise damaged(f"{folder}/{STATE}", f"can't be: {error}", DataError, WAY_OUT) from None
    files: dict[str, int] = content["files"]
    state, ranks = content["state"], content["ranks"]
    for name, size in files.items():
        if type(size) is not int or "\0" in name or Path(name).is_absolute() or ".." in name:
            raise damaged(f"{folder}/{STATE}", f"names the file {name[:80]!r}", DataError, WAY_OUT)
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise DataError(f"{folder} lacks {name}") from None
        if found != size:
            raise DataError(f"{folder}/{name} has {found:,} bytes and should have {size:,}")
    return Checkpoint(folder=folder, version=version, ranks=ranks, state=state)
