"""Starts the processes of ``rank_of_many.py``, and compares what came of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

DEADLINE = 300.0
Trained = tuple[dict[str, torch.Tensor], dict[str, list[dict[str, float]]]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def trained(ranks: int, folder: Path, stage: int | str, names: list[str]) -> Trained:
    """Parameters by ``objective/name``, and metrics by objective, of so many processes.

    With several stages, as in ``0,3``, ``objective@stage`` takes the objective's place.
    """
    out = folder / f"{ranks}-{stage}.safetensors"
    port = free_port() if ranks > 1 else 0
    script = Path(__file__).with_name("rank_of_many.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, (script, rank, ranks, port, out, stage)), *names],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, error = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, error[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    from safetensors.torch import load_file

    metrics: dict[str, Any] = json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))
    return load_file(out), metrics


def compare(found: Trained, alone: Trained, names: list[str]) -> None:
    for name in names:
        for one, other in zip(alone[1][name], found[1][name], strict=True):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-6), name
    keys = [key for key in alone[0] if key.partition("/")[0] in names]
    assert keys
    for key in keys:
        torch.testing.assert_close(found[0][key], alone[0][key], atol=2e-6, rtol=1e-5, msg=key)
