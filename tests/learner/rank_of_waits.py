"""One rank of several that wait for one another for longer than the process group allows.

python tests/learner/rank_of_waits.py RANK RANKS PORT FOLDER NAME...

Each name is a function below, ``orders`` among them, which all ranks go through.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import made_up

import tandem.common.disk as disk
import tandem.learner.engine.model_folder as model_folder
import tandem.learner.ranks as ranks_module
import tandem.learner.resume.checkpoints as checkpoints
import tandem.learner.resume.far_files as far_files
from tandem.common.run_folder import RunFolder
from tandem.common.telemetry import Clock
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.loop.saving import Saver
from tandem.learner.ranks import Leader, follow
from tandem.learner.rendezvous import TIMEOUT, Seat, process_group
from tandem.learner.updates.updates import Updates

ALLOWED = timedelta(seconds=4)
"""How long a rank waits for another one before it gives up."""
SLOW = 6.0
"""Seconds that what rank 0 does alone takes here."""
CPU = torch.device("cpu")
sync_tree = model_folder.sync_tree


def slowed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return call(*arguments)

    return slow


def all_ranks(stage: int, lead: Callable[[Leader], None]) -> None:
    """Rank 0 leads, the others follow."""
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    config = made_up.config_of(learner={"zero_stage": stage, "ranks": dist.get_world_size()})
    engine = DeepSpeedEngine(made_up.tiny_model(), config, CPU)
    updates = Updates(engine, config, reference_folder=None)
    engine.barrier()
    # Only now, since the ranks may be made at different speeds.
    dist.distributed_c10d._set_pg_timeout(ALLOWED)
    if engine.rank:
        follow(engine, updates)
    else:
        leader = Leader(engine, updates)
        lead(leader)
        leader.stop()


def checkpoint(place: Path) -> None:
    """Rank 0 takes the digests of a checkpoint for longer than the others wait, as it saves and as it goes on."""
    checkpoints._file_digest = slowed(checkpoints._file_digest, SLOW)

    def lead(leader: Leader) -> None:
        known: Any = SimpleNamespace(term=lambda: 1, durable=lambda step, term: None)
        saver = Saver(
            RunFolder(place),
            kept=2,
            leader=leader,
            ledger=known,
            source=known,
            clock=Clock(),
            term=1,
            state={},
        )
        saver.save(1)
        assert saver.load_newest(1) == 1

    all_ranks(1, lead)


def export(place: Path, stage: int) -> None:
    """Rank 0 syncs the model's files for longer than the others wait."""
    model_folder.sync_tree = slowed(sync_tree, SLOW)
    all_ranks(stage, lambda leader: leader.export(place / f"model-{stage}", None))


def orders(place: Path) -> None:
    """Rank 0 gives orders in the middle of a wait, and says without a pause that it is alive."""
    ranks_module.IDLE_SECONDS = 0.01
    model_folder.sync_tree = sync_tree

    def lead(leader: Leader) -> None:
        with leader.waiting(), leader.waiting():
            for _ in range(10):
                leader.export(place / "model", None)
                assert len(list(leader.parameters())) > 1

    all_ranks(3, lead)


def far(place: Path) -> None:
    """Rank 0 moves a checkpoint of rank 2, which is elsewhere, for longer than rank 1 waits, which is near."""
    far_files.BLOCK, far_files.SIGN_BLOCKS = 100, 4
    dist.send = slowed(dist.send, 0.4)
    rank, folder = dist.get_rank(), place / "checkpoint"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(ALLOWED)
    files = far_files.CheckpointFiles(far=(2,), receivers=(2,), place=place / "elsewhere")
    content = {f"of-{one}": bytes([one]) * size for one, size in enumerate((250, 0, 1150))}
    began, asked = time.monotonic(), []

    def has_room(folder: Path, nbytes: int) -> bool:
        asked.append((folder, nbytes))
        return time.monotonic() - began > SLOW

    disk.has_room = has_room
    with files.writing(folder, share=1150) as own:
        # There was no room before, for longer than the others wait.
        assert time.monotonic() - began > SLOW
        assert set(asked) == ({(place / "elsewhere", 1150)} if rank == 2 else set())
        (own / f"of-{rank}").write_bytes(content[f"of-{rank}"])
    dist.barrier()
    with files.reading(folder) as own:
        assert (own == folder) == (rank < 2)
        assert {path.name: path.read_bytes() for path in own.iterdir()} == content


def main() -> None:
    rank, ranks, port, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    ranks_module.IDLE_SECONDS = 0.5
    seat = Seat(rank=int(rank), world_size=int(ranks), local_rank=int(rank), port=int(port))
    with process_group(seat):
        for name in names:
            what, _, stage = name.partition("-")
            globals()[what](Path(folder), *([int(stage)] if stage else []))


if __name__ == "__main__":
    main()
