"""Importance ratios in log space, clamped before ``exp``, and what is made of them.

All functions take and give tensors of any one shape; nothing here knows of rows or groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this: e^20 = 4.9e8 is finite in float32, also squared."""


def log_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """``log π_θ − log μ``, clamped to ±:data:`MAX_LOG_RATIO` (no gradient beyond)."""
    return (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
) -> Tensor:
    """Loss per token of the clipped surrogate (arXiv 1707.06347, eq. 7).

    ``max(−A ρ, −A clamp(ρ, 1 − clip_low, 1 + clip_high))``; where A < 0 it is at most
    ``−A dual_clip`` (arXiv 1912.09729, eq. 5): without that bound a token with ρ = 1000 and
    A = −1 costs 1000. None leaves a side, or the dual clip, out.
    """
    ratio = log_ratios.exp()
    loss = -advantages * ratio
    if clip_low is not None or clip_high is not None:
        clamped = ratio.clamp(
            min=None if clip_low is None else 1.0 - clip_low,
            max=None if clip_high is None else 1.0 + clip_high,
        )
        loss = torch.maximum(loss, -advantages * clamped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss


def shaped(log_weights: Tensor, gamma: float) -> Tensor:
    """``f(w) = w / (w + γ)`` of ``log w`` (LUFFY, arXiv 2504.14945, eq. 8).

    Written as ``sigmoid(log w − log γ)``, which is the same and cannot overflow. Its gradient
    by ``log w``, ``γ w / (w + γ)²``, is greatest (1/4) at w = γ: tokens that the policy finds
    unlikely keep a signal.
    """
    return torch.sigmoid(log_weights - torch.log(log_weights.new_tensor(gamma)))


def k3(log_r: Tensor) -> Tensor:
    """``r − log r − 1``, the non-negative estimator of a KL divergence.

    With samples from μ and r = π_θ/μ its mean is KL(μ‖π_θ); with samples from π_θ and
    r = π_ref/π_θ it is KL(π_θ‖π_ref) (Schulman, "Approximating KL divergence", 2020).
    """
    clamped = log_r.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(clamped) - clamped


def effective_sample_share(sum_w: float, sum_w2: float, count: float) -> float:
    """Effective sample size as a share: ``(Σw)² / (n Σw²)``; 1 where all weights are equal."""
    return sum_w * sum_w / (count * sum_w2) if count and sum_w2 else 1.0
