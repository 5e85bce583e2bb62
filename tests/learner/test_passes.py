"""Several passes over one step's batch: their order, what they share, and where they stop."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.objectives import Grpo, make
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")
OPTIMIZER = {"lr": 0.01, "eps": 0.1, "betas": [0.5, 0.9], "grad_clip": 0}
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
    def started(given: Any = None, **learner: Any) -> Updates:
        config = made_up.config_of(
            learner={"optimizer": OPTIMIZER, **learner}, replay={"groups_per_step": 4}
        )
        return Updates(DeepSpeedEngine(made_up.tiny_model(), config, CPU), config, given)

    return started


@pytest.fixture
def groups(made_up: ModuleType, plain: ModuleType) -> list[MixedGroup]:
    found: list[MixedGroup] = plain.sampled_by(made_up.tiny_model(), made_up.groups_of(4))
    return found


def snapshot(updates: Updates) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in updates.engine.parameters()}


def in_float64(plain: ModuleType, made_up: ModuleType, lr: float = 0.01) -> Any:
    return plain.Plain(made_up.tiny_model(), lr=lr, eps=0.1, betas=(0.5, 0.9))


def compare(updates: Updates, policy: Any) -> None:
    for name, tensor in updates.engine.parameters():
        expected = policy.parameters(critic=False)[name].detach().float()
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("budget", [4096, 18])
@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 3), (2, 2), (4, 3)])
def test_two_steps_are_those_of_a_computation_in_float64(
    minibatches: int,
    epochs: int,
    budget: int,
    learner: Learner,
    groups: list[MixedGroup],
    made_up: ModuleType,
    plain: ModuleType,
) -> None:
    updates = learner(minibatches=minibatches, update_epochs=epochs, micro_batch_tokens=budget)
    policy = in_float64(plain, made_up)
    for step in (1, 2):
        outcome = updates.train(step, groups, lr=0.01)
        assert outcome.applied
        losses = plain.grpo_step(
            policy, groups, plain.shuffled(4, minibatches, epochs, SEED, step), longest=12
        )
        mean = sum(losses) / len(losses)
        assert outcome.metrics["train/loss"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
        assert outcome.metrics["train/updates"] == len(losses) == minibatches * epochs
        assert outcome.metrics["train/update_epochs"] == epochs
        # Every row is counted once, whatever the number of passes.
        assert outcome.metrics["train/rows"] == 16
    compare(updates, policy)


def test_sft_goes_over_a_batch_of_traces_several_times(
    learner: Learner, made_up: ModuleType, plain: ModuleType
) -> None:
    groups = [
        MixedGroup(group=mixed.group, traces=(made_up.trace(number),))
        for number, mixed in enumerate(made_up.groups_of(4, size=3))
    ]
    updates = learner(
        objective={"name": "sft", "aggregation": "token_mean"}, minibatches=2, update_epochs=3
    )
    policy = in_float64(plain, made_up, lr=0.005)
    assert updates.train(1, groups, lr=0.005).applied
    plain.sft_step(policy, groups, plain.shuffled(4, 2, 3, SEED, 1))
    compare(updates, policy)


def test_each_pass_has_an_order_of_its_own_and_the_first_keeps_the_batchs(
    learner: Learner, groups: list[MixedGroup]
) -> None:
    def orders(step: int, seed: int = SEED) -> list[list[list[int]]]:
        updates = learner(minibatches=2, update_epochs=4)
        run = updates.config.run.model_copy(update={"seed": seed})
        updates.config = updates.config.model_copy(update={"run": run})
        rows, measured = updates._filled(step, groups)
        # Rewards say which group a row is of.
        rows = rows.with_columns(rewards=rows.group.double())
        found: list[list[list[int]]] = [[] for _ in range(4)]
        for number, update in updates._passes(step, rows, measured):
            found[number].append(sorted({int(reward) for reward in update.rows.rewards}))
        return found

    first = orders(1)
    assert first[0] == [[0, 1], [2, 3]]
    assert all(sorted([*one, *other]) == [0, 1, 2, 3] for one, other in first)
    assert orders(1) == first
    later = [str(orders(step)[1:]) for step in range(1, 5)]
    assert len(set(later)) > 1
    assert [str(orders(step, seed=4)[1:]) for step in range(1, 5)] != later


class Curious(Grpo):
    """Looks at the columns that all passes share."""

    unit = "group"
    columns = frozenset({"behaviour", "proximal"})

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.seen: list[tuple[float, float, float]] = []

    def loss(self, rows: Any, scalars: Any) -> Any:
        apart = float((rows.logprobs.detach() - rows.proximal).abs().max())
        key = float(rows.behaviour.sum())
        self.seen.append((key, float(rows.proximal.sum()), apart))
        return super().loss(rows, scalars)


def test_log_probs_of_the_steps_start_are_computed_once_for_all_passes(
    learner: Learner, groups: list[MixedGroup]
) -> None:
    objective = Curious(make("grpo").settings)
    updates = learner(objective, minibatches=2, update_epochs=3, micro_batch_tokens=90)
    assert updates.train(1, groups, lr=0.01).applied
    by_group: dict[float, set[float]] = {}
    for key, proximal, _ in objective.seen:
        by_group.setdefault(round(key, 3), set()).add(proximal)
    assert len(by_group) == 4
    assert all(len(found) == 1 for found in by_group.values())
    # The weights have left the start after the first update.
    assert objective.seen[0][2] < 1e-5
    assert min(apart for _, _, apart in objective.seen[-4:]) > 1e-4


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 4), (2, 2), (4, 1)])
def test_an_update_that_begins_beyond_the_kl_and_all_after_it_are_left_out(
    minibatches: int,
    epochs: int,
    learner: Learner,
    groups: list[MixedGroup],
    plain: ModuleType,
    made_up: ModuleType,
) -> None:
    """The KL is measured by hand before each update; bounds between two of them stop there."""
    policy = in_float64(plain, made_up)

    def logprobs(number: int) -> torch.Tensor:
        mixed = groups[number]
        with torch.no_grad():
            parts = [
                policy.logprobs(mixed, sample.tokens)[plain.own(sample)]
                for sample in mixed.group.samples
            ]
        return torch.cat(parts)

    start = {number: logprobs(number) for number in range(4)}
    order = list(plain.shuffled(4, minibatches, epochs, SEED, 1))
    away = []
    weights = []
    for these in order:
        gap = torch.cat([logprobs(number) - start[number] for number in these])
        away.append(float((gap.exp() - 1 - gap).mean()))
        weights.append({k: v.detach().clone() for k, v in policy.parameters(critic=False).items()})
        plain.grpo_step(policy, groups, iter([these]), longest=12)
    assert away[0] == pytest.approx(0.0, abs=1e-12)
    highest = 0.0
    for made in range(1, len(order)):
        if away[made] <= highest:
            continue
        updates = learner(
            minibatches=minibatches, update_epochs=epochs, stop_kl=(highest + away[made]) / 2
        )
        outcome = updates.train(1, groups, lr=0.01)
        assert outcome.applied
        assert outcome.metrics["train/updates"] == made
        assert outcome.metrics["train/kl_stop"] == 1
        assert outcome.metrics["train/kl_start"] == pytest.approx(away[made], rel=1e-3)
        for name, tensor in updates.engine.parameters():
            torch.testing.assert_close(tensor, weights[made][name].float(), atol=1e-6, rtol=0)
        highest = away[made]
    updates = learner(minibatches=minibatches, update_epochs=epochs, stop_kl=2 * highest)
    outcome = updates.train(1, groups, lr=0.01)
    assert outcome.metrics["train/kl_stop"] == 0
    assert outcome.metrics["train/updates"] == len(order)
    compare(updates, policy)


def test_rounding_stops_no_step_before_its_first_update(
    learner: Learner, groups: list[MixedGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the pass that begins a step and that of its first update may differ in bfloat16."""
    measured = iter([1e-6, 1e-6])
    monkeypatch.setattr(
        "tandem.learner.updates.updates._kl_from_start", lambda *given: next(measured)
    )
    found = learner(update_epochs=2, stop_kl=1e-7).train(1, groups, lr=0.01).metrics
    assert (found["train/updates"], found["train/kl_stop"]) == (1, 1)
    assert found["train/kl_start"] == 1e-6


