"""PPO with a critic: whole updates against float64, what is left out, faults, and checkpoints."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem.common.errors import ConfigError, DataError
from tandem.common.records import Sample
from tandem.learner.engine.critic import CriticEngine, load_critic
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.loop.saving import size_of
from tandem.learner.losses.returns import explained_variance, whitened
from tandem.learner.objectives import make
from tandem.learner.objectives.configured import objective_of
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")
OPTIMIZER = {"lr": 0.01, "eps": 0.1, "betas": [0.5, 0.9], "grad_clip": 0.5}
CRITIC = {"lr": 0.02, "eps": 0.1, "betas": [0.6, 0.95], "grad_clip": 0.3}
OBJECTIVE = {
    "name": "ppo",
    "discount": 0.97,
    "gae_lambda": 0.9,
    "value_clip": 0.1,
    "value_coefficient": 0.7,
    "truncation": "mask",
}
SEED = 3
"""``run.seed`` of ``made_up.config_of``."""
IN_CI = [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "bfloat16")]
CELLS = [
    pytest.param(stage, dtype, marks=[] if (stage, dtype) in IN_CI else [pytest.mark.byhand])
    for stage in (0, 1, 2, 3)
    for dtype in ("float32", "bfloat16")
]
"""Every ZeRO stage with every dtype."""

Learner = Callable[..., Updates]


@pytest.fixture
def learner(made_up: ModuleType) -> Learner:
    """Makes a rank with a policy and a critic, whose body is another model."""

    def started(objective: dict[str, Any] | None = None, **learner: Any) -> Updates:
        optimizer = learner.pop("optimizer", OPTIMIZER)
        critic = {"optimizer": CRITIC} | learner.pop("critic", {})
        config = made_up.config_of(
            learner={
                "objective": OBJECTIVE | (objective or {}),
                "optimizer": optimizer,
                "critic": critic,
                **learner,
            },
            replay={"groups_per_step": 4},
        )
        beside = CriticEngine(made_up.tiny_model(seed=7), config, CPU)
        engine = DeepSpeedEngine(made_up.tiny_model(), config, CPU, beside)
        return Updates(engine, config)

    return started


@pytest.fixture
def learner_at(made_up: ModuleType, parity: ModuleType) -> Learner:
    """Makes such a rank of one dtype, at exactly this ZeRO stage."""

    def started(stage: int, dtype: str, **learner: Any) -> Updates:
        config = made_up.config_of(
            learner={"objective": OBJECTIVE, "zero_stage": stage, **learner},
            replay={"groups_per_step": 4},
            model={"dtype": dtype},
        )
        kind = getattr(torch, dtype)
        with parity.stages_as_set():
            beside = CriticEngine(made_up.tiny_model(seed=7, dtype=kind), config, CPU)
            engine = DeepSpeedEngine(made_up.tiny_model(dtype=kind), config, CPU, beside)
        assert engine.stage == beside.stage == stage
        return Updates(engine, config)

    return started


@pytest.fixture
def groups(made_up: ModuleType, plain: ModuleType) -> list[MixedGroup]:
    found: list[MixedGroup] = plain.sampled_by(made_up.tiny_model(), made_up.groups_of(4))
    return found


def of_critic(updates: Updates) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every parameter of the critic, whole while it is used."""
    critic = updates.engine.critic
    assert critic is not None
    for name, parameter in critic.model.named_parameters():
        with updates.engine._gathered([parameter]):
            yield name, parameter.detach()


def snapshot(updates: Updates) -> dict[str, torch.Tensor]:
    """Every parameter of the policy and of the critic."""
    found = {name: tensor.clone() for name, tensor in updates.engine.parameters()}
    found |= {f"critic.{name}": tensor.clone() for name, tensor in of_critic(updates)}
    # With ZeRO-3 a parameter is empty until it is gathered, and empty ones are equal.
    assert all(tensor.numel() for tensor in found.values())
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def in_float64(plain: ModuleType, made_up: ModuleType) -> tuple[Any, Any]:
    def options(given: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": given["lr"],
            "eps": given["eps"],
            "betas": tuple(given["betas"]),
            "clip": given["grad_clip"],
        }

    return (
        plain.Plain(made_up.tiny_model(), **options(OPTIMIZER)),
        plain.Plain(made_up.tiny_model(seed=7), **options(CRITIC)),
    )


