"""Which settings would free most of a process's memory, by the plan's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...common.config import build
from ...common.config.checks.choices import why_not_started
from ...common.errors import TandemError
from ..wording import human
from . import memory
from .hardware import machine
from .sizes import shape_of

if TYPE_CHECKING:
    from ...common.config import Config

MOST = 5
"""Number of settings that are named."""
LEAST_BYTES = 1 << 20
"""What frees less isn't worth a try."""


def advice(config: Config, role: str) -> Sequence[str]:
    """Sentences on what can help a role (``learner`` or ``rollout``) that has too little memory on this machine;
    none if the model's sizes aren't known."""
    gpus = machine().gpus if config.launch.gpus != "none" else ()
    device, size = ("cuda", gpus[0].memory_mb << 20) if gpus else ("cpu", 0)
    found = ways_out(config, role, device, size)
    if not found:
        return ()
    listed = ", ".join(f"{setting} ({human(freed)})" for setting, freed in found)
    return (
        f"Settings that would free most, on paper: {listed}",
        "docs/memory.md says what they cost",
    )


def ways_out(config: Config, role: str, device: str, size: int) -> list[tuple[str, int]]:
    """Settings with the bytes that each alone would free of one process, most first.

    Settings with which no run would be started, or that free nothing on this device, are left out. A process sees no more
    GPUs than it was given, so whether there are others only the reader knows.

    Args:
        config: the run's config.
        role: ``learner`` or ``rollout``.
        device: ``cuda`` or ``cpu``.
        size: bytes of one GPU.
    """
    try:
        before = _held(config, role, device, size)
    except TandemError:
        return []
    found = []
    for setting in _learner(config, device) if role == "learner" else _rollout(config, device):
        try:
            changed = build(config.model_dump(mode="json"), [setting])
            freed = before - _held(changed, role, device, size)
        except TandemError:
            continue  # It doesn't go with the other settings.
        if why_not_started(changed, anew=False):
            continue
        if freed >= LEAST_BYTES:
            found.append((setting, freed))
    return sorted(found, key=lambda one: -one[1])[:MOST]


def _held(config: Config, role: str, device: str, size: int) -> int:
    """Bytes of a process on its device, on paper; of an engine on the same GPU too."""
    shape = shape_of(config.model.path)
    if shape is None:
        return 0
    of_engine = memory.engine(config, shape, device, size).total
    if role != "learner":
        return of_engine
    together = of_engine if device == "cuda" and config.launch.share_gpu else 0
    return memory.learner(config, shape, device).total + together


def _learner(config: Config, device: str) -> Iterator[str]:
    learner = config.learner
    yield "learner.gradient_checkpointing=true"
    yield f"learner.micro_batch_tokens={learner.micro_batch_tokens // 2}"
    if device == "cuda":
        yield "learner.offload=optimizer"
        yield "learner.offload=parameters"
        yield f"learner.ranks={2 * learner.ranks}"
    for stage in range(learner.zero_stage + 1, 4):
        yield f"learner.zero_stage={stage}"
    if config.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if learner.lora is None:
        yield "learner.lora={}"
    if device == "cuda" and config.launch.share_gpu:
        yield from _of_vllm(config, device)


def _rollout(config: Config, device: str) -> Iterator[str]:
    rollout = config.rollout
    if rollout.groups_per_batch > 1:
        yield f"rollout.groups_per_batch={rollout.groups_per_batch // 2}"
    yield f"rollout.max_new_tokens={max(1, rollout.max_new_tokens // 2)}"
    if config.engine_dtype == "float32":
        yield "rollout.dtype=bfloat16"
    if device == "cuda":
        yield f"rollout.gpus_per_worker={2 * rollout.gpus_per_worker}"
    if memory.uses_vllm(config, device):
        yield from _of_vllm(config, device)


def _of_vllm(config: Config, device: str) -> Iterator[str]:
    cache = memory.vllm_setting(config, "kv_cache_mb", None)
    if cache is None and device == "cpu":
        cache = memory.VLLM_CPU_CACHE_MB
    if cache is not None:
        yield f"rollout.vllm.kv_cache_mb={max(1, int(cache) // 2)}"
        return
    share = float(memory.vllm_setting(config, "gpu_memory_utilization", memory.VLLM_SHARE))
    yield f"rollout.vllm.gpu_memory_utilization={share - 0.1:.2g}"
