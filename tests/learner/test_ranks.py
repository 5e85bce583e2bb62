"""Two and four real ranks train to the parameters of one, whatever the objective.

Some minutes, so by hand: ``bash tests/run.sh tests/learner/test_ranks.py -m byhand``. What CI runs of it:
``test_trainer.py`` (two ranks, one objective) and the simulated ranks of
``test_objective_rules.py`` (every objective).
"""

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

from tandem.common.objectives import OBJECTIVES

pytestmark = [pytest.mark.byhand, pytest.mark.timeout(600)]

NAMES = [*sorted(set(OBJECTIVES) - {"ppo"}), "dpo-stored", "kto-stored"]
# One for each unit and each kind of column, and stored pairs.
FEW = ["decoupled_ppo", "dpo", "dpo-stored", "exgrpo", "gspo", "kto", "kto-stored", "luffy"]
DEADLINE = 300.0
Trained = tuple[dict[str, torch.Tensor], dict[str, list[dict[str, float]]]]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def trained(ranks: int, folder: Path, stage: int = 1, names: list[str] = NAMES) -> Trained:
    """Parameters by ``objective/name``, and metrics by objective, of so many processes."""
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Trained:
    return trained(1, folder)


def compare(found: Trained, alone: Trained, names: list[str]) -> None:
    for name in names:
        for one, other in zip(alone[1][name], found[1][name], strict=True):
            assert other == pytest.approx(one, rel=1e-5, abs=1e-6), name
    keys = [key for key in alone[0] if key.partition("/")[0] in names]
    assert keys
    for key in keys:
        torch.testing.assert_close(found[0][key], alone[0][key], atol=2e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize(("ranks", "names"), [(2, FEW), (4, NAMES)], ids=["2", "4"])
def test_many_ranks_train_as_one_does(
    ranks: int, names: list[str], folder: Path, alone: Trained
) -> None:
    compare(trained(ranks, folder, names=names), alone, names)


@pytest.mark.parametrize("stage", [2, 3])
def test_so_do_those_that_share_gradients_and_weights(
    stage: int, folder: Path, alone: Trained
) -> None:
    compare(trained(4, folder, stage, FEW), alone, FEW)


def test_the_parameters_have_moved(alone: Trained, made_up: Any) -> None:
    """Or the comparison would be of the start."""
    start = dict(made_up.tiny_model().named_parameters())
    for name in NAMES:
        moved = [
            float((tensor - start[key.partition("/")[2]].detach()).abs().max())
            for key, tensor in alone[0].items()
            if key.partition("/")[0] == name
        ]
        assert max(moved) > 1e-4, name
