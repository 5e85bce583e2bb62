"""Seconds of a device, and what its matrix product reaches."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
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
    # Compiled functions hold the model that they were compiled for.
    torch.compiler.reset()
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


def kernels(device: torch.device, work: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Where the time of some work goes on a GPU, from its first kernel's start to its last one's end.

    Returns:
        ``shares`` of the time by kind of kernel (:data:`KINDS`), ``idle`` among them; seconds of the ten ``longest_kernels``
        by name; and ``waits``, the seconds of idleness before the ten for which the GPU waited longest in all.
        The profiler slows the host down, so that without it less is idle.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        settle(device)
    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    )
    seconds: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    until = first = ran[0][0]
    for start, end, name in ran:
        seconds[name] += (end - start) / 1e6
        waits[name] += max(0.0, start - until) / 1e6
        until = max(until, end)
    took = (until - first) / 1e6
    kinds: Counter[str] = Counter()
    for name, each in seconds.items():
        lower = name.lower()
        kind = next((kind for kind, parts in KINDS if any(p in lower for p in parts)), OTHERS)
        kinds[kind] += each
    shares = {kind: each / took for kind, each in kinds.most_common()}
    shares["idle"] = sum(waits.values()) / took
    return {
        "shares": shares,
        "longest_kernels": {name[:160]: each for name, each in seconds.most_common(10)},
        "waits": {name[:160]: each for name, each in waits.most_common(10)},
    }
