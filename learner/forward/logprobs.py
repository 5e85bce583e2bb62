"""Log-probs and entropies of given tokens from hidden states and the output matrix.

With a small vocabulary the logits of a micro-batch are computed at once. With a large one they are
computed, used and dropped for one slice of the vocabulary at a time, forward and again backward, so
that the logits of a whole micro-batch never exist. The vocabulary is sliced, not the tokens, since
the output matrix is the larger side: it is read once per pass, and each row of its gradient is
written once.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

CHUNKED_FROM = 8192
"""Vocabulary size from which slices are used; below it, the logits are smaller than the activations."""
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Size of one slice's float32 logits."""
LEAST_SLICE = 256
"""Number of columns below which a matrix product is inefficient, and of which slices have a multiple: rows of an odd
number of columns keep a GPU from its fastest kernels."""
KEPT_BYTES = {"cpu": 1 << 30}
"""Size of the logits that are kept for the backward pass, since recomputing them is slow on a CPU."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor | None,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    entropy_gradient: bool = False,
    chunked: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """``log π(token | hidden)`` and the entropy of π, of ``softmax(f(hidden Wᵀ + b) / T)``.

    f(z) is ``scale z``, or with a cap ``cap tanh(scale z / cap)`` (Gemma 2's soft cap,
    arXiv 2408.00118, section 2).

    Args:
        hidden: ``[N, H]`` after the final norm, at the positions that predict the tokens.
        weight: ``[V, H]`` the output matrix.
        tokens: ``[N]`` int64.
        temperature: ``[N]`` float32, or None for 1 everywhere.
        bias: ``[V]`` b, or None.
        scale: factor of the logits.
        cap: bound of the logits' size, or None.
        entropy_gradient: whether the entropy carries a gradient.
        chunked: None = by the size of the vocabulary.

    Returns:
        ``[N]`` log-probs and ``[N]`` entropies in nats; float32, or float64 for float64 inputs.
    """
    if chunked is None:
        chunked = weight.shape[0] >= CHUNKED_FROM
    if chunked:
        size = CHUNK_BYTES.get(hidden.device.type, 64 << 20) // (4 * max(len(hidden), 1))
        size = max(size // LEAST_SLICE, 1) * LEAST_SLICE
        inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
        wanted = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
        kept = KEPT_BYTES.get(hidden.device.type, 0) // (4 * max(len(hidden), 1) * size)
        logprobs, entropy = _Sliced.apply(
            hidden, weight, bias, tokens, temperature, scale, cap, size, kept if wanted else 0
        )
        return logprobs, entropy if entropy_gradient else entropy.detach()
    logits = _product(hidden, weight, bias)
    if scale != 1.0:
        logits = _float(logits) * scale
    if cap is not None:
        logits = cap * torch.tanh(_float(logits) / cap)
    return from_logits(logits, tokens, temperature, entropy_gradient=entropy_gradient)


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
    logps = torch.log_softmax(logits, -1)
    logprobs = logps.gather(1, tokens[:, None]).squeeze(1)
    source = logps if entropy_gradient else logps.detach()
    entropy = -torch.linalg.vecdot(source.exp(), source)
    return logprobs, entropy


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)


def _slice_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part: slice,
    bend: float | None,
    heat: Tensor | None,
) -> Tensor:
    """``heat · z`` of a slice, z = hidden Wᵀ + b; or ``heat · tanh(bend · z)``."""
    logits = _float(_product(hidden, weight[part], None if bias is None else bias[part]))
    if bend is not None:
        logits.mul_(bend).tanh_()
    return logits if heat is None else logits.mul_(heat)


def _factors(
    temperature: Tensor | None, scale: float, cap: float | None, like: Tensor
) -> tuple[Tensor | None, float | None]:
    """Heat ``[N, 1]`` and bend for :func:`_slice_logits`; as a part of the heat, the scale costs nothing."""
    outside = scale if cap is None else cap
    if temperature is not None:
        heat = temperature[:, None].to(like.dtype).reciprocal()
        heat = heat if outside == 1.0 else heat.mul_(outside)
    elif cap is None and scale == 1.0:
        return None, None
    else:
        heat = torch.full_like(like, outside)[:, None]
    return heat, None if cap is None else scale / cap


Part = tuple[Tensor, Tensor, Tensor]
"""Of a slice's logits z, each ``[N]``: their maximum m, ``s = Σ e^(z − m)``, and ``u = Σ e^(z − m) (z − m)``."""


