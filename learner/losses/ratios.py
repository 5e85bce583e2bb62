"""Importance ratios in log space, clamped before ``exp``, and what is computed from them.

Functions of tokens take and return tensors of the same, arbitrary shape. Functions of rows take flat
tokens ``[N]`` with ``row`` ``[N]`` int64, the index of each token's row among R rows; nothing here
knows about groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.objectives.keys import Correction, CorrectionLevel
from .finite import finite, widened

MAX_LOG_RATIO = 20.0
"""Bound of the size of log-ratios: e^20 = 4.9e8 is finite in float32, even squared."""


def clamped(log_ratios: Tensor) -> Tensor:
    """Clamps to ± :data:`MAX_LOG_RATIO`, with no gradient beyond."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """``log π_θ − log μ``, clamped to ±:data:`MAX_LOG_RATIO` (no gradient beyond).

    Raises:
        NonFiniteError: a log-prob is infinite or NaN.
    """
    finite("logprobs", logprobs)
    finite("behaviour log-probs", behaviour)
    return clamped(widened(logprobs) - widened(behaviour))


def row_sums(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """``[R]`` sums of ``[N]`` values over each row's tokens, differentiable."""
    zeros = torch.zeros(rows, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, row, values)


def sequence_log_ratio(
    logprobs: Tensor, behaviour: Tensor, row: Tensor, rows: int, among: Tensor | None = None
) -> Tensor:
    """``[R]`` mean over each row's tokens of ``log π_θ − log μ``: the log of the geometric mean.

    ``s_i = (π_θ(y_i|x) / μ(y_i|x))^(1/|y_i|)`` (GSPO, arXiv 2507.18071, eq. 7).

    Args:
        logprobs: ``[N]`` log π_θ.
        behaviour: ``[N]`` log μ.
        row: ``[N]`` index of each token's row.
        rows: number of rows, R.
        among: ``[N]`` bool, tokens that count; None = all. A row without any gives 0.
    """
    difference = widened(logprobs) - widened(behaviour)
    counted = torch.ones_like(difference)
    if among is not None:
        counted = among.to(difference.dtype)
        difference = torch.where(among, difference, torch.zeros_like(difference))
    finite("log-ratios", difference)
    lengths = row_sums(counted, row, rows).clamp(min=1)
    return clamped(row_sums(difference, row, rows) / lengths)


def corrected(
    log_weights: Tensor,
    how: Correction,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Detached weights w of log w, bounded.

    ``truncate``: min(w, high) (TIS; IMPALA, arXiv 1802.01561). ``mask``: w where
    low ≤ w ≤ high, else 0 (IcePop, Ring-1T, arXiv 2510.18855; MIS with low = 0). ``none``: 1.
    """
    weights = clamped(log_weights.detach()).exp()
    if how == "none":
        return torch.ones_like(weights)
    if how == "truncate":
        return weights.clamp(max=high)
    kept = (weights >= low) & (weights <= high)
    return torch.where(kept, weights, torch.zeros_like(weights))


def correction_weights(
    log_ratios: Tensor,
    how: Correction,
    level: CorrectionLevel = "token",
    *,
    low: float = 0.0,
    high: float = 2.0,
    row: Tensor | None = None,
    rows: int = 0,
    among: Tensor | None = None,
) -> Tensor:
    """``[N]`` detached weight of every token, from ``[N]`` log π_prox/μ (not yet clamped).

    Args:
        log_ratios: ``[N]`` log-ratios.
        how: see :func:`corrected`.
        level: ``token``: the token's own. ``sequence``: the product over the row's tokens.
            ``geometric``: the row's geometric mean.
        low: least weight that ``mask`` keeps.
        high: greatest weight.
        row: ``[N]`` index of each token's row; for the levels of rows.
        rows: number of rows, R.
        among: ``[N]`` bool, tokens that count in a row's weight; None = all.
    """
    values = widened(log_ratios.detach())
    if level == "token" or how == "none":
        return corrected(values, how, low=low, high=high)
    assert row is not None
    counted = torch.ones_like(values)
    if among is not None:
        counted = among.to(values.dtype)
        values = torch.where(among, values, torch.zeros_like(values))
    total = row_sums(values, row, rows)
    if level == "geometric":
        total = total / row_sums(counted, row, rows).clamp(min=1)
    return corrected(total, how, low=low, high=high)[row]


def ppo_clip(
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
) -> Tensor:
    """Loss per token of the clipped surrogate (arXiv 1707.06347, eq. 7), of log-ratios.

    See :func:`clip_surrogate`.
    """
    return clip_surrogate(
        log_ratios.exp(), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def clip_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
) -> Tensor:
    """Loss per token of the clipped surrogate (arXiv 1707.06347, eq. 7).

    ``max(−A ρ, −A clamp(ρ, 1 − clip_low, 1 + clip_high))``; where A < 0 it is at most
    ``−A dual_clip`` (arXiv 1912.09729, eq. 5): without that bound a token with ρ = 1000 and
    A = −1 costs 1000. None leaves a side, or the dual clip, out. ``clip_high > clip_low`` is
    DAPO's clip-higher (arXiv 2503.14476, eq. 10).
    """
    loss = -advantages * ratio
    if clip_low is not None or clip_high is not None:
        bounded = ratio.clamp(
            min=None if clip_low is None else 1.0 - clip_low,
            max=None if clip_high is None else 1.0 + clip_high,
        )
        loss = torch.maximum(loss, -advantages * bounded)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss


def cispo(
    logprobs: Tensor,
    log_ratios: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None,
    clip_high: float | None,
) -> Tensor:
    """``−sg(clamp(ρ, 1 − clip_low, 1 + clip_high)) A log π_θ`` (MiniMax-M1, arXiv 2506.13585,
    eq. 4-5).

    The clip bounds the weight and never stops the gradient.
    """
    weight = log_ratios.detach().exp()
    if clip_low is not None or clip_high is not None:
        weight = weight.clamp(
            min=None if clip_low is None else max(1.0 - clip_low, 0.0),
            max=None if clip_high is None else 1.0 + clip_high,
        )
    return -advantages * weight * logprobs


def k3(log_r: Tensor) -> Tensor:
    """``r − log r − 1``, the non-negative estimator of a KL divergence.

    With samples from μ and r = π_θ/μ its mean is KL(μ‖π_θ); with samples from π_θ and
    r = π_ref/π_θ it is KL(π_θ‖π_ref) (Schulman, "Approximating KL divergence", 2020).
    """
    bounded = clamped(log_r)
    return torch.expm1(bounded) - bounded


def effective_sample_share(sum_w: float, sum_w2: float, count: float) -> float:
    """Effective sample size as a share: ``(Σw)² / (n Σw²)``; 1 if all weights are equal."""
    return sum_w * sum_w / (count * sum_w2) if count and sum_w2 else 1.0
