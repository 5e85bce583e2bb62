"""KL penalties in the loss and in the reward, entropy coefficients, and the critic's loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.objectives.keys import KlForm, KlRewardForm
from .finite import finite, widened
from .ratios import clamped, k3

LOW_VAR_BOUND = 10.0
"""Bound of LUFFY's (verl's) ``low_var_kl``."""


def kl_in_loss(
    logprobs: Tensor,
    reference: Tensor,
    form: KlForm,
    *,
    log_ratios: Tensor | None = None,
) -> Tensor:
    """Penalty per token that keeps π_θ near π_ref.

    With d = log π_θ − log π_ref: ``k2``: ρ̄ d²/2, ρ̄ detached. ``k3``: ρ (e^−d + d − 1), ρ
    differentiable. Both have the gradient of KL(π_θ‖π_ref) in expectation over samples of μ
    (arXiv 2510.01555), which none of the others has: ``kl``: d (its gradient is 0 in expectation),
    ``abs``: |d|, ``mse``: d²/2, ``low_var``: e^−d + d − 1 clamped to ±10, as in LUFFY's and verl's
    code, without a ratio.

    Args:
        logprobs: log π_θ, any shape.
        reference: log π_ref; no gradient goes through.
        form: Which of them.
        log_ratios: log ρ = log π_θ/μ with gradient; None = 0, as for samples of π_θ itself.
    """
    difference = widened(finite("logprobs", logprobs)) - widened(reference.detach())
    finite("log-ratios to the reference", difference)
    if form == "kl":
        return difference
    if form == "abs":
        return difference.abs()
    if form == "mse":
        return 0.5 * difference * difference
    if form == "low_var":
        return k3(-difference).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    ratio = torch.ones_like(difference) if log_ratios is None else clamped(log_ratios).exp()
    if form == "k2":
        # d² is finite for every finite d; only the ratio needs its clamp.
        return ratio.detach() * 0.5 * difference * difference
    return ratio * k3(-difference)


def entropy_of(logits: Tensor) -> Tensor:
    """``−Σ p log p`` in nats over the last dimension, in float32 or better; gradient goes through.

    logits [2, 1, 0] give 0.832396.
    """
    logps = torch.log_softmax(widened(logits), -1)
    # 0 · −∞ of a forbidden token (logit −∞) counts as 0.
    return -torch.where(
        logps == -torch.inf,
        torch.zeros_like(logps),
        logps.exp() * logps,
    ).sum(-1)


def scaled_coefficient(coefficient: float, target: float, entropy: float) -> float:
    """``c · H*/H``: presses harder the less entropy is left (LUFFY's ``adaptive_temperature_fixed``).

    An entropy of 0 or less is replaced by 1e-6 of the target, so that the result is finite.
    """
    return coefficient * target / max(entropy, 1e-6 * max(target, 1e-6))


def stepped_coefficient(
    coefficient: float, target: float, entropy: float, *, step: float = 0.005, most: float = 1.0
) -> float:
    """The next coefficient: up by a step below the target, down above, within [0, most].

    Skywork-OR1 (arXiv 2505.22312, section 4), which uses it only while the entropy is under its
    target: multiply by ``entropy <= target`` for that.
    """
    moved = coefficient + step if entropy < target else coefficient - step
    return min(max(moved, 0.0), most)


def learned_coefficient(
    coefficient: float, target: float, entropy: float, *, step: float = 0.005
) -> float:
    """The next coefficient by one step of gradient descent on its loss
    (:func:`tandem.learner.recipes.as_published.temperature_loss`):
    ``α e^(−step (H − H*) α)``, which stays above 0.

    The exponent is bounded by ±1, so that no single update changes α by more than a factor of e.
    """
    moved = -step * (entropy - target) * coefficient
    return coefficient * math.exp(min(max(moved, -1.0), 1.0))


def controlled_coefficient(
    coefficient: float, target: float, measured: float, *, gain: float = 0.1
) -> float:
    """The next β of a KL penalty: ``β (1 + gain · clamp(KL/target − 1, ±0.2))``, up where the
    policy is farther from the reference than the target, down where it is nearer (Ziegler et al.,
    arXiv 1909.08593, section 2.2).
    """
    return coefficient * (1.0 + gain * min(max(measured / target - 1.0, -0.2), 0.2))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.2
) -> Tensor:
    """``½ max((V − G)², (V_old + clamp(V − V_old, ±clip) − G)²)`` per token (PPO's code; arXiv
    2005.12729, section 3).

    Args:
        values: V of the critic, with gradient, any shape.
        old_values: V when the rows were collected.
        returns: G, see :func:`tandem.learner.losses.returns.gae`.
        clip: None = no clip.
    """
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss


def kl_in_reward(logprobs: Tensor, reference: Tensor, form: KlRewardForm) -> Tensor:
    """What a token's reward is lowered by, times β: with d = log π − log π_ref, ``k1``: d, ``k3``: e^−d + d − 1.

    k1 belongs here and not in the loss, where its expected gradient is 0 (arXiv 2203.02155, eq. 2;
    Schulman, "Approximating KL divergence", 2020).

    Args:
        logprobs: log π of the policy that sampled, any shape; no gradient goes through.
        reference: log π_ref.
        form: Which of them.
    """
    difference = (logprobs - reference).detach()
    return difference if form == "k1" else k3(-difference)
