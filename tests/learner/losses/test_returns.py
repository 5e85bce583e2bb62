"""GAE over own tokens, and the KL in the reward."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from tandem.common.objectives.keys import KlRewardForm
from tandem.learner.losses.penalties import kl_in_reward
from tandem.learner.losses.returns import gae, last_token_rewards

F64 = torch.float64


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def test_without_a_discount_an_advantage_is_the_reward_to_come_minus_the_value() -> None:
    found, returns = gae(
        vector(0, 0, 1), vector(0.5, 0.6, 0.7), torch.zeros(3).long(), gamma=1.0, lam=1.0
    )
    torch.testing.assert_close(found, vector(0.5, 0.4, 0.3))
    torch.testing.assert_close(returns, vector(1, 1, 1))


def test_gae_is_the_discounted_sum_of_its_errors() -> None:
    rewards, values = vector(0.1, -0.2, 0.3, 1.0, 0.5), vector(0.4, 0.1, -0.3, 0.2, 0.9)
    row = torch.tensor([0, 0, 0, 1, 1])
    bootstrap = vector(0.0, 0.7)
    gamma, lam = 0.9, 0.8
    found, returns = gae(rewards, values, row, gamma=gamma, lam=lam, bootstrap=bootstrap)
    first = [0.1 + 0.9 * 0.1 - 0.4, -0.2 + 0.9 * -0.3 - 0.1, 0.3 - -0.3]
    second = [1.0 + 0.9 * 0.9 - 0.2, 0.5 + 0.9 * 0.7 - 0.9]
    step = gamma * lam
    expected = [
        first[0] + step * first[1] + step**2 * first[2],
        first[1] + step * first[2],
        first[2],
        second[0] + step * second[1],
        second[1],
    ]
    torch.testing.assert_close(found, vector(*expected))
    torch.testing.assert_close(returns, found + values)


def test_rows_do_not_reach_into_each_other() -> None:
    rewards, values = torch.rand(7, dtype=F64), torch.rand(7, dtype=F64)
    row = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    together, _ = gae(rewards, values, row)
    for number in range(3):
        mine = row == number
        alone, _ = gae(rewards[mine], values[mine], torch.zeros(int(mine.sum())).long())
        torch.testing.assert_close(together[mine], alone)


def test_a_row_without_tokens_and_no_rows_at_all_are_fine() -> None:
    found, _ = gae(vector(1, 1), vector(0, 0), torch.tensor([0, 2]), bootstrap=vector(0, 9, 0))
    torch.testing.assert_close(found, vector(1, 1))
    assert len(gae(vector(), vector(), torch.zeros(0).long())[0]) == 0


def test_the_verdict_stands_at_a_rows_last_token() -> None:
    found = last_token_rewards(vector(1, 2, 3), torch.tensor([0, 0, 2]))
    assert found.tolist() == [0, 1, 3]


def test_the_kl_in_the_reward_has_two_estimators() -> None:
    logprobs, reference = vector(-1, -2, -3), vector(-1.5, -1, -3)
    torch.testing.assert_close(kl_in_reward(logprobs, reference, "k1"), vector(0.5, -1, 0))
    expected = vector(math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1, 0)
    torch.testing.assert_close(kl_in_reward(logprobs, reference, "k3"), expected)


def test_no_gradient_goes_through_values_or_penalties() -> None:
    values = torch.rand(3, dtype=F64, requires_grad=True)
    found, returns = gae(torch.rand(3, dtype=F64), values, torch.zeros(3).long())
    assert not found.requires_grad
    assert not returns.requires_grad
    for form in get_args(KlRewardForm):
        assert not kl_in_reward(values, vector(0, 0, 0), form).requires_grad


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_lambda_goes_from_one_step_to_the_whole_return(lam: float) -> None:
    rewards, values = vector(0, 0, 1), vector(0.2, 0.5, 0.6)
    found, _ = gae(rewards, values, torch.zeros(3).long(), gamma=1.0, lam=lam)
    errors = [0.5 - 0.2, 0.6 - 0.5, 1 - 0.6]
    assert found[0].item() == pytest.approx(sum(lam**k * e for k, e in enumerate(errors)))
