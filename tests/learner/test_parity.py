"""Gradients are those of a plain model in float64, to 1e-5, in every cell that DeepSpeed offers.

The cells: each ZeRO stage, what is offloaded, one and two ranks, shared prompts and padded rows, and what is
trained, each with several micro-batches an update. CI runs ``IN_CI`` on one rank and ``OF_TWO_RANKS``. All of
them, in some minutes: ``bash tests/run.sh tests/learner/test_parity.py -m ''``.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.common.config import build
from tandem.common.errors import ConfigError

BOUND = 1e-5
OFFERED = {
    0: ("none",),
    1: ("none", "optimizer"),
    2: ("none", "optimizer"),
    3: ("none", "optimizer", "parameters"),
}
CELLS = [
    f"{stage}-{offload}-{layout}-{trained}"
    for stage, offered in OFFERED.items()
    for offload in offered
    for layout in ("shared", "padded")
    for trained in ("policy", "adapters", "critic")
]
OF_TWO_RANKS = (
    *("1-optimizer-padded-critic", "2-optimizer-shared-policy", "3-parameters-shared-policy"),
    "2-none-shared-policy-overlaid",
)
OVERLAID = [
    f"{stage}-{offload}-{layout}-overlaid"
    for layout, cells in {
        "padded-critic": ((1, "none"), (2, "optimizer"), (3, "parameters")),
        "shared-policy": ((2, "none"), (1, "optimizer"), (3, "none"), (3, "optimizer")),
    }.items()
    for stage, offload in cells
]
"""Cells with a user's settings of DeepSpeed laid over the learner's."""
IN_CI = (
    "0-none-shared-critic",
    "1-none-padded-adapters",
    "1-optimizer-shared-policy",
    "1-optimizer-padded-critic",
    "2-none-shared-adapters",
    "2-optimizer-padded-policy",
    "2-optimizer-shared-critic",
    "3-none-padded-policy",
    "3-optimizer-shared-adapters",
    "3-optimizer-padded-critic",
    "3-parameters-shared-policy",
    "3-parameters-padded-adapters",
    "1-optimizer-shared-policy-overlaid",
    "3-parameters-padded-critic-overlaid",
)
"""Each stage with each offload, and each layout with whatever is trained twice; the others are run by hand."""


def with_the_others_by_hand(names: list[str]) -> list[Any]:
    assert set(IN_CI) <= {*CELLS, *OVERLAID}
    return [
        pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.byhand]) for name in names
    ]


def check(name: str, found: dict[str, Any]) -> None:
    assert found["micro_batches"] >= 2, name
    assert found["offloaded"] == name.split("-")[1], name
    for what in ("norm", "gradient", "tensor"):
        assert found[what] < BOUND, (name, found)
    assert found["saved"] == 0, (name, found)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", with_the_others_by_hand(CELLS))
def test_on_one_rank(name: str, parity: ModuleType) -> None:
    with parity.stages_as_set():
        check(name, parity.measured(parity.Cell.of(name), 1))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", with_the_others_by_hand(OVERLAID))
def test_so_it_is_with_a_users_settings_of_deepspeed(name: str, parity: ModuleType) -> None:
    with parity.stages_as_set():
        check(name, parity.measured(parity.Cell.of(name), 1))


@pytest.mark.timeout(300)
def test_on_two_ranks(tmp_path: Path, many: ModuleType) -> None:
    of_two(OF_TWO_RANKS, tmp_path, many)


@pytest.mark.byhand
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(stage, offload) for stage, offered in OFFERED.items() for offload in offered],
)
def test_on_two_ranks_in_every_cell(
    stage: int, offload: str, tmp_path: Path, many: ModuleType
) -> None:
    start = f"{stage}-{offload}-"
    of_two([name for name in [*CELLS, *OVERLAID] if name.startswith(start)], tmp_path, many)


def of_two(names: Any, folder: Path, many: ModuleType) -> None:
    many.start("parity.py", 2, folder / "found.json", *names)
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    assert list(found) == list(names)
    for name, figures in found.items():
        check(name, figures)


@pytest.mark.usefixtures("group")
def test_a_gradient_of_the_first_micro_batch_alone_would_be_found(
    parity: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that DeepSpeed had with offload (arXiv 2604.23747)."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    whole = DeepSpeedZeroOptimizer.async_accumulate_grad_in_cpu_via_gpu

    def first_alone(self: Any, parameter: Any) -> None:
        if self.get_param_id(parameter) not in self._offload_accumulated_param_ids:
            whole(self, parameter)

    monkeypatch.setattr(DeepSpeedZeroOptimizer, "async_accumulate_grad_in_cpu_via_gpu", first_alone)
    with parity.stages_as_set():
        found = parity.measured(parity.Cell.of("2-optimizer-padded-policy"), 1)
    assert found["gradient"] > 0.01


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (stage, offload)
        for stage, offered in OFFERED.items()
        for offload in ("optimizer", "parameters")
        if offload not in offered
    ],
)
def test_what_deepspeed_does_not_offer_is_refused_with_the_way_out(
    stage: int, offload: str
) -> None:
    tree = {"run": {"steps": 1}, "data": {"train": [{"path": "unused.parquet", "name": "a"}]}}
    least = 1 if offload == "optimizer" else 3
    with pytest.raises(
        ConfigError, match=f"learner.offload={offload} .*set learner.zero_stage={least}"
    ):
        build(tree, [f"learner.zero_stage={stage}", f"learner.offload={offload}"])
    assert build(tree, [f"learner.zero_stage={least}", f"learner.offload={offload}"])


def test_one_rank_with_offload_keeps_the_stage_that_is_set(made_up: ModuleType) -> None:
    """Without, ZeRO-1 and 2 divide nothing on one float32 rank, and it runs without them."""
    for stage in (1, 2, 3):
        config = made_up.config_of(learner={"zero_stage": stage, "offload": "optimizer"})
        assert config.zero_stage() == stage
