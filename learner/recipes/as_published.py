"""Published code that no run calls, for reproducing its numbers one batch at a time.

LUFFY's loss on padded tensors ``[B, T]`` with its metrics and its learned temperature, and ExGRPO's
buckets. Training uses the objectives ``luffy_code`` and ``luffy_paper``, whose denominators are
global over an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...common.objectives.keys import Shaping
from ..losses.ratios import clip_surrogate, log_ratio
from ..losses.shaping import expert_weights, own_ratios
from .sequences import masked_mean, masked_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLoss:
    """A loss, and what the published code logs beside it (detached scalars)."""

    loss: Tensor
    """The loss, with gradient."""
    own_loss: Tensor
    """Mean over own tokens (on_pg_loss)."""
    expert_loss: Tensor
    """Mean over expert tokens (off_pg_loss); 0 without any."""
    expert_weight: Tensor
    """Mean weight of expert tokens (off_ratio_mean)."""
    clip_fraction: Tensor
    """Share of all tokens at which the clip decides (pg_clipfrac); taken before the maximum."""
    kl: Tensor
    """Mean of log μ − log π_θ over all tokens (ppo_kl)."""
    own_probability: Tensor
    """Mean e^(log μ) of own tokens (on_policy_prob)."""
    expert_probability: Tensor
    """Mean π_θ of expert tokens (off_policy_prob)."""
    at_most: Tensor
    """Share of expert tokens whose weight is at its upper bound (off_ratio_max_clip_frac)."""
    at_least: Tensor
    """Share of expert tokens whose weight is at its lower bound (off_ratio_min_clip_frac)."""


def mixed_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    expert: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    own_shaping: Shaping = "none",
    own_coefficient: float = 1.0,
    shaping: Shaping = "ratio",
    gamma: float = 0.1,
    own_gamma: float = 0.1,
    exponent: float = 0.5,
    coefficient: float = 0.1,
    teacher: Tensor | None = None,
    expert_clip_low: float | None = None,
    expert_clip_high: float | None = None,
    max_probability: float | None = None,
    how: Literal["width", "token_mean"] = "width",
) -> MixedLoss:
    """``Σ ℓ / T`` (or over tokens) of ``ℓ = −A f(π_θ)`` of expert and of ``−A ρ``, clipped or not, of
    own tokens (LUFFY's ``compute_token_on_off_policy_loss``).

    Args:
        logprobs: ``[B, T]`` log π_θ.
        old_logprobs: ``[B, T]`` log μ; only own tokens' are in the loss.
        advantages: ``[B]`` or ``[B, 1]``.
        mask: ``[B, T]`` tokens of responses.
        expert: ``[B, T]`` bool, tokens of an expert's prefix.
        clip_low: PPO clip of own tokens; None = no clip (loss_remove_clip).
        clip_high: the same above.
        own_shaping: on_policy_reshape.
        own_coefficient: c of it (1 for ``logp``, on_policy_reshape_weight for ``p_logp``).
        shaping: off_policy_reshape.
        gamma: γ of expert tokens' p/(p + γ).
        own_gamma: γ of own tokens'.
        exponent: k of both ``power``.
        coefficient: c of expert tokens' ``log`` and ``plus_log``.
        teacher: ``[B, T]`` log π_φ of expert tokens: then the weight is π_θ/(π_φ + 1e-6).
        expert_clip_low: off_policy_min_clip.
        expert_clip_high: off_policy_max_clip.
        max_probability: all_max_clip: likelier tokens leave the loss and the denominator.
        how: ``width`` is loss_remove_token_mean, the padded width T without division by rows.
    """
    mask, expert = mask.bool(), expert.bool()
    advantages = advantages.reshape(-1, 1).to(logprobs.dtype)
    seen = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    old = torch.where(mask, old_logprobs, torch.zeros_like(logprobs))
    ratio = own_ratios(
        seen, old, own_shaping, gamma=own_gamma, exponent=exponent, coefficient=own_coefficient
    )
    plain = -advantages * ratio
    own_losses = clip_surrogate(
        ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    known = torch.full_like(expert, teacher is not None)
    weights = expert_weights(
        seen,
        torch.zeros_like(seen) if teacher is None else torch.where(expert & mask, teacher, 0.0),
        known,
        shaping,
        behaviour="published",
        gamma=gamma,
        exponent=exponent,
        coefficient=coefficient,
        clip_low=expert_clip_low,
        clip_high=expert_clip_high,
    )
    expert_losses = -advantages * weights
    losses = torch.where(expert, expert_losses, own_losses)
    counted = mask if max_probability is None else mask & (seen.exp() <= max_probability)
    if how == "width":
        loss = masked_sum(losses, counted, divisor=logprobs.shape[-1])
    else:
        loss = masked_mean(losses, counted)
    own, experts = mask & ~expert, mask & expert

    def mean(values: Tensor, among: Tensor) -> Tensor:
        return masked_mean(values.detach().to(logprobs.dtype), among)

    none = torch.zeros_like(expert)
    return MixedLoss(
        loss=loss,
        own_loss=mean(own_losses, own),
        expert_loss=mean(expert_losses, experts),
        expert_weight=mean(weights, experts),
        clip_fraction=mean(own_losses > plain, mask),
        kl=mean(-log_ratio(seen, old), mask),
        own_probability=mean(old.exp(), own),
        expert_probability=mean(seen.exp(), experts),
        at_most=mean(none if expert_clip_high is None else weights == expert_clip_high, experts),
        at_least=mean(none if expert_clip_low is None else weights == expert_clip_low, experts),
    )


def supervised_multitask_loss(
    logprobs: Tensor, mask: Tensor, expert_rows: Tensor, *, coefficient: float = 1.0
) -> Tensor:
    """``c · mean over the expert rows' tokens of −log π`` (sft multitask); 0 without such rows.

    Args:
        logprobs: ``[B, T]`` log π_θ.
        mask: ``[B, T]`` tokens of responses.
        expert_rows: ``[B]`` bool, expert rows.
        coefficient: c.
    """
    return coefficient * masked_mean(-logprobs, mask.bool() & expert_rows.bool()[:, None])


def bucket_weights(group_size: int, *, mean: float | None = None, sigma: float = 1.0) -> Tensor:
    """``[group_size − 1]`` probabilities of the buckets of 1 … G − 1 successes, float64.

    Proportional to the normal density N(k; G/2, 1): replay is drawn most from problems that are
    solved half of the time (ExGRPO, arXiv 2510.02245, ``normal`` in its code, which leaves out
    buckets that are empty). With G = 8, k = 4: 0.3990.
    """
    centre = group_size / 2 if mean is None else mean
    k = torch.arange(1, group_size, dtype=torch.float64)
    density = torch.exp(-((k - centre) ** 2) / (2 * sigma * sigma))
    return density / density.sum()


def temperature_loss(log_alpha: Tensor, entropy: Tensor, target: float) -> Tensor:
    """``mean(H − H*) · e^log_alpha`` with H detached: learns the coefficient α (SAC, arXiv
    1812.05905, eq. 18; LUFFY's ``adaptive_temperature``)."""
    return (entropy.detach() - target).mean() * log_alpha.exp()