def test_a_steps_pairs_are_counted_once(learner: Learner, groups: list[MixedGroup]) -> None:
    counted = [
        learner(objective={"name": "cpo"}, **passes).train(1, groups, lr=0.01).metrics
        for passes in ({}, {"minibatches": 2}, {"minibatches": 2, "update_epochs": 2})
    ]
    assert [found["train/updates"] for found in counted] == [1, 2, 4]
    once, *others = [found["train/preference_pairs"] for found in counted]
    assert others == [once, once]


@pytest.mark.parametrize(("stage", "dtype"), CELLS)
def test_after_a_stop_the_next_step_is_as_if_the_update_had_never_begun(
    dtype: str, stage: int, groups: list[MixedGroup], made_up: ModuleType, parity: ModuleType
) -> None:
    def started(**learner: Any) -> Updates:
        config = made_up.config_of(
            learner={"optimizer": OPTIMIZER, "zero_stage": stage, **learner},
            replay={"groups_per_step": 4},
            model={"dtype": dtype},
        )
        model = made_up.tiny_model(dtype=getattr(torch, dtype))
        with parity.stages_as_set():
            engine = DeepSpeedEngine(model, config, CPU)
        assert engine.stage == stage
        return Updates(engine, config)

    stopped = started(update_epochs=2, stop_kl=1e-9)
    once = started()
    for step in (1, 2):
        found = stopped.train(step, groups, lr=0.05).metrics
        assert (found["train/updates"], found["train/update_epochs"]) == (1, 1)
        once.train(step, groups, lr=0.05)
    ours, theirs = snapshot(stopped), snapshot(once)
    for name, tensor in theirs.items():
        # With ZeRO-3 a parameter is empty until it is gathered.
        assert tensor.numel(), name
        assert torch.equal(ours[name], tensor), name


def test_a_fault_in_the_second_pass_undoes_the_step(
    learner: Learner, groups: list[MixedGroup]
) -> None:
    class Breaks(Grpo):
        calls = 0

        def loss(self, rows: Any, scalars: Any) -> Any:
            self.calls += 1
            loss, sums = super().loss(rows, scalars)
            return (loss * float("nan") if self.calls > 1 else loss), sums

    updates = learner(Breaks(make("grpo").settings), update_epochs=2)
    outcome = updates.train(1, groups, lr=0.01)
    assert not outcome.applied
    assert outcome.undone
