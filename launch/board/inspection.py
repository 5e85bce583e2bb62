"""What ``tandem status`` shows beyond the live view's snapshot: too costly to ask for at every frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...common.errors import TandemError
from ...common.run_folder import RunFolder, read_join
from ...replay.connection import connect
from ...replay.inspecting.inspection import (
    MemoryUse,
    OldestLease,
    WaitingAges,
    memory_use,
    oldest_lease,
    waiting_ages,
)
from ...replay.ledger import Ledger
from .on_disk import DiskUse, JournalEnd, disk_use, journal_end

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The results; None for what couldn't be asked."""

    oldest_lease: OldestLease | None = None
    """The oldest lease that is out; None also if nothing is leased."""
    waiting_ages: WaitingAges | None = None
    """Ages of the graded groups."""
    memory: MemoryUse | None = None
    """Memory of the run's Redis."""
    disk: DiskUse | None = None
    """Disk use of the run's folder."""
    journal: JournalEnd | None = None
    """How far the journal in the folder goes."""
    notes: tuple[str, ...] = ()
    """Why something is missing, one sentence each."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(
    folder: RunFolder | None, join_file: Path, *, redis_answers: bool, deadline: float
) -> Inspection:
    """Looks more closely at a run: into its folder if it is here, and into Redis if it answers.

    Args:
        folder: None if the run is on another host.
        join_file: how to join it.
        redis_answers: whether Redis has just answered.
        deadline: seconds that Redis may take to answer again.
    """
    notes: list[str] = []

    def tried(what: str, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except (TandemError, OSError, ValueError) as error:
            notes.append(f"{what}: {' '.join(str(error).split())}")
            return None

    disk = journal = None
    if folder is None:
        notes.append("the run's folder is on its own host: ask there for what is on disk")
    else:
        disk = tried("disk", lambda: disk_use(folder))
        journal = tried("journal.jsonl", lambda: journal_end(folder))
    lease = ages = memory = None
    if redis_answers:
        store = tried("redis", lambda: connect(read_join(join_file), deadline=deadline))
        if store is not None:
            try:
                ledger = Ledger(store, "status")
                lease = tried("oldest lease", lambda: oldest_lease(ledger))
                ages = tried("ages", lambda: waiting_ages(ledger))
                memory = tried("bytes by kind", lambda: memory_use(ledger))
            finally:
                store.close()
    return Inspection(
        oldest_lease=lease,
        waiting_ages=ages,
        memory=memory,
        disk=disk,
        journal=journal,
        notes=tuple(notes),
    )
