"""What a run's folder holds on disk: bytes by part, and how far its journal goes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import DataError
from ...common.run_folder import RunFolder
from ...common.telemetry import read_json_lines
from ..hardware import free_bytes

PARTS: Mapping[str, tuple[str, ...]] = {
    "redis": ("redis",),
    "checkpoints": ("checkpoints",),
    "model": ("model",),
    "journal": ("journal.jsonl",),
    "metrics": ("metrics.jsonl",),
    "samples": ("samples.jsonl",),
    "logs": ("logs",),
    "data": ("data",),
    "trackers": ("wandb", "tensorboard", "trackers"),
}
"""Entries of a run's folder by what they are; ``redis`` is the append-only file. Weights lie in
``checkpoints`` and, at the end, in ``model``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes of a run's folder."""

    parts: dict[str, int]
    """By what they are (:data:`PARTS`), and ``other``."""
    free: int
    """Left on that disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEnd:
    """How far the learner's own record goes."""

    rows: int
    """The last step that has a row."""
    applied: int
    """The last step whose update is in the weights, on the present line of history."""
    quarantined: tuple[int, ...]
    """Steps that used their number and changed nothing."""


def disk_use(folder: RunFolder) -> DiskUse:
    """Adds up files as they are now; what goes away meanwhile isn't counted."""
    of = {entry: part for part, entries in PARTS.items() for entry in entries}
    parts = dict.fromkeys([*PARTS, "other"], 0)
    for path in folder.path.iterdir():
        parts[of.get(path.name, "other")] += sum(_sizes(path))
    return DiskUse(parts=parts, free=free_bytes(folder.path))


def journal_end(folder: RunFolder) -> JournalEnd | None:
    """Of a run's ``journal.jsonl``; None where there is none yet.

    Raises:
        DataError: a line before the last is damaged.
    """
    if not folder.journal.exists():
        return None
    rows, applied, quarantined = 0, 0, set()
    for record in read_json_lines(folder.journal):
        kind, step = record.get("kind"), record.get("step")
        if type(step) is not int:
            raise DataError(f"{folder.journal} is damaged: it has the step {str(step)[:40]!r}")
        if kind == "row":
            rows = max(rows, step)
        elif kind == "applied":
            applied = step
        elif kind == "quarantined":
            applied = step
            quarantined.add(step)
        elif kind == "resumed":
            applied = min(applied, step)
    return JournalEnd(rows=rows, applied=applied, quarantined=tuple(sorted(quarantined)))


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
