"""Makes the engine that a config asks for. torch is imported when one is made."""

from __future__ import annotations

from ..common.config import ModelConfig, RolloutConfig
from ..common.errors import TandemError
from .engine import Engine

MIN_ROWS = 256
"""Least number of samples that an engine may run at a time."""


def make_engine(
    model: ModelConfig, rollout: RolloutConfig, *, max_rows: int | None = None
) -> Engine:
    """The engine with the base model's weights, not yet started.

    Args:
        model: which model, in which dtype.
        rollout: which engine, and its settings.
        max_rows: most samples generated at a time; None = a worker's batch, at least
            :data:`MIN_ROWS`.

    Raises:
        DataError: the model can't be loaded.
        TandemError: the engine isn't available here.
    """
    if rollout.engine == "vllm":
        raise TandemError(
            "rollout.engine=vllm is not available in this version: set rollout.engine=torch"
        )
    import torch

    from ..common.models import load_model, load_tokenizer
    from .torch_engine import TorchEngine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The engine keeps its own cache, which flash attention's kernels can't read.
    attention = "eager" if model.attention == "eager" else "sdpa"
    loaded = load_model(model.path, dtype=model.dtype, attention=attention, device=device)
    return TorchEngine(
        loaded,
        load_tokenizer(model.path),
        recompute_kv=rollout.recompute_kv,
        update_wait=rollout.update_wait_seconds,
        max_rows=max_rows or max(MIN_ROWS, rollout.groups_per_batch * rollout.group_size),
    )
