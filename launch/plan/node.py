"""The node that is planned for: its GPUs' memory, arithmetic, bandwidth and links."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...common.errors import ConfigError
from ..wording import nearest
from .hardware import Machine

GB = 1 << 30
"""What is called a GB here, as nvidia-smi counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """GPUs of one kind in one machine."""

    gpus: int
    """How many; 0: the run is on CPUs."""
    kind: str
    """Name of the GPU."""
    memory: int
    """Bytes of one."""
    flops: float
    """Dense bf16 multiplications and additions a second."""
    bandwidth: float
    """Bytes a second between a GPU's memory and its cores."""
    link: float
    """Bytes a second from one GPU to another."""

    def __str__(self) -> str:
        if not self.gpus:
            return "CPUs"
        return (
            f"{self.gpus} x {self.kind}, {self.memory / GB:.0f} GB, "
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
    "L40S": _kind("L40S", 48, 362, 864, 32),
    "A10": _kind("A10", 24, 125, 600, 32),
    "L4": _kind("L4", 24, 121, 300, 32),
    "RTX4090": _kind("RTX4090", 24, 165, 1008, 32),
}
"""NVIDIA's data sheets (SXM where there are two): GB, dense bf16 TFLOP/s, GB/s of memory, and
GB/s one way over NVLink, or over PCIe 4.0 x16 where there is no NVLink."""


def node(
    machine: Machine,
    *,
    needed: int,
    gpus: int | None = None,
    kind: str | None = None,
    memory_gb: float | None = None,
) -> Node:
    """The node to plan for: as given, else this machine's GPUs, else as many H100 as are needed.

    Raises:
        ConfigError: an unknown kind of GPU.
    """
    if kind is not None and kind.upper() not in KINDS:
        raise ConfigError(f"--gpu {kind} is not known{nearest(kind, list(KINDS))}")
    named = kind.upper() if kind is not None else _like(machine)
    found = KINDS[named or "H100"]
    count = needed
    if kind is None and machine.gpus and memory_gb is None:
        found = replace(
            found,
            kind=found.kind if named else f"{machine.gpus[0].name} (taken for an H100)",
            memory=machine.gpus[0].memory_mb << 20,
        )
        count = len(machine.gpus)
    if memory_gb is not None:
        found = replace(found, memory=int(memory_gb * GB))
    return replace(found, gpus=count if gpus is None else gpus)


def _like(machine: Machine) -> str | None:
    """The kind that this machine's first GPU is."""
    if not machine.gpus:
        return None
    name = machine.gpus[0].name.upper().replace(" ", "")
    # The longest: an A100 is no A10.
    found = max((k for k in KINDS if k in name), key=len, default=None)
    return "A100-40" if found == "A100" and machine.gpus[0].memory_mb < 50_000 else found