def compare(updates: Updates, policy: Any, critic: Any, *, within: float = 1e-6) -> None:
    for name, tensor in updates.engine.parameters():
        expected = policy.parameters(critic=False)[name].detach().float()
        torch.testing.assert_close(tensor, expected, atol=within, rtol=0)
    theirs = critic.parameters(critic=True)
    for name, tensor in of_critic(updates):
        if name.startswith("head."):
            expected = critic.head[:-1][None] if name == "head.weight" else critic.head[-1:]
        else:
            expected = theirs[name.replace("body.", "model.", 1)]
        expected = expected.detach().float()
        torch.testing.assert_close(tensor, expected, atol=within, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("minibatches", "epochs", "budget", "stage"),
    [
        *((1, 1, 4096, 0), (1, 1, 18, 0), (2, 3, 4096, 0), (2, 3, 18, 0)),
        *((1, 1, 18, 3), (2, 3, 4096, 3)),
        # Each pair of these stands above.
        *(pytest.param(*cell, 3, marks=pytest.mark.byhand) for cell in ((1, 1, 4096), (2, 3, 18))),
    ],
)
def test_whole_steps_are_those_of_a_computation_in_float64(
    minibatches: int,
    epochs: int,
    budget: int,
    stage: int,
    learner: Learner,
    groups: list[MixedGroup],
    made_up: ModuleType,
    plain: ModuleType,
) -> None:
    """Two steps: the critic is 0 in the first, and knows something in the second."""
    updates = learner(
        minibatches=minibatches,
        update_epochs=epochs,
        micro_batch_tokens=budget,
        zero_stage=stage,
    )
    policy, critic = in_float64(plain, made_up)
    for step in (1, 2):
        outcome = updates.train(step, groups, lr=OPTIMIZER["lr"], critic_lr=CRITIC["lr"])
        assert outcome.applied
        one = plain.PpoStep(
            policy,
            critic,
            groups,
            **{key: OBJECTIVE[key] for key in OBJECTIVE if key not in ("name", "truncation")},
        )
        norms = [one.update(these) for these in plain.shuffled(4, minibatches, epochs, SEED, step)]
        for place, key in enumerate(("train/grad_norm", "train/critic_grad_norm")):
            mean = sum(norm[place] for norm in norms) / len(norms)
            assert outcome.metrics[key] == pytest.approx(mean, rel=1e-4)
        assert outcome.metrics["train/updates"] == minibatches * epochs
    compare(updates, policy, critic)


def test_tokens_keep_what_they_have_earned_along_the_way(
    learner: Learner, groups: list[MixedGroup], made_up: ModuleType, plain: ModuleType
) -> None:
    noise = np.random.default_rng(5)

    def earning(sample: Sample) -> Sample:
        earned = noise.normal(size=len(sample.tokens)).astype(np.float32)
        return replace(sample, token_rewards=earned, reward=float(earned.sum()) + 0.5)

    rich = [
        dataclasses.replace(
            mixed,
            group=replace(mixed.group, samples=tuple(map(earning, mixed.group.samples))),
        )
        for mixed in groups
    ]
    updates = learner()
    policy, critic = in_float64(plain, made_up)
    keys = {key: OBJECTIVE[key] for key in OBJECTIVE if key not in ("name", "truncation")}
    for step in (1, 2):
        assert updates.train(step, rich, lr=OPTIMIZER["lr"], critic_lr=CRITIC["lr"]).applied
        plain.PpoStep(policy, critic, rich, **keys).update([0, 1, 2, 3])
    compare(updates, policy, critic)
    # At the end of the rows the same rewards would have taught something else.
    other = learner()
    late = [
        dataclasses.replace(
            mixed,
            group=replace(
                mixed.group,
                samples=tuple(replace(one, token_rewards=None) for one in mixed.group.samples),
            ),
        )
        for mixed in rich
    ]
    for step in (1, 2):
        other.train(step, late, lr=OPTIMIZER["lr"], critic_lr=CRITIC["lr"])
    assert not same(snapshot(updates), snapshot(other))


