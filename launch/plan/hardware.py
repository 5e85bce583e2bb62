"""What this machine has: GPUs (asked of nvidia-smi, without torch), cores and memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

import psutil

from ...common.cores import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    """The index by which CUDA counts it with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""
    name: str
    memory_mb: int
    """Total memory, MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware that a run can be placed on."""

    gpus: tuple[Gpu, ...]
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
    cores: int
    """CPU cores that this process may use."""
    memory_mb: int
    """Total main memory, MiB."""

    def __str__(self) -> str:
        gpus = "no GPU"
        if self.gpus:
            kinds = sorted({gpu.name for gpu in self.gpus})
            gpus = f"{len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)} ({', '.join(kinds)})"
        return f"{self.cores} cores, {self.memory_mb / 1024:.0f} GB, {gpus}"


def machine() -> Machine:
    """Inspects this machine; takes a few milliseconds if there is no NVIDIA driver."""
    return Machine(
        gpus=gpus(),
        cores=usable_cores(),
        memory_mb=psutil.virtual_memory().total >> 20,
    )


def gpus(deadline: float = 20.0) -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists and ``CUDA_VISIBLE_DEVICES`` leaves; none if nvidia-smi fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        listed = subprocess.run(
            [program, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=deadline,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible(parse_gpus(listed), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """Parses rows ``index, name, MiB`` of nvidia-smi; other rows (a driver's error) are skipped.

    >>> parse_gpus("0, NVIDIA H100 80GB HBM3, 81559")[0].memory_mb
    81559
    """
    parsed = []
    for line in listed.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit() and parts[2].isdigit():
            parsed.append(Gpu(index=int(parts[0]), name=parts[1], memory_mb=int(parts[2])))
    return tuple(parsed)


def visible(gpus: tuple[Gpu, ...], mask: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; with UUIDs in it, all GPUs stay."""
    if mask is None:
        return gpus
    by_index = {str(gpu.index): gpu for gpu in gpus}
    wanted = [word.strip() for word in mask.split(",") if word.strip()]
    if any(not word.lstrip("-").isdigit() for word in wanted):
        return gpus[: len(wanted)]
    chosen = []
    for word in wanted:
        if word not in by_index:
            break  # CUDA stops at the first index that doesn't exist.
        chosen.append(by_index[word])
    return tuple(chosen)
