"""Every objective's loss and gradient against numbers computed by hand, and its invariances."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.common.errors import ConfigError
from tandem.common.objectives import OBJECTIVES
from tandem.common.objectives.keys import Baseline
from tandem.learner.losses.ratios import k3, log_ratio, ppo_clip
from tandem.learner.losses.shaping import shaped
from tandem.learner.objectives import REGISTRY, Grpo, make, register
from tandem.learner.rows.rows import Rows

F64 = torch.float64

UNCLIPPED: dict[str, Any] = {"clip_low": None, "clip_high": None, "dual_clip": None}


@pytest.mark.parametrize(
    ("settings", "baseline", "loss"),
    [
        (UNCLIPPED, "group_mean", 0.002315),
        (UNCLIPPED | {"aggregation": "token_mean"}, "group_mean", 0.000926),
        ({"dual_clip": None}, "group_mean", 0.049537),
        (UNCLIPPED | {"shaping": "none"}, "group_mean", 0.059444),
        (UNCLIPPED, "own_mean", -0.361111),
    ],
    ids=["as published", "token mean", "clipped", "without shaping", "own baseline"],
)
def test_luffy_gives_the_published_losses(
    settings: dict[str, Any], baseline: Baseline, loss: float, hand: ModuleType
) -> None:
    these, _ = hand.reference_case(baseline)
    objective = make("luffy", **settings)
    found, _ = objective.loss(these, hand.scalars_of(objective, these))
    assert found.item() == pytest.approx(loss, abs=1e-6)


def test_luffy_gives_the_published_gradient(hand: ModuleType) -> None:
    these, logprobs = hand.reference_case()
    objective = make("luffy", **UNCLIPPED)
    objective.loss(these, hand.scalars_of(objective, these))[0].backward()
    expected = [0.208333, 0.166667, 0.111111, -0.083333, -0.041667, -0.125, -0.083333]
    expected += [-0.011574, -0.015625, -0.008230]
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=F64), atol=1e-6, rtol=0)


def test_clip_fractions_are_told_by_the_sign_of_the_advantage(hand: ModuleType) -> None:
    these, _ = hand.reference_case()
    objective = make("luffy")
    scalars = hand.scalars_of(objective, these)
    _, sums = objective.loss(these, scalars)
    told = objective.report({k: float(v) for k, v in sums.items()}, scalars)
    # ρ = 1.5 of four tokens with A > 0, and ρ = 2/3 of three with A < 0.
    assert told["clip_fraction_positive"] == pytest.approx(1 / 4)
    assert told["clip_fraction_negative"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("p", "q", "slope"),
    [
        (0.01, 0.090909, 0.082645),
        (0.1, 0.5, 0.25),
        (0.5, 0.833333, 0.138889),
        (1.0, 0.909091, 0.082645),
    ],
)
def test_shaping_and_its_gradient(p: float, q: float, slope: float) -> None:
    logp = torch.tensor(math.log(p), dtype=F64, requires_grad=True)
    value = shaped(logp, 0.1)
    value.backward()
    assert value.item() == pytest.approx(q, abs=1e-6)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(slope, abs=1e-6)


def test_an_experts_recorded_log_probs_divide_the_weight(hand: ModuleType) -> None:
    these, _ = hand.reference_case()
    behaviour = torch.where(these.expert, math.log(0.5), these.behaviour)
    objective = make("luffy", **UNCLIPPED)
    found, sums = objective.loss(
        these.with_columns(behaviour=behaviour, known=torch.ones_like(these.known)),
        hand.scalars_of(objective, these),
    )
    weights = [p / 0.5 for p in hand.P[2][:3]]
    expected = -sum(w / (w + 0.1) for w in weights) / 3 / 4
    assert sums["loss_expert"].item() == pytest.approx(expected, abs=1e-12)
    assert found.item() == pytest.approx(0.48611 - 0.33333 + expected, abs=1e-4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (0.5, 1, -0.5),
        (1.0, 1, -1.0),
        (1.25, 1, -1.2),
        (2.0, 1, -1.2),
        (0.5, -1, 0.8),
        (1.0, -1, 1.0),
        (2.0, -1, 2.0),
        (1000.0, -1, 3.0),
        (1000.0, -2, 6.0),
    ],
)
def test_ppo_clip_with_its_dual_bound(ratio: float, advantage: float, loss: float) -> None:
    found = ppo_clip(
        torch.tensor([math.log(ratio)], dtype=F64),
        torch.tensor([float(advantage)], dtype=F64),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=3.0,
    )
    assert found.item() == pytest.approx(loss)


def test_without_the_dual_clip_a_bad_token_costs_its_ratio() -> None:
    log_r, bad = torch.tensor([math.log(1000.0)]), torch.tensor([-1.0])
    found = ppo_clip(log_r, bad, clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert found.item() == pytest.approx(1000.0, rel=1e-4)


def test_grpo_leaves_expert_tokens_out(hand: ModuleType) -> None:
    these, logprobs = hand.reference_case()
    objective = make("grpo", **UNCLIPPED)
    loss, _ = objective.loss(these, hand.scalars_of(objective, these))
    loss.backward()
    assert loss.item() == pytest.approx((1.944444 - 1.333333) / 4, abs=1e-6)
    assert logprobs.grad is not None
    assert (logprobs.grad[these.expert] == 0).all()


def test_rl_sft_loss_adds_the_mean_over_expert_tokens(hand: ModuleType) -> None:
    these, logprobs = hand.reference_case()
    objective = make("rl_sft_loss", sft_coefficient=0.5, **UNCLIPPED)
    loss, _ = objective.loss(these, hand.scalars_of(objective, these))
    loss.backward()
    sft = -sum(math.log(p) for p in hand.P[2][:3]) / 3
    assert loss.item() == pytest.approx((1.944444 - 1.333333) / 4 + 0.5 * sft, abs=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad[these.expert], torch.full((3,), -0.5 / 3, dtype=F64))


@pytest.mark.parametrize(
    ("how", "denominator"),
    [("constant", 4.0), ("token_mean", 3.0), ("by_source", 3.0), ("sequence_mean", 3.0)],
)
def test_sft_is_cross_entropy_of_expert_tokens(
    how: Any, denominator: float, hand: ModuleType
) -> None:
    these, logprobs = hand.reference_case()
    objective = make("sft", aggregation=how)
    loss, _ = objective.loss(these, hand.scalars_of(objective, these))
    loss.backward()
    nll = -sum(math.log(p) for p in hand.P[2][:3])
    assert loss.item() == pytest.approx(nll / denominator)
    assert logprobs.grad is not None
    assert (logprobs.grad[~these.expert] == 0).all()


@pytest.mark.parametrize(
    ("how", "weights"),
    [
        ("constant", [1 / 4, 1 / 4, 1 / 4]),
        ("token_mean", [1 / 10, 1 / 10, 1 / 10]),
        ("sequence_mean", [1 / 9, 1 / 12, 1 / 9]),
        ("by_source", [1 / 7, 1 / 7, 1 / 3]),
    ],
)
def test_each_aggregation_weighs_the_tokens_of_a_row(
    how: Any, weights: list[float], hand: ModuleType
) -> None:
    these, logprobs = hand.reference_case()
    objective = make("luffy", aggregation=how, **UNCLIPPED)
    objective.loss(these, hand.scalars_of(objective, these))[0].backward()
    plain = make("luffy", **UNCLIPPED)
    ours = logprobs.grad
    again, logprobs2 = hand.reference_case()
    plain.loss(again, hand.scalars_of(plain, again, constant=1.0))[0].backward()
    assert ours is not None
    assert logprobs2.grad is not None
    expected = logprobs2.grad * torch.tensor(weights, dtype=F64)[these.row]
    torch.testing.assert_close(ours, expected)


def test_entropy_bonus_is_a_mean_over_own_tokens(hand: ModuleType) -> None:
    these, _ = hand.reference_case()
    entropy = torch.arange(10, dtype=F64).requires_grad_()
    objective = make("grpo", entropy_coefficient=0.01, **UNCLIPPED)
    loss, _ = objective.loss(these.with_columns(entropy=entropy), hand.scalars_of(objective, these))
    loss.backward()
    expected = torch.where(these.expert, 0.0, -0.01 / 7).double()
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, expected)


def test_expert_tokens_with_a_negative_advantage_leave_the_loss_unless_wanted(
    hand: ModuleType,
) -> None:
    for negative, expected in ((False, 0.0), (True, 0.5 / 0.6)):
        logprobs = torch.tensor([math.log(0.5)], dtype=F64, requires_grad=True)
        these = hand.rows(
            torch.zeros(1, dtype=torch.int64),
            torch.ones(1, dtype=torch.bool),
            torch.zeros(1, dtype=F64),
            torch.tensor([-1.0], dtype=F64),
            logprobs=logprobs,
            expert_row=torch.ones(1, dtype=torch.bool),
        )
        objective = make("luffy", expert_negative=negative)
        loss, _ = objective.loss(these, hand.scalars_of(objective, these, constant=1.0))
        assert loss.item() == pytest.approx(expected)


def test_k3_is_the_divergence_with_samples_of_either_side() -> None:
    left, right = torch.tensor([0.5, 0.2, 0.1]).log(), torch.tensor([0.4, 0.2, 0.3]).log()
    torch.testing.assert_close(
        k3(right - left), torch.tensor([0.023144, 0.0, 0.901388]), atol=1e-6, rtol=0
    )
    p, mu = torch.tensor([0.7, 0.3]).double(), torch.tensor([0.4, 0.6]).double()
    exact = (mu * (mu / p).log()).sum()
    torch.testing.assert_close((mu * k3(log_ratio(p.log(), mu.log()))).sum(), exact)


def test_every_name_is_that_of_an_objective() -> None:
    assert set(REGISTRY) == set(OBJECTIVES)
    with pytest.raises(ValueError, match="common/objectives"):
        register("nameless")(Grpo)


def test_an_unknown_objective_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean grpo.*luffy, luffy_paper"):
        make("grop")
    with pytest.raises(ConfigError, match="can't be imported"):
        make("no.such.module:Loss")
    with pytest.raises(ConfigError, match="neither a subclass of Objective nor a function"):
        make("collections:OrderedDict")


def test_a_users_objective_is_named_by_its_import_path() -> None:
    found = make("tandem.learner.objectives:Grpo")
    assert type(found) is Grpo


def test_a_class_that_derives_from_a_built_in_one_has_its_keys_in_params() -> None:
    given = {"clip_high": 0.5, "mine": 3}
    path = "tandem.learner.objectives:Grpo"
    found = make(path, entropy_coefficient=0.1, params=given)
    assert found.clips == {"clip_low": 0.2, "clip_high": 0.5, "dual_clip": 3.0}
    assert (found.settings.name, found.settings.entropy_coefficient) == (path, 0.1)
    assert found.settings.params == given
    assert found.needs_entropy


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("Gspo", {"aggregation": "sequence_mean", "advantage": "group_mean_std"}),
        ("Ppo", {"aggregation": "token_mean", "advantage": "none"}),
        ("LuffyCode", {"aggregation": "width", "entropy_coefficient": 0.001}),
    ],
)
def test_a_class_that_derives_from_a_built_in_one_has_its_defaults(
    name: str, kept: dict[str, Any]
) -> None:
    path = f"tandem.learner.objectives:{name}"
    found = make(path).settings
    assert {key: getattr(found, key) for key in kept} == kept
    assert found.name == path
    assert make(path, aggregation="by_source").settings.aggregation == "by_source"
    for params, said in (
        (
            {"aggregation": "tokenmean"},
            r"learner\.objective\.params\.aggregation='tokenmean': input should be",
        ),
        (
            {"clip_high": -0.5},
            r"learner\.objective\.params\.clip_high=-0\.5: input should be greater",
        ),
        ({"clip_high": "much"}, r"learner\.objective\.params\.clip_high='much'"),
        ({"kl_target": 0.1}, r"learner\.objective\.params: kl_target has no"),
    ):
        with pytest.raises(ConfigError, match=said):
            make(path, params=params)
    assert make(path, params={"clip_high": "0.25", "mine": "x"}).settings.clip_high == 0.25
    steered = make(path, kl_coefficient=0.05, params={"kl_target": 0.1}).settings
    assert (steered.kl_coefficient, steered.kl_target) == (0.05, 0.1)
    # What an objective of one's own has anyway can't be told from what isn't given, except in params.
    found = make(path, aggregation="constant", params={"entropy_coefficient": 0.0}).settings
    assert (found.aggregation, found.entropy_coefficient) == (kept["aggregation"], 0.0)
    assert make(path, params={"aggregation": "constant"}).settings.aggregation == "constant"


def clip_figures(objective: Any, these: Rows, hand: ModuleType) -> tuple[dict[str, float], Any]:
    """What the loss reports of its clip, and the tokens at which it decides by their log π_θ/μ."""
    scalars = hand.scalars_of(objective, these)
    _, sums = objective.loss(these, scalars)
    told = objective.report({k: float(v) for k, v in sums.items()}, scalars)
    decided = objective.clipped(
        these.with_columns(logprobs=None), these.logprobs - these.behaviour
    ).tolist()
    return {k: v for k, v in told.items() if k.startswith("clip_fraction")}, decided


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_the_clip_of_gspo_is_told_by_the_ratio_of_its_sequences(
    name: str, hand: ModuleType
) -> None:
    """Means of log-ratios of 0, 5e-4 and −5e-4; the clip is at 4e-4 and −3e-4."""
    behaviour = torch.full((6,), -1.0, dtype=F64)
    gaps = torch.tensor([0.3, -0.3, 0.001, 0.0, -0.001, 0.0], dtype=F64)
    these = hand.rows(
        torch.tensor([0, 0, 1, 1, 2, 2]),
        torch.zeros(6, dtype=torch.bool),
        behaviour,
        torch.tensor([1.0, 1.0, -1.0], dtype=F64),
        logprobs=behaviour + gaps,
    )
    told, decided = clip_figures(make(name), these, hand)
    assert decided == [False, False, True, True, True, True]
    assert (told["clip_fraction_positive"], told["clip_fraction_negative"]) == (0.5, 1.0)


def test_the_clip_of_decoupled_ppo_is_told_by_the_ratio_to_the_steps_start(
    hand: ModuleType,
) -> None:
    """Stale samples alone are no reason for it: at a step's first update π_θ is π_prox."""
    these = hand.random_rows(3)
    these = these.with_columns(behaviour=these.logprobs - 1.0, proximal=these.logprobs)
    told, decided = clip_figures(make("decoupled_ppo"), these, hand)
    assert set(told.values()) == {0.0}
    assert not any(decided)
    away = these.with_columns(proximal=these.logprobs - 1.0)
    told, decided = clip_figures(make("decoupled_ppo"), away, hand)
    assert told["clip_fraction_positive"] == 1.0
    assert any(decided)


