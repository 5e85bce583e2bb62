"""Advantages of the turns of episodes: returns from a turn on, compared within a group.

A turn is what the policy wrote between two texts of an environment. A response to a prompt is an episode of one
turn, so that its tokens have the advantage that :func:`~.advantages.advantages` gives its row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.objectives.keys import Baseline
from .advantages import advantages


def turn_advantages(
    earned: Tensor,
    *,
    row: Tensor,
    turn: Tensor,
    group: Tensor,
    groups: int,
    expert_row: Tensor,
    baseline: Baseline,
    discount: float,
    graded: Tensor | None = None,
) -> Tensor:
    """``[N]`` advantages of tokens: those of their turns' discounted returns.

    ``G_k = Σ_{l ≥ k} γ^(l − k) r_l``, and ``A_k = G_k`` less the baseline of the G_k of all episodes of the group
    that have a turn k: normalised discounted returns as advantages, as in GTPO (arXiv 2511.14846), with the
    baseline of the run's objective. A turn that only one episode of its group has is compared with itself, A = 0.

    Example: two episodes whose turns earned (0, 1) and (1, 0), with γ = 0.5: G is (0.5, 1) and (1, 0), and with the
    group's mean as baseline A is (−0.25, 0.5) and (0.25, −0.5).

    Args:
        earned: ``[N]`` float64, reward of every own and expert token.
        row: ``[N]`` int64, index of each token's row, ascending.
        turn: ``[N]`` number of each token's turn in its row, ascending in each row.
        group: ``[R]`` int64, index of each row's group.
        groups: number of groups.
        expert_row: ``[R]`` bool, rows with expert tokens.
        baseline: the baseline.
        discount: γ, of one turn.
        graded: ``[N]`` ``earned`` before a KL was taken off it; None = there is no KL in it.
    """
    if not len(row):
        return torch.zeros_like(earned)
    most = int(turn.max()) + 1
    # A place for each turn that a row could have.
    place = row * most + turn

    def returns_of(rewards: Tensor) -> Tensor:
        returns = torch.zeros(len(group) * most, dtype=rewards.dtype, device=rewards.device)
        returns = returns.index_add(0, place, rewards).reshape(len(group), most)
        for number in range(most - 2, -1, -1):
            returns[:, number] += discount * returns[:, number + 1]
        return returns.flatten()

    there, unit, sizes = torch.unique(place, return_inverse=True, return_counts=True)
    of_row, number = there // most, there % most
    found = advantages(
        returns_of(earned)[there],
        group[of_row] * most + number,
        groups * most,
        expert_row[of_row],
        baseline,
        sizes,
        graded=None if graded is None else returns_of(graded)[there],
    )
    return found[unit]
