"""Preference losses on numbers that can be followed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.learner.losses.finite import NonFiniteError
from tandem.learner.losses.preferences import cpo, dpo, kto, log_odds, orpo, pairs_of_groups

F64 = torch.float64


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=F64, requires_grad=True)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_of_equal_gains_is_log_2_and_pulls_the_two_apart() -> None:
    won, lost = one(-3.0), one(-5.0)
    loss = dpo(won, lost, torch.tensor([-4.0]), torch.tensor([-6.0]), beta=0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert won.grad is not None
    assert lost.grad is not None
    assert won.grad.item() == pytest.approx(-0.25)
    assert lost.grad.item() == pytest.approx(0.25)


def test_dpo_with_smoothed_labels() -> None:
    loss = dpo(one(-3), one(-5), one(-3), one(-4), beta=0.5, label_smoothing=0.1)
    expected = -0.9 * math.log(sigmoid(0.5)) - 0.1 * math.log(sigmoid(-0.5))
    assert loss.item() == pytest.approx(expected)


def test_kto_weighs_good_and_bad_rows_against_one_point() -> None:
    gain = torch.tensor([1.0, -0.5], dtype=F64, requires_grad=True)
    loss = kto(
        gain, torch.zeros(2, dtype=F64), torch.tensor([True, False]), 0.2, beta=2.0,
        desirable_weight=1.5, undesirable_weight=0.5,
    )  # fmt: skip
    expected = [1.5 * (1 - sigmoid(2 * 0.8)), 0.5 * (1 - sigmoid(2 * 0.7))]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=F64))
    loss.sum().backward()
    slopes = [
        -1.5 * 2 * sigmoid(1.6) * (1 - sigmoid(1.6)),
        0.5 * 2 * sigmoid(1.4) * (1 - sigmoid(1.4)),
    ]
    assert gain.grad is not None
    torch.testing.assert_close(gain.grad, torch.tensor(slopes, dtype=F64))


def test_ktos_point_carries_no_gradient() -> None:
    point = torch.tensor(0.3, requires_grad=True)
    kto(one(1.0), one(0.0), torch.tensor([True]), point).sum().backward()
    assert point.grad is None


def test_orpo_is_cross_entropy_plus_log_odds() -> None:
    won, lost = math.log(0.6), math.log(0.2)
    odds = math.log(0.6 / 0.4) - math.log(0.2 / 0.8)
    loss = orpo(one(won), one(lost), beta=0.3)
    assert loss.item() == pytest.approx(-won - 0.3 * math.log(sigmoid(odds)))


def test_cpo_is_dpo_without_a_reference_plus_cross_entropy() -> None:
    loss = cpo(one(-3), one(-5), one(-0.6), beta=0.5, nll_coefficient=2.0)
    assert loss.item() == pytest.approx(-math.log(sigmoid(1.0)) + 1.2)


def test_log_odds_of_a_certain_answer_are_finite() -> None:
    leaf = torch.tensor([0.0, -1e-12, -50.0], requires_grad=True)
    found = log_odds(leaf)
    found.sum().backward()
    assert found.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_an_impossible_answer_is_named() -> None:
    with pytest.raises(NonFiniteError, match="rejected log-probs"):
        dpo(one(-1), one(-math.inf), one(-1), one(-1))


def test_every_pair_of_a_groups_rows_with_different_rewards_counts() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 5.0])
    chosen, rejected = pairs_of_groups(rewards, torch.tensor([0, 0, 0, 0, 1]))
    found = set(zip(chosen.tolist(), rejected.tolist(), strict=True))
    assert found == {(0, 1), (0, 3), (2, 1), (2, 3)}


def test_rewards_that_differ_by_rounding_make_no_pair() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 1.0], dtype=torch.float64)
    assert rewards[0] > rewards[1]
    chosen, rejected = pairs_of_groups(rewards, torch.zeros(3, dtype=torch.int64))
    assert list(zip(chosen.tolist(), rejected.tolist(), strict=True)) == [(2, 0), (2, 1)]
