"""Rank 0 leads and the other ranks follow: every collective is entered by all of them, or by none.

Rank 0 decides alone (step, checkpoint, export, end) and broadcasts the decision; for a step the
others get the rows as tensors (:func:`~.updates.columns.share_rows`). A follower knows neither Redis nor the
journal.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..common.adapters import base_digest
from ..common.errors import DataError
from ..common.models import local_folder
from .engine.deepspeed_engine import DeepSpeedEngine
from .orders import (
    Compare,
    Export,
    Frozen,
    Idle,
    Load,
    Order,
    Parameters,
    Save,
    Score,
    Stop,
    Train,
    read_order,
)
from .rendezvous import broadcast_bytes
from .resume.far_files import CheckpointFiles
from .rows.groups import MixedGroup
from .scored import score
from .updates.updates import StepOutcome, Updates

IDLE_SECONDS = 20.0
"""Interval at which rank 0 says that it is alive while it waits for something."""


class Leader:
    """Rank 0's view of all ranks. To be used by one thread, except for the signs of life."""

    def __init__(
        self, engine: DeepSpeedEngine, updates: Updates, files: CheckpointFiles | None = None
    ) -> None:
        self.engine = engine
        self._updates = updates
        self._files = files or CheckpointFiles()
        self._alone = engine.world_size == 1
        self._collective = threading.Lock()
        """Held from an order to the end of what all ranks then do together."""

    def train(
        self,
        step: int,
        groups: Sequence[MixedGroup],
        *,
        lrs: tuple[float, float],
        before_step: Callable[[], None] | None = None,
        settled: bool = False,
    ) -> StepOutcome:
        """See :meth:`Updates.train`; ``lrs`` are the learning rates of policy and critic."""
        lr, critic_lr = lrs
        with self._ordered(Train(step=step, lr=lr, critic_lr=critic_lr, settled=settled)):
            outcome = self._updates.train(
                step, groups, lr=lr, critic_lr=critic_lr, before_step=before_step, settled=settled
            )
            outcome.metrics.update(self.engine.memory.over_ranks())
            return outcome

    def frozen(self) -> dict[str, str]:
        """Digest of the weights of each model in :attr:`Updates.frozen_paths`, by path; reads all of their files.

        The first rank of each other host compares its own with them.
        """
        with self.waiting():
            digests = _digests(self._updates)
        with self._ordered(Frozen(digests=digests)):
            return digests

    def compare(self, step: int, groups: Sequence[MixedGroup]) -> dict[str, float]:
        """See :meth:`Updates.compare`."""
        with self._ordered(Compare(step=step)):
            return self._updates.compare(step, groups)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint's engine part on all ranks."""
        with self._ordered(Save(folder=str(folder))):
            with self._files.writing(folder, _share(self.engine)) as place:
                self.engine.save(place, self._updates.state())
            # All ranks' files are there once all have answered.
            self.engine.barrier()

    def load(self, folder: Path) -> None:
        """Reads a checkpoint's engine part on all ranks."""
        with self._ordered(Load(folder=str(folder))), self._files.reading(folder) as place:
            self._updates.restore(self.engine.load(place))

    def export(self, folder: Path, base: Path | None) -> None:
        """See :meth:`DeepSpeedEngine.export`; only the parameters are gathered by all ranks."""
        with self.waiting():
            self.engine.export(folder, base, self._ordered_at_stage_3(Export()))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every parameter; must be iterated to the end."""
        with self._ordered_at_stage_3(Parameters()):
            yield from self.engine.parameters()

    def score(self, rows: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        """``[R, S - 1]`` log-probs of some rows in a dtype; see :func:`~.scored.score`."""
        name: Any = str(dtype).removeprefix("torch.")
        with self._ordered_at_stage_3(Score(rows=rows.tolist(), dtype=name)):
            return score(self.engine, rows, dtype)

    def stop(self) -> None:
        """Ends the followers."""
        with self._ordered(Stop()):
            pass

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Keeps the followers from giving up while rank 0 waits for something else, or works alone.

        Orders may be given meanwhile, and another wait may begin.
        """
        if self._alone:
            yield
            return
        done = threading.Event()

        def reassure() -> None:
            while not done.wait(IDLE_SECONDS):
                # While an order is carried out nobody waits for a sign of life, and it would get in between.
                if self._collective.acquire(blocking=False):
                    try:
                        self._tell(Idle())
                    finally:
                        self._collective.release()

        thread = threading.Thread(target=reassure, name="ranks-idle", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextmanager
    def _ordered(self, order: Order) -> Iterator[None]:
        """Tells the followers what to do; the body is rank 0's part in it."""
        with self._collective:
            self._tell(order)
            yield

    def _ordered_at_stage_3(self, order: Order) -> AbstractContextManager[None]:
        """The same for what rank 0 does alone at the other stages, where it has all parameters."""
        return self._ordered(order) if self.engine.stage == 3 else nullcontext()

    def _tell(self, order: Order) -> None:
        if not self._alone:
            broadcast_bytes(order.pack())


def _share(engine: DeepSpeedEngine) -> int:
    """Bytes that each rank writes of a checkpoint, roughly."""
    return engine.checkpoint_bytes() // engine.world_size


def _digests(updates: Updates) -> dict[str, str]:
    return {path: base_digest(local_folder(path)) for path in updates.frozen_paths}


def follow(
    engine: DeepSpeedEngine,
    updates: Updates,
    files: CheckpointFiles | None = None,
    *,
    first_of_host: bool = False,
) -> None:
    """Follows the orders of rank 0 until it says stop.

    Args:
        engine: this rank's engine.
        updates: this rank's updates.
        files: where it writes and reads checkpoints.
        first_of_host: whether it is the first rank of a host other than rank 0's.

    Raises:
        DataError: this host has other weights of the reference or the teacher than rank 0's.
    """
    files = files or CheckpointFiles()
    while True:
        match read_order(broadcast_bytes(None)):
            case Train() as order:
                updates.train(
                    order.step,
                    None,
                    lr=order.lr,
                    critic_lr=order.critic_lr,
                    settled=order.settled,
                )
                engine.memory.over_ranks()
            case Compare() as order:
                updates.compare(order.step, None)
            case Frozen() as order:
                mine = _digests(updates) if first_of_host else order.digests
                if others := [path for path in mine if mine[path] != order.digests.get(path)]:
                    raise DataError(
                        f"the weights in {others[0]}, which the run's reference or teacher is loaded from, are others on "
                        f"{socket.gethostname()} than on the host of the learner's rank 0: copy them from there"
                    )
            case Save() as order:
                with files.writing(Path(order.folder), _share(engine)) as place:
                    engine.save(place, updates.state())
                engine.barrier()
            case Load() as order:
                with files.reading(Path(order.folder)) as place:
                    updates.restore(engine.load(place))
            case Export():
                engine.gather_for_export()
            case Parameters():
                for _ in engine.parameters():
                    pass
            case Score() as order:
                score(engine, np.array(order.rows, np.int64), getattr(torch, order.dtype))
            case Stop():
                return
