"""Advantages of the rows of groups: pure functions of rewards.

Rows without a verdict are not among the rows that come in here; they leave the baseline and the
loss before.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_mean", "group_mean_std", "own_mean", "none"]

EQUAL_REWARDS = 1e-6
"""Rewards of a group within this range count as equal.

Deciding by the standard deviation fails: that of seven rewards of 0.3 is 3e-8 in float32, and
dividing by it makes advantages of 0.03.
"""
STD_FLOOR = 1e-6
"""Added to the standard deviation, as in the code of GRPO and LUFFY."""


def group_range(values: Tensor, group: Tensor, groups: int, among: Tensor | None = None) -> Tensor:
    """``[groups]`` greatest minus least value by group; 0 where a group has no row among them."""
    high = torch.full((groups,), -torch.inf, dtype=values.dtype, device=values.device)
    low = torch.full((groups,), torch.inf, dtype=values.dtype, device=values.device)
    if among is not None:
        values, group = values[among], group[among]
    high = high.scatter_reduce(0, group, values, "amax")
    low = low.scatter_reduce(0, group, values, "amin")
    return torch.where(high >= low, high - low, torch.zeros_like(high))


def _mean(values: Tensor, group: Tensor, groups: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.zeros(groups, dtype=values.dtype, device=values.device)
    count = count.index_add(0, group, weight)
    total = torch.zeros_like(count).index_add(0, group, values * weight)
    return total / count.clamp(min=1), count


def advantages(
    rewards: Tensor, group: Tensor, groups: int, expert_row: Tensor, baseline: Baseline
) -> Tensor:
    """``[R]`` one advantage a row.

    ``group_mean``: R − mean over the whole group, expert rows included (LUFFY, arXiv
    2504.14945, eq. 5, without std as in Dr. GRPO, arXiv 2503.20783). ``group_mean_std``: over
    ``std + 1e-6`` besides, std with n − 1 (GRPO, arXiv 2402.03300). ``own_mean``: the mean over
    own rows only, for all rows; without own rows that of the group. ``none``: the reward.

    Args:
        rewards: ``[R]`` float; use float64.
        group: ``[R]`` int64, which group a row is of, in ``[0, groups)``.
        groups: How many groups there are.
        expert_row: ``[R]`` bool, rows with expert tokens.
        baseline: Which baseline.
    """
    if baseline == "none":
        return rewards.clone()
    everything = torch.ones_like(rewards)
    mean, count = _mean(rewards, group, groups, everything)
    among = None
    if baseline == "own_mean":
        own = (~expert_row).to(rewards.dtype)
        own_mean, own_count = _mean(rewards, group, groups, own)
        mean = torch.where(own_count > 0, own_mean, mean)
        among = ~expert_row
    result = rewards - mean[group]
    if baseline == "group_mean_std":
        variance, _ = _mean(result * result, group, groups, everything)
        std = (variance * count / (count - 1).clamp(min=1)).sqrt()
        result = result / (std + STD_FLOOR)[group]
    equal = group_range(rewards, group, groups, among)[group] <= EQUAL_REWARDS
    # Rounding of the mean must not turn equal rewards into a signal. With an own baseline the
    # expert's row still differs from it.
    level = result.abs() <= EQUAL_REWARDS if among is not None else torch.ones_like(equal)
    return torch.where(equal & level, torch.zeros_like(result), result)


def zero_variance(row_advantages: Tensor, group: Tensor, groups: int) -> Tensor:
    """``[groups]`` bool, groups in which every row's advantage is 0."""
    most = torch.zeros(groups, dtype=row_advantages.dtype, device=row_advantages.device)
    most = most.scatter_reduce(0, group, row_advantages.abs(), "amax")
    return most == 0
