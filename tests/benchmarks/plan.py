"""The plan's simulation beside real runs: does a step take as long as it says?

    .venv/bin/python tests/benchmarks/plan.py                    # 1, 2 and 8 workers, staleness 0, 1 and 4
    .venv/bin/python tests/benchmarks/plan.py --workers 8 --staleness 1

Each run is a whole one (Redis, workers, pool, learner) of the miniature with an engine that sleeps in place of
a model (``tests/faults/scripted_engine.py``) and an objective that sleeps besides (:func:`slow`), so that eight
workers need no more than two cores. Lengths are drawn from two distributions. What the simulation is told is
how long a token step took, and how long the learner worked between two rows; what it has to find is the time
of a step. Prints each run and the greatest difference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEP_SECONDS = 0.02
"""Of a token step, which takes somewhat longer."""
GROUPS, SAMPLES, ROWS = 16, 4, 32
"""Groups of a step, samples of a group, rows of an engine."""
LENGTHS = ("40:120:0.5", "40:120:1.0")
"""mean:limit:spread."""
SKIPPED = 6
"""First steps that are left out: warm-up."""
SECONDS = "TANDEM_SLOW_OBJECTIVE"


def slow(rows: Any, scalars: Any, settings: Any) -> Any:
    """A policy gradient that takes a while, for ``learner.objective.name=plan:slow``."""
    time.sleep(float(os.environ[SECONDS]))
    ratio = (rows.logprobs - rows.behaviour.nan_to_num(0.0)).clamp(-1, 1).exp()
    counted = ~rows.expert & rows.kept
    losses = -rows.by_token(rows.advantages.to(ratio.dtype)) * ratio
    return losses.where(counted, 0.0).sum() / max(1.0, scalars["constant"])


def leases(workers: int, staleness: int) -> tuple[int, int]:
    """As ``tandem plan --splits`` chooses them."""
    held = min(math.ceil(GROUPS * max(1, staleness) / workers), 3 * ROWS // SAMPLES)
    batch = max(1, held // 8)
    return batch, held - batch


def real(folder: Path, workers: int, staleness: int, lengths: str, steps: int) -> dict[str, float]:
    """Seconds of a step, of the learner's work in it, and of a token step, of one real run."""
    times = folder.parent / "times"
    times.mkdir()
    batch, ahead = leases(workers, staleness)
    mean, limit, _ = lengths.split(":")
    balanced = GROUPS * SAMPLES * float(mean) / (ROWS * workers) * STEP_SECONDS
    overrides = [
        *("rollout.engine=scripted_engine:make", f"rollout.workers={workers}"),
        *(f"rollout.group_size={SAMPLES}", f"rollout.max_new_tokens={limit}"),
        *(f"rollout.groups_per_batch={batch}", f"rollout.groups_ahead={ahead}"),
        *(f"replay.groups_per_step={GROUPS}", f"replay.max_staleness={staleness}"),
        *("expert.per_group=0", "learner.objective.name=plan:slow", "learner.max_idle=1000"),
        *("learner.micro_batch_tokens=20000", "weights.check_bound=0"),
        *("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false"),
        *(f"run.steps={steps}", f"run.dir={folder}"),
    ]
    environment = {
        **os.environ,
        "TANDEM_SCRIPTED_STEP_SECONDS": str(STEP_SECONDS),
        "TANDEM_SCRIPTED_ROWS": str(ROWS),
        "TANDEM_SCRIPTED_LENGTHS": lengths,
        "TANDEM_SCRIPTED_TIMES": str(times),
        SECONDS: str(max(0.2, balanced)),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parent / "faults"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    subprocess.run(
        [sys.executable, "-m", "tandem.launch.cli", "start", "miniature", *overrides],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if "train/loss" in r and r["step"] >= SKIPPED]
    seconds = (records[-1]["time"] - records[0]["time"]) / (len(records) - 1)
    waited = statistics.mean(r["time/wait/batch"] for r in records[1:])
    token = statistics.mean(float(one.read_text()) for one in times.iterdir())
    return {"step": seconds, "trained": seconds - waited, "token": token}


def simulated(
    workers: int, staleness: int, lengths: str, found: dict[str, float], steps: int
) -> float:
    """Seconds of a step of the same run, simulated."""
    from tandem.launch.plan.lengths import Lengths
    from tandem.launch.plan.simulation import EngineSpeed, LearnerSpeed, Scenario, simulate
    from tandem.replay.rules.leases import Limits

    batch, ahead = leases(workers, staleness)
    mean, limit, spread = lengths.split(":")
    return simulate(
        Scenario(
            limits=Limits(groups_per_step=GROUPS, max_staleness=staleness),
            workers=workers,
            samples=SAMPLES,
            batch=batch,
            ahead=ahead,
            slots=ROWS,
            whole_groups=True,
            lengths=Lengths(mean=float(mean), limit=int(limit), spread=float(spread)),
            engine=EngineSpeed(host=found["token"]),
            learner=LearnerSpeed(step=found["trained"], transfer=TRANSFER),
        ),
        steps=steps - SKIPPED,
        warm=SKIPPED,
    ).step


TRANSFER = 0.05
"""Seconds from a publication until the workers hold the version, on loopback."""


def main() -> None:
    """Compares and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 4])
    parser.add_argument("--lengths", nargs="*", default=LENGTHS, metavar="MEAN:LIMIT:SPREAD")
    parser.add_argument("--steps", type=int, default=24)
    given = parser.parse_args()
    worst = 0.0
    print(
        "workers staleness lengths      real s  simulated s  difference  learner works s  token step s"
    )
    for workers in given.workers:
        for staleness in given.staleness:
            for lengths in given.lengths:
                folder = Path(tempfile.mkdtemp(prefix="tandem-plan-"))
                try:
                    found = real(folder / "run", workers, staleness, lengths, given.steps)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                told = simulated(workers, staleness, lengths, found, given.steps)
                difference = told / found["step"] - 1
                worst = max(worst, abs(difference))
                print(
                    f"{workers:7} {staleness:9} {lengths:11} {found['step']:8.2f} {told:12.2f} "
                    f"{difference:+11.0%} {found['trained']:12.2f} {found['token']:13.4f}",
                    flush=True,
                )
    print(f"greatest difference: {worst:.0%}")


if __name__ == "__main__":
    main()
