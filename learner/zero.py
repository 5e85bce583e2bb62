"""A module under DeepSpeed: how it is set up, and its backward pass."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common.config import Config
from .optimizers import Optimizer

REDUCE_BUCKET = 500_000_000
"""Most elements whose gradients are reduced at once: DeepSpeed's default."""


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
        config=_settings(config, optimizer, stage, _trained(module)),
        dist_init_required=False,
    )
    if stage == 3:
        # Hooks of the whole module must gather them for the forward and the backward pass.
        for one in outside:
            for parameter in one.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
    return engine


def _trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _settings(config: Config, optimizer: Optimizer, stage: int, trained: int) -> dict[str, Any]:
    bf16 = config.model.dtype == "bfloat16"
    # Every default that affects the result is written out.
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The caller decides where a step ends: any number of backward passes, then one step.
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if optimizer.guards else optimizer.clip,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # DeepSpeed makes a buffer of this size, however small the model is.
            "reduce_bucket_size": min(REDUCE_BUCKET, max(1, trained)),
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if bf16 and stage:
        # Gradients of many micro-batches are summed, and bf16 would lose the small ones.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage == 3:
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return settings


def backward(engine: Any, loss: Tensor, ranks: int) -> Tensor:
    """Adds the gradient of this rank's part of a loss that is summed over ranks; returns the part, detached."""
    value = loss.detach()
    # Data parallelism averages over ranks, but the sum is needed. The factor in brackets is 1, or
    # NaN if the loss isn't finite, so that such a loss never has a finite gradient.
    engine.backward(loss * (float(ranks) * (1 + (value - value))), scale_wrt_gas=False)
    return value


def prepared(device: torch.device) -> Any:
    """DeepSpeed, set up so that it compiles nothing."""
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
    # init_distributed otherwise compiles an all-reduce for inference, with g++ and ninja.
    known = getattr(deepspeed.ops, "__compatible_ops__", None)
    if device.type == "cpu" and isinstance(known, dict):
        known["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed
