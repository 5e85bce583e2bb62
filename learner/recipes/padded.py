"""The losses on padded tensors ``[B, T]``, as papers and exercises write them.

There is one function for each step of a plain GRPO loop. The trainer's objectives
(:mod:`tandem.learner.objectives`) compute the same on flat tokens with denominators that are global
over an update; the functions here treat the micro-batch as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..losses.ratios import cispo, clamped, clip_surrogate, log_ratio
from .sequences import Tokenizer, masked_mean, masked_sum, response_log_probs, tokenize_pairs

RewardFunction = Callable[[str, str], Mapping[str, float]]
"""Takes a response and a gold answer; returns named rewards, ``reward`` among them."""
Method = Literal["none", "noclip", "grpo", "gspo", "cispo"]
"""How off-policy tokens are weighted; see :func:`policy_gradient_losses`."""


def rollout_rewards(
    reward: RewardFunction, responses: Sequence[str], golds: Sequence[str]
) -> tuple[Tensor, dict[str, float]]:
    """``[B]`` float32 rewards, and the mean of every named part as ``mean_<name>``."""
    parts = [reward(text, gold) for text, gold in zip(responses, golds, strict=True)]
    means = {
        f"mean_{name}": sum(float(part[name]) for part in parts) / len(parts)
        for name in (parts[0] if parts else ())
    }
    return torch.tensor([float(part["reward"]) for part in parts]), means


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    baseline: Literal["mean", "none"] = "mean",
    normalizer: Literal["std", "mean", "none"] = "std",
    eps: float = 1e-6,
) -> Tensor:
    """``[B]`` advantages of consecutive groups of equal size.

    ``(R − mean) / (std + ε)`` with std of n − 1 (GRPO), without the division (Dr. GRPO), or over
    ``mean + ε`` (MaxRL), each also without the baseline. Here equal rewards are not special-cased
    as in :func:`tandem.learner.losses.advantages.advantages`.
    """
    grouped = rewards.reshape(-1, group_size)
    mean = grouped.mean(1, keepdim=True)
    result = grouped - mean if baseline == "mean" else grouped
    if normalizer == "std":
        result = result / (grouped.std(1, keepdim=True) + eps)
    elif normalizer == "mean":
        result = result / (mean + eps)
    return result.reshape(rewards.shape)


def policy_gradient_losses(
    advantages: Tensor,
    logprobs: Tensor,
    method: Method = "none",
    *,
    old_logprobs: Tensor | None = None,
    clip: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``[B, T]`` loss of every token, and which were clipped.

    ``none``: −A log π. ``noclip``: −A ρ. ``grpo``: −min(A ρ, A clamp(ρ, 1 ± clip)). ``gspo``:
    the same with the geometric mean of ρ over the row's masked tokens. ``cispo``:
    −A sg(min(ρ, 1 + clip)) log π.

    Args:
        advantages: ``[B]`` or ``[B, 1]``; or rewards.
        logprobs: ``[B, T]``
        method: How samples of an older policy are weighted.
        old_logprobs: ``[B, T]``, needed but for ``none``.
        clip: ε, needed for grpo, gspo and cispo.
        mask: ``[B, T]`` tokens of responses; needed for gspo.

    Returns:
        The losses, and for the clipped methods ``clipped`` (bool, where the clip decides).

    Raises:
        ValueError: a value that the method needs is missing.
    """
    advantages = advantages.reshape(-1, 1)
    if method == "none":
        return -advantages * logprobs, {}
    if old_logprobs is None:
        raise ValueError(f"method={method!r} needs old_logprobs")
    if method == "noclip":
        return -advantages * log_ratio(logprobs, old_logprobs).exp(), {}
    if clip is None:
        raise ValueError(f"method={method!r} needs clip")
    if method == "gspo":
        if mask is None:
            raise ValueError("method='gspo' needs the mask of the responses")
        mean = masked_mean(logprobs - old_logprobs, mask, 1)[:, None]
        ratio = clamped(mean).exp().expand_as(logprobs)
    else:
        ratio = log_ratio(logprobs, old_logprobs).exp()
    if method == "cispo":
        losses = cispo(
            logprobs, log_ratio(logprobs, old_logprobs), advantages, clip_low=None, clip_high=clip
        )
        return losses, {"clipped": ratio > 1 + clip}
    losses = clip_surrogate(ratio, advantages, clip_low=clip, clip_high=clip, dual_clip=None)
    return losses, {"clipped": losses > -advantages * ratio}


