"""What this machine has: GPUs (asked of nvidia-smi, without torch), cores and memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace

from ...common.cores import usable_cores
from ...common.memory import total

DRIVER_SECONDS = 20.0
"""Time that nvidia-smi has for an answer."""
QUERY = ("--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits")
UUIDS = ("GPU-", "MIG-")
"""How UUIDs begin: of a whole GPU, and of a part of one."""

GpuName = int | str
"""How ``CUDA_VISIBLE_DEVICES`` names a GPU: by its index, or by its UUID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, or a part of one (MIG)."""

    index: int
    """The index by which CUDA counts it with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""
    name: str
    memory_mb: int
    """Total memory, MiB."""
    uuid: str = ""
    by_uuid: bool = False
    """Whether processes are told its UUID and not its index, which a part of a GPU doesn't have."""

    @property
    def is_part(self) -> bool:
        return self.uuid.startswith("MIG-")

    @property
    def told(self) -> GpuName:
        """How a process is told that it sees this GPU."""
        return self.uuid if self.by_uuid else self.index


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware that a run can be placed on."""

    gpus: tuple[Gpu, ...]
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
    cores: int
    """CPU cores that this process may use."""
    memory_mb: int
    """Main memory that this process and its children may use, MiB."""

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
        memory_mb=total() >> 20,
    )


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists and ``CUDA_VISIBLE_DEVICES`` leaves; none if nvidia-smi fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = parse_gpus(_answer(program, *QUERY))
        if "MIG-" in (mask or ""):
            listed += parse_parts(_answer(program, "-L"))
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible(listed, mask)


def oldest_capability() -> float | None:
    """The least compute capability of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, such as 7.5; None without any, and
    where nvidia-smi doesn't tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = ("--query-gpu=index,compute_cap,uuid", "--format=csv,noheader")
    try:
        listed = _answer(program, *query)
        rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines()]
        named = tuple(
            Gpu(index=int(index), name=of, memory_mb=0, uuid=uuid) for index, of, uuid in rows
        )
        left = visible(named, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return min((float(gpu.name) for gpu in left), default=None)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _answer(program: str, *options: str) -> str:
    return subprocess.run(
        [program, *options], capture_output=True, text=True, timeout=DRIVER_SECONDS, check=True
    ).stdout


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """Parses rows ``index, name, MiB, UUID`` of nvidia-smi; other rows (a driver's error) are skipped.

    >>> parse_gpus("0, NVIDIA H100 80GB HBM3, 81559, GPU-7f57f032")[0].memory_mb
    81559
    """
    parsed = []
    for line in listed.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[0].isdigit() and parts[2].isdigit():
            index, name, memory, uuid = parts
            parsed.append(Gpu(index=int(index), name=name, memory_mb=int(memory), uuid=uuid))
    return tuple(parsed)


def parse_parts(listed: str) -> tuple[Gpu, ...]:
    """Parses the parts of GPUs (MIG) in the list of ``nvidia-smi -L``, in which they are below their GPUs.

    >>> listed = "GPU 1: NVIDIA H100 (UUID: GPU-7f)\\n  MIG 2g.20gb     Device  0: (UUID: MIG-37)"
    >>> parse_parts(listed)[0].name
    'NVIDIA H100 MIG 2g.20gb'
    """
    parsed: list[Gpu] = []
    index, name = 0, ""
    for line in listed.splitlines():
        if whole := re.match(r"GPU (\d+): (.*) \(UUID:", line):
            index, name = int(whole[1]), whole[2]
        elif part := re.match(r"\s+MIG (\S*?(\d+)gb\S*) .*\(UUID: (MIG-[^)]+)\)", line):
            parsed.append(
                Gpu(
                    index=index,
                    name=f"{name} MIG {part[1]}",
                    memory_mb=int(part[2]) << 10,
                    uuid=part[3],
                )
            )
    return tuple(parsed)


def visible(gpus: tuple[Gpu, ...], mask: str | None) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order, by indices or by UUIDs or their beginnings."""
    if mask is None:
        return gpus
    wanted = [word.strip() for word in mask.split(",") if word.strip()]
    by_uuid = any(not word.lstrip("-").isdigit() for word in wanted)
    chosen = []
    for word in wanted:
        found = [gpu for gpu in gpus if word == str(gpu.index) and not gpu.is_part]
        found += [gpu for gpu in gpus if word.startswith(UUIDS) and gpu.uuid.startswith(word)]
        if len(found) != 1:
            break  # CUDA stops at the first word that names no GPU.
        chosen.append(replace(found[0], by_uuid=by_uuid))
    return tuple(chosen)
