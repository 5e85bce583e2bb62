"""Every objective's loss and gradient against its formula, worked out without torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.common.objectives import OBJECTIVES, reads
from tandem.learner.objectives import REGISTRY, make

NAMES = sorted(REGISTRY)
STEP = 1e-6


def both(
    name: str, hand: ModuleType, formula: ModuleType, seed: int, **changes: Any
) -> tuple[float, torch.Tensor, float, torch.Tensor]:
    """Loss and gradient by log-probs: the objective's, then the formula's."""
    objective = make(name, **changes)
    these = hand.random_rows(seed, count=8, group_size=4)
    leaf = these.logprobs.clone().requires_grad_()
    these = hand.filled(objective, these, leaf)
    scalars = hand.scalars_of(objective, these, constant=hand.CONSTANT)
    loss, _ = objective.loss(these, scalars)
    loss.backward()
    assert leaf.grad is not None
    case = formula.case_of(these, objective, scalars)
    now = leaf.detach().tolist()
    expected = formula.LOSSES[name](case, now, now)
    slopes = []
    for i in range(len(now)):
        ends = []
        for move in (STEP, -STEP):
            there = [value + move * (j == i) for j, value in enumerate(now)]
            ends.append(formula.LOSSES[name](case, there, now))
        slopes.append((ends[0] - ends[1]) / (2 * STEP))
    return loss.item(), leaf.grad, expected, torch.tensor(slopes, dtype=torch.float64)


def check(name: str, hand: ModuleType, formula: ModuleType, seed: int, **changes: Any) -> None:
    loss, gradient, expected, slopes = both(name, hand, formula, seed, **changes)
    assert loss == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(gradient, slopes, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_loss_and_gradient_are_those_of_the_formula(
    name: str, seed: int, hand: ModuleType, formula: ModuleType
) -> None:
    check(name, hand, formula, seed, expert_negative=True)


@pytest.mark.parametrize("how", ["constant", "width", "token_mean", "sequence_mean", "by_source"])
@pytest.mark.parametrize(
    "name", ["grpo", "luffy", "exgrpo", "sft", "distill", "decoupled_ppo", "prefix_rft"]
)
def test_each_denominator_is_that_of_the_formula(
    name: str, how: str, hand: ModuleType, formula: ModuleType
) -> None:
    changes = {"expert_negative": True} if how != "width" or name != "exgrpo" else {}
    check(name, hand, formula, 3, aggregation=how, **changes)


@pytest.mark.parametrize("shaping", ["none", "ratio", "log", "power", "square_root", "plus_log"])
@pytest.mark.parametrize("behaviour", ["recorded", "one", "published"])
def test_each_shaping_of_expert_weights_is_that_of_the_formula(
    shaping: str, behaviour: str, hand: ModuleType, formula: ModuleType
) -> None:
    check(
        "luffy", hand, formula, 4, shaping=shaping, expert_behaviour=behaviour, gamma=0.3,
        shaping_exponent=0.3, shaping_coefficient=0.7, expert_negative=True,
    )  # fmt: skip


@pytest.mark.parametrize("bounds", [(None, 0.4), (0.3, None), (0.2, 0.5)])
def test_expert_weights_are_clipped_from_above_and_below(
    bounds: tuple[float | None, float | None], hand: ModuleType, formula: ModuleType
) -> None:
    low, high = bounds
    check("luffy", hand, formula, 5, expert_clip_low=low, expert_clip_high=high)


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("name", ["tis", "decoupled_ppo"])
def test_each_correction_is_that_of_the_formula(
    name: str, how: str, level: str, hand: ModuleType, formula: ModuleType
) -> None:
    check(
        name, hand, formula, 6, correction=how, correction_level=level, correction_low=0.8,
        correction_high=1.1,
    )  # fmt: skip


@pytest.mark.parametrize("step", [1, 5, 30, 400])
def test_chord_goes_from_imitation_to_reinforcement(
    step: int, hand: ModuleType, formula: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars_of = hand.scalars_of
    monkeypatch.setattr(
        hand, "scalars_of", lambda *a, **k: scalars_of(*a, **k) | {"step": float(step)}
    )
    check("chord", hand, formula, 7, mu_warmup_steps=10, mu_decay_steps=100)


def test_the_parts_of_chords_loss_add_up_to_it(hand: ModuleType) -> None:
    objective = make("chord")
    these = hand.filled(objective, hand.random_rows(7))
    these = these.with_columns(lag=(~these.expert).long())
    loss, sums = objective.loss(these, hand.scalars_of(objective, these))
    assert sums["loss_own"] != 0
    assert float(sums["loss_own"] + sums["loss_expert"]) == pytest.approx(float(loss), abs=1e-12)
    assert float(sums["loss_stale"]) == pytest.approx(float(sums["loss_own"]), abs=1e-12)


@pytest.mark.parametrize("clips", [(0.1, 0.3, 3.0), (None, 0.2, 1.2), (0.2, None, None)])
def test_each_clip_is_that_of_the_formula(
    clips: tuple[float | None, ...], hand: ModuleType, formula: ModuleType
) -> None:
    low, high, dual = clips
    check("grpo", hand, formula, 8, clip_low=low, clip_high=high, dual_clip=dual)


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_exgrpo_weighs_replayed_groups_by_their_share(
    share: float, hand: ModuleType, formula: ModuleType
) -> None:
    check("exgrpo", hand, formula, 10, replay_share=share)


def test_preferences_read_their_own_numbers(hand: ModuleType, formula: ModuleType) -> None:
    check("dpo", hand, formula, 9, beta=0.7, label_smoothing=0.1)
    check("kto", hand, formula, 9, beta=0.7, desirable_weight=1.5, undesirable_weight=0.5)
    check("cpo", hand, formula, 9, beta=0.7, sft_coefficient=0.3)
    check("orpo", hand, formula, 9, beta=0.7)


def test_distillation_reads_its_own_numbers(hand: ModuleType, formula: ModuleType) -> None:
    check(
        "distill", hand, formula, 9, divergence_coefficient=0.6, divergence_temperature=2.0,
        sft_coefficient=0.3,
    )  # fmt: skip


def test_the_odds_of_orpo_are_of_the_tokens_that_are_not_muted(hand: ModuleType) -> None:
    objective = make("orpo", beta=0.7)
    logprobs = torch.tensor([-0.5, -0.1, -2.0, -1.0, -3.0], dtype=torch.float64)
    row = torch.tensor([0, 0, 0, 1, 1])
    muted = torch.tensor([False, False, True, True, False])

    def loss(kept: torch.Tensor, **columns: torch.Tensor) -> float:
        these = hand.rows(
            row[kept],
            torch.zeros_like(row[kept]).bool(),
            torch.zeros_like(logprobs[kept]),
            torch.zeros(2),
            rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
            logprobs=logprobs[kept],
            **columns,
        )
        return float(objective.loss(these, hand.scalars_of(objective, these))[0])

    everything = torch.ones_like(muted)
    assert loss(everything, muted=muted) == pytest.approx(loss(~muted), abs=1e-12)


def test_every_objective_has_a_formula_of_its_own(formula: ModuleType) -> None:
    assert set(formula.LOSSES) == set(OBJECTIVES)


# Away from kinks, losses without a stop-gradient are the gradient's potential.
POTENTIAL = (
    "grpo", "reinforce", "gspo", "ppo", "luffy", "luffy_paper", "luffy_code", "exgrpo", "sft",
    "rl_sft_loss", "distill", "prefix_rft", "decoupled_ppo", "dpo", "cpo", "orpo",
)  # fmt: skip


@pytest.mark.parametrize("name", POTENTIAL)
def test_gradcheck(name: str, hand: ModuleType) -> None:
    added = {"entropy_coefficient": 0.01, "kl_coefficient": 0.1}
    read = {key: value for key, value in added.items() if key in reads(OBJECTIVES[name])}
    objective = make(name, **read)
    these = hand.random_rows(11, count=5, group_size=2)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        filled = these.with_columns(logprobs=logprobs, entropy=entropy, values=values)
        filled = hand.filled(objective, filled)
        found: torch.Tensor = objective.loss(filled, scalars)[0]
        return found

    scalars = hand.scalars_of(objective, hand.filled(objective, these))
    leaves = [t.clone().requires_grad_() for t in (these.logprobs, these.entropy, these.values)]
    assert torch.autograd.gradcheck(loss, leaves)
