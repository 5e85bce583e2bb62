"""The node that is planned for: its GPUs' memory, arithmetic, bandwidth and links."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ...common.errors import ConfigError
from ..wording import nearest
from .hardware import Machine

GB = 1 << 30
"""Bytes of one GB, as nvidia-smi counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """GPUs of one kind in one machine."""

    gpus: int
    """Number of GPUs; 0 if the run is on CPUs."""
    kind: str
    """Name of the GPU."""
    memory: int
    """Memory of one GPU, in bytes."""
    flops: float
    """Dense bf16 multiplications and additions per second."""
    bandwidth: float
    """Bytes per second between a GPU's memory and its cores."""
    link: float
    """Bytes per second from one GPU to another."""

    def __str__(self) -> str:
        if not self.gpus:
            return "CPUs"
        return (
            f"{self.gpus} x {self.kind}, {self.memory / GB:.3g} GB, "
            f"{self.flops / 1e12:.0f} TFLOP/s bf16, {self.bandwidth / 1e9:,.0f} GB/s"
        )


def _kind(name: str, memory: float, teraflops: float, bandwidth: float, link: float) -> Node:
    return Node(
        gpus=1,
        kind=name,
        memory=int(memory * GB),
        flops=teraflops * 1e12,
        bandwidth=bandwidth * 1e9,
        link=link * 1e9,
    )


KINDS: dict[str, Node] = {
    "H100": _kind("H100", 80, 989, 3350, 450),
    "H200": _kind("H200", 141, 989, 4800, 450),
    "A100": _kind("A100", 80, 312, 2039, 300),
    "A100-40": _kind("A100-40", 40, 312, 1555, 300),
    "L40S": _kind("L40S", 45, 362, 864, 32),
    "L40": _kind("L40", 45, 181, 864, 32),
    "A10": _kind("A10", 22.5, 125, 600, 32),
    "A10G": _kind("A10G", 22.5, 70, 600, 32),
    "L4": _kind("L4", 22.5, 121, 300, 32),
    "RTX4090": _kind("RTX4090", 24, 165, 1008, 32),
}
"""NVIDIA's data sheets (SXM if there are two): GB, dense bf16 TFLOP/s, GB/s of memory, and
GB/s one way over NVLink, or over PCIe 4.0 x16 if there is no NVLink. Where error correction takes a part of the memory,
as on those of 24 and 48 GB for servers, it is what nvidia-smi shows as the total."""


def node(
    machine: Machine,
    *,
    needed: int,
    gpus: int | None = None,
    kind: str | None = None,
    memory_gb: float | None = None,
) -> Node:
    """The node to plan for: as given, else GPUs like this machine's, else H100; as many as are needed, or more if there
    are more here.

    Raises:
        ConfigError: the kind of GPU is unknown, or a number isn't possible.
    """
    if gpus is not None and gpus < 0:
        raise ConfigError(f"--gpus {gpus} should be at least 0")
    if memory_gb is not None and not 0 < memory_gb < math.inf:
        raise ConfigError(f"--gpu-memory {memory_gb:g} should be a number of GB above 0")
    if kind is not None and kind.upper() not in KINDS:
        raise ConfigError(f"--gpu {kind} is not known{nearest(kind, list(KINDS))}")
    named = kind.upper() if kind is not None else _like(machine)
    planned = KINDS[named or "H100"]
    count = needed
    if kind is None and machine.gpus and memory_gb is None:
        planned = replace(
            planned,
            kind=planned.kind if named else f"{machine.gpus[0].name} (taken for an H100)",
            memory=machine.gpus[0].memory_mb << 20,
        )
        count = max(needed, len(machine.gpus))
    if memory_gb is not None:
        planned = replace(planned, memory=int(memory_gb * GB))
    return replace(planned, gpus=count if gpus is None else gpus)


def _like(machine: Machine) -> str | None:
    """The kind of this machine's first GPU, if it is known."""
    if not machine.gpus:
        return None
    name = machine.gpus[0].name.upper().replace("RTX ", "RTX")
    # Whole words: an A100 is no A10, and an L40 no L4.
    words = re.split(r"[^A-Z0-9]+", name)
    kind = next((k for k in KINDS if k in words), None)
    return "A100-40" if kind == "A100" and machine.gpus[0].memory_mb < 50_000 else kind
