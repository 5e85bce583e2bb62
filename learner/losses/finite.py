"""Refuses log-probs that aren't numbers, by name, before they spoil a loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...common.errors import TandemError


class NonFiniteError(TandemError):
    """Log-probs from which no loss can be made: −inf, +inf or NaN for a token that counts."""


def finite(name: str, values: Tensor) -> Tensor:
    """Returns the values unchanged.

    Raises:
        NonFiniteError: a value is infinite or NaN; the message names the first.
    """
    # The sum is cheaper to check; it is nearly always finite, and then so is each term.
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
    """Converts bf16 and half to float32; returns other values unchanged."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
