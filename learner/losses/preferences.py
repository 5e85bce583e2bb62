"""Losses over pairs of responses, and KTO's over single ones: pure functions of row log-probs.

``chosen`` and ``rejected`` are ``[P]`` sums of a response's token log-probs at temperature 1
(means if the name says so). Every function returns ``[P]`` losses, differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...common.objectives.keys import EQUAL_REWARDS
from .finite import finite, widened


def _margin(chosen: Tensor, rejected: Tensor) -> Tensor:
    return widened(finite("chosen log-probs", chosen)) - widened(
        finite("rejected log-probs", rejected)
    )


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``−log σ(β [(log π_w − log π_l) − (log ref_w − log ref_l)])`` (arXiv 2305.18290, eq. 7).

    With ``label_smoothing`` ε it is (1 − ε) of that plus ε of it with the labels exchanged
    (conservative DPO).
    """
    margin = _margin(chosen, rejected) - _margin(reference_chosen, reference_rejected)
    loss = -(1 - label_smoothing) * logsigmoid(beta * margin)
    return loss - label_smoothing * logsigmoid(-beta * margin)


def kto(
    logprobs: Tensor,
    reference: Tensor,
    desirable: Tensor,
    z0: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``λ_y − v``: ``λ_D (1 − σ(β (r − z₀)))`` of desirable rows, ``λ_U (1 − σ(β (z₀ − r)))`` of
    the others, r = log π/ref (arXiv 2402.01306, eq. 8).

    z₀ is KL(π_θ‖π_ref) over the batch, at least 0, and no gradient goes through it.

    Args:
        logprobs: ``[R]`` sums over each row's tokens.
        reference: ``[R]`` likewise under π_ref.
        desirable: ``[R]`` bool.
        z0: The same for every part of an update, or the loss depends on how it is split.
        beta: β.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
    """
    reward = _margin(logprobs, reference)
    point = z0.detach() if isinstance(z0, Tensor) else z0
    signed = torch.where(desirable, reward - point, point - reward)
    weight = torch.where(
        desirable,
        reward.new_tensor(desirable_weight),
        reward.new_tensor(undesirable_weight),
    )
    # 1 − σ(x) = σ(−x), without the cancellation.
    return weight * torch.sigmoid(-beta * signed)


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """``log(p / (1 − p))`` of p = e^mean log-prob, finite also where p rounds to 1.

    p is bounded by 1 − 1e-7, where log-odds are 16.
    """
    bounded = mean_logprobs.clamp(max=-1e-7)
    return bounded - torch.log(-torch.expm1(bounded))


def orpo(chosen_mean: Tensor, rejected_mean: Tensor, *, beta: float = 0.1) -> Tensor:
    """``−log p_w − β log σ(log odds_w − log odds_l)`` of mean log-probs (arXiv 2403.07691, eq. 6-7).

    The first term is the chosen response's mean cross entropy.
    """
    _margin(chosen_mean, rejected_mean)
    won, lost = widened(chosen_mean), widened(rejected_mean)
    return -won - beta * logsigmoid(log_odds(won) - log_odds(lost))


def cpo(
    chosen: Tensor,
    rejected: Tensor,
    chosen_mean: Tensor,
    *,
    beta: float = 0.1,
    nll_coefficient: float = 1.0,
) -> Tensor:
    """``−log σ(β (log π_w − log π_l)) − c · mean log π_w`` (arXiv 2401.08417, eq. 3-5).

    Needs no reference.
    """
    return -logsigmoid(beta * _margin(chosen, rejected)) - nll_coefficient * widened(chosen_mean)


def pairs_of_groups(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """``[P]`` row indices of the chosen and of the rejected rows: every pair of rows in a group whose
    rewards differ by more than :data:`EQUAL_REWARDS`, so that neither the order of rows, nor ties, nor rounding matter.

    Args:
        rewards: ``[R]`` rewards.
        group: ``[R]`` int64, index of each row's group.
    """
    better = (rewards[:, None] - rewards[None] > EQUAL_REWARDS) & (group[:, None] == group[None])
    chosen, rejected = torch.nonzero(better, as_tuple=True)
    return chosen, rejected
