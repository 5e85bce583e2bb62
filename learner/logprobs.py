"""Log-probs and entropies of given tokens from hidden states and the output matrix.

With a small vocabulary the logits of a micro-batch are made at once. With a large one they are
made, used and dropped chunk by chunk, forward and again backward, so that the logits of a whole
micro-batch never exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNKED_FROM = 8192
"""Vocabulary size from which chunks pay: below, the logits are smaller than the activations."""
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Size of one chunk's float32 logits."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor | None,
    *,
    entropy_gradient: bool = False,
    chunked: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """``log π(token | hidden)`` and the entropy of π, of ``softmax(hidden Wᵀ / T)``.

    Args:
        hidden: ``[N, H]`` after the final norm, at the positions that predict the tokens.
        weight: ``[V, H]`` the output matrix.
        tokens: ``[N]`` int64.
        temperature: ``[N]`` float32, or None for 1 everywhere.
        entropy_gradient: Whether the entropy carries a gradient.
        chunked: None = by the size of the vocabulary.

    Returns:
        ``[N]`` log-probs and ``[N]`` entropies in nats; float32, or float64 for float64 inputs.
    """
    if chunked is None:
        chunked = weight.shape[0] >= CHUNKED_FROM
    if chunked:
        size = CHUNK_BYTES.get(hidden.device.type, 64 << 20) // (4 * weight.shape[0])
        logprobs, entropy = _Chunked.apply(hidden, weight, tokens, temperature, max(size, 1))
        return logprobs, entropy if entropy_gradient else entropy.detach()
    logits = _float(hidden @ weight.T)
    if temperature is not None:
        logits = logits / temperature[:, None].to(logits.dtype)
    every = torch.log_softmax(logits, -1)
    logprobs = every.gather(1, tokens[:, None]).squeeze(1)
    source = every if entropy_gradient else every.detach()
    entropy = -torch.linalg.vecdot(source.exp(), source)
    return logprobs, entropy


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _chunk_logits(hidden: Tensor, weight: Tensor, temperature: Tensor | None) -> Tensor:
    logits = _float(hidden @ weight.T)
    if temperature is not None:
        logits.div_(temperature[:, None].to(logits.dtype))
    return logits


class _Chunked(torch.autograd.Function):
    """Keeps hidden, W, tokens, logsumexp and entropy; makes the logits again in backward.

    ∂ log p_y / ∂z = onehot(y) − p and ∂H / ∂z_j = −p_j (log p_j + H), both over T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: Tensor | None,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        norms = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            heat = None if temperature is None else temperature[part]
            logits = _chunk_logits(hidden[part], weight, heat)
            norm = torch.logsumexp(logits, -1)
            picked = logits.gather(1, tokens[part, None]).squeeze(1)
            logprobs[part] = picked - norm
            norms[part] = norm
            mean = torch.linalg.vecdot((logits - norm[:, None]).exp_(), logits)
            entropy[part] = norm - mean
        ctx.save_for_backward(hidden, weight, tokens, temperature, norms, entropy)
        ctx.size = size
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = gradients
        hidden, weight, tokens, temperature, norms, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=norms.dtype) if wants_weight else None
        with_entropy = bool(by_entropy.any())
        for start in range(0, len(hidden), ctx.size):
            part = slice(start, start + ctx.size)
            heat = None if temperature is None else temperature[part]
            every = _chunk_logits(hidden[part], weight, heat).sub_(norms[part, None])
            share = every.exp()
            grad = share * -by_logprob[part, None]
            if with_entropy:
                every.add_(entropy[part, None]).mul_(share)
                grad.sub_(every.mul_(by_entropy[part, None]))
            grad.scatter_add_(1, tokens[part, None], by_logprob[part, None].to(grad.dtype))
            if heat is not None:
                grad.div_(heat[:, None].to(grad.dtype))
            narrow = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ weight
            if grad_weight is not None:
                # Summed in float32: a bf16 sum over thousands of chunks loses small terms.
                grad_weight += (narrow.T @ hidden[part]).to(grad_weight.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None
