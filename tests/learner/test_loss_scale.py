"""float16: the loss's scale is searched within an update, and only what isn't finite at any scale is given up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.common.config import build
from tandem.common.errors import ConfigError
from tandem.learner.engine.critic import CriticEngine
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.engine.zero import prepared
from tandem.learner.objectives import Objective, make
from tandem.learner.rows.microbatch import micro_batch
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group", "float16")
CPU = torch.device("cpu")
HIGH, FITS = 26, 4
"""Exponents of scales at which the tiny model's gradient is, and isn't, too great for float16."""

Make = Callable[..., DeepSpeedEngine]


@pytest.fixture
def float16(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets DeepSpeed train in float16 on a CPU that doesn't compute in it: torch does so all the same, slowly."""
    prepared(CPU)
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


@pytest.fixture
def engines(made_up: ModuleType) -> Make:
    def make_engine(power: int, **learner: Any) -> DeepSpeedEngine:
        scale = {"fp16": {"initial_scale_power": power}}
        config = made_up.config_of(
            learner={"zero_stage": 2, "deepspeed": scale, **learner}, model={"dtype": "float16"}
        )
        critic = None
        if config.learner.critic is not None:
            critic = CriticEngine(made_up.tiny_model(seed=7, dtype=torch.float16), config, CPU)
        return DeepSpeedEngine(made_up.tiny_model(dtype=torch.float16), config, CPU, critic)

    return make_engine


def batch(made_up: ModuleType, objective: Objective) -> tuple[list[Any], dict[str, float]]:
    rows = made_up.random_rows()
    scalars = {k: float(v) for k, v in objective.statistics(rows).items()} | {"constant": 192.0}
    halves = torch.arange(rows.count).chunk(2)
    return [micro_batch(rows.select(half)) for half in halves], scalars


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.parameters()}


@pytest.mark.parametrize(
    ("stage", "offload"), [(1, "none"), (1, "optimizer"), (2, "optimizer"), (3, "parameters")]
)
def test_an_update_is_repeated_until_its_gradient_fits(
    stage: int, offload: str, engines: Make, made_up: ModuleType
) -> None:
    objective = make("luffy")
    micros, scalars = batch(made_up, objective)
    fits = engines(FITS, zero_stage=stage, offload=offload)
    searches = engines(HIGH, zero_stage=stage, offload=offload)
    found = [engine.update(micros, objective, scalars, lr=1e-3) for engine in (fits, searches)]
    assert all(result.applied for result in found)
    assert found[0].loss_scale == 2**FITS
    assert found[1].loss_scale is not None
    assert 2**FITS < found[1].loss_scale < 2**HIGH
    assert found[1].grad_norm == pytest.approx(found[0].grad_norm, rel=0.01)
    again = searches.update(micros, objective, scalars, lr=1e-3)
    assert again.loss_scale == found[1].loss_scale


class Poisoned(Objective):
    """A loss that isn't finite, or only its gradient."""

    finite = False
    passes = 0

    def loss(self, rows: Any, scalars: Any) -> Any:
        self.passes += 1
        if self.finite:
            # The slope of the root at 0.
            return ((rows.logprobs - rows.logprobs.detach()) * 0).abs().sqrt().sum(), {}
        return rows.logprobs.sum() + math.inf, {}


@pytest.mark.parametrize("finite", [False, True])
def test_what_is_not_finite_at_any_scale_is_given_up_and_leaves_the_scale(
    finite: bool, engines: Make, made_up: ModuleType
) -> None:
    good = make("luffy")
    micros, scalars = batch(made_up, good)
    engine = engines(FITS)
    engine.update(micros, good, scalars, lr=1e-3)
    before = weights(engine)
    poisoned = Poisoned(good.settings)
    poisoned.finite = finite
    result = engine.update(micros, poisoned, scalars, lr=1e-3)
    assert not result.applied
    # Once at each scale down to 1, if the loss doesn't say already that none will do.
    assert poisoned.passes == (FITS + 1 if finite else 1) * len(micros)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.parameters())
    after = engine.update(micros, good, scalars, lr=1e-3)
    assert (after.applied, after.loss_scale) == (True, 2**FITS)


def test_what_the_caller_refuses_is_tried_once(engines: Make, made_up: ModuleType) -> None:
    objective = make("luffy")
    micros, scalars = batch(made_up, objective)
    engine = engines(FITS)
    before, looks = weights(engine), []

    def refuse(logprobs: Any) -> bool:
        looks.append(len(logprobs))
        return False

    result = engine.update(micros, objective, scalars, lr=1e-3, inspect=refuse)
    assert (result.applied, result.refused, looks) == (False, True, [2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.parameters())
    assert engine.update(micros, objective, scalars, lr=1e-3).loss_scale == 2**FITS


@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_scale_is_lowered_only_for_the_model_that_needs_it(
    whose: str, engines: Make, made_up: ModuleType, plain: ModuleType
) -> None:
    engine = engines(FITS, objective={"name": "ppo", "truncation": "mask"})
    assert engine.critic is not None
    policy, critic = engine._scales
    (policy if whose == "policy" else critic).restore((2.0**HIGH, 1))
    updates = Updates(engine, engine.config)
    groups = made_up.groups_of(4)
    for step in (1, 2):
        outcome = updates.train(step, groups, lr=1e-3)
        assert outcome.applied
    found = {"policy": policy.value, "critic": critic.value}
    assert found.pop(whose) != 2**HIGH
    assert list(found.values()) == [2**FITS]
    assert outcome.metrics["train/loss_scale"] == policy.value


def test_the_scale_is_kept_with_a_checkpoint(
    engines: Make, made_up: ModuleType, tmp_path: Path
) -> None:
    objective = make("luffy")
    micros, scalars = batch(made_up, objective)
    engine = engines(HIGH)
    lowered = engine.update(micros, objective, scalars, lr=1e-3).loss_scale
    engine.save(tmp_path)
    other = engines(FITS)
    other.load(tmp_path)
    one, two = (e.update(micros, objective, scalars, lr=1e-3) for e in (engine, other))
    assert (two.loss_scale, two.loss) == (lowered, one.loss)


def test_float16_is_refused_where_it_cannot_train() -> None:
    tree = {"run": {"steps": 1}, "data": {"train": [{"path": "unused.parquet", "name": "a"}]}}
    half = "model.dtype=float16"
    with pytest.raises(ConfigError, match=r"float16 needs .*learner.zero_stage=1"):
        build(tree, [half, "learner.zero_stage=0"])
    with pytest.raises(ConfigError, match=r"float16 trains only on GPUs.*launch.gpus=required"):
        build(tree, [half, "launch.gpus=none"])
    assert build(tree, [half])
