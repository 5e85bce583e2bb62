"""Advantages of turns, with numbers by hand."""

from __future__ import annotations

import pytest
import torch

from tandem.learner.losses.advantages import advantages
from tandem.learner.losses.turns import turn_advantages

F64 = torch.float64


def of(
    earned: list[float],
    row: list[int],
    turn: list[int],
    group: list[int],
    *,
    baseline: str = "group_mean",
    discount: float = 1.0,
    kl: list[float] | None = None,
) -> list[float]:
    rows = len(group)
    graded = torch.tensor(earned, dtype=F64)
    found = turn_advantages(
        graded if kl is None else graded - torch.tensor(kl, dtype=F64),
        row=torch.tensor(row),
        turn=torch.tensor(turn, dtype=torch.int32),
        group=torch.tensor(group),
        groups=max(group) + 1,
        expert_row=torch.zeros(rows, dtype=torch.bool),
        baseline=baseline,
        discount=discount,
        graded=graded,
    )
    return [round(value, 12) for value in found.tolist()]


def test_a_turn_is_paid_what_comes_from_it_on_less_the_mean_of_the_same_turn() -> None:
    """Two episodes of two turns, of which the first has two tokens: G is (0.5, 1) and (1, 0)."""
    found = of([0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 1], [0, 0], discount=0.5)
    assert found == [-0.25, -0.25, 0.5, 0.25, 0.25, -0.5]


def test_without_a_discount_a_reward_counts_whole_for_all_turns_before_it() -> None:
    # G is (3, 2) and (1, 1).
    assert of([1, 2, 0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0]) == [1.0, 0.5, -1.0, -0.5]


def test_a_turn_that_no_other_episode_of_the_group_has_is_compared_with_itself() -> None:
    # The second group's turns are no part of the first one's baseline.
    found = of([0, 0, 5, 1, 7, 9], [0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 0, 1], [0, 0, 1])
    assert found == [2.0, 0.0, 0.0, -2.0, 0.0, 0.0]


def test_a_kl_is_not_divided_by_its_own_std_in_turns_whose_returns_are_equal() -> None:
    """G is (1.5, 1) for both episodes, of which the second pays a KL of 1e-3 at its end."""
    found = of(
        [1, 1, 1, 1],
        [0, 0, 1, 1],
        [0, 1, 0, 1],
        [0, 0],
        baseline="group_mean_std",
        discount=0.5,
        kl=[0, 0, 0, 1e-3],
    )
    assert found == pytest.approx([2.5e-4, 5e-4, -2.5e-4, -5e-4], rel=1e-5)


@pytest.mark.parametrize(
    "baseline",
    [
        "group_mean",
        "group_mean_std",
        "leave_one_out",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "none",
    ],
)
def test_responses_of_one_turn_have_the_advantages_of_their_rows(baseline: str) -> None:
    rewards, group = (
        torch.tensor([1, 0, 0.5, 2, 2, -1], dtype=F64),
        torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    row = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 5])
    last = torch.tensor([0, 2, 3, 6, 7, 8])
    earned = torch.zeros(9, dtype=F64).index_copy(0, last, rewards)
    expert = torch.zeros(6, dtype=torch.bool)
    found = turn_advantages(
        earned,
        row=row,
        turn=torch.zeros(9, dtype=torch.int32),
        group=group,
        groups=2,
        expert_row=expert,
        baseline=baseline,
        discount=0.3,
    )
    expected = advantages(rewards, group, 2, expert, baseline, torch.bincount(row))
    torch.testing.assert_close(found, expected[row])


def test_no_tokens_have_no_advantages() -> None:
    assert of([], [], [], [0]) == []