@pytest.mark.parametrize(
    ("budget", "form", "whiten"), [(4096, "k1", False), (18, "k1", True), (4096, "k3", True)]
)
def test_each_own_token_pays_the_kl_of_the_reward(
    budget: int,
    form: str,
    whiten: bool,
    learner: Learner,
    groups: list[MixedGroup],
    made_up: ModuleType,
    plain: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = made_up.tiny_model(seed=5)
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: reference
    )
    rewards = {"whiten_rewards": whiten, "kl_reward_form": form}
    updates = learner({"kl_reward_coefficient": 0.2, **rewards}, micro_batch_tokens=budget)
    policy, critic = in_float64(plain, made_up)
    fixed = plain.Plain(reference, lr=0.0, eps=1.0, betas=(0.0, 0.0))
    assert updates.train(1, groups, lr=OPTIMIZER["lr"], critic_lr=CRITIC["lr"]).applied
    one = plain.PpoStep(
        policy,
        critic,
        groups,
        **{key: OBJECTIVE[key] for key in OBJECTIVE if key not in ("name", "truncation")},
        **rewards,
        beta=0.2,
        reference=fixed.logprobs,
    )
    one.update([0, 1, 2, 3])
    compare(updates, policy, critic)


def test_in_the_warm_up_only_the_critic_is_trained(
    learner: Learner, groups: list[MixedGroup], made_up: ModuleType, plain: ModuleType
) -> None:
    updates = learner(critic={"warmup_steps": 1})
    policy, critic = in_float64(plain, made_up)
    options = {key: OBJECTIVE[key] for key in OBJECTIVE if key not in ("name", "truncation")}
    for step in (1, 2):
        outcome = updates.train(step, groups, lr=OPTIMIZER["lr"], critic_lr=CRITIC["lr"])
        assert outcome.applied
        # The ratio check and the token figures are there all the same.
        assert outcome.metrics["train/tokens_own"] > 0
        assert "ratio/log_ratio" in outcome.metrics
        one = plain.PpoStep(policy, critic, groups, **options)
        one.update([0, 1, 2, 3], critic_alone=step == 1)
        compare(updates, policy, critic)


def test_the_coefficients_stay_at_their_start_until_the_policy_is_trained(
    learner: Learner,
    groups: list[MixedGroup],
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model",
        lambda path, **kwargs: made_up.tiny_model(seed=5),
    )
    following = {
        "kl_coefficient": 0.1,
        "kl_reward_coefficient": 0.2,
        "kl_target": 1e-6,
        "entropy_target": 0.1,
        "entropy_adapt": "stepped",
        "entropy_coefficient": 0.3,
    }
    updates = learner(following, critic={"warmup_steps": 2}, minibatches=2)
    start = dataclasses.asdict(updates.coefficients)
    for step in (1, 2):
        assert updates.train(step, groups, lr=0.01, critic_lr=0.02).applied
        assert dataclasses.asdict(updates.coefficients) == start
    assert updates.train(3, groups, lr=0.01, critic_lr=0.02).applied
    moved = dataclasses.asdict(updates.coefficients)
    assert all(moved[name] != start[name] for name in ("entropy", "kl", "kl_reward"))


def test_rows_that_teach_nothing_change_nothing(
    learner: Learner, groups: list[MixedGroup], made_up: ModuleType
) -> None:
    """A trace's row and rows whose advantage is set to 0 are out of the losses and the whitening."""
    found = {}
    for kind in ("without", "with"):
        updates = learner({"truncation": "zero_advantage", "aggregation": "constant"})
        these = [groups[0], groups[1], groups[2], groups[3]]
        if kind == "with":
            # Paid otherwise, a cut row is the same, and so is a batch with a trace beside it.
            *kept, late = groups[2].group.samples
            other = replace(late, reward=5.0)
            group = replace(groups[2].group, samples=(*kept, other))
            these[2] = MixedGroup(group=group, traces=())
            these[0] = MixedGroup(group=groups[0].group, traces=(made_up.trace(0),))
        assert updates.train(1, these, lr=OPTIMIZER["lr"], critic_lr=CRITIC["lr"]).applied
        found[kind] = snapshot(updates)
    for name in found["with"]:
        torch.testing.assert_close(found["with"][name], found["without"][name], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("stage", "dtype"), CELLS)
@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_gradient_that_is_no_number_leaves_both_as_they_are(
    whose: str,
    dtype: str,
    stage: int,
    learner_at: Learner,
    groups: list[MixedGroup],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = learner_at(stage, dtype)
    good = updates.train(1, groups, lr=1e-2)
    assert good.applied
    before = snapshot(updates)
    objective = updates.objective
    with monkeypatch.context() as patch:
        name = "loss" if whose == "policy" else "value_loss"
        right = getattr(objective, name)

        def spoiled(rows: Any, scalars: Any) -> Any:
            loss, sums = right(rows, scalars)
            return loss * math.inf, sums

        patch.setattr(objective, name, spoiled)
        outcome = updates.train(2, groups, lr=1e-2)
    assert not outcome.applied
    assert not outcome.undone
    assert same(snapshot(updates), before)
    # Nothing of the spoiled gradients is left: the next step is as if that one had never been.
    fresh = learner_at(stage, dtype)
    fresh.train(1, groups, lr=1e-2)
    for one in (updates, fresh):
        assert one.train(3, groups, lr=1e-2).applied
    assert same(snapshot(updates), snapshot(fresh))
    assert not same(snapshot(updates), before)


def test_a_fault_in_a_later_pass_undoes_the_step(
    learner: Learner, groups: list[MixedGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = learner(update_epochs=2)
    right = updates.objective.value_loss  # type: ignore[attr-defined]
    calls = []

    def spoiled(rows: Any, scalars: Any) -> Any:
        calls.append(None)
        loss, sums = right(rows, scalars)
        return (loss * math.nan if len(calls) > 1 else loss), sums

    monkeypatch.setattr(updates.objective, "value_loss", spoiled)
    outcome = updates.train(1, groups, lr=1e-2)
    assert not outcome.applied
    assert outcome.undone


@pytest.mark.parametrize(("stage", "dtype"), CELLS)
def test_after_a_load_the_next_steps_are_the_same_to_the_bit(
    dtype: str, stage: int, learner_at: Learner, groups: list[MixedGroup], tmp_path: Path
) -> None:
    updates = learner_at(stage, dtype, update_epochs=2)
    updates.train(1, groups, lr=1e-2)
    updates.engine.save(tmp_path, updates.state())
    ours = [updates.train(step, groups, lr=1e-2).metrics for step in (2, 3)]
    other = learner_at(stage, dtype, update_epochs=2)
    other.restore(other.engine.load(tmp_path))
    theirs = [other.train(step, groups, lr=1e-2).metrics for step in (2, 3)]
    assert theirs == ours
    assert ours[0]["train/value_mean"] != 0
    assert same(snapshot(other), snapshot(updates))


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "adamw_8bit"])
def test_room_is_wanted_for_what_a_checkpoint_of_policy_and_critic_has(
    name: str, learner_at: Learner, groups: list[MixedGroup], states: ModuleType, tmp_path: Path
) -> None:
    chosen = {"optimizer": {"name": name}}
    updates = learner_at(1, "float32", **chosen, critic=chosen)
    updates.train(1, groups, lr=1e-2)
    alone = states.engine_at(1, "float32", **chosen)
    states.train(alone, 1)
    for number, engine in enumerate((updates.engine, alone)):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine.save(folder)
        # Besides there are the names of the tensors, and the random state.
        assert 0 <= size_of(folder) - engine.checkpoint_bytes() < 30_000


def test_a_checkpoint_without_a_critic_is_refused(
    learner: Learner, made_up: ModuleType, tmp_path: Path
) -> None:
    config = made_up.config_of()
    DeepSpeedEngine(made_up.tiny_model(), config, CPU).save(tmp_path)
    with pytest.raises(DataError, match="critic"):
        learner().engine.load(tmp_path)


def test_the_exported_model_has_no_value_head(
    learner: Learner, groups: list[MixedGroup], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    updates = learner()
    updates.train(1, groups, lr=1e-2)
    updates.engine.export(tmp_path / "model", None)
    names = set(load_file(tmp_path / "model" / "model.safetensors"))
    assert names <= {name for name, _ in updates.engine.model.state_dict().items()}


def test_checkpointing_gives_the_same_critic(learner: Learner, groups: list[MixedGroup]) -> None:
    found = []
    for checkpointing in (False, True):
        updates = learner(gradient_checkpointing=checkpointing)
        updates.train(1, groups, lr=1e-2)
        updates.train(2, groups, lr=1e-2)
        found.append(snapshot(updates))
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_critic_drops_the_language_models_head(
    checkpointing: bool, made_up: ModuleType
) -> None:
    config = made_up.config_of(
        learner={
            "objective": {"name": "ppo"},
            "critic": {},
            "gradient_checkpointing": checkpointing,
        }
    )
    model = made_up.tiny_model()
    # An output matrix of its own, which nothing but the head holds.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    head = weakref.ref(model.lm_head)
    critic = CriticEngine(model, config, CPU)
    del model
    gc.collect()
    assert head() is None
    assert critic.model.training


def test_a_critic_that_knows_fewer_tokens_than_the_policy_is_refused(made_up: ModuleType) -> None:
    config = made_up.config_of(
        learner={"objective": OBJECTIVE, "critic": {"model": "miniature"}},
    )
    with pytest.raises(ConfigError, match="token ids"):
        load_critic(config, CPU, 1000)
    assert load_critic(made_up.config_of(), CPU, 1000) is None


def test_whitening_is_by_the_values_that_count() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 100.0], dtype=torch.float64)
    found = whitened(values, torch.tensor([True, True, True, False]))
    # Mean 7/3, unbiased variance 7/3.
    expected = (values[:3] - 7 / 3) / math.sqrt(7 / 3 + 1e-8)
    torch.testing.assert_close(found[:3], expected)
    one = torch.tensor([True, False, False, False])
    assert torch.equal(whitened(values, one), values)


