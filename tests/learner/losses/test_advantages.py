"""Advantages and the rule for groups without a signal."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from tandem.common.objectives.keys import Baseline
from tandem.learner.losses.advantages import STD_FLOOR, advantages, whiten

LUFFY_GROUP = [1.0, 0, 0, 1, 0, 0, 0, 1]  # seven own rows, then the expert's


def of(rewards: list[float], baseline: Baseline, experts: int = 0, **more: Any) -> torch.Tensor:
    count = len(rewards)
    expert = torch.arange(count) >= count - experts
    group = torch.zeros(count, dtype=torch.int64)
    values = torch.tensor(rewards, dtype=torch.float64)
    return advantages(values, group, 1, expert, baseline, **more)


@pytest.mark.parametrize(
    ("baseline", "right", "wrong"),
    [
        ("group_mean", 0.625, -0.375),
        ("group_mean_std", 1.207612, -0.724567),
        ("own_mean", 0.714286, -0.285714),
        ("own_mean_std", 1.463847, -0.585539),
        ("leave_one_out", 0.625 * 8 / 7, -0.375 * 8 / 7),
        ("max_rl", 0.625 / 0.375, -1.0),
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


@pytest.mark.parametrize("baseline", [name for name in get_args(Baseline) if name != "none"])
def test_equal_rewards_give_exactly_zero(baseline: Baseline) -> None:
    """Seven times 0.3 has a std of 3e-8 in float32, which must not become a signal."""
    rewards = [float(torch.tensor(0.3))] * 6 + [0.3]
    assert of(rewards, baseline).tolist() == [0.0] * 7


@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_rounding_is_no_advantage(baseline: Baseline) -> None:
    """The mean of 0.1, 0.2 and 0.3 is 0.2 + 3e-17; and a KL may be of rounding alone."""
    raw = baseline == "none"
    for rewards in ([0.0, 0.0, 0.3],) if raw else ([0.1, 0.2, 0.3], [0.3, 0.6, 0.9]):
        for kl in (0.0, 1e-9):
            found = of([rewards[0], rewards[1] - kl, rewards[2]], baseline)
            assert found[1] == 0
            assert found[2] > 0.09


STD_BASELINES = ("group_mean_std", "own_mean_std", "reinforce_pp", "reinforce_pp_baseline")


@pytest.mark.parametrize("baseline", STD_BASELINES)
def test_a_kl_of_rows_that_graders_paid_the_same_is_not_divided_by_its_own_std(
    baseline: Baseline,
) -> None:
    """It counts as what it is: one of 1e-5, which is rounding, as 1e-5."""
    graded = torch.full((4,), 0.5, dtype=torch.float64)
    kl = torch.tensor([0.0, 1.0, 2.0, 5.0], dtype=torch.float64)
    for size in (1e-5, 1e-2, 1.0):
        found = of((graded - size * kl).tolist(), baseline, graded=graded)
        std = 1.0 if baseline.startswith("reinforce") else 1.0 + STD_FLOOR
        torch.testing.assert_close(found, size * (2.0 - kl) / std, rtol=0, atol=1e-15)


@pytest.mark.parametrize("baseline", STD_BASELINES)
def test_a_kl_of_rows_that_graders_paid_differently_is_divided_as_they_are(
    baseline: Baseline,
) -> None:
    graded = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    paid = (graded - torch.tensor([0.0, 0.1, 0.2, 0.5])).tolist()
    assert torch.equal(of(paid, baseline, graded=graded), of(paid, baseline))


def test_a_kl_of_equal_own_rows_leaves_the_experts_distance_as_it_is() -> None:
    graded = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    found = of([-1e-5, 0.0, 1e-5, 1.0], "own_mean_std", experts=1, graded=graded)
    assert found[-1] == 1 / (1 + STD_FLOOR)


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


@pytest.mark.parametrize("baseline", ["own_mean", "own_mean_std"])
def test_a_split_group_without_own_rows_is_a_group(baseline: Baseline) -> None:
    whole = "group_mean_std" if baseline == "own_mean_std" else "group_mean"
    found = of([1.0, 0.0, 1.0], baseline, experts=3)
    torch.testing.assert_close(found, of([1.0, 0.0, 1.0], whole), atol=1e-5, rtol=0)


def test_equal_own_rewards_leave_the_experts_distance_as_it_is() -> None:
    found = of([0.0, 0.0, 0.0, 1.0], "own_mean_std", experts=1)
    assert found.tolist() == [0, 0, 0, 1 / (1 + STD_FLOOR)]


def test_a_row_alone_is_compared_with_itself_or_as_published_with_nothing() -> None:
    """As published: mean 0 and std 1."""
    for baseline in ("group_mean", "group_mean_std", "own_mean", "own_mean_std"):
        assert of([0.7], baseline).tolist() == [0.0]
        found = of([0.7], baseline, singles="absolute")
        assert found.item() == (0.7 / (1 + STD_FLOOR) if "std" in baseline else 0.7)
    split = of([0.5, 1.0], "own_mean", experts=1, singles="absolute")
    assert split.tolist() == [0.5, 1.0]
    assert of([0.5, 1.0], "own_mean", experts=1).tolist() == [0.0, 0.5]


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.5, 0.2]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    torch.testing.assert_close(of(rewards, "leave_one_out"), torch.tensor(expected).double())


def test_max_rl_of_an_unsolved_group_is_0() -> None:
    assert of([0.0, 0.0], "max_rl").tolist() == [0.0, 0.0]
    # Rewards that differ around a mean of 0 have no such advantage either.
    assert of([-1.0, 1.0], "max_rl").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rewards", [[0.0, 0.0, -1.0, 0.0], [0.1, 0.2, -0.3], [1e-7, 0.0, 2e-6]])
def test_max_rl_of_a_group_whose_mean_is_not_above_0_is_0(rewards: list[float]) -> None:
    """Dividing by a mean below 0 would prefer the worst row, and by one of 2e-17 give 1e16."""
    assert of(rewards, "max_rl").tolist() == [0.0] * len(rewards)


def test_max_rl_of_one_group_does_not_depend_on_an_unsolved_one() -> None:
    rewards = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    found = advantages(rewards, group, 2, torch.zeros(4, dtype=torch.bool), "max_rl")
    assert found.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_whitening_counts_every_token_of_a_row() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    lengths = torch.tensor([2, 3, 5])
    tokens = torch.repeat_interleave(rewards, lengths)
    expected = (rewards - tokens.mean()) / tokens.std(correction=0)
    torch.testing.assert_close(whiten(rewards, lengths), expected)
    group, expert = torch.tensor([0, 0, 1]), torch.zeros(3).bool()
    found = advantages(rewards, group, 2, expert, "reinforce_pp", lengths)
    torch.testing.assert_close(found, expected)
    centred = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)
    found = advantages(rewards, group, 2, expert, "reinforce_pp_baseline", lengths)
    torch.testing.assert_close(found, whiten(centred, lengths))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "baseline", ["group_mean", "group_mean_std", "own_mean", "leave_one_out", "max_rl"]
)
def test_a_reward_that_is_no_number_is_no_equal_reward(bad: float, baseline: Any) -> None:
    """It would silence its group, and the step would go on without a word."""
    rewards = torch.tensor([1.0, bad, 0.0, 1.0, 1.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1])
    found = advantages(rewards, group, 3, torch.zeros(5, dtype=torch.bool), baseline)
    assert not found[:3].isfinite().all()
    assert found[3:].tolist() == [0.0, 0.0]
