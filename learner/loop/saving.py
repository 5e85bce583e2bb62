"""Checkpoints and the exported model, written once the disk has room for them.

A checkpoint also frees samples: Redis keeps those of the steps since the oldest checkpoint, from which a
resumed learner trains again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ...common import disk
from ...common.errors import DataError, FencedError
from ...common.records import Version
from ...common.run_folder import RunFolder
from ...common.telemetry import Clock
from ...replay.ledger import Ledger
from ..adapters import require_same
from ..ranks import Leader
from ..resume.checkpoints import Checkpoint, Checkpoints
from ..resume.former import is_former
from ..rows.sources import BatchSource

log = logging.getLogger("tandem.learner")

FAILURES = (OSError, RuntimeError, SafetensorError)
"""Errors that torch, DeepSpeed and safetensors raise if a write fails."""


def write_with_room(
    folder: Path, nbytes: int, leader: Leader, write: Callable[[], object], undo: Callable[[], None]
) -> None:
    """Waits for room, then writes; if the write still fails for lack of room, writes once more.

    Args:
        folder: destination of the write.
        nbytes: bytes that it takes at least.
        leader: leader of the ranks that write; several ranks can't repeat a write in which one failed.
        write: writes.
        undo: removes what a failed write has left.

    Raises:
        DiskFull: there was no room for too long.
    """
    wait = disk.SpaceWait(folder, nbytes)
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


def require_same_frozen(kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that was written beside a reference or a teacher of other weights.

    Args:
        kept: what the checkpoint says; without ``frozen`` if an older version of Tandem wrote it.
        now: the same of this run.

    Raises:
        DataError: the weights at a path that both name have changed.
    """
    before = kept.get("frozen", {})
    for path, digest in now.get("frozen", {}).items():
        if before.get(path, digest) != digest:
            raise DataError(
                f"the weights in {path}, which the run's reference or teacher is loaded from, have changed since "
                f"the run was started: put them back, or start over with --fresh"
            )


def size_of(folder: Path) -> int:
    """Total size in bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Saver:
    """The checkpoints of one term.

    Args:
        folder: the run's folder.
        kept: number of checkpoints that are kept (``learner.checkpoints_kept``).
        leader: leader of the ranks, all of which write their part.
        ledger: knows whether another learner has taken over.
        source: holds the samples that a checkpoint frees.
        clock: clock of the learner's loop.
        term: the learner's term.
        state: further state of the run for the checkpoint, :func:`~..adapters.identity` among it.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        kept: int,
        leader: Leader,
        ledger: Ledger,
        source: BatchSource,
        clock: Clock,
        term: int,
        state: Mapping[str, Any],
    ) -> None:
        self._folder = folder.checkpoints
        self._checkpoints = Checkpoints(folder.checkpoints, kept)
        self._leader = leader
        self._ledger = ledger
        self._source = source
        self._clock = clock
        self._term = term
        self._state = dict(state)
        self._released = 0
        self.saved = -1
        """Step of the newest checkpoint; −1 if there is none."""

    def load_newest(self, last_step: int) -> int | None:
        """Loads the newest whole checkpoint; returns its step, or None if there is none.

        Args:
            last_step: the newest step of the journal; later checkpoints are ignored.

        Raises:
            DataError: it can't be read, or was written with other adapters or beside another reference or teacher, or
                by an earlier version of Tandem and another number of ranks.
        """
        # Every file of it is read.
        with self._leader.waiting():
            self._checkpoints.clean()
            newest = self._checkpoints.newest(last_step)
        if newest is None:
            return None
        self._compare_ranks(newest)
        require_same(newest.state, self._state, newest.folder)
        require_same_frozen(newest.state, self._state)
        self._leader.load(newest.folder)
        with self._leader.waiting():
            # A save may have been killed before it had LATEST name it.
            disk.persist(newest.folder, lambda: self._checkpoints.point_to(newest.folder))
        self.saved = newest.version.step
        return self.saved

    def oldest(self) -> int:
        """Step of the oldest checkpoint; 0 if there is none."""
        return min((kept.version.step for kept in self._checkpoints.all()), default=0)

    def save(self, step: int) -> None:
        """Writes the checkpoint of this step unless it exists."""
        if self.saved == step:
            return
        with self._clock.doing("checkpoint"):
            before = self._checkpoints.all()[-1:]
            sizes = [size_of(checkpoint.folder) for checkpoint in before]
            least = max([self._leader.engine.checkpoint_bytes(), *sizes])
            write_with_room(
                self._folder,
                least,
                self._leader,
                lambda: self._save(step),
                undo=self._checkpoints.clean,
            )
            self.saved = step
            # A single one might be damaged, and then the samples since the start are needed.
            kept = self._checkpoints.all()
            if len(kept) >= 2:
                self._let_go(kept[0].version.step)
        log.info(f"checkpoint of step {step}")

    def can_make_room(self, step: int) -> bool:
        """Whether Redis keeps samples of steps up to this one that :meth:`make_room` can free."""
        return self._released < step

    def make_room(self, step: int) -> None:
        """Frees samples that are kept for a resume, when Redis is too full for another lease."""
        if self.saved < step:
            log.warning(
                f"Redis is too full for another lease: a checkpoint is written at step {step}, so "
                f"that samples can be let go. Raise replay.maxmemory_mb, or lower "
                f"learner.checkpoint_every"
            )
            self.save(step)
            return
        log.warning(
            f"Redis is too full for another lease: the samples up to the newest checkpoint, of "
            f"step {self.saved}, are let go, so that no earlier one can be gone back to. Raise "
            f"replay.maxmemory_mb, or lower learner.checkpoint_every"
        )
        self._let_go(self.saved)

    def _let_go(self, step: int) -> None:
        self._source.durable(step, self._term)
        self._released = step

    def _save(self, step: int) -> None:
        self._checkpoints.save(
            Version(term=self._term, step=step),
            self._leader.save,
            ranks=self._leader.engine.world_size,
            state={**self._state, "zero_stage": self._leader.engine.stage},
            may_finish=self._still_newest,
            meanwhile=self._leader.waiting,
        )

    def _still_newest(self) -> None:
        newest = self._ledger.term()
        if newest != self._term:
            raise FencedError(f"term {self._term} is over: a learner of term {newest} has started")

    def _compare_ranks(self, checkpoint: Checkpoint) -> None:
        engine = self._leader.engine
        if is_former(checkpoint.folder):
            if checkpoint.ranks != engine.world_size:
                raise DataError(
                    f"{checkpoint.folder} was written by {checkpoint.ranks} rank(s) of an earlier version of Tandem, "
                    f"and there are {engine.world_size}: resume with learner.ranks={checkpoint.ranks}, and change "
                    f"it once there is a newer checkpoint"
                )
            return
        before = _described(checkpoint.ranks, checkpoint.state.get("zero_stage"))
        now = _described(engine.world_size, engine.stage)
        if before != now:
            log.info(f"{checkpoint.folder} was written by {before}, and is now loaded by {now}")


def _described(ranks: int, stage: Any) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)} with ZeRO-{stage}"
