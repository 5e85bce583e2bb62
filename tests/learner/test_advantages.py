"""Advantages and the rule for groups without a signal."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.learner.advantages import Baseline, advantages, zero_variance

LUFFY_GROUP = [1.0, 0, 0, 1, 0, 0, 0, 1]  # seven own rows, then the expert's


def of(rewards: list[float], baseline: Baseline, experts: int = 0) -> torch.Tensor:
    count = len(rewards)
    expert = torch.arange(count) >= count - experts
    group = torch.zeros(count, dtype=torch.int64)
    return advantages(torch.tensor(rewards, dtype=torch.float64), group, 1, expert, baseline)


@pytest.mark.parametrize(
    ("baseline", "right", "wrong"),
    [
        ("group_mean", 0.625, -0.375),
        ("group_mean_std", 1.207612, -0.724567),
        ("own_mean", 0.714286, -0.285714),
        ("none", 1.0, 0.0),
    ],
)
def test_advantages_of_seven_own_rows_and_one_expert_row(
    baseline: Baseline, right: float, wrong: float
) -> None:
    """Against the published numbers for this group (LUFFY's estimators)."""
    found = of(LUFFY_GROUP, baseline, experts=1)
    expected = [right if reward else wrong for reward in LUFFY_GROUP]
    # The published std variant adds 1e-6 to the std as well.
    torch.testing.assert_close(found, torch.tensor(expected).double(), atol=3e-6, rtol=0)


@pytest.mark.parametrize("baseline", ["group_mean", "group_mean_std", "own_mean"])
def test_equal_rewards_give_exactly_zero(baseline: Baseline) -> None:
    """Seven times 0.3 has a std of 3e-8 in float32, which must not become a signal."""
    rewards = [float(torch.tensor(0.3))] * 6 + [0.3]
    assert of(rewards, baseline).tolist() == [0.0] * 7


def test_an_expert_row_gives_an_all_failed_group_a_signal() -> None:
    found = of([0.0] * 7 + [1.0], "group_mean", experts=1)
    torch.testing.assert_close(found[-1].item(), 0.875)
    assert (found[:-1] == -0.125).all()


def test_an_own_baseline_keeps_the_experts_advantage_where_all_own_rows_failed() -> None:
    assert of([0.0, 0.0, 0.0, 1.0], "own_mean", experts=1).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_expert_rows_alone_have_no_advantage_under_the_group_baseline() -> None:
    assert of([1.0, 1.0], "group_mean", experts=2).tolist() == [0.0, 0.0]
    assert of([1.0, 1.0], "own_mean", experts=2).tolist() == [0.0, 0.0]
    assert of([1.0, 1.0], "none", experts=2).tolist() == [1.0, 1.0]


def test_groups_do_not_mix() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 3.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    found = advantages(rewards, group, 2, torch.zeros(4, dtype=torch.bool), "group_mean")
    assert found.tolist() == [0.5, -0.5, 1.0, -1.0]


def test_the_std_is_that_of_n_minus_one() -> None:
    found = of([0.0, 1.0], "group_mean_std")
    assert found[1].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))


def test_a_group_is_without_a_signal_only_if_every_row_is() -> None:
    group = torch.tensor([0, 0, 1, 1, 2])
    values = torch.tensor([0.0, 0.0, 0.0, 1e-9, 0.0])
    assert zero_variance(values, group, 4).tolist() == [True, False, True, True]
