"""Large files, checkpoints and the exported model, written once the disk has room for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ..common import disk
from .ranks import Leader

log = logging.getLogger("tandem.learner")

FAILURES = (OSError, RuntimeError, SafetensorError)
"""What torch, DeepSpeed and safetensors raise where a write fails."""


def write_with_room(
    folder: Path, nbytes: int, leader: Leader, write: Callable[[], object], undo: Callable[[], None]
) -> None:
    """Waits for room, then writes; where it failed for want of room all the same, once more.

    Args:
        folder: where it is written.
        nbytes: that it takes at least.
        leader: of the ranks that write; several can't repeat a write that one of them failed in.
        write: writes.
        undo: removes what a failed write has left.

    Raises:
        DiskFull: there was no room for too long.
    """
    wait = disk.Wait(folder, nbytes)
    while True:
        with leader.waiting():
            disk.await_room(folder, nbytes)
        try:
            write()
            return
        except FAILURES as error:
            full = disk.is_full(error) or not disk.has_room(folder)
            undo()
            if not full or leader.engine.world_size > 1:
                raise
            log.warning(f"{folder}: the disk was full in the middle of a write: {error}")
        with leader.waiting():
            wait.go_on()


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
