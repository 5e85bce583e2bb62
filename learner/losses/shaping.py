"""Weights of tokens: shaped importance weights of expert and own tokens, and CHORD's.

The tensors of a call have the same shape. A weight w is given as ``log w``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.objectives.keys import ExpertBehaviour, Shaping
from .finite import finite, widened
from .ratios import clamped, log_ratio

PUBLISHED_EPSILON = 1e-6
"""Added to π_φ in LUFFY's code."""


def shaped(log_weights: Tensor, gamma: float) -> Tensor:
    """``f(w) = w / (w + γ)`` of ``log w`` (LUFFY, arXiv 2504.14945, eq. 8).

    Written as ``sigmoid(log w − log γ)``, which is the same and cannot overflow. Its gradient
    by ``log w``, ``γ w / (w + γ)²``, is greatest (1/4) at w = γ: tokens that the policy finds
    unlikely keep a signal.
    """
    return torch.sigmoid(log_weights - torch.log(log_weights.new_tensor(gamma)))


def shape(
    log_weights: Tensor,
    how: Shaping,
    *,
    gamma: float = 0.1,
    exponent: float = 0.5,
    coefficient: float = 0.1,
) -> Tensor:
    """A shaped weight of ``log w``.

    ``none``: w. ``ratio``: w/(w+γ). ``log``: c·log w. ``power``: w^k. ``square_root``: √w.
    ``plus_log``: w + c·log w. (LUFFY's code calls them no_reshape, p_div_p_γ, logp, pow,
    square_root and p_logp.) Where w itself is exponentiated, log w is clamped to ±20 first.

    Args:
        log_weights: Any shape, finite.
        how: Which of them.
        gamma: γ.
        exponent: k.
        coefficient: c.
    """
    if how == "ratio":
        return shaped(log_weights, gamma)
    if how == "log":
        return coefficient * log_weights
    if how == "power":
        return (exponent * clamped(log_weights)).exp()
    if how == "square_root":
        return (0.5 * clamped(log_weights)).exp()
    if how == "plus_log":
        return clamped(log_weights).exp() + coefficient * log_weights
    return clamped(log_weights).exp()


def expert_weights(
    logprobs: Tensor,
    recorded: Tensor,
    known: Tensor,
    how: Shaping = "ratio",
    *,
    behaviour: ExpertBehaviour = "recorded",
    gamma: float = 0.1,
    exponent: float = 0.5,
    coefficient: float = 0.1,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> Tensor:
    """The weight of expert tokens, shaped, then clipped from above and below.

    ``recorded``: w = π_θ/π_φ where log π_φ is known, π_θ where not. ``one``: w = π_θ (LUFFY, π_φ
    = 1). ``published``: as LUFFY's code does it, π_θ/(π_φ + 1e-6) unshaped where π_φ is known, and
    the shaped π_θ where not.

    Args:
        logprobs: log π_θ of expert tokens, any shape.
        recorded: log π_φ, anything where not known.
        known: bool.
        how: See :func:`shape`.
        behaviour: Which denominator.
        gamma: γ of ``ratio``.
        exponent: k of ``power``.
        coefficient: c of ``log`` and ``plus_log``.
        clip_low: Least weight (off_policy_min_clip).
        clip_high: Greatest weight (off_policy_max_clip).
    """
    logprobs = widened(finite("logprobs", logprobs))
    past = torch.where(known, widened(recorded).to(logprobs.dtype), torch.zeros_like(logprobs))
    finite("recorded log-probs", past)
    log_w = logprobs - past if behaviour == "recorded" else logprobs
    if how == "log" or how == "plus_log":
        # Linear in log w, which must not be clamped; only the exponential must be.
        weights = shape(log_w, how, coefficient=coefficient)
    else:
        weights = shape(clamped(log_w), how, gamma=gamma, exponent=exponent)
    if behaviour == "published":
        plain = clamped(logprobs).exp() / (past.exp() + PUBLISHED_EPSILON)
        weights = torch.where(known, plain, weights)
    if clip_low is not None or clip_high is not None:
        # The upper bound first, as in the published code: if the two cross, the lower one wins.
        weights = weights if clip_high is None else weights.clamp(max=clip_high)
        weights = weights if clip_low is None else weights.clamp(min=clip_low)
    return weights


def own_ratios(
    logprobs: Tensor,
    behaviour: Tensor,
    how: Shaping = "none",
    *,
    gamma: float = 0.1,
    exponent: float = 0.5,
    coefficient: float = 0.1,
) -> Tensor:
    """ρ = π_θ/μ of own tokens, shaped as LUFFY's ``on_policy_reshape`` does it.

    ``ratio`` is [p/(p+γ)] / [p_μ/(p_μ+γ)]; the others are functions of ρ as in :func:`shape`.
    """
    log_r = log_ratio(logprobs, behaviour)
    if how == "ratio":
        gap = math.log(gamma)
        # log of p/(p+γ) is logsigmoid(log p − log γ): without a division, nothing can overflow.
        new = torch.nn.functional.logsigmoid(widened(logprobs) - gap)
        old = torch.nn.functional.logsigmoid(widened(behaviour) - gap)
        return clamped(new - old).exp()
    return shape(log_r, how, exponent=exponent, coefficient=coefficient)


def chord_mu(
    step: float,
    *,
    peak: float = 0.9,
    valley: float = 0.05,
    warmup_steps: int = 0,
    decay_steps: int = 0,
) -> float:
    """CHORD's μ: linear up to the peak, then a half cosine down to the valley (arXiv
    2508.11408).

    Args:
        step: current step, from 0.
        peak: greatest μ.
        valley: final μ.
        warmup_steps: steps until the peak.
        decay_steps: steps from the peak to the valley; 0 = the valley at once.
    """
    if step < warmup_steps:
        return step / warmup_steps * peak
    if step >= warmup_steps + decay_steps:
        return valley
    share = (step - warmup_steps) / decay_steps
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * share))


def chord_phi(logprobs: Tensor) -> Tensor:
    """``φ = p (1 − p)``, detached: small at tokens that are certain either way (arXiv 2508.11408)."""
    probs = logprobs.detach().exp()
    return probs * (1 - probs)
