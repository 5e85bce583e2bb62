"""Advantages of the rows of groups: pure functions of rewards.

Rows without a verdict never get here; they have left the baseline and the loss before. Advantages of
single tokens (GAE) are in :mod:`tandem.learner.losses.returns`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...common.objectives.keys import EQUAL_REWARDS, Baseline

STD_FLOOR = 1e-6
"""Added to the standard deviation, as in the code of GRPO and LUFFY."""
WHITEN_FLOOR = 1e-8
"""Least variance whose root :func:`whiten` divides by."""


def group_range(values: Tensor, group: Tensor, groups: int, among: Tensor | None = None) -> Tensor:
    """``[groups]`` greatest minus least value by group; 0 if a group has no such row."""
    high = torch.full((groups,), -torch.inf, dtype=values.dtype, device=values.device)
    low = torch.full((groups,), torch.inf, dtype=values.dtype, device=values.device)
    if among is not None:
        values, group = values[among], group[among]
    high = high.scatter_reduce(0, group, values, "amax")
    low = low.scatter_reduce(0, group, values, "amin")
    # Groups without a row keep their initial value. A NaN among the values stays NaN: whatever is
    # computed from it must be refused, and mustn't look like equal values.
    nothing = (high == -torch.inf) & (low == torch.inf)
    return torch.where(nothing, torch.zeros_like(high), high - low)


def _mean(values: Tensor, group: Tensor, groups: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.zeros(groups, dtype=values.dtype, device=values.device)
    count = count.index_add(0, group, weight)
    total = torch.zeros_like(count).index_add(0, group, values * weight)
    return total / count.clamp(min=1), count


def whiten(values: Tensor, weight: Tensor | None = None, *, unit: bool = False) -> Tensor:
    """``(x − mean) / std`` over all values, std with n and a floor of its square of 1e-8.

    REINFORCE++'s normalisation over the whole batch (arXiv 2501.03262, eq. 8).

    Args:
        values: any shape.
        weight: same shape, how often each value counts (tokens of a row); None = once.
        unit: takes the std as 1.
    """
    weight = torch.ones_like(values) if weight is None else weight.to(values.dtype)
    count = weight.sum().clamp(min=1)
    mean = (values * weight).sum() / count
    centred = values - mean
    if unit:
        return centred
    variance = (centred * centred * weight).sum() / count
    return centred * variance.clamp(min=WHITEN_FLOOR).rsqrt()


def advantages(
    rewards: Tensor,
    group: Tensor,
    groups: int,
    expert_row: Tensor,
    baseline: Baseline,
    lengths: Tensor | None = None,
    *,
    graded: Tensor | None = None,
    singles: Literal["compared", "absolute"] = "compared",
) -> Tensor:
    """``[R]`` one advantage a row.

    ``group_mean``: R − mean over the whole group, expert rows included (LUFFY, arXiv
    2504.14945, eq. 5, without std as in Dr. GRPO, arXiv 2503.20783). ``group_mean_std``: over
    ``std + 1e-6`` besides, std with n − 1 (GRPO, arXiv 2402.03300). ``own_mean``,
    ``own_mean_std``: mean (and std) over own rows only, for all rows (LUFFY's grpo_split); without
    own rows those of the group. ``leave_one_out``: R − mean of the group's other rows (RLOO, arXiv
    2402.14740). ``max_rl``: (R − mean) / mean, 0 where the mean isn't over 1e-6 (MaxRL, arXiv
    2602.02710, which is defined for rewards of 0 and more: an unsolved group teaches nothing).
    ``reinforce_pp``: the reward, and ``reinforce_pp_baseline``: R − group mean, whitened over all
    rows by their tokens (arXiv 2501.03262). ``none``: the reward.

    A std is that of what graders paid: where they paid the same (all rows, for whitening), it counts as 1. A KL in
    ``rewards`` is nearly 0 at first, so that over its own std even its rounding would be as large as a real difference.

    An advantage of at most 1e-6 is 0: rounding of a mean, or of a KL in ``rewards``, is no signal, and its sign
    tells no good row from a bad one.

    A row alone in its group is compared with itself, A = 0; ``singles="absolute"`` gives it mean 0
    and std 1, so A = R, as LUFFY's and verl's code do.

    Args:
        rewards: ``[R]`` float; use float64.
        group: ``[R]`` int64, index of each row's group, in ``[0, groups)``.
        groups: number of groups.
        expert_row: ``[R]`` bool, rows with expert tokens.
        baseline: the baseline.
        lengths: ``[R]`` own and expert tokens of a row, for whitening; None = 1 each.
        graded: ``[R]`` the rewards before a KL was taken off them; None = ``rewards``, there is no KL in them.
        singles: the treatment of a group's only row (only own row, if own rows are the baseline).
    """
    graded = rewards if graded is None else graded
    if baseline == "none":
        return _without_rounding(rewards)
    if baseline == "reinforce_pp":
        paid_alike = not len(graded) or float(graded.max() - graded.min()) <= EQUAL_REWARDS
        return _whitened(rewards, lengths, paid_alike)
    everything = torch.ones_like(rewards)
    mean, count = _mean(rewards, group, groups, everything)
    counted = everything
    by_own_rows = baseline in ("own_mean", "own_mean_std")
    if by_own_rows:
        own = (~expert_row).to(rewards.dtype)
        own_mean, own_count = _mean(rewards, group, groups, own)
        mean = torch.where(own_count > 0, own_mean, mean)
        counted = torch.where((own_count > 0)[group], own, everything)
        count = torch.where(own_count > 0, own_count, count)
    paid_equally = group_range(graded, group, groups, counted > 0) <= EQUAL_REWARDS
    alone = torch.zeros_like(count, dtype=torch.bool)
    if singles == "absolute":
        alone = count == 1
        mean = torch.where(alone, torch.zeros_like(mean), mean)
    result = rewards - mean[group]
    if baseline in ("group_mean_std", "own_mean_std"):
        result = _over_std(result, group, groups, counted, paid_equally)
    elif baseline == "leave_one_out":
        result = result * (count / (count - 1).clamp(min=1))[group]
    elif baseline == "max_rl":
        # A mean below 0 would turn the advantages round, and one of 1e-17, which is a rounding error,
        # would make them 1e16. Infinite means stay, so that what is computed from them is refused.
        unsolved = mean.isfinite() & (mean <= EQUAL_REWARDS)
        divisor = torch.where(unsolved, torch.ones_like(mean), mean)[group]
        result = torch.where(unsolved[group], torch.zeros_like(result), result / divisor)
    result = _without_rounding(result)
    if not by_own_rows:
        # Whatever they were divided by, equal rewards are no signal.
        equal = group_range(rewards, group, groups) <= EQUAL_REWARDS
        result = torch.where((equal & ~alone)[group], torch.zeros_like(result), result)
    if baseline == "reinforce_pp_baseline":
        return _whitened(result, lengths, bool(paid_equally.all()))
    return result


def _over_std(result: Tensor, group: Tensor, groups: int, counted: Tensor, unit: Tensor) -> Tensor:
    """Divides by the std (n − 1) of the rows that count, plus the floor.

    ``unit`` marks groups whose std is taken as 1, as in LUFFY's split, so that equal own rewards leave the
    expert's distance unchanged.
    """
    variance, count = _mean(result * result, group, groups, counted)
    std = (variance * count / (count - 1).clamp(min=1)).sqrt()
    std = torch.where(unit, torch.ones_like(std), std)
    return result / (std + STD_FLOOR)[group]


def _whitened(values: Tensor, lengths: Tensor | None, unit: bool) -> Tensor:
    """Whitens; ``unit`` takes the std as 1."""
    if not len(values) or float(values.max() - values.min()) <= EQUAL_REWARDS:
        return torch.zeros_like(values)
    return _without_rounding(whiten(values, lengths, unit=unit))


def _without_rounding(found: Tensor) -> Tensor:
    return torch.where(found.abs() <= EQUAL_REWARDS, torch.zeros_like(found), found)
