"""Two and four real ranks train to the parameters of one, whatever the objective.

It takes minutes, so by hand: ``bash tests/run.sh tests/learner/test_ranks.py -m byhand``. CI has instead of it
``test_trainer.py`` (two ranks, one objective), ``test_parity.py`` (two ranks in some cells) and the simulated ranks of
``test_objective_rules.py`` (every objective).
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.common.objectives import OBJECTIVES

pytestmark = pytest.mark.timeout(600)

PASSES = ["grpo-passes", "kto-passes", "ppo-passes", "sft-passes"]
NAMES = [*sorted(OBJECTIVES), "dpo-stored", "kto-stored", *PASSES]
# One for each unit and each kind of column, stored pairs, and several passes.
FEW = [
    *(
        "decoupled_ppo",
        "distill",
        "dpo",
        "dpo-stored",
        "exgrpo",
        "gspo",
        "kto",
        "kto-stored",
        "luffy",
        "ppo",
    ),
    *PASSES,
]
# Own samples with a reference in loss and reward, expert traces, and stored pairs.
ADAPTED = ["grpo-lora", "luffy-lora", "dpo-stored-lora"]
Trained = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder: Path, many: ModuleType) -> Trained:
    return many.trained(1, folder, 1, NAMES)


@pytest.mark.byhand
@pytest.mark.parametrize(("ranks", "names"), [(2, FEW), (4, NAMES)], ids=["2", "4"])
def test_many_ranks_train_as_one_does(
    ranks: int, names: list[str], folder: Path, alone: Trained, many: ModuleType
) -> None:
    many.compare(many.trained(ranks, folder, 1, names), alone, names)


@pytest.mark.byhand
@pytest.mark.parametrize("stage", [2, 3])
def test_so_do_those_that_share_gradients_and_weights(
    stage: int, folder: Path, alone: Trained, many: ModuleType
) -> None:
    many.compare(many.trained(4, folder, stage, FEW), alone, FEW)


@pytest.mark.byhand
def test_a_rank_without_rows_trains_an_objective_that_needs_the_entropy(
    folder: Path, many: ModuleType
) -> None:
    """Of the four groups ExGRPO leaves some out, so that ranks have nothing but dummies."""
    one = many.trained(1, folder, 1, ["exgrpo"])
    many.compare(many.trained(4, folder, 3, ["exgrpo"]), one, ["exgrpo"])


@pytest.mark.byhand
def test_the_parameters_have_moved(alone: Trained, made_up: Any) -> None:
    """Or the comparison would be of the start."""
    start = dict(made_up.tiny_model().named_parameters())
    for name in NAMES:
        moved = [
            float((tensor - start[key.partition("/")[2]].detach()).abs().max())
            for key, tensor in alone[0].items()
            if key.partition("/")[0] == name and key.partition("/")[2] in start
        ]
        assert max(moved) > 1e-4, name


@pytest.mark.byhand
def test_adapters_train_alike_at_every_stage_and_on_two_ranks(
    folder: Path, many: ModuleType
) -> None:
    """How frozen parameters are left out differs from stage to stage."""
    tensors, metrics = many.trained(1, folder, "0,3", ADAPTED)
    for name in ADAPTED:
        adapters = {k: t for k, t in tensors.items() if k.startswith(f"{name}@0/model.")}
        assert len(adapters) == 2 * 14
        assert all(bool(tensor.any()) for tensor in adapters.values())
    two = many.trained(2, folder, "0,1,2,3", ADAPTED)
    for stage, found in [(3, (tensors, metrics)), *((stage, two) for stage in range(4))]:
        named = tuple(
            {
                key.replace(f"@{stage}", "@0"): value
                for key, value in part.items()
                if f"@{stage}" in key
            }
            for part in found
        )
        many.compare(named, (tensors, metrics), [f"{name}@0" for name in ADAPTED])
