"""DeepSpeed's update is the optimizer's plain update, whatever the split; and nothing else leaks in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.objectives import OBJECTIVES
from tandem.learner.engine import DeepSpeedEngine, stage_of
from tandem.learner.forward.policy import Policy
from tandem.learner.objectives import Objective, make
from tandem.learner.rows.microbatch import dummy, micro_batch
from tandem.learner.rows.packing import plan

pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")
CONSTANT = 12.0 * 16
CLIP = 0.1


@pytest.fixture
def engines(made_up: ModuleType) -> Callable[..., DeepSpeedEngine]:
    """Makes engines on equal tiny models."""

    def make_engine(stage: int = 0, **learner: Any) -> DeepSpeedEngine:
        dtype = learner.pop("dtype", "float32")
        config = made_up.config_of(learner={"zero_stage": stage, **learner}, model={"dtype": dtype})
        model = made_up.tiny_model(dtype=getattr(torch, dtype))
        return DeepSpeedEngine(model, config, CPU)

    return make_engine


def micro_batches(
    rows: Any, objective: Objective, budget: int = 4096
) -> tuple[list[Any], dict[str, float]]:
    scalars = {k: float(v) for k, v in objective.statistics(rows).items()} | {"constant": CONSTANT}
    parts = plan(rows.forward_lengths.numpy(), np.arange(rows.count), budget=budget)[0]
    return [micro_batch(rows.select(torch.from_numpy(part))) for part in parts], scalars


def plain_update(
    model: Any, micro: Any, objective: Objective, scalars: Any, optimizer: Any
) -> float:
    policy = Policy(model)
    logprobs, entropy = policy(micro.input_ids, micro.index, micro.targets, micro.temperature)
    rows = micro.rows.with_columns(logprobs=logprobs, entropy=entropy)
    loss, _ = objective.loss(rows, scalars)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=3e-4, alpha=0.9, weight_decay=0.01),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "rmsprop": {"name": "rmsprop", "alpha": 0.9, "weight_decay": 0.01},
}


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_is_the_plain_update(
    stage: int, name: str, engines: Any, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.learner.engine.stage_of", lambda config, ranks: stage)
    objective = make("luffy")
    (whole,), scalars = micro_batches(made_up.random_rows(), objective)
    reference = made_up.tiny_model()
    optimizer = OPTIMIZERS[name](reference.parameters())
    engine = engines(stage, optimizer={"grad_clip": CLIP, **SETTINGS[name]})
    for _ in range(3):
        norm = plain_update(reference, whole, objective, scalars, optimizer)
        assert norm > CLIP  # or the clip would go untested
        # Not the config's, which is 1e-3: the schedule sets the rate of every step.
        result = engine.update([whole], objective, scalars, lr=3e-4)
        assert result.applied
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for (name, ours), theirs in zip(engine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["grpo", "luffy", "rl_sft_loss", "sft"])
@pytest.mark.parametrize("how", ["constant", "token_mean", "sequence_mean", "by_source"])
def test_loss_and_gradient_do_not_depend_on_the_split(
    name: str, how: Any, engines: Any, made_up: ModuleType
) -> None:
    bonus = {} if name == "sft" else {"entropy_coefficient": 0.01}
    objective = make(name, aggregation=how, **bonus)
    rows = made_up.random_rows(2, temperature=0.7, objective=objective)
    found = []
    for budget in (4096, 40, 18):
        micros, scalars = micro_batches(rows, objective, budget)
        engine = engines(0, optimizer={"lr": 1e-3, "grad_clip": 0.0})
        result = engine.update(micros, objective, scalars, lr=1e-3)
        found.append((len(micros), result.loss, result.grad_norm))
    assert found[0][0] == 1
    assert found[-1][0] > 8
    for _, loss, norm in found[1:]:
        assert loss == pytest.approx(found[0][1], rel=1e-5, abs=1e-6)
        assert norm == pytest.approx(found[0][2], rel=1e-5)


def test_padding_and_neighbours_do_not_reach_a_row(made_up: ModuleType) -> None:
    policy = Policy(made_up.tiny_model())
    rows = made_up.random_rows(3)

    def scored(which: list[int]) -> dict[int, torch.Tensor]:
        micro = micro_batch(rows.select(torch.tensor(which)))
        with torch.no_grad():
            found, _ = policy(micro.input_ids, micro.index, micro.targets, micro.temperature)
        return dict(zip(which, found.split(micro.rows.lengths.tolist()), strict=True))

    together = scored([3, 1, 4, 0, 5, 9, 2, 6])
    for row, values in together.items():
        torch.testing.assert_close(values, scored([row])[row], atol=2e-5, rtol=1e-5)


def test_log_probs_are_those_of_the_whole_models_logits(made_up: ModuleType) -> None:
    model = made_up.tiny_model()
    rows = made_up.random_rows(4, groups=1, temperature=0.7)
    micro = micro_batch(rows.select(torch.tensor([0])))
    with torch.no_grad():
        found, _ = Policy(model)(micro.input_ids, micro.index, micro.targets, micro.temperature)
        logits = model(input_ids=micro.input_ids).logits[0] / 0.7
    expected = torch.log_softmax(logits, -1)[micro.index, micro.targets]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_dummies_change_nothing(engines: Any, made_up: ModuleType) -> None:
    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    plain = engines().update(micros, objective, scalars, lr=1e-3)
    padded = engines().update([*micros, dummy(micros[0].rows)], objective, scalars, lr=1e-3)
    assert padded.loss == plain.loss
    assert padded.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)


class Poisoned(Objective):
    """A loss, or only its gradient, that isn't finite."""

    def loss(self, rows: Any, scalars: Any) -> Any:
        factor = math.inf if self.settings.gamma < 1 else math.nan
        if self.settings.dual_clip is None:
            return rows.logprobs.sum() + math.inf, {}
        if self.settings.shaping == "ratio":
            return (rows.logprobs * factor).sum(), {}
        # sqrt has an infinite slope at 0: a finite loss with a NaN gradient.
        return ((rows.logprobs - rows.logprobs.detach()) * 0).abs().sqrt().sum(), {}