def aggregate_padded(
    losses: Tensor,
    mask: Tensor,
    how: Literal["sequence", "token", "constant"] = "sequence",
    *,
    constant: float | None = None,
    rows: int | None = None,
) -> Tensor:
    """A scalar: the mean over rows of each row's mean, the mean over tokens, or Σ / constant.

    Args:
        losses: ``[B, T]`` losses.
        mask: ``[B, T]`` tokens that count.
        how: which of the three.
        constant: the divisor of Σ.
        rows: number of rows in the whole batch, if these are a part of it; None = B.

    Raises:
        ValueError: ``constant`` is needed and missing.
    """
    if how == "constant":
        if constant is None:
            raise ValueError("how='constant' needs the constant to divide by")
        return masked_sum(losses, mask, divisor=constant)
    if how == "token":
        return masked_mean(losses, mask)
    per_row = masked_mean(losses, mask, 1)
    return per_row.sum() / (len(losses) if rows is None else rows)


def sft_micro_batch(
    logprobs: Tensor, mask: Tensor, *, accumulation_steps: int, divisor: float = 1.0
) -> Tensor:
    """Runs backward on one micro-batch of supervised fine-tuning; returns its detached loss.

    ``Σ_t −log π / divisor`` of each row, the mean over rows, over the accumulation steps.
    """
    loss = masked_sum(-logprobs, mask, -1, divisor=divisor).mean() / accumulation_steps
    loss.backward()
    return loss.detach()


def grpo_micro_batch(
    advantages: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    method: Method = "none",
    *,
    accumulation_steps: int,
    old_logprobs: Tensor | None = None,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Runs backward on one micro-batch of a policy gradient; returns its detached loss and the
    metrics of :func:`policy_gradient_losses`."""
    losses, metrics = policy_gradient_losses(
        advantages, logprobs, method, old_logprobs=old_logprobs, clip=clip, mask=mask
    )
    loss = aggregate_padded(losses, mask) / accumulation_steps
    loss.backward()
    return loss.detach(), metrics


def grpo_step(
    model: Any,
    tokenizer: Tokenizer,
    optimizer: torch.optim.Optimizer,
    *,
    prompts: Sequence[str],
    responses: Sequence[str],
    advantages: Tensor,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    method: Method = "none",
    old_logprobs: Tensor | None = None,
    clip: float | None = None,
    how: Literal["sequence", "constant"] = "sequence",
    constant: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """One optimizer step on the rows of a batch, in ``accumulation_steps`` micro-batches.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's tokenizer.
        optimizer: optimizer of the model's parameters; gradients are gone afterwards.
        prompts: ``B`` prompts, one for each response.
        responses: ``B`` responses.
        advantages: ``[B]`` advantages.
        accumulation_steps: number of micro-batches; the result doesn't depend on it.
        max_grad_norm: None = no clipping of the gradient.
        method: see :func:`policy_gradient_losses`.
        old_logprobs: ``[B, T]`` for the methods that need them.
        clip: ε.
        how: see :func:`aggregate_padded`.
        constant: divisor for ``how="constant"``.

    Returns:
        The detached loss of the batch; ``grad_norm`` before clipping and ``entropy``.
    """
    device = next(model.parameters()).device
    batch = {k: v.to(device) for k, v in tokenize_pairs(prompts, responses, tokenizer).items()}
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    entropy = torch.zeros((), device=device)
    for part in torch.arange(len(prompts)).chunk(accumulation_steps):
        mask = batch["response_mask"][part]
        scored = response_log_probs(
            model, batch["input_ids"][part], batch["labels"][part], with_entropy=True
        )
        losses, _ = policy_gradient_losses(
            advantages.to(device)[part],
            scored["log_probs"],
            method,
            old_logprobs=None if old_logprobs is None else old_logprobs.to(device)[part],
            clip=clip,
            mask=mask,
        )
        loss = aggregate_padded(losses, mask, how, constant=constant, rows=len(prompts))
        loss.backward()
        total = total + loss.detach()
        entropy = entropy + masked_sum(scored["token_entropy"].detach(), mask)
    bound = float("inf") if max_grad_norm is None else max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tokens = max(float(batch["response_mask"].sum()), 1.0)
    return total, {"grad_norm": float(norm), "entropy": float(entropy) / tokens}
