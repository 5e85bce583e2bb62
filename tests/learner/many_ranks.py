"""Starts the processes of ``rank_of_many.py`` and its like, and compares what came of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
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


def start(script: str, ranks: int, *arguments: object) -> None:
    """Runs a script of this folder as so many processes: ``SCRIPT RANK RANKS PORT ARGUMENT...``."""
    port = free_port() if ranks > 1 else 0
    path = Path(__file__).with_name(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        # Files, since a pipe that nobody reads yet would stop a rank for which the others wait.
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, *map(str, (path, rank, ranks, port, *arguments))],
                env=environment,
                stderr=errors[rank],
                stdout=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=DEADLINE) for process in processes]
            for error in errors:
                error.seek(0)
            # All of them: where one fails, the others only say that it is gone.
            said = "\n".join(f"rank {n}: {error.read()[-3000:]}" for n, error in enumerate(errors))
            assert not any(codes), said
        finally:
            for process in processes:
                process.kill()
                process.wait()


def trained(ranks: int, folder: Path, stage: int | str, names: list[str]) -> Trained:
    """Parameters by ``objective/name``, and metrics by objective, of so many processes.

    With several stages, as in ``0,3``, ``objective@stage`` takes the objective's place.
    """
    out = folder / f"{ranks}-{stage}.safetensors"
    start("rank_of_many.py", ranks, out, stage, *names)
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
