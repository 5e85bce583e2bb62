"""Cuts metrics and samples back to the step that a learner continues from, and keeps what it cuts."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from ...common.parts import parts

log = logging.getLogger("tandem.learner")

KEPT_FILES = 8
"""Number of newest files of one kind (metrics, samples) that are kept of what was cut."""
KEPT_BYTES = 256 << 20
"""Bytes that they may have together; the newest one is kept whatever its size."""


def cut_back(path: Path, step: int, aside: Path) -> None:
    """Moves the records above a step from a record in parts into a separate file.

    Lines that can't be read go with them, and are reported. Parts are replaced as a whole, after what is
    removed from them is on disk; if nothing is to be removed, they aren't touched. Parts from before the
    step aren't read.

    Args:
        path: ``metrics.jsonl`` or ``samples.jsonl``, the first part; may be missing.
        step: records of this step and of earlier ones stay.
        aside: folder for what is cut, as ``metrics-above-38.1.jsonl``.
    """
    for folder, names in (
        (path.parent, f".{path.stem}*.jsonl.*"),
        (aside, f".{path.stem}-above-*"),
    ):
        for left in folder.glob(names):
            left.unlink(missing_ok=True)  # A learner was killed while it cut.
    affected: dict[Path, list[bool | None]] = {}
    for part in reversed(parts(path)):
        stays, reaches_back = _look(part, step)
        if not all(stays):
            affected = {part: stays, **affected}
        if reaches_back:
            break
    if not affected:
        return
    aside.mkdir(mode=0o700, exist_ok=True)
    place = _free_name(aside, f"{path.stem}-above-{step}")
    cut = aside / f".{place.name}"
    kept = {part: part.with_name(f".{part.name}.{os.getpid()}") for part in affected}
    unreadable: list[str] = []
    with open(cut, "wb") as take:
        for part, temporary in kept.items():
            with open(part, "rb") as source, open(temporary, "wb") as keep:
                # Split at b"\n" alone: a sample's text may hold other line separators.
                for number, (line, it_stays) in enumerate(
                    zip(source, affected[part], strict=True), 1
                ):
                    if it_stays is None:
                        unreadable.append(f"line {number} of {part}")
                    (keep if it_stays else take).write(line.rstrip(b"\n") + b"\n")
                keep.flush()
                os.fsync(keep.fileno())
        take.flush()
        os.fsync(take.fileno())
    os.replace(cut, place)
    # The oldest first: if killed here, the next start will find what is left to cut.
    for part, temporary in kept.items():
        if part != path and not temporary.stat().st_size:
            temporary.unlink()
            part.unlink()
        else:
            os.replace(temporary, part)
    log.info(f"{path.name} goes on after step {step}; what was above it is in {place}")
    if unreadable:
        shown = ", ".join(unreadable[:5]) + ", …" * (len(unreadable) > 5)
        log.warning(f"can't be read and was moved to {place}: {shown}")
    _let_go(aside, path.stem)


def _look(part: Path, step: int) -> tuple[list[bool | None], bool]:
    """For each line of a part, whether it stays (None if it can't be read); and whether a step's record stays.

    An evaluation's step is that of the weights that it measured, which may be long past.
    """
    stays: list[bool | None] = []
    reaches_back = False
    with open(part, "rb") as file:
        for line in file:
            at = _step_of(line)
            stays.append(None if at is None else at <= step)
            if stays[-1] and b'"eval/id"' not in line:
                reaches_back = True
    return stays, reaches_back


def _step_of(line: bytes) -> float | None:
    """The step of a record; None if the line isn't one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    at = record.get("step", 0) if isinstance(record, dict) else None
    return at if isinstance(at, int | float) else None


def _free_name(folder: Path, stem: str) -> Path:
    number = 1
    while (path := folder / f"{stem}.{number}.jsonl").exists():
        number += 1
    return path


def _let_go(aside: Path, stem: str) -> None:
    """Removes the oldest of what was cut if there is more than is kept."""
    files = sorted(aside.glob(f"{stem}-above-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    total = 0
    for number, path in enumerate(reversed(files)):
        total += path.stat().st_size
        if number >= KEPT_FILES or (number and total > KEPT_BYTES):
            path.unlink()
