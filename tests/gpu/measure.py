"""Seconds of a device, and what its matrix product reaches."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

SECONDS = 0.5
"""How long a matrix product is repeated."""

KINDS = (
    ("log-probs", ("_fold", "_slope")),
    ("norms, positions and MLPs", ("rms_norm", "rope", "glu_")),
    ("attention", ("flash", "fmha", "attention")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk")),
    ("optimizer", ("adam", "multi_tensor", "lpnorm")),
    ("copies", ("memcpy", "memset", "copy")),
    ("reductions", ("reduce", "softmax", "scan", "sort")),
)
"""Kinds of kernels by a part of their names; the first that fits counts."""
OTHERS = "elementwise and others"


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


def kernels(
    device: torch.device, work: Callable[[], object]
) -> tuple[dict[str, float], dict[str, float]]:
    """Where the time of some work goes on a GPU.

    Returns:
        Shares of its time by kind of kernel (:data:`KINDS`), ``idle`` among them, which includes what the profiler
        itself costs; and the seconds of the ten kernels that take longest, by name.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        took = timed(device, work)
    seconds: Counter[str] = Counter()
    for event in found.key_averages():
        seconds[event.key] += event.self_device_time_total / 1e6
    kinds: Counter[str] = Counter()
    for name, each in seconds.items():
        lower = name.lower()
        kind = next((kind for kind, parts in KINDS if any(p in lower for p in parts)), OTHERS)
        kinds[kind] += each
    shares = {kind: each / took for kind, each in kinds.most_common() if each > 0}
    shares["idle"] = 1 - sum(shares.values())
    return shares, {name[:160]: each for name, each in seconds.most_common(10) if each > 0}