def _kernels(hidden: Tensor) -> ModuleType | None:
    """The kernels for slices where they are: on a GPU, in a dtype that they compute in float32."""
    if not hidden.is_cuda or hidden.dtype == torch.float64:
        return None
    return _tried(hidden.device)


@functools.cache
def _tried(device: torch.device) -> ModuleType | None:
    """:mod:`tandem.learner.forward.kernels`, or None where it doesn't work: Triton needs a C compiler and Python's
    headers."""
    try:
        from . import kernels

        with torch.cuda.device(device):
            product = torch.zeros(2, 16, device=device)
            row = torch.zeros(2, device=device)
            token, heat = row.long(), row[:, None]
            kernels.fold(
                product, token, 0, heat, None, (row.clone(), row.clone(), row.clone()), row.clone()
            )
            kernels.slope(product, token, 0, heat, None, row, row, row, row)
    except Exception as error:  # noqa: BLE001 - of the compiler, which has many; the slower way is right, too
        log.warning(
            "log-probs take several times as long as they could, since their kernels can't be compiled here (Triton, "
            "gcc and Python's headers are needed): %s",
            f"{type(error).__name__}: {error}".splitlines()[0][:300],
        )
        return None
    return kernels


def _sums_in_place(logits: Tensor, keep: bool) -> Part:
    """The sums of a slice, from its logits, which are overwritten unless they are to be kept."""
    top = logits.amax(1)
    # A slice of only forbidden tokens (−∞) must not make NaN of −∞ − (−∞).
    base = torch.where(top == -torch.inf, torch.zeros_like(top), top)[:, None]
    moved = logits - base if keep else logits.sub_(base)
    share = moved.exp()
    # e^x x is 0 at x = −∞, but the product is NaN.
    return top, share.sum(1), torch.linalg.vecdot(share, moved.clamp_(min=-1e30))


def _slopes_in_place(
    logps: Tensor,
    heat: Tensor | None,
    bend: float | None,
    norms: Tensor,
    entropy: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    local: Tensor,
) -> Tensor:
    """The gradient of a slice's matrix product, in float32, from its log-probs, which are overwritten."""
    bent = None
    if bend is not None:
        assert heat is not None
        # 1 − tanh², from heat · tanh.
        bent = ((logps + norms[:, None]) / heat).square_().neg_().add_(1)
    share = logps.exp()
    width = share.shape[1]
    if by_entropy is not None:
        # −p (g + h (log p + H)): one factor, then one product.
        logps.clamp_(min=-1e30).add_(entropy[:, None]).mul_(by_entropy[:, None])
        logps.add_(by_logprob[:, None])
        grad = share.mul_(logps.neg_())
    else:
        grad = share.mul_(-by_logprob[:, None])
    here = (local >= 0) & (local < width)
    added = torch.where(here, by_logprob, torch.zeros_like(by_logprob)).to(grad.dtype)
    grad.scatter_add_(1, local.clamp(0, width - 1)[:, None], added[:, None])
    if heat is not None:
        grad.mul_(heat)
    if bent is not None:
        assert bend is not None
        grad.mul_(bent.mul_(bend))
    return grad


def _merged(one: Part, other: Part) -> Part:
    """The sums of two slices together."""
    top = torch.maximum(one[0], other[0])
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    for own, s, u in (one, other):
        # −∞ − (−∞) again: what has seen no token that is allowed adds nothing.
        moved = torch.where(own == -torch.inf, torch.zeros_like(top), own - top)
        shrunk = torch.where(own == -torch.inf, torch.zeros_like(top), moved.exp())
        total = total + shrunk * s
        moment = moment + shrunk * (u + moved * s)
    return top, total, moment