NOT_FINITE: dict[str, dict[str, Any]] = {
    "loss and gradient": {},
    "NaN loss and gradient": {"gamma": 2.0},
    "gradient alone": {"shaping": "none"},
    "loss alone": {"dual_clip": None},
}
STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")]


@pytest.mark.parametrize(
    ("what", "stage", "dtype"),
    [(what, 0, "float32") for what in NOT_FINITE]
    + [("loss alone", stage, dtype) for stage, dtype in STAGES[1:]],
)
def test_what_is_not_finite_changes_no_parameter(
    what: str,
    stage: int,
    dtype: str,
    engines: Any,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.learner.engine.stage_of", lambda config, ranks: stage)
    good = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), good, budget=60)
    engine = engines(stage, dtype=dtype)
    engine.update(micros, good, scalars, lr=1e-3)
    before = {name: tensor.clone() for name, tensor in engine.parameters()}
    bad = engine.update(micros, Poisoned(OBJECTIVES["luffy"](**NOT_FINITE[what])), scalars, lr=1e-3)
    assert not bad.applied
    for name, tensor in engine.parameters():
        assert torch.equal(tensor, before[name]), name
    after = engine.update(micros, good, scalars, lr=1e-3)
    assert after.applied
    assert math.isfinite(after.loss)
    moved = [not torch.equal(tensor, before[name]) for name, tensor in engine.parameters()]
    assert any(moved)


def test_the_gradients_are_there_before_anything_changes(engines: Any, made_up: ModuleType) -> None:
    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    engine = engines()
    before = {name: tensor.clone() for name, tensor in engine.parameters()}
    seen = []

    def look() -> None:
        same = all(torch.equal(tensor, before[name]) for name, tensor in engine.parameters())
        graded = all(p.grad is not None for p in engine.model.parameters())
        seen.append(same and graded)

    engine.update(micros, objective, scalars, lr=1e-3, before_step=look)
    assert seen == [True]


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "float32"), (1, "bfloat16")])
def test_after_a_load_the_next_updates_are_the_same_to_the_bit(
    stage: int,
    dtype: str,
    name: str,
    engines: Any,
    made_up: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.learner.engine.stage_of", lambda config, ranks: stage)
    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    engine = engines(stage, dtype=dtype, optimizer={"name": name})
    for _ in range(3):
        engine.update(micros, objective, scalars, lr=1e-3)
    engine.save(tmp_path)
    torch.manual_seed(11)
    expected = [engine.update(micros, objective, scalars, lr=1e-3).loss for _ in range(3)]
    for other in (engine, engines(stage, dtype=dtype, optimizer={"name": name})):
        other.load(tmp_path)
        assert torch.initial_seed() is not None
        found = [other.update(micros, objective, scalars, lr=1e-3).loss for _ in range(3)]
        assert found == expected


def test_bf16_training_keeps_float32_master_weights(engines: Any, made_up: ModuleType) -> None:
    """One step of 2e-6 is less than half the distance of bf16 numbers above 0.002."""
    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    engine = engines(1, dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in engine.parameters()}
    for _ in range(30):
        engine.update(micros, objective, scalars, lr=2e-6)
    moved = sum(
        int(((tensor != before[name]) & (before[name].abs() > 0.002)).sum())
        for name, tensor in engine.parameters()
    )
    assert moved > 10


def test_a_single_float32_rank_has_nothing_to_partition(made_up: ModuleType) -> None:
    config = made_up.config_of(learner={"zero_stage": 2})
    assert stage_of(config, ranks=1) == 0
    assert stage_of(config, ranks=2) == 2
    assert stage_of(made_up.config_of(model={"dtype": "bfloat16"}), ranks=1) == 1


def test_the_export_is_a_folder_that_transformers_loads(
    engines: Any, made_up: ModuleType, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tandem.common.models import resolve

    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    engine = engines()
    engine.update(micros, objective, scalars, lr=1e-2)
    base = tmp_path / "base"
    engine.export(base, None)
    shipped = Path(resolve("miniature"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (base / name).write_bytes((shipped / name).read_bytes())
    place = tmp_path / "model"
    for _ in range(2):  # the second one replaces the first
        engine.export(place, base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "model"]
    loaded = AutoModelForCausalLM.from_pretrained(place)
    for (name, ours), theirs in zip(engine.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert AutoTokenizer.from_pretrained(place)("1+2")["input_ids"] == [10, 19, 11]
    assert json.loads((place / "config.json").read_text())["dtype"] == "float32"
