"""Log-probs and entropies of given tokens from hidden states and the output matrix.

With a small vocabulary the logits of a micro-batch are made at once. With a large one they are
made, used and dropped for a slice of the vocabulary at a time, forward and again backward, so that
the logits of a whole micro-batch never exist. Slices of the vocabulary, and not of the tokens,
since the output matrix is the larger side: it is read once a pass, and each row of its gradient is
written once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNKED_FROM = 8192
"""Vocabulary size from which slices pay: below, the logits are smaller than the activations."""
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Size of one slice's float32 logits."""
LEAST_SLICE = 256
"""Columns below which a matrix product wastes its time."""
KEPT_BYTES = {"cpu": 1 << 30}
"""Logits that are kept for the backward pass instead of being made again: a CPU is slow at that."""


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
        size = CHUNK_BYTES.get(hidden.device.type, 64 << 20) // (4 * max(len(hidden), 1))
        size = max(size, LEAST_SLICE)
        wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        kept = KEPT_BYTES.get(hidden.device.type, 0) // (4 * max(len(hidden), 1) * size)
        logprobs, entropy = _Sliced.apply(
            hidden, weight, tokens, temperature, size, kept if wanted else 0
        )
        return logprobs, entropy if entropy_gradient else entropy.detach()
    return from_logits(hidden @ weight.T, tokens, temperature, entropy_gradient=entropy_gradient)


def from_logits(
    logits: Tensor,
    tokens: Tensor,
    temperature: Tensor | None = None,
    *,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """The plain version: log-probs of tokens and entropies of ``softmax(logits / T)``.

    Args:
        logits: ``[N, V]``
        tokens: ``[N]`` int64.
        temperature: ``[N]`` or None for 1 everywhere.
        entropy_gradient: Whether the entropy carries a gradient.

    Returns:
        ``[N]`` and ``[N]``, as :func:`token_logprobs`.
    """
    logits = _float(logits)
    if temperature is not None:
        logits = logits / temperature[:, None].to(logits.dtype)
    every = torch.log_softmax(logits, -1)
    logprobs = every.gather(1, tokens[:, None]).squeeze(1)
    source = every if entropy_gradient else every.detach()
    entropy = -torch.linalg.vecdot(source.exp(), source)
    return logprobs, entropy


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _slice_logits(hidden: Tensor, weight: Tensor, heat: Tensor | None) -> Tensor:
    logits = _float(hidden @ weight.T)
    return logits if heat is None else logits.mul_(heat)


class _Sliced(torch.autograd.Function):
    """Keeps hidden, W, tokens, logsumexp and entropy; makes the logits again in backward, but for
    those of the first slices, which it keeps.

    Forward goes over slices with a running maximum m, ``s = Σ e^(z − m)`` and
    ``u = Σ e^(z − m) (z − m)``: then log-sum-exp is m + log s and the entropy log s − u/s.
    Backward uses ∂ log p_y / ∂z = onehot(y) − p and ∂H / ∂z_j = −p_j (log p_j + H), both over T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        temperature: Tensor | None,
        size: int,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        saved: list[Tensor] = []
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        heat = None if temperature is None else temperature[:, None].to(dtype).reciprocal()
        count = len(hidden)
        most = hidden.new_full((count,), -torch.inf, dtype=dtype)
        total = hidden.new_zeros(count, dtype=dtype)
        moment = torch.zeros_like(total)
        picked = torch.zeros_like(total)
        for start in range(0, weight.shape[0], size):
            logits = _slice_logits(hidden, weight[start : start + size], heat)
            width = logits.shape[1]
            local = tokens - start
            here = (local >= 0) & (local < width)
            found = logits.gather(1, local.clamp(0, width - 1)[:, None]).squeeze(1)
            picked = torch.where(here, found, picked)
            top = torch.maximum(most, logits.amax(1))
            # A slice of forbidden tokens alone (−∞) must not make NaN of −∞ − (−∞).
            base = torch.where(top == -torch.inf, torch.zeros_like(top), top)
            if start < kept * size:
                saved.append(logits)
                logits = logits - base[:, None]
            else:
                logits.sub_(base[:, None])
            moved = torch.where(most == -torch.inf, torch.zeros_like(most), most - base)
            scale = torch.where(most == -torch.inf, torch.zeros_like(most), moved.exp())
            share = logits.exp()
            moment = scale * (moment + moved * total)
            total = scale * total + share.sum(1)
            # e^x x is 0 at x = −∞, where the product is NaN.
            moment += torch.linalg.vecdot(share, logits.clamp_(min=-1e30))
            most = top
        norms = most + total.log()
        entropy = total.log() - moment / total
        logprobs = picked - norms
        ctx.save_for_backward(hidden, weight, tokens, heat, norms, entropy, *saved)
        ctx.size = size
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = gradients
        hidden, weight, tokens, heat, norms, entropy, *saved = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        # Summed in float32: a bf16 sum over many slices loses small terms.
        grad_hidden = torch.zeros_like(hidden, dtype=norms.dtype) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        with_entropy = bool(by_entropy.any())
        for number, start in enumerate(range(0, weight.shape[0], ctx.size)):
            part = slice(start, start + ctx.size)
            if number < len(saved):
                every = saved[number] - norms[:, None]
            else:
                every = _slice_logits(hidden, weight[part], heat).sub_(norms[:, None])
            share = every.exp()
            width = share.shape[1]
            if with_entropy:
                # −p (g + h (log p + H)): one factor, then one product.
                every.clamp_(min=-1e30).add_(entropy[:, None]).mul_(by_entropy[:, None])
                every.add_(by_logprob[:, None])
                grad = share.mul_(every.neg_())
            else:
                grad = share.mul_(-by_logprob[:, None])
            local = tokens - start
            here = (local >= 0) & (local < width)
            added = torch.where(here, by_logprob, torch.zeros_like(by_logprob)).to(grad.dtype)
            grad.scatter_add_(1, local.clamp(0, width - 1)[:, None], added[:, None])
            if heat is not None:
                grad.mul_(heat)
            narrow = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += narrow @ weight[part]
            if grad_weight is not None:
                torch.mm(narrow.T, hidden, out=grad_weight[part])
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None
