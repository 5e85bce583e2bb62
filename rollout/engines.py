"""Makes the engine that a config asks for. torch is imported when one is made.

An engine of your own is named by its import path, ``rollout.engine=package.module:factory``; the
module must be installed or on ``PYTHONPATH`` wherever a worker runs. The factory is called as

    factory(model, rollout, max_rows=…) -> Engine

with the sections ``model`` and ``rollout`` of the config and the most samples that are generated
at a time; what it returns must keep the contract of :mod:`tandem.rollout.engine`.
"""

from __future__ import annotations

import importlib

from ..common.config import ModelConfig, RolloutConfig
from ..common.errors import ConfigError, TandemError
from .engine import Engine

MIN_ROWS = 256
"""Least number of samples that an engine may run at a time."""
_METHODS = ("keyed_noise", *(name for name in vars(Engine) if not name.startswith("_")))


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
        ConfigError: an import path leads to no engine.
        DataError: the model can't be loaded.
        TandemError: the engine isn't available here.
    """
    rows = max_rows or max(MIN_ROWS, rollout.groups_per_batch * rollout.group_size)
    if ":" in rollout.engine:
        return _imported(rollout.engine, model, rollout, rows)
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
        max_rows=rows,
    )


def _imported(path: str, model: ModelConfig, rollout: RolloutConfig, max_rows: int) -> Engine:
    """The engine that the factory at an import path makes."""
    module, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"rollout.engine={path} can't be imported: {error}. Install it, or put its folder on "
            f"PYTHONPATH of the rollout workers"
        ) from None
    engine = factory(model, rollout, max_rows=max_rows)
    if not isinstance(engine, Engine):
        raise ConfigError(
            f"rollout.engine={path} made a {type(engine).__name__}, which is no Engine: it lacks "
            f"{', '.join(name for name in _METHODS if not hasattr(engine, name))}"
        )
    return engine
