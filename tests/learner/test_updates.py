"""A step: mini-batches of whole groups, columns filled in, and the ratio check at lag 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem.common.config import Config
from tandem.common.errors import ConfigError
from tandem.common.objectives import OBJECTIVES
from tandem.common.records import FinishReason, Group, Sample, SamplingParams, Source
from tandem.learner.engine.critic import CriticEngine
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.objectives import Grpo, Objective, make
from tandem.learner.objectives.configured import check_own, objective_of
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group")

Learner = Callable[..., Updates]


@pytest.fixture
def learner(made_up: ModuleType) -> Learner:
    """Makes a rank on a tiny model."""

    def started(objective: Objective | None = None, **sections: Any) -> Updates:
        config: Config = made_up.config_of(**sections)
        critic = None
        if config.learner.critic is not None:
            critic = CriticEngine(made_up.tiny_model(seed=7), config, torch.device("cpu"))
        engine = DeepSpeedEngine(made_up.tiny_model(), config, torch.device("cpu"), critic)
        return Updates(engine, config, objective)

    return started


def groups_of(made_up: ModuleType, *args: Any, **options: Any) -> list[MixedGroup]:
    found: list[MixedGroup] = made_up.groups_of(*args, **options)
    return found


def with_samples(mixed: MixedGroup, samples: Sequence[Sample]) -> MixedGroup:
    """The group with other samples."""
    group = replace(mixed.group, samples=tuple(samples))
    return MixedGroup(group=group, traces=mixed.traces)


def changed(groups: list[MixedGroup], **values: Any) -> list[MixedGroup]:
    """The groups with all samples changed."""
    return [
        with_samples(mixed, [replace(s, **values) for s in mixed.group.samples]) for mixed in groups
    ]


def snapshot(updates: Updates) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in updates.engine.parameters()}


def test_a_step_without_a_signal_changes_nothing_and_is_applied(
    learner: Learner, made_up: ModuleType
) -> None:
    updates = learner()
    before = snapshot(updates)
    called = []
    outcome = updates.train(
        1,
        changed(groups_of(made_up, 2), reward=0.0),
        lr=1e-3,
        before_step=lambda: called.append(True),
    )
    assert outcome.applied
    assert outcome.metrics["train/rows_active"] == 0
    assert outcome.metrics["train/updates"] == 0
    assert called == [True]
    after = snapshot(updates)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_rows_without_an_advantage_are_left_out_and_still_count(
    learner: Learner, made_up: ModuleType
) -> None:
    """Four groups of which two have no signal: half the loss of the two alone."""
    signal, silent = groups_of(made_up, 2), groups_of(made_up, 4)[2:]
    half = learner().train(1, [*signal, *changed(silent, reward=1.0)], lr=1e-3)
    alone = learner().train(1, signal, lr=1e-3)
    assert half.metrics["train/rows"] == 16
    assert half.metrics["train/rows_active"] == 8
    assert half.metrics["train/loss"] == pytest.approx(alone.metrics["train/loss"] / 2, rel=1e-5)


def test_a_mini_batch_without_a_signal_is_no_update(learner: Learner, made_up: ModuleType) -> None:
    """The weights are still those that sampled when the second one is trained on."""
    silent, signal = groups_of(made_up, 2)
    both = learner(learner={"minibatches": 2}).train(
        1, [*changed([silent], reward=1.0), signal], lr=1e-3
    )
    alone = learner().train(1, [signal], lr=1e-3)
    assert both.metrics["train/updates"] == 1
    for name in ("train/log_ratio_max_lag0", "train/grad_norm"):
        assert both.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-5)


@pytest.mark.parametrize(
    ("how", "active"), [("wrong", 8), ("mask", 6), ("zero_advantage", 6), ("leave_out", 6)]
)
def test_the_setting_says_what_becomes_of_stragglers(
    learner: Learner, made_up: ModuleType, how: str, active: int
) -> None:
    """The last sample of each group was cut at its deadline."""
    groups = []
    for mixed in groups_of(made_up, 2):
        *ended, late = mixed.group.samples
        late = replace(late, finish_reason=FinishReason.DEADLINE)
        groups.append(with_samples(mixed, [*ended, late]))
    updates = learner(learner={"objective": {"stragglers": how}})
    found = updates.train(1, groups, lr=1e-3).metrics
    assert found["train/rows"] == (6 if how == "leave_out" else 8)
    assert found["train/rows_active"] == active


def test_the_constant_is_configured_length_times_nominal_rows(
    learner: Learner, made_up: ModuleType
) -> None:
    groups = groups_of(made_up, 2)
    # A row without a verdict leaves the loss, and the denominator stays.
    first, *rest = groups
    right, other, *others = first.group.samples
    ungraded = replace(other, verdict=None, reward=None)
    for batch in (groups, [with_samples(first, [right, ungraded, *others]), *rest]):
        by_constant = learner().train(1, batch, lr=1e-3).metrics
        objective = {"objective": {"aggregation": "token_mean"}}
        by_token = learner(learner=objective).train(1, batch, lr=1e-3).metrics
        total = by_token["train/loss"] * by_token["train/tokens_own"]
        # 12 tokens, 2 groups of 4.
        assert by_constant["train/loss"] * (12 * 2 * 4) == pytest.approx(total, rel=1e-5)


def test_mini_batches_are_whole_groups_and_steps_of_their_own(
    learner: Learner, made_up: ModuleType
) -> None:
    groups = groups_of(made_up, 4)
    updates = learner(learner={"minibatches": 2}, replay={"groups_per_step": 4})
    outcome = updates.train(1, groups, lr=1e-3)
    assert outcome.metrics["train/updates"] == 2
    apart = learner()
    first = apart.train(1, groups[:2], lr=1e-3)
    second = apart.train(1, groups[2:], lr=1e-3)
    mean = (first.metrics["train/loss"] + second.metrics["train/loss"]) / 2
    assert outcome.metrics["train/loss"] == pytest.approx(mean, rel=1e-6)
    for (_, ours), (_, theirs) in zip(
        updates.engine.parameters(), apart.engine.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


class Curious(Grpo):
    """Looks at the columns that it asks for."""

    unit = "group"
    columns = frozenset({"behaviour", "proximal", "current"})

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.groups_seen: list[list[int]] = []
        self.apart: list[float] = []

    def statistics(self, rows: Any) -> dict[str, torch.Tensor]:
        total = super().statistics(rows)
        return total | {"sum_logprobs": rows.logprobs.double().sum()}

    def loss(self, rows: Any, scalars: Any) -> Any:
        self.groups_seen.append(sorted(set(rows.group.tolist())))
        self.apart.append(float((rows.logprobs.detach() - rows.proximal).abs().max()))
        self.scalars = scalars
        return super().loss(rows, scalars)


def test_columns_are_filled_in_and_units_stay_whole(learner: Learner, made_up: ModuleType) -> None:
    objective = Curious(OBJECTIVES["grpo"]())
    updates = learner(
        objective,
        learner={"minibatches": 2, "micro_batch_tokens": 80},
        replay={"groups_per_step": 4},
    )
    outcome = updates.train(1, groups_of(made_up, 4), lr=1e-2)
    assert outcome.applied
    # Two mini-batches of two groups, each group a micro-batch of its own.
    assert sorted(objective.groups_seen) == [[0], [0], [1], [1]]
    # The proximal policy is that of the step's start: the second mini-batch has left it.
    assert max(objective.apart[:2]) < 1e-5
    assert min(objective.apart[2:]) > 1e-3
    assert objective.scalars["sum_logprobs"] < 0


BASELINES = (
    "group_mean",
    "group_mean_std",
    "own_mean",
    "own_mean_std",
    "leave_one_out",
    "max_rl",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "none",
)


class Recorder(Grpo):
    """Keeps the advantages of the rows that its updates count."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.given: list[float] = []

    def statistics(self, rows: Any) -> dict[str, torch.Tensor]:
        self.given += rows.advantages.tolist()
        return super().statistics(rows)


