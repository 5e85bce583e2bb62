"""A module under DeepSpeed: how it is set up, and its backward pass."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...common.config import Config
from ...common.config.checks.deepspeed import settings_of
from .optimizers import Optimizer


def initialise(
    module: nn.Module,
    optimizer: Optimizer,
    config: Config,
    stage: int,
    device: torch.device,
    *,
    outside: Sequence[nn.Module] = (),
) -> Any:
    """The DeepSpeed engine around a module.

    Args:
        module: its parameters become DeepSpeed's.
        optimizer: steps them.
        config: the run's config.
        stage: the ZeRO stage that is run.
        device: this rank's device.
        outside: modules of it whose parameters its forward reads by itself, outside of their own forward.
    """
    deepspeed = prepared(device)
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer.optimizer,
        config=settings_of(
            config,
            stage=stage,
            trained=sum(p.numel() for p in module.parameters() if p.requires_grad),
            clip=0.0 if optimizer.guards else optimizer.clip,
            pinned=device.type == "cuda",
        ),
        dist_init_required=False,
    )
    optimizer.is_ready = True
    if optimizer.guards and dist.get_world_size() == 1:
        # All that a sum over one rank does is to copy every gradient twice.
        engine.enable_backward_allreduce = False
    if stage == 3:
        # Hooks of the whole module must gather them for the forward and the backward pass.
        for one in outside:
            for parameter in one.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
    return engine


def backward(engine: Any, loss: Tensor, ranks: int) -> Tensor:
    """Adds the gradient of this rank's part of a loss that is summed over ranks; returns the part, detached."""
    value = loss.detach()
    # Data parallelism averages over ranks, but the sum is needed. The factor in brackets is 1, or
    # NaN if the loss isn't finite, so that such a loss never has a finite gradient.
    engine.backward(loss * (float(ranks) * (1 + (value - value))), scale_wrt_gas=False)
    return value


def prepared(device: torch.device) -> Any:
    """DeepSpeed, set up so that it compiles nothing."""
    deepspeed = deepspeed_for(device)
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed


def deepspeed_for(device: torch.device) -> Any:
    """DeepSpeed without its process group."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # A build that was killed leaves a lock there, on which every later process waits forever. The
    # folder isn't made: nothing is built, and a process that is killed could not remove it.
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        place = Path(tempfile.gettempdir()) / f"tandem-extensions-{secrets.token_hex(16)}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(place)
    os.environ.setdefault("DS_BUILD_OPS", "0")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    _load_muon()
    if device.type == "cpu":
        # init_distributed otherwise compiles an all-reduce for inference, with g++ and ninja. On a GPU it
        # doesn't, and asking for the table would make DeepSpeed look for nvcc, once for each operation.
        known = getattr(deepspeed.ops, "__compatible_ops__", None)
        if isinstance(known, dict):
            known["deepspeed_shm_comm"] = False
    elif not os.environ.get("CUDA_VISIBLE_DEVICES", "0").replace(",", "").isdigit():
        # DeepSpeed takes UUIDs for numbers where it asks NVML for the free memory. Without NVML it asks torch.
        from deepspeed.accelerator import cuda_accelerator

        cuda_accelerator.pynvml = None
    return deepspeed


def _load_muon() -> None:
    """Loads Muon without the compiler that its functions are decorated with.

    With ZeRO, DeepSpeed loads it to see that our optimizer is another one, and torch's compiler takes two seconds.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from deepspeed.runtime import compiler

        compiled = compiler.compile
        compiler.compile = lambda **_: lambda function: function
        try:
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
        finally:
            compiler.compile = compiled
