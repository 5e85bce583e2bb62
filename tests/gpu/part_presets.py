"""Every preset's method on the device: the twins of all presets, several at a time."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import part_runs
import torch
from record import LAST_LINES, Recorder
from sizes import Sizes

from tandem.common.config import read_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from twins import AGAIN, SAMPLED, STAGED, command, different, overrides, prepare

CORES_OF_A_RUN = 2
"""Cores that each of the runs is given."""


def run(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The twins, in the dtype of the presets, with learner and engine on the one GPU that all of them share."""
    chosen = [*STAGED, *different()]
    if sizes.presets is not None:
        chosen = [name for name in chosen if name in sizes.presets]
    at_once = max(1, (os.cpu_count() or 1) // CORES_OF_A_RUN)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(at_once) as threads:
        folder = Path(temporary)
        prepare(folder)
        started: dict[str, Future[None]] = {}
        for name in sorted(chosen, key=lambda name: name == AGAIN):
            after = started.get(SAMPLED) if name == AGAIN else None
            started[name] = threads.submit(_one, folder, device, name, record, after)
        for one in as_completed(started.values()):
            one.result()


def _one(
    folder: Path, device: torch.device, name: str, record: Recorder, after: Future[None] | None
) -> None:
    with record.case(name):
        if after is not None:
            after.result()
        where = ["launch.gpus=none"]
        if device.type == "cuda":
            where = ["launch.gpus=required"]
            where += ["launch.share_gpu=true"] if command(name) == "start" else []
            where += ["model.dtype=bfloat16"]
        start = time.perf_counter()
        ran = part_runs.command(
            *(command(name), f"{name}+miniature-twin", "--plain", *where, *overrides(name)),
            cwd=folder,
        )
        seconds = time.perf_counter() - start
        if ran.returncode:
            said = ran.stdout.strip().splitlines()[-LAST_LINES:]
            record.failed(name, f"its command ended with status {ran.returncode}", said)
            return
        record.figures(name, seconds=seconds, **_figures(folder, name))


def _figures(folder: Path, name: str) -> dict[str, Any]:
    """A twin's steps and losses.

    Raises:
        ValueError: it has a loss that isn't finite, or trained nothing though it should.
    """
    if name in STAGED:
        where = folder / "runs" / f"{name}+miniature-twin"
        return {"stages": len(json.loads((where / "summary.json").read_text())["stages"])}
    given = next((one for one in overrides(name) if one.startswith("run.dir=")), None)
    where = folder / (given.partition("=")[2] if given else f"runs/{name}+miniature-twin")
    config = read_config((where / "config.yaml").read_text())
    lines = map(json.loads, (where / "metrics.jsonl").read_text().splitlines())
    steps = [one for one in lines if "train/lr" in one]
    losses = [one["train/loss"] for one in steps if "train/loss" in one]
    if config.learner.train and not losses:
        raise ValueError(f"none of its {len(steps)} steps has a loss")
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"losses {losses}")
    return {
        "objective": config.learner.objective.name,
        "optimizer": config.learner.optimizer.name,
        "steps": len(steps),
        "loss": losses[-1] if losses else None,
    }
