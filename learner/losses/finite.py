"""Log-probs that aren't numbers are refused by name, before they spoil a loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.errors import TandemError


class NonFiniteError(TandemError):
    """Log-probs that a loss can't be made of: −inf, +inf or NaN where a token counts."""


def finite(name: str, values: Tensor) -> Tensor:
    """The values themselves.

    Raises:
        NonFiniteError: one of them is infinite or NaN; the message names the first.
    """
    # A sum is finite in nearly every case, and then each term is; it is the quicker look.
    if math.isfinite(float(values.detach().sum())) or bool(torch.isfinite(values.detach()).all()):
        return values
    flat = values.detach().reshape(-1)
    bad = torch.nonzero(~torch.isfinite(flat)).squeeze(1)
    first = int(bad[0])
    raise NonFiniteError(
        f"{name}: {len(bad)} of {len(flat)} are not finite, the first is {float(flat[first])} at "
        f"place {first}: a token of probability 0 has no log-prob to learn from; mask it, or look "
        f"for what made the logits overflow"
    )


def widened(values: Tensor) -> Tensor:
    """float32 for bf16 and half, else the values themselves."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