def test_the_clip_of_a_shaped_ratio_is_told_by_what_it_bounds(hand: ModuleType) -> None:
    """π_θ = 0.9 and μ = 0.6 have ρ = 1.5, and with γ = 0.1 the ratio 0.9/1.0 over 0.6/0.7 = 1.05."""
    these = hand.rows(
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.bool),
        torch.tensor([0.6], dtype=F64).log(),
        torch.ones(1, dtype=F64),
        logprobs=torch.tensor([0.9], dtype=F64).log(),
    )
    assert clip_figures(make("grpo"), these, hand)[1] == [True]
    told, decided = clip_figures(make("grpo", own_shaping="ratio", gamma=0.1), these, hand)
    assert decided == [False]
    assert told["clip_fraction_positive"] == 0.0


def test_a_log_prob_that_is_no_number_is_left_to_the_loss_to_refuse(hand: ModuleType) -> None:
    these = hand.random_rows(3)
    for name in ("grpo", "gspo", "decoupled_ppo"):
        found = make(name).clipped(these, torch.full_like(these.behaviour, math.nan))
        assert not found.any()


def test_the_clip_of_cispo_is_told_by_the_weights_that_it_bounds(hand: ModuleType) -> None:
    """ρ of 6, 1 and 0.1 within [0.2, 5], of tokens with A > 0 and with A < 0."""
    ratios = torch.tensor([6.0, 1.0, 1.0, 6.0, 0.1, 1.0], dtype=F64)
    behaviour = torch.full((6,), -3.0, dtype=F64)
    these = hand.rows(
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.zeros(6, dtype=torch.bool),
        behaviour,
        torch.tensor([1.0, -1.0], dtype=F64),
        logprobs=behaviour + ratios.log(),
    )
    told, decided = clip_figures(make("cispo", clip_low=0.8), these, hand)
    assert decided == [True, False, False, True, True, False]
    assert told == {
        "clip_fraction_positive": pytest.approx(1 / 3),
        "clip_fraction_negative": pytest.approx(2 / 3),
        "clip_fraction_dual": 0.0,
    }
    # By default only from above; a row whose advantage is 0 has no loss for it to decide about.
    assert clip_figures(make("cispo"), these, hand)[1] == [True, False, False, True, False, False]
    idle = these.with_columns(advantages=torch.zeros(2, dtype=F64))
    assert not any(clip_figures(make("cispo"), idle, hand)[1])
