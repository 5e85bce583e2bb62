"""DeepSpeed's update is the optimizer's plain update, whatever the split; and nothing else leaks in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.errors import DataError
from tandem.common.objectives import OBJECTIVES
from tandem.launch.plan.memory import offloaded
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine, stage_of
from tandem.learner.forward.policy import Policy
from tandem.learner.objectives import Objective, make
from tandem.learner.resume.state_files import POLICY, StateFiles
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


@pytest.fixture(scope="module")
def still(group: None, made_up: ModuleType) -> Iterator[DeepSpeedEngine]:
    """An engine that cases share: with a rate of 0 no update changes a parameter."""
    config = made_up.config_of(learner={"zero_stage": 0, "optimizer": {"grad_clip": 0.0}})
    engine = DeepSpeedEngine(made_up.tiny_model(), config, CPU)
    yield engine
    start = made_up.tiny_model().parameters()
    for (name, tensor), before in zip(engine.parameters(), start, strict=True):
        assert torch.equal(tensor, before), name


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
@pytest.mark.parametrize(
    ("stage", "offload"),
    [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "parameters")],
)
def test_an_update_is_the_plain_update(
    stage: int,
    offload: str,
    name: str,
    engines: Any,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    objective = make("luffy")
    (whole,), scalars = micro_batches(made_up.random_rows(), objective)
    reference = made_up.tiny_model()
    optimizer = OPTIMIZERS[name](reference.parameters())
    engine = engines(stage, offload=offload, optimizer={"grad_clip": CLIP, **SETTINGS[name]})
    for _ in range(3):
        norm = plain_update(reference, whole, objective, scalars, optimizer)
        assert norm > CLIP  # or the clip would go untested
        # Not the config's, which is 1e-3: the schedule sets the rate of every step.
        result = engine.update([whole], objective, scalars, lr=3e-4)
        assert result.applied
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for (name, ours), theirs in zip(engine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5, msg=name)


def test_a_half_precision_engine_without_zero_makes_no_step_of_its_own(
    made_up: ModuleType, tmp_path: Path
) -> None:
    before = dict(made_up.tiny_model(dtype=torch.bfloat16).named_parameters())
    optimizer = {"lr": 0.1, "weight_decay": 0.5, "schedule": "constant"}
    config = made_up.config_of(
        learner={"zero_stage": 0, "optimizer": optimizer}, model={"dtype": "bfloat16"}
    )
    engine = DeepSpeedEngine(made_up.tiny_model(dtype=torch.bfloat16), config, CPU)
    objective = make("luffy")
    (whole,), scalars = micro_batches(made_up.random_rows(), objective)
    steps = []
    for name in ("made", "stepped"):
        (tmp_path / name).mkdir()
        engine.save(tmp_path / name)
        files = StateFiles(tmp_path / name / POLICY)
        steps.append({files.step(parameter) for parameter in files.names})
        if name == "made":
            for parameter in files.names:
                assert torch.equal(files.whole(parameter), before[parameter].float()), parameter
            assert engine.update([whole], objective, scalars, lr=1e-3).applied
    assert steps == [{None}, {1.0}]


def test_one_rank_reduces_no_gradient_and_decays_what_no_row_uses(
    made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = make("luffy")
    (whole,), scalars = micro_batches(made_up.random_rows(), objective)
    model = made_up.tiny_model()
    model.model.unused = torch.nn.Parameter(torch.ones(3))
    config = made_up.config_of(learner={"optimizer": {"weight_decay": 0.1}})
    engine = DeepSpeedEngine(model, config, CPU)

    def reduced(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(
            "one rank has nothing to reduce, and it costs two copies of the gradient"
        )

    monkeypatch.setattr(engine._engine, "allreduce_bucket", reduced)
    assert engine.update([whole], objective, scalars, lr=0.5).applied
    torch.testing.assert_close(model.model.unused.detach(), torch.full((3,), 0.95))


@pytest.mark.parametrize("name", ["grpo", "luffy", "rl_sft_loss", "sft"])
@pytest.mark.parametrize("how", ["constant", "token_mean", "sequence_mean", "by_source"])
def test_loss_and_gradient_do_not_depend_on_the_split(
    name: str, how: Any, still: DeepSpeedEngine, made_up: ModuleType
) -> None:
    bonus = {} if name == "sft" else {"entropy_coefficient": 0.01}
    objective = make(name, aggregation=how, **bonus)
    rows = made_up.random_rows(2, temperature=0.7, objective=objective)
    found = []
    for budget in (4096, 40, 18):
        micros, scalars = micro_batches(rows, objective, budget)
        result = still.update(micros, objective, scalars, lr=0.0)
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
STAGES = [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")]
OFFLOADED = [
    *(("optimizer", stage, "float32") for stage in (1, 2, 3)),
    *(("optimizer", stage, "bfloat16") for stage in (1, 2)),
    ("parameters", 3, "bfloat16"),
]
"""What lies in host memory, at which stage."""


@pytest.mark.parametrize(
    ("what", "offload", "stage", "dtype"),
    [(what, "none", 0, "float32") for what in NOT_FINITE]
    + [("loss alone", "none", stage, dtype) for stage, dtype in STAGES]
    + [("loss alone", *cell) for cell in OFFLOADED],
)
def test_what_is_not_finite_changes_no_parameter(
    what: str,
    offload: str,
    stage: int,
    dtype: str,
    engines: Any,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    good = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), good, budget=60)
    engine = engines(stage, dtype=dtype, offload=offload)
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
@pytest.mark.parametrize(
    ("offload", "stage", "dtype"),
    [
        *(("none", stage, dtype) for stage, dtype in ((0, "float32"), *STAGES)),
        *OFFLOADED,
    ],
)
def test_after_a_load_the_next_updates_are_the_same_to_the_bit(
    offload: str,
    stage: int,
    dtype: str,
    name: str,
    engines: Any,
    made_up: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    settings = {"dtype": dtype, "offload": offload, "optimizer": {"name": name}}
    engine = engines(stage, **settings)
    for _ in range(3):
        engine.update(micros, objective, scalars, lr=1e-3)
    engine.save(tmp_path)
    random = torch.get_rng_state()
    expected = [engine.update(micros, objective, scalars, lr=1e-3).loss for _ in range(3)]
    for other in (engine, engines(stage, **settings)):
        torch.manual_seed(11)
        other.load(tmp_path)
        assert torch.equal(torch.get_rng_state(), random)
        found = [other.update(micros, objective, scalars, lr=1e-3).loss for _ in range(3)]
        assert found == expected


def with_second_head(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Tandem 0.1.0 kept the output matrix under a second name, too."""
    state[f"{prefix}head.weight"] = state[f"{prefix}model.lm_head.weight"]


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "bfloat16")])
def test_a_checkpoint_of_deepspeeds_own_form_still_goes_on_to_the_bit(
    stage: int,
    dtype: str,
    engines: Any,
    made_up: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tandem 0.1.0 wrote it, in exactly this way."""
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    engine = engines(stage, dtype=dtype)
    engine.update(micros, objective, scalars, lr=1e-3)
    random = {"torch_rng": torch.get_rng_state()}
    engine.policy.register_state_dict_post_hook(with_second_head)
    engine._engine.save_checkpoint(
        str(tmp_path),
        tag="engine",
        client_state={"rng_0": random, "coefficients": {"entropy": 0.5}},
        save_latest=False,
    )
    expected = [engine.update(micros, objective, scalars, lr=1e-3).loss for _ in range(2)]
    other = engines(stage, dtype=dtype)
    torch.manual_seed(7)
    assert other.load(tmp_path) == {"entropy": 0.5}
    assert torch.equal(torch.get_rng_state(), random["torch_rng"])
    assert [other.update(micros, objective, scalars, lr=1e-3).loss for _ in range(2)] == expected
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda *_: 1 if stage == 3 else 3
    )
    with pytest.raises(DataError, match=r"earlier version .* same learner.ranks and learner.zero_"):
        engines(dtype=dtype).load(tmp_path)


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


@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (3, "parameters")])
def test_the_export_is_a_folder_that_transformers_loads(
    stage: int, offload: str, engines: Any, made_up: ModuleType, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tandem.common.models import resolve

    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective)
    engine = engines(stage, offload=offload)
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


@pytest.mark.parametrize(("offload", "stage", "dtype"), OFFLOADED)
def test_what_is_offloaded_is_what_the_plan_counts(
    offload: str, stage: int, dtype: str, engines: Any, made_up: ModuleType, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    objective = make("luffy")
    micros, scalars = micro_batches(made_up.random_rows(), objective, budget=60)
    engine = engines(stage, dtype=dtype, offload=offload)
    engine.update(micros, objective, scalars, lr=1e-3)
    held = engine._engine.optimizer
    masters = getattr(
        held, "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    )
    moments = [
        tensor
        for state in held.optimizer.state.values()
        for tensor in state.values()
        if tensor.numel() > 1
    ]
    sums = (
        [held.grad_partitions_flat_buffer]
        if stage == 3
        else [
            *held.param_buffer_of_bit16_for_cpu_offload_groups,
            *held.accumulated_grads_in_cpu.values(),
        ]
    )
    pinned = [*masters, *(master.grad for master in masters), *sums]
    count = engine.parameter_count()
    of_weights = engine.model.dtype.itemsize * count if offload == "parameters" else 0
    found = sum(tensor.numel() * tensor.element_size() for tensor in pinned) + of_weights
    own = sum(tensor.numel() * tensor.element_size() for tensor in moments)
    # ZeRO pads each rank's part.
    expected = offloaded(engine.config, count, count, engine.config.learner.optimizer)
    assert (found + own, found) == pytest.approx(expected, rel=0.01)