def test_the_explained_variance_is_1_for_a_critic_that_knows() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full_like(returns, 0.5), returns) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones_like(returns)) == 0.0


def test_objective_and_critic_go_together(made_up: ModuleType) -> None:
    config = made_up.config_of(learner={"objective": {"name": "ppo"}})
    assert config.learner.critic is not None
    assert objective_of(config).columns >= {"values"}
    without = config.learner.model_copy(update={"critic": None})
    with pytest.raises(ConfigError, match="needs a critic"):
        objective_of(config.model_copy(update={"learner": without}))
    other = made_up.config_of(learner={"critic": {"warmup_steps": 1}})
    given = config.learner.critic
    other = other.model_copy(update={"learner": other.learner.model_copy(update={"critic": given})})
    with pytest.raises(ConfigError, match="has no critic"):
        objective_of(other)


def test_the_loss_without_gae_is_refused(hand: ModuleType) -> None:
    objective = make("ppo")
    rows = hand.random_rows(11, count=5, group_size=2).with_columns(token_advantages=None)
    with pytest.raises(ConfigError, match="token_advantages"):
        objective.loss(rows, {})


def test_a_policy_of_adapters_is_trained_beside_a_whole_critic(
    learner: Learner, groups: list[MixedGroup]
) -> None:
    updates = learner(lora={"rank": 2, "alpha": 8.0})
    before = snapshot(updates)
    base = {name: tensor.clone() for name, tensor in updates.engine.base_tensors()}
    found = updates.train(1, groups, lr=0.01, critic_lr=0.02)
    assert found.applied
    after = snapshot(updates)
    assert all("lora_" in name for name in after if not name.startswith("critic."))
    # A stays for one update, since B is zero.
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name for name in before if "lora_B" in name} <= moved
    assert any(name.startswith("critic.") for name in moved)
    assert all(torch.equal(tensor, base[name]) for name, tensor in updates.engine.base_tensors())