class SlicedGradients:
    """Gradients by the hidden states, matrix and bias of an output head, from those by slices of its logits.

    Args:
        ctx: of the backward pass of a function whose first three inputs these are.
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]``, if there is one.
        dtype: in which sums are made.
        width: rows of the matrix that are in some slice; the others have no gradient.
    """

    def __init__(
        self,
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        width: int,
    ) -> None:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        self._states, self._matrix, self._dtype = hidden, weight, dtype
        # Summed in float32: a bf16 sum over many slices loses small terms.
        self._hidden = torch.zeros_like(hidden, dtype=dtype) if wants_hidden else None
        self._weight = torch.empty_like(weight) if wants_weight else None
        self._bias = torch.empty_like(bias) if bias is not None and wants_bias else None
        for found in (self._weight, self._bias):
            if found is not None:
                found[width:] = 0

    def add(self, part: slice, grad: Tensor, narrow: Tensor) -> None:
        """Takes ``[N, v]`` gradients by a slice's logits, and the same in the hidden states' dtype."""
        if self._bias is not None:
            self._bias[part] = grad.sum(0, dtype=self._dtype)
        if self._hidden is not None:
            self._hidden += narrow @ self._matrix[part]
        if self._weight is not None:
            torch.mm(narrow.T, self._states, out=self._weight[part])

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three gradients, None where nobody wants one."""
        hidden = None if self._hidden is None else self._hidden.to(self._states.dtype)
        return hidden, self._weight, self._bias


class _Sliced(torch.autograd.Function):
    """Keeps hidden, W, b, tokens, logsumexp and entropy; computes the logits again in backward, except
    for those of the first slices, which it keeps.

    Forward goes over slices with a running maximum m, ``s = Σ e^(z − m)`` and
    ``u = Σ e^(z − m) (z − m)``: then log-sum-exp is m + log s and the entropy log s − u/s.
    Backward uses ∂ log p_y / ∂z = onehot(y) − p and ∂H / ∂z_j = −p_j (log p_j + H), both times
    what multiplies z, and under a cap times 1 − tanh².
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: Tensor | None,
        scale: float,
        cap: float | None,
        size: int,
        kept: int,
    ) -> tuple[Tensor, Tensor]:
        saved: list[Tensor] = []
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        count = len(hidden)
        most = hidden.new_full((count,), -torch.inf, dtype=dtype)
        heat, bend = _factors(temperature, scale, cap, most)
        total = hidden.new_zeros(count, dtype=dtype)
        picked = torch.zeros_like(total)
        sums = most, total, torch.zeros_like(total)
        kernels = _kernels(hidden)
        if kernels is not None and heat is None:
            heat = torch.ones_like(most)[:, None]
        for start in range(0, weight.shape[0], size):
            part = slice(start, start + size)
            if kernels is not None:
                product = _product(hidden, weight[part], None if bias is None else bias[part])
                kernels.fold(product, tokens, start, heat, bend, sums, picked)
                continue
            logits = _slice_logits(hidden, weight, bias, part, bend, heat)
            local = tokens - start
            width = logits.shape[1]
            here = (local >= 0) & (local < width)
            own = logits.gather(1, local.clamp(0, width - 1)[:, None])
            picked = torch.where(here, own.squeeze(1), picked)
            keep = start < kept * size
            if keep:
                saved.append(logits)
            sums = _merged(sums, _sums_in_place(logits, keep))
        most, total, moment = sums
        norms = most + total.log()
        entropy = total.log() - moment / total
        logprobs = picked - norms
        ctx.save_for_backward(hidden, weight, bias, tokens, heat, norms, entropy, *saved)
        ctx.size, ctx.bend, ctx.kernels = size, bend, kernels
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_logprob, by_entropy = gradients
        hidden, weight, bias, tokens, heat, norms, entropy, *saved = ctx.saved_tensors
        sums = SlicedGradients(ctx, hidden, weight, bias, norms.dtype, weight.shape[0])
        # Asking a GPU would wait for it.
        with_entropy = ctx.kernels is None and bool(by_entropy.any())
        for number, start in enumerate(range(0, weight.shape[0], ctx.size)):
            part = slice(start, start + ctx.size)
            if ctx.kernels is not None:
                narrow = _product(hidden, weight[part], None if bias is None else bias[part])
                ctx.kernels.slope(
                    *(narrow, tokens, start, heat, ctx.bend, norms, entropy, by_logprob, by_entropy)
                )
                grad = narrow
            else:
                if number < len(saved):
                    logps = saved[number] - norms[:, None]
                else:
                    logps = _slice_logits(hidden, weight, bias, part, ctx.bend, heat)
                    logps.sub_(norms[:, None])
                grad = _slopes_in_place(
                    *(logps, heat, ctx.bend, norms, entropy, by_logprob),
                    *(by_entropy if with_entropy else None, tokens - start),
                )
                narrow = grad.to(hidden.dtype)
            sums.add(part, grad, narrow)
        return *sums.found(), None, None, None, None, None, None
