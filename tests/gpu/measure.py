"""Seconds of a device, and what its matrix product reaches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

SECONDS = 0.5
"""How long a matrix product is repeated."""


def settle(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of some work, with the device's share of it."""
    settle(device)
    start = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start


def free(device: torch.device) -> None:
    """Gives back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def product_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a product of two square matrices of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def products(count: int) -> float:
        return timed(device, lambda: [torch.mm(a, b, out=out) for _ in range(count)])

    once = products(3) / 3
    count = max(3, int(SECONDS / max(once, 1e-6)))
    return 2 * size**3 * count / products(count)
