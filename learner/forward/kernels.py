"""Triton kernels for a slice of the vocabulary: its sums, and its gradient in the place of its logits.

Each reads the slice once, in the dtype in which the matrix product wrote it; single operations would read and write
it some ten times in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns that a program works on at a time."""
WARPS = 4
"""Warps of 32 threads of a program. Of the blocks from 1,024 to 8,192 and 4 to 16 warps these were fastest on an H200."""


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    product,
    stride,
    columns,
    tokens,
    start,
    heat,
    bend,
    tops,
    totals,
    moments,
    picked,
    BENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(tokens + row) - start
    factor = tl.load(heat + row)
    top = tl.load(tops + row)
    total = tl.load(totals + row)
    moment = tl.load(moments + row)
    taken = tl.load(picked + row)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < columns
        z = tl.load(product + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        if BENT:
            z = _tanh(z * bend)
        z = tl.where(inside, z * factor, float("-inf"))
        taken += tl.sum(tl.where((at == own) & inside, z, 0.0), 0)
        highest = tl.maximum(top, tl.max(z, 0))
        # −∞ − (−∞): where no token has been allowed yet, nothing is moved.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        back = tl.where(top == float("-inf"), 0.0, top - base)
        moved = z - base
        share = tl.exp(moved)
        shrunk = tl.exp(back)
        # e^x x is 0 at x = −∞, but the product is NaN.
        moment = shrunk * (moment + back * total) + tl.sum(share * tl.maximum(moved, -1e30), 0)
        total = shrunk * total + tl.sum(share, 0)
        top = highest
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(moments + row, moment)
    tl.store(picked + row, taken)


@triton.jit
def _slope(  # type: ignore[no-untyped-def]
    product,
    stride,
    columns,
    tokens,
    start,
    heat,
    bend,
    norms,
    entropies,
    by_logprobs,
    by_entropies,
    BENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    own = tl.load(tokens + row) - start
    factor = tl.load(heat + row)
    by_logprob = tl.load(by_logprobs + row)
    by_entropy = tl.load(by_entropies + row)
    place = product + row * stride + at
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if BENT:
        z = _tanh(z * bend)
    logp = z * factor - tl.load(norms + row)
    surprise = tl.maximum(logp, -1e30) + tl.load(entropies + row)
    grad = tl.where(at == own, by_logprob, 0.0)
    grad -= tl.exp(logp) * (by_logprob + by_entropy * surprise)
    grad *= factor
    if BENT:
        grad *= (1 - z * z) * bend
    tl.store(place, grad.to(product.dtype.element_ty), mask=inside)


def fold(
    product: Tensor,
    tokens: Tensor,
    start: int,
    heat: Tensor,
    bend: float | None,
    sums: tuple[Tensor, Tensor, Tensor],
    picked: Tensor,
) -> None:
    """Takes a slice into the sums over the slices before it, in place.

    The logits are z = heat · product, or ``heat · tanh(bend · product)``.

    Args:
        product: ``[N, C]`` of the columns from ``start`` on; bfloat16, float16 or float32.
        tokens: ``[N]`` int64, of the whole vocabulary.
        start: the slice's first column.
        heat: ``[N, 1]`` float32.
        bend: or None.
        sums: m, the maximum of z so far, Σ e^(z − m) and Σ e^(z − m) (z − m); ``[N]`` float32 each, −∞, 0 and 0 at
            first.
        picked: ``[N]`` float32, to which the logit of a row's token is added where the slice has it.
    """
    count, columns = product.shape
    _fold[(count,)](
        *(product, product.stride(0), columns, tokens.contiguous(), start, heat, bend or 0.0),
        *(*sums, picked),
        BENT=bend is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def slope(
    product: Tensor,
    tokens: Tensor,
    start: int,
    heat: Tensor,
    bend: float | None,
    norms: Tensor,
    entropy: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor,
) -> None:
    """Puts the gradient of a slice's product into its place.

    Args:
        product: as for :func:`fold`.
        tokens: likewise.
        start: likewise.
        heat: likewise.
        bend: likewise.
        norms: ``[N]`` float32, the log of Σ e^z over the vocabulary.
        entropy: ``[N]`` float32, in nats.
        by_logprob: ``[N]`` float32, the gradients of the tokens' log-probs.
        by_entropy: ``[N]`` float32, those of the entropies.
    """
    count, columns = product.shape
    _slope[(count, triton.cdiv(columns, BLOCK))](
        *(product, product.stride(0), columns, tokens.contiguous(), start, heat, bend or 0.0),
        # The gradient of a sum is one number with a stride of 0.
        *(norms, entropy, by_logprob.contiguous(), by_entropy.contiguous()),
        BENT=bend is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