def with_rewards(groups: list[MixedGroup], rewards: list[list[float]]) -> list[MixedGroup]:
    """The groups with these rewards of their samples."""
    return [
        with_samples(
            mixed,
            [
                replace(sample, reward=reward)
                for sample, reward in zip(mixed.group.samples, own, strict=True)
            ],
        )
        for mixed, own in zip(groups, rewards, strict=True)
    ]


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_are_of_the_steps_batch_however_it_is_cut(
    baseline: str, minibatches: int, learner: Learner, made_up: ModuleType, formula: ModuleType
) -> None:
    """Two groups whose samples are all wrong, one of them with an expert's row, and two others."""
    objective = Recorder(OBJECTIVES["grpo"](advantage=baseline))
    updates = learner(
        objective,
        learner={"minibatches": minibatches},
        replay={"groups_per_step": 4},
    )
    rewards = [[0.0, 1.0, 0.5, 1.0], [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [0.0] * 3]
    groups = with_rewards([*groups_of(made_up, 3), *groups_of(made_up, 4, size=3)[3:]], rewards)
    trace = made_up.trace(0)
    groups[3] = MixedGroup(group=groups[3].group, traces=(trace,))
    updates.train(1, groups, lr=1e-3)
    expected = formula.advantages_of(
        baseline,
        [reward for own in rewards for reward in own] + [trace.reward],
        [number for number in range(4) for _ in range(4)],
        [False] * 15 + [True],
        [len(s.tokens) for mixed in groups for s in mixed.group.samples] + [len(trace.tokens)],
    )
    assert objective.given == pytest.approx(expected, abs=1e-12)


def test_a_group_that_is_all_wrong_learns_from_the_rest_of_the_batch(
    learner: Learner, made_up: ModuleType
) -> None:
    """REINFORCE++ has no group baseline: alone in its mini-batch, such a group is pressed down as
    far as beside the others."""
    pair = groups_of(made_up, 2)
    groups = [with_samples(mixed, [pair[0].group.samples[0]] * 4) for mixed in pair]
    found = {}
    for minibatches in (1, 2):
        objective = Recorder(OBJECTIVES["reinforce_pp"]())
        updates = learner(objective, learner={"minibatches": minibatches})
        rewards = [[1.0, 1.0, 1.0, 0.0], [0.0] * 4]
        outcome = updates.train(1, with_rewards(groups, rewards), lr=1e-3)
        assert outcome.metrics["train/rows_active"] == 8
        found[minibatches] = objective.given
    # Mean 3/8, variance 15/64.
    assert found[2] == found[1]
    assert found[2][4:] == pytest.approx([-0.375 / (15 / 64) ** 0.5] * 4)


@pytest.mark.parametrize(
    "objective",
    [{"name": "grpo", "kl_coefficient": 0.1}, {"name": "dpo"}, {"name": "kto"}],
    ids=lambda objective: objective["name"],
)
def test_the_reference_is_the_base_model_and_stays_it(
    objective: dict[str, Any],
    learner: Learner,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: made_up.tiny_model()
    )
    updates = learner(learner={"objective": objective, "micro_batch_tokens": 80})
    groups = groups_of(made_up, 2)
    first = updates.train(1, groups, lr=1e-2).metrics
    assert first["train/k3_reference"] == pytest.approx(0.0, abs=1e-8)
    second = updates.train(2, groups, lr=1e-2).metrics
    assert second["train/k3_reference"] > 1e-5


def gap_to(model: Any, group: Group, sample: Sample) -> tuple[float, float]:
    """Σ log μ/π_ref over a sample, and the k3 of it, by the model's whole logits."""
    ids = np.concatenate([group.prompt_tokens, sample.tokens]).astype(np.int64)
    with torch.no_grad():
        every = torch.log_softmax(model(input_ids=torch.from_numpy(ids)[None]).logits[0], -1)
    places = torch.arange(len(group.prompt_tokens), len(ids))
    known = every[places - 1, torch.from_numpy(ids)[places]]
    gaps = sample.logprobs.astype(np.float64) - known.double().numpy()
    return float(gaps.sum()), float((np.exp(-gaps) - 1 + gaps).sum())


@pytest.mark.parametrize(("budget", "form"), [(4096, "k1"), (18, "k1"), (18, "k3")])
def test_the_kl_in_the_reward_is_taken_off_before_the_advantages(
    budget: int,
    form: str,
    learner: Learner,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the graders had paid R − β Σ log μ/π_ref, or the sum of its k3."""
    reference = made_up.tiny_model(seed=5)
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: reference
    )
    groups = groups_of(made_up, 3)
    gaps = [[gap_to(reference, m.group, s) for s in m.group.samples] for m in groups]
    rewards = [
        [
            (sample.reward or 0.0) - 0.03 * gap[form == "k3"]
            for sample, gap in zip(m.group.samples, own, strict=True)
        ]
        for m, own in zip(groups, gaps, strict=True)
    ]
    paid = with_rewards(groups, rewards)
    expected = learner().train(1, paid, lr=1e-3).metrics
    objective = {"kl_reward_coefficient": 0.03, "kl_reward_form": form}
    options = {"objective": objective, "micro_batch_tokens": budget}
    found = learner(learner=options).train(1, groups, lr=1e-3).metrics
    tokens = sum(len(sample.tokens) for mixed in groups for sample in mixed.group.samples)
    assert found["train/k1_reference"] == pytest.approx(
        np.sum(gaps, axis=(0, 1))[0] / tokens, rel=1e-5
    )
    for key in ("train/loss", "train/grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6)
    assert "train/k3_reference" not in found


def test_a_kl_of_rounding_alone_teaches_nothing_where_rewards_are_equal(
    learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has sampled the rows itself, and its log-probs are rounded at 1e-6."""
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: made_up.tiny_model()
    )
    groups = [
        with_samples(
            mixed,
            [
                replace(sample, logprobs=sample.logprobs + np.float32(1e-6 * place))
                for place, sample in enumerate(mixed.group.samples)
            ],
        )
        for mixed in from_engine(made_up, made_up.tiny_model())
    ]
    groups = with_rewards(groups, [[1, 0, 1, 0], [1] * 4])
    norms = []
    for beta in (0.0, 0.5):
        options = {"objective": {"name": "dapo", "kl_reward_coefficient": beta}}
        found = learner(learner=options).train(1, groups, lr=1e-3)
        norms.append(found.metrics["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_reference_that_gives_no_numbers_changes_nothing(
    learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = made_up.tiny_model(seed=5)
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: reference
    )
    for key in ("kl_coefficient", "kl_reward_coefficient"):
        updates = learner(learner={"objective": {key: 0.03}})
        before = snapshot(updates)
        # Later than at start, where it would be refused.
        with torch.no_grad():
            reference.model.embed_tokens.weight.fill_(float("nan"))
        assert not updates.train(1, groups_of(made_up, 2), lr=1e-3).applied
        after = snapshot(updates)
        assert all(torch.equal(after[name], before[name]) for name in before)
        reference.load_state_dict(made_up.tiny_model(seed=5).state_dict())


def test_an_experts_tokens_cost_no_kl(
    learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their log μ isn't known; the row keeps its reward, and so the others' distance to it grows."""
    reference = made_up.tiny_model(seed=5)
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: reference
    )
    (mixed,) = with_traces(made_up, groups_of(made_up, 1, size=3))
    group = mixed.group
    updates = learner(
        learner={"objective": {"name": "luffy", "kl_reward_coefficient": 0.03}},
    )
    found = updates.train(1, [mixed], lr=1e-3).metrics
    gaps = [gap_to(reference, group, sample)[0] for sample in group.samples]
    tokens = sum(len(sample.tokens) for sample in group.samples)
    assert found["train/k1_reference"] == pytest.approx(sum(gaps) / tokens, rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "key", "expected"),
    [
        (
            {"entropy_target": 9.0, "entropy_adapt": "stepped", "entropy_step": 0.01},
            "entropy_coefficient",
            [0.0, 0.01, 0.02],
        ),
        (
            {
                "entropy_target": 0.1,
                "entropy_adapt": "stepped",
                "entropy_step": 0.01,
                "entropy_coefficient": 0.015,
            },
            "entropy_coefficient",
            [0.015, 0.005, 0.0],
        ),
        ({"kl_target": 1e-9, "kl_coefficient": 0.5}, "kl_coefficient", [0.5, 0.49, 0.4998]),
        ({"kl_target": 1e9, "kl_reward_coefficient": 0.5}, "kl_reward_coefficient", [0.5, 0.49]),
    ],
)
def test_a_coefficient_follows_what_the_update_before_measured(
    objective: dict[str, Any],
    key: str,
    expected: list[float],
    learner: Learner,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The KL in the loss is 0 at first and soon over 1e-9."""
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: made_up.tiny_model()
    )
    updates = learner(learner={"objective": objective})
    groups = groups_of(made_up, 2)
    found = [
        updates.train(step, groups, lr=1e-2).metrics[f"train/{key}"]
        for step in range(1, len(expected) + 1)
    ]
    assert found == pytest.approx(expected, rel=1e-9)
    moved = updates.coefficients.state()
    other = learner(learner={"objective": objective}).coefficients
    assert other.state() != moved
    other.restore(moved)
    assert other.state() == moved


def test_the_moved_coefficient_is_the_one_in_the_loss(
    learner: Learner, made_up: ModuleType
) -> None:
    """A bonus that has been stepped to 0.01 makes the same update as one of 0.01."""
    groups = groups_of(made_up, 2)
    moving = {"entropy_target": 9.0, "entropy_adapt": "stepped", "entropy_step": 0.01}
    updates = learner(learner={"objective": moving})
    updates.coefficients.restore({"entropy": 0.01})
    fixed = learner(learner={"objective": {"entropy_coefficient": 0.01}})
    found, expected = (one.train(1, groups, lr=1e-2).metrics for one in (updates, fixed))
    assert found["train/loss"] == expected["train/loss"]
    assert found["train/grad_norm"] == expected["train/grad_norm"]


def with_traces(made_up: ModuleType, groups: list[MixedGroup], count: int = 1) -> list[MixedGroup]:
    """The groups, the first ones of them with a trace each."""
    return [
        MixedGroup(group=mixed.group, traces=(made_up.trace(number),) if number < count else ())
        for number, mixed in enumerate(groups)
    ]


def begun_by_an_expert(mixed: MixedGroup, tokens: int) -> MixedGroup:
    """The group, its first sample's first tokens an expert's."""
    first, *others = mixed.group.samples
    place = np.arange(len(first.tokens))
    (span,) = first.spans
    begun = replace(
        first,
        source=np.where(place < tokens, Source.EXPERT, Source.OWN).astype(np.uint8),
        logprobs=np.where(place < tokens, np.nan, first.logprobs).astype(np.float32),
        spans=(replace(span, start=tokens),),
    )
    return with_samples(mixed, [begun, *others])


def test_a_prefix_counts_with_the_experts_tokens(learner: Learner, made_up: ModuleType) -> None:
    mixed = begun_by_an_expert(groups_of(made_up, 1)[0], 3)
    updates = learner(learner={"objective": {"name": "luffy"}})
    found = updates.train(1, [mixed], lr=1e-3).metrics
    assert found["train/tokens_expert"] == 3
    own = sum(len(sample.tokens) for sample in mixed.group.samples) - 3
    assert found["train/tokens_own"] == own
    assert found["train/loss_expert"] != 0


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_trains_whatever_the_micro_batches(
    name: str, learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates of a step, with traces and a trace's prefix among the rows."""
    monkeypatch.setattr("tandem.learner.updates.reference.load_model", made_up.other_model)
    groups = with_traces(made_up, groups_of(made_up, 4, size=3), 2)
    groups[3] = begun_by_an_expert(groups[3], 2)
    found = []
    for budget in (4096, 18 if make(name).unit == "row" else 90):
        updates = learner(
            learner={"objective": {"name": name}, "minibatches": 2, "micro_batch_tokens": budget},
            replay={"max_staleness": 0},
        )
        before = snapshot(updates)
        outcome = updates.train(1, groups, lr=1e-3)
        assert outcome.applied
        after = snapshot(updates)
        assert any(not torch.equal(after[key], before[key]) for key in before)
        found.append(outcome.metrics)
    assert found[1]["train/micro_batches"] > found[0]["train/micro_batches"]
    for key in ("train/loss", "train/grad_norm"):
        assert np.isfinite(found[0][key])
        assert found[1][key] == pytest.approx(found[0][key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_log_probs_that_are_no_numbers_undo_a_step_of_any_objective(
    name: str, learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is raised and no parameter changes: the step's groups are put aside, and on it goes."""
    monkeypatch.setattr("tandem.learner.updates.reference.load_model", made_up.other_model)
    updates = learner(learner={"objective": {"name": name}}, replay={"max_staleness": 0})
    norm = dict(updates.engine.model.named_parameters())["model.norm.weight"]
    with torch.no_grad():
        norm.fill_(float("nan"))
    before = snapshot(updates)
    groups = with_traces(made_up, groups_of(made_up, 1, size=3))
    assert not updates.train(1, groups, lr=1e-3).applied
    after = snapshot(updates)
    assert all(torch.equal(after[key], before[key]) for key in before if "norm" not in key)


def from_engine(
    made_up: ModuleType, model: Any, *, temperature: float = 0.7, shift: int = 0
) -> list[MixedGroup]:
    """Groups whose behaviour log-probs a model's whole logits give, as an engine reports them."""
    found: list[MixedGroup] = []
    for mixed in groups_of(made_up, 2, step=4):
        group, samples = mixed.group, []
        for sample in group.samples:
            ids = np.concatenate([group.prompt_tokens, sample.tokens]).astype(np.int64)
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0] / temperature
            every = torch.log_softmax(logits, -1)
            places = torch.arange(len(group.prompt_tokens), len(ids))
            picked = every[places - 1 - shift, torch.from_numpy(ids)[places]]
            samples.append(
                replace(
                    sample,
                    logprobs=picked.numpy(),
                    sampling=SamplingParams(
                        temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=1024
                    ),
                )
            )
        found.append(with_samples(mixed, samples))
    return found


def greatest_log_ratio(learner: Learner, groups: list[MixedGroup]) -> float:
    metrics = learner().train(5, groups, lr=1e-3).metrics
    assert metrics["train/lag"] == 0
    return metrics["train/log_ratio_max_lag0"]


def test_at_lag_0_engine_and_learner_agree(learner: Learner, made_up: ModuleType) -> None:
    assert greatest_log_ratio(learner, from_engine(made_up, made_up.tiny_model())) <= 1e-4


@pytest.mark.parametrize(
    "fault", ["temperature", "shifted labels", "older weights", "no final norm"]
)
def test_each_planted_fault_trips_the_ratio_check(
    fault: str, learner: Learner, made_up: ModuleType
) -> None:
    model = made_up.tiny_model()
    options: dict[str, Any] = {}
    if fault == "temperature":
        options["temperature"] = 1.0
    elif fault == "shifted labels":
        options["shift"] = 1
    elif fault == "older weights":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3 * torch.randn_like(parameter))
    else:
        model.model.norm = torch.nn.Identity()
    assert greatest_log_ratio(learner, from_engine(made_up, model, **options)) > 1e-3


def test_the_kl_in_the_reward_is_steered_once_by_each_measurement(
    learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured once a step, however many updates the step has; that in the loss is by each update."""
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: made_up.tiny_model()
    )
    objective = {"kl_target": 1e9, "kl_reward_coefficient": 0.5, "kl_coefficient": 0.5}
    updates = learner(learner={"objective": objective, "update_epochs": 4})
    metrics = updates.train(1, groups_of(made_up, 2), lr=1e-2).metrics
    assert metrics["train/updates"] == 4
    # The step's rewards were made with one β.
    assert metrics["train/kl_reward_coefficient"] == 0.5
    assert updates.coefficients.kl_reward == pytest.approx(0.5 * 0.98, rel=1e-12)
    assert updates.coefficients.kl == pytest.approx(0.5 * 0.98**4, rel=1e-12)


OWN = "tandem.learner.objectives:"


def test_the_turns_of_an_objective_of_ones_own_are_discounted_as_its_params_say(
    learner: Learner, made_up: ModuleType
) -> None:
    rows = made_up.random_rows()
    for objective, per_turn in (
        ({"name": f"{OWN}Grpo", "params": {"turn_discount": 0.5}}, True),
        ({"name": f"{OWN}Grpo"}, False),
        ({"name": "grpo", "turn_discount": 0.5}, True),
    ):
        columns = learner(learner={"objective": objective}).columns
        found = columns.compared(rows, rows.rewards).token_advantages
        assert (found is not None) is per_turn


STORED = {"source": "offline"}


@pytest.mark.parametrize(
    ("objective", "learner_keys", "staleness", "said"),
    [
        (
            {"name": f"{OWN}Reinforce"},
            {},
            1,
            r"neither clips nor weights .* set replay\.max_staleness=0",
        ),
        ({"name": f"{OWN}Luffy"}, {"minibatches": 2}, 1, None),
        ({"name": "capped_objective:Capped"}, {"minibatches": 2}, 1, None),
        (
            {"name": f"{OWN}Srft"},
            {"minibatches": 2},
            0,
            r"has no ratio .* set learner\.minibatches=1",
        ),
        ({"name": f"{OWN}Srft"}, {}, 0, None),
        ({"name": f"{OWN}Dpo"}, STORED, 1, r"set it to true, and start over with --fresh"),
        ({"name": f"{OWN}Kto", "rejected": True}, STORED, 1, None),
        ({"name": f"{OWN}Dpo"}, {}, 1, None),
        (
            {"name": "own_objective:unclipped", "kl_coefficient": 0.1},
            {},
            1,
            r"kl_coefficient=0\.1 does",
        ),
        ({"name": f"{OWN}Grpo", "kl_coefficient": 0.1}, {}, 1, None),
    ],
)
def test_an_objective_of_ones_own_is_held_to_what_its_class_needs(
    objective: dict[str, Any],
    learner_keys: dict[str, Any],
    staleness: int,
    said: str | None,
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    config = made_up.config_of(
        learner={"objective": objective, **learner_keys}, replay={"max_staleness": staleness}
    )
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_own(objective_of(config), config)


@pytest.mark.parametrize(
    ("objective", "told", "way_out"),
    [
        ({"name": f"{OWN}Grpo", "params": {"advantage": "none"}}, "compares no rows", "none"),
        ({"name": f"{OWN}Grpo", "params": {"advantage": "leave_one_out"}}, "", ""),
        ({"name": f"{OWN}Grpo", "advantage": "none"}, "", ""),
        ({"name": f"{OWN}Reinforce"}, "compares no rows", "none"),
        ({"name": f"{OWN}Reinforce", "advantage": "none"}, "", ""),
        ({"name": f"{OWN}Dpo", "advantage": "none"}, "compares the rows", "group_mean"),
    ],
)
def test_a_ledger_that_takes_an_objective_of_ones_own_for_another_one_is_told(
    objective: dict[str, Any],
    told: str,
    way_out: str,
    made_up: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = made_up.config_of(learner={"objective": objective}, replay={"max_staleness": 0})
    check_own(objective_of(config), config)
    assert ("the ledger, which can't look there" in caplog.text) == bool(told)
    assert told in caplog.text
    assert ("set learner.objective.advantage=" in caplog.text) == bool(told)
    assert not told or f"set learner.objective.advantage={way_out} in" in caplog.text


def test_held_out_pairs_need_an_objective_with_a_margin(
    made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)

    def held_out(**objective: Any) -> None:
        learner = {"objective": objective, **STORED}
        objective_of(made_up.config_of(learner=learner, data={"heldout_pairs": 0.2}))

    with pytest.raises(ConfigError, match=r"set learner\.objective\.rejected=true if it learns"):
        held_out(name=f"{OWN}Dpo")
    with pytest.raises(ConfigError, match=r"own_objective:unclipped has no margin"):
        held_out(name="own_objective:unclipped", rejected=True)
    held_out(name=f"{OWN}Dpo", rejected=True)


@pytest.mark.parametrize("name", ["gspo", "cispo", "reinforce"])
def test_a_class_that_derives_from_a_built_in_one_trains_as_it_does(
    name: str, learner: Learner, made_up: ModuleType
) -> None:
    """Also by its advantages, which are made before its loss is asked."""
    groups = groups_of(made_up, 2)
    after = []
    for called in (name, f"{OWN}{name.title()}"):
        updates = learner(learner={"objective": {"name": called}}, replay={"max_staleness": 0})
        assert updates.train(1, groups, lr=1e-2).applied
        after.append(snapshot(updates))
    built_in, derived = after
    assert all(torch.equal(derived[key], built_in[key]) for key in built_in)
