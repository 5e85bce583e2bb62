"""One rank of two that go on from checkpoints of one rank at every ZeRO stage, and write what they have then.

python tests/learner/rank_of_states.py RANK RANKS PORT FOLDER

See :func:`go_through`, which the tests call for one rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import made_up
import numpy as np

import tandem.learner.engine.deepspeed_engine as engine_module
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.objectives import make
from tandem.learner.rendezvous import Seat, process_group
from tandem.learner.resume.state_files import POLICY, StateFiles
from tandem.learner.rows.microbatch import micro_batch
from tandem.learner.rows.packing import plan

STAGES = (0, 1, 2, 3)
DTYPES = ("float32", "bfloat16")
CPU = torch.device("cpu")


def engine_at(
    stage: int, dtype: str, path: Path | str = "miniature", **learner: Any
) -> DeepSpeedEngine:
    """An engine on a model of some thousand parameters, at exactly this stage."""
    config = made_up.config_of(
        learner={"zero_stage": stage, **learner}, model={"dtype": dtype, "path": str(path)}
    )
    before, engine_module.stage_of = engine_module.stage_of, lambda config, ranks: stage
    try:
        return DeepSpeedEngine(made_up.tiny_model(dtype=getattr(torch, dtype)), config, CPU)
    finally:
        engine_module.stage_of = before


def train(engine: DeepSpeedEngine, steps: int) -> list[float]:
    """Losses of some steps on rows of which each rank has its part."""
    objective = make("luffy")
    rows = made_up.random_rows(groups=2)
    scalars = {k: float(v) for k, v in objective.statistics(rows).items()} | {"constant": 192.0}
    shares = plan(
        rows.forward_lengths.numpy(), np.arange(rows.count), budget=4096, ranks=engine.world_size
    )
    micros = [micro_batch(rows.select(torch.from_numpy(part))) for part in shares[engine.rank]]
    return [engine.update(micros, objective, scalars, lr=1e-3).loss for _ in range(steps)]


def require_rounded(engine: DeepSpeedEngine, folder: Path) -> None:
    """The model's own parameters are the masters, rounded to its dtype."""
    files = StateFiles(folder / POLICY)
    for name, tensor in engine.parameters():
        assert torch.equal(tensor, files.whole(name).to(tensor.dtype)), name


def go_through(place: Path, ranks: int, *, sources: int, fresh: bool = True) -> None:
    """Goes on from ``PLACE/SOURCES-STAGE-DTYPE`` of every stage, and writes what it then has to ``…-at-RANKS-STAGE``.

    Args:
        place: the folder of all checkpoints.
        ranks: number of ranks here.
        sources: number of ranks that wrote what is gone on from; what isn't there is left out. 0 = go on from none.
        fresh: train two steps first, and write ``PLACE/RANKS-STAGE-DTYPE``, and the model beside it.
    """
    for dtype in DTYPES:
        for stage in STAGES:
            engine = engine_at(stage, dtype)
            if fresh:
                train(engine, 2)
                own = place / f"{ranks}-{stage}-{dtype}"
                save(engine, own)
                if engine.rank == 0:
                    engine.export(Path(f"{own}-model"), None)
                else:
                    engine.gather_for_export()
            for source in (place / f"{sources}-{other}-{dtype}" for other in STAGES):
                if source.is_dir():
                    engine.load(source)
                    require_rounded(engine, source)
                    save(engine, Path(f"{source}-at-{ranks}-{stage}"))


def save(engine: DeepSpeedEngine, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    engine.save(folder)
    engine.barrier()


def main() -> None:
    rank, ranks, port, place = sys.argv[1:]
    torch.set_num_threads(1)
    seat = Seat(rank=int(rank), world_size=int(ranks), local_rank=int(rank), port=int(port) or None)
    with process_group(seat):
        go_through(Path(place), int(ranks), sources=1)


if __name__ == "__main__":
    main()
