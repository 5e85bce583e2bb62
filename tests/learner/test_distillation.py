"""Updates that learn from a teacher: they are those of the formula, however rows are laid out and split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tandem.common.errors import ConfigError
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.forward.divergence import Lesson
from tandem.learner.forward.policy import Policy
from tandem.learner.objectives import make
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.rows.microbatch import MicroBatch, dummy, micro_batch
from tandem.learner.rows.rows import Rows
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group")

CPU = torch.device("cpu")
Learner = Callable[..., Updates]


@pytest.fixture
def learner(made_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Learner:
    """Makes a rank on a tiny model, with a teacher that is wider and has a padded output."""

    def started(vocabulary: int = 40, **sections: Any) -> Updates:
        monkeypatch.setattr(
            "tandem.learner.updates.reference.load_model",
            lambda path, **options: made_up.tiny_teacher(vocabulary),
        )
        objective = {"name": "distill", **sections.pop("objective", {})}
        learner = {"objective": objective, **sections.pop("learner", {})}
        config = made_up.config_of(learner=learner, **sections)
        model = made_up.tiny_model(dtype=getattr(torch, config.model.dtype))
        return Updates(DeepSpeedEngine(model, config, CPU), config)

    return started


def mixed_groups(made_up: ModuleType, count: int = 3) -> list[MixedGroup]:
    """Groups of own samples that are all paid alike, the first one with a trace."""
    groups = [
        MixedGroup(
            group=replace(
                mixed.group, samples=tuple(replace(s, reward=0.0) for s in mixed.group.samples)
            )
        )
        for mixed in made_up.groups_of(count, size=3)
    ]
    groups[0] = MixedGroup(group=groups[0].group, traces=(made_up.trace(0),))
    return groups


def by_the_formula(
    policy: Any, teacher: Any, rows: Rows, *, heat: float, mix: float, weight: float, sft: float
) -> Tensor:
    """The loss, with the mean over all tokens, row by row from whole logits in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(rows.count):
        one = rows.select(torch.tensor([row]))
        if one.masked.any():
            continue
        places = int(one.prompt_lengths) + one.position - 1
        logits = policy(input_ids=one.ids[None]).logits[0, places]
        with torch.no_grad():
            known = teacher(input_ids=one.ids[None]).logits[0, places][:, : logits.shape[1]]
        p, q = torch.softmax(known / heat, -1), torch.softmax(logits / heat, -1)
        middle = mix * p + (1 - mix) * q
        first = (p * (p / (q if mix == 0 else middle)).log()).sum(-1)
        second = (q * (q / (p if mix == 1 else middle)).log()).sum(-1)
        found = {0.0: first, 1.0: second}.get(mix, mix * first + (1 - mix) * second)
        total = total + weight * heat**2 * found.sum()
        tokens = one.ids[places + 1]
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens]
        total = total - sft * logprobs[one.expert].sum()
    return total / len(rows.row)


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("heat", [1.0, 2.0])
@pytest.mark.parametrize("sft", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_formula(
    sft: float, heat: float, mix: float, made_up: ModuleType
) -> None:
    policy, teacher = made_up.tiny_model().double(), made_up.tiny_teacher().double()
    objective = make(
        "distill", divergence_mix=mix, divergence_temperature=heat, sft_coefficient=sft,
        divergence_coefficient=0.7,
    )  # fmt: skip
    rows = made_up.random_rows(2, temperature=0.7, objective=objective)
    masked = torch.arange(rows.count) % 5 == 4
    rows = rows.with_columns(masked=masked)
    assert rows.expert.any()
    expected = by_the_formula(policy, teacher, rows, heat=heat, mix=mix, weight=0.7, sft=sft)
    slopes = torch.autograd.grad(expected, list(policy.parameters()))
    reads, whole = Policy(teacher), micro_batch(rows)
    lesson = Lesson(
        hidden=reads.hidden(whole), head=reads.head, temperature=heat, mix=mix, logprobs=sft != 0
    )
    logprobs, entropy, divergence = Policy(policy)(
        whole.input_ids, whole.index, whole.targets, whole.temperature, False, None, lesson
    )
    scalars = {key: float(value) for key, value in objective.statistics(rows).items()}
    loss, _ = objective.loss(
        rows.with_columns(logprobs=logprobs, entropy=entropy, divergence=divergence), scalars
    )
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-10)
    found = torch.autograd.grad(loss, list(policy.parameters()))
    for one, other in zip(found, slopes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_learns_from_own_samples_that_are_paid_alike_and_from_traces(
    dtype: str, learner: Learner, made_up: ModuleType
) -> None:
    groups = mixed_groups(made_up)
    updates = learner(objective={"sft_coefficient": 0.1}, model={"dtype": dtype})
    told = [updates.train(step, groups, lr=1e-2).metrics for step in (1, 2, 3, 4)]
    assert told[0]["train/rows_active"] == told[0]["train/rows"] == 10
    assert told[0]["train/tokens_expert"] == 6
    # Of the same tokens as the loss, which adds a tenth of the traces' cross entropy.
    tokens = told[0]["train/tokens_own"] + 6
    expected = told[0]["train/divergence"] + 0.1 * told[0]["train/nll"] * 6 / tokens
    assert told[0]["train/loss"] == pytest.approx(expected, rel=1e-4)
    falls = [one["train/divergence"] for one in told]
    assert falls == sorted(falls, reverse=True)
    assert falls[-1] < 0.7 * falls[0]


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_neither_layout_nor_split_changes_an_update(
    mix: float, learner: Learner, made_up: ModuleType
) -> None:
    """Nor does a teacher whose attention takes another layout than the policy's."""
    groups = mixed_groups(made_up)
    found: dict[tuple[str, str, int], Any] = {}
    for wanted in (
        ("padded", "padded", 4096), ("padded", "padded", 20), ("shared", "shared", 4096),
        ("packed", "packed", 20), ("packed", "padded", 4096), ("shared", "padded", 4096),
    ):  # fmt: skip
        own, of_teacher, budget = wanted
        updates = learner(
            objective={"divergence_mix": mix, "divergence_temperature": 2.0},
            model={"attention": "varlen" if own == "packed" else "auto"},
            learner={"micro_batch_tokens": budget},
        )
        assert updates.teacher is not None
        for policy, layout in ((updates.engine.policy, own), (updates.teacher.policy, of_teacher)):
            if layout == "padded":
                policy.model.set_attn_implementation("sdpa")
                policy.layout = "padded"
            assert policy.layout == layout
        found[wanted] = updates.train(1, groups, lr=1e-3).metrics
    plain = found["padded", "padded", 4096]
    assert found["padded", "padded", 20]["train/micro_batches"] > plain["train/micro_batches"]
    for metrics in found.values():
        for name in ("train/loss", "train/grad_norm", "train/divergence"):
            assert metrics[name] == pytest.approx(plain[name], rel=1e-4)


@pytest.mark.parametrize("budget", [20, 40, 60])
def test_a_teacher_that_pads_keeps_to_the_budget_of_a_policy_that_packs(
    budget: int, learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = learner(model={"attention": "varlen"}, learner={"micro_batch_tokens": budget})
    assert updates.teacher is not None
    teacher = updates.teacher.policy
    teacher.model.set_attn_implementation("sdpa")
    teacher.layout = "padded"
    hidden, sizes = teacher.hidden, []

    def seen(micro: MicroBatch) -> torch.Tensor:
        sizes.append(micro.input_ids.numel())
        return hidden(micro)

    monkeypatch.setattr(teacher, "hidden", seen)
    assert updates.train(1, mixed_groups(made_up), lr=1e-3).applied
    assert updates.engine.policy.layout == "packed"
    assert sizes
    assert max(sizes) <= budget


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sft", [0.0, 0.3])
def test_a_dummy_changes_nothing_at_any_stage(
    sft: float,
    stage: int,
    learner: Learner,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    found = []
    for more in (0, 1):
        updates = learner(objective={"sft_coefficient": sft}, learner={"zero_stage": stage})
        assert updates.teacher is not None
        objective = updates.objective
        rows = made_up.random_rows(2, objective=objective)
        scalars = {key: float(value) for key, value in objective.statistics(rows).items()}
        micros = [micro_batch(rows), *[dummy(rows)] * more]
        teach = updates.teacher.lesson
        for _ in range(2):
            result = updates.engine.update(micros, objective, scalars, lr=1e-2, teach=teach)
            assert result.applied
        found.append((result, {name: one.clone() for name, one in updates.engine.parameters()}))
    (plain, weights), (padded, others) = found
    assert padded.loss == plain.loss
    start = dict(made_up.tiny_model().named_parameters())
    assert not torch.equal(weights["model.norm.weight"], start["model.norm.weight"])
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=2e-6, rtol=1e-5, msg=name)


def test_the_teacher_stays_as_it_is(learner: Learner, made_up: ModuleType) -> None:
    updates = learner()
    assert updates.teacher is not None
    model = updates.teacher.policy.model
    before = copy.deepcopy(model.state_dict())
    assert updates.train(1, mixed_groups(made_up), lr=0.1).applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_id_of_the_policys_padding_is_read_by_a_teacher_without_it(
    learner: Learner, made_up: ModuleType
) -> None:
    groups = mixed_groups(made_up)
    samples = groups[0].group.samples
    odd = samples[0].tokens.copy()
    odd[1] = 31
    samples = (replace(samples[0], tokens=odd), *samples[1:])
    groups[0] = MixedGroup(group=replace(groups[0].group, samples=samples))
    assert learner(vocabulary=28).train(1, groups, lr=1e-3).applied


def test_adapters_with_dropout_learn_from_a_teacher(learner: Learner, made_up: ModuleType) -> None:
    updates = learner(learner={"lora": {"rank": 4, "dropout": 0.1}})
    groups = mixed_groups(made_up)
    told = [updates.train(step, groups, lr=3e-2).metrics for step in range(1, 9)]
    assert told[-1]["train/divergence"] < 0.8 * told[0]["train/divergence"]


def test_a_teacher_and_an_objective_that_has_one_come_together(
    learner: Learner, made_up: ModuleType
) -> None:
    with pytest.raises(ConfigError, match=r"needs a teacher: set learner\.teacher"):
        learner(learner={"teacher": None})
    own = {"name": "tandem.learner.objectives:Sft"}
    with pytest.raises(ConfigError, match=r"teacher=a/b has nothing to teach.*teacher=null"):
        learner(learner={"objective": own, "teacher": "a/b"})


def test_a_class_that_derives_from_distillation_has_a_teacher(
    learner: Learner, made_up: ModuleType
) -> None:
    own = {"name": "tandem.learner.objectives:Distill", "params": {"divergence_mix": 1.0}}
    groups = mixed_groups(made_up)
    found = learner(learner={"objective": own, "teacher": "a/b"}).train(1, groups, lr=1e-3)
    built_in = learner(objective={"divergence_mix": 1.0}).train(1, groups, lr=1e-3)
    for name in ("train/loss", "train/divergence"):
        assert found.metrics[name] == built_in.metrics[name]
