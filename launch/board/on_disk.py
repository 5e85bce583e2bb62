"""What a run's folder holds on disk: bytes by part, and how far its journal goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.disk import free_bytes
from ...common.parts import is_part, parts
from ...common.run_folder import RunFolder
from ...common.telemetry import read_json_lines
from ...learner.resume.journal import History

log = logging.getLogger("tandem.launch")

PARTS: Mapping[str, tuple[str, ...]] = {
    "redis": ("redis",),
    "checkpoints": ("checkpoints",),
    "model": ("model",),
    "journal": (),
    "metrics": (),
    "samples": (),
    "cut": ("cut",),
    "logs": ("logs",),
    "data": ("data",),
    "trackers": ("wandb", "tensorboard", "trackers"),
}
"""Kind to entries of a run's folder; ``redis`` is the append-only file. Weights are in
``checkpoints`` and, at the end, in ``model``. Journal, metrics and samples are files in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes of a run's folder."""

    parts: dict[str, int]
    """Bytes by kind (:data:`PARTS`), and ``other``."""
    free: int
    """Bytes left on the folder's disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEnd:
    """How far the learner's own record goes."""

    rows: int
    """The last step that has a row."""
    applied: int
    """The last step whose update is in the weights, on the current line of history."""
    quarantined: tuple[int, ...]
    """Steps that used up their number and changed nothing."""


def read_restarts(folder: RunFolder) -> list[dict[str, Any]]:
    """Deaths that the supervisor has seen since the run was first started."""
    return list(read_json_lines(folder.logs / "restarts.jsonl", log.warning))


def disk_use(folder: RunFolder) -> DiskUse:
    """Adds up the files as they are now; a file that disappears in the meantime isn't counted."""
    of = {entry: part for part, entries in PARTS.items() for entry in entries}
    sizes = dict.fromkeys([*PARTS, "other"], 0)
    for path in folder.path.iterdir():
        sizes[of.get(path.name) or _record(folder, path.name) or "other"] += sum(_sizes(path))
    return DiskUse(parts=sizes, free=free_bytes(folder.path))


def journal_end(folder: RunFolder) -> JournalEnd | None:
    """The end of a run's journal; None if there is no journal yet.

    Raises:
        StoreError: the journal is damaged.
    """
    if not parts(folder.journal):
        return None
    history = History(folder.journal)
    quarantined = [s for s, outcome in history.outcomes().items() if outcome == "quarantined"]
    return JournalEnd(
        rows=history.last_step, applied=history.applied_step, quarantined=tuple(quarantined)
    )


def _record(folder: RunFolder, name: str) -> str:
    """The kind of record that a file is a part of; empty if it isn't one."""
    records = {"journal": folder.journal, "metrics": folder.metrics, "samples": folder.samples}
    return next((what for what, path in records.items() if is_part(path, name)), "")


def _sizes(path: Path) -> Iterator[int]:
    try:
        if path.is_dir() and not path.is_symlink():
            for entry in os.scandir(path):
                yield from _sizes(Path(entry.path))
        else:
            yield path.lstat().st_size
    except OSError:
        # A file that is being replaced, or a folder that only another user may read.
        return
