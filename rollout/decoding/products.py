"""Products with weight matrices on a CPU, where the order in which they are read matters.

A token step multiplies few rows by large matrices. The library copies a matrix into an order of its
own for every product, and one that is larger than a core's cache goes out to memory and comes back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LARGE_BYTES = 8 << 20
"""Size from which on a matrix is multiplied piece by piece."""
PIECE_BYTES = 3 << 19
"""Size of one thread's piece, which must fit into a core's cache. Among 0.4 to 6 MB, sizes from 0.75 to
3 MB were the fastest; the whole matrix (32,768 x 768, 2 to 64 rows) took 1.1 to 1.6 times as long."""
FEW_ROWS = 5
"""Up to this many rows the product with the matrix in front is faster, by 1.3 to 1.7 times."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``.

    Args:
        x: ``[N, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.

    Returns:
        ``[N, out]``, contiguous.
    """
    rows = len(x)
    if x.dtype != torch.float32 or x.is_cuda or rows < 2 or weight.nbytes < LARGE_BYTES:
        return F.linear(x, weight, bias)
    if rows <= FEW_ROWS:
        out = torch.mm(weight, x.t()).t().contiguous()
    else:
        out = x.new_empty(rows, len(weight))
        step = max(1, PIECE_BYTES * torch.get_num_threads() // (weight[0].nbytes))
        for start in range(0, len(weight), step):
            torch.mm(x, weight[start : start + step].t(), out=out[:, start : start + step])
    return out if bias is None else out.add_(bias)
