"""Starts the processes of ``rank_of_many.py`` and its like, and compares what came of them.

As a program, ``many_ranks.py ERRORS SCRIPT GROUPS``, it loads the libraries and forks the ranks of each group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
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
    start_together(script, (ranks, *arguments))


def start_together(script: str, *groups: Sequence[Any]) -> None:
    """Runs several groups of ranks at the same time, each ``(ranks, ARGUMENT...)``, see :func:`start`."""
    told = [
        [str(ranks), str(free_port() if ranks > 1 else 0), *map(str, arguments)]
        for ranks, *arguments in groups
    ]
    with tempfile.TemporaryDirectory() as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), errors, script, json.dumps(told)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=DEADLINE)
            # All of them: where one fails, the others only say that it is gone.
            said = "\n".join(
                f"rank {path.name}: {path.read_text()[-3000:]}" for path in Path(errors).iterdir()
            )
            assert not code, said
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fork(errors: str, script: str, groups: str) -> int:
    """Forks the ranks of a script, since each would take seconds to load the same libraries; how many failed."""
    import deepspeed  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    # DeepSpeed looks for garbage again and again, and there is none in what is loaded.
    gc.freeze()
    path = Path(__file__).with_name(script)
    children = [
        _rank(path, Path(errors) / f"{rank} of group {number}", rank, ranks, port, *arguments)
        for number, (ranks, port, *arguments) in enumerate(json.loads(groups))
        for rank in range(int(ranks))
    ]
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _rank(path: Path, errors: Path, rank: int, *arguments: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # Files, since a pipe that nobody reads yet would stop a rank for which the others wait.
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 2)
        sys.argv = [str(path), str(rank), *arguments]
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on with what its parent does
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


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


if __name__ == "__main__":
    sys.exit(fork(*sys.argv[1:]))
