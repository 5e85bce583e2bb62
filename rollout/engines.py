"""Makes the engine that a config names. torch and vLLM are imported only when one is made.

An engine of your own is named by its import path, ``rollout.engine=package.module:factory``; the
module must be installed or on ``PYTHONPATH`` wherever a worker runs. The factory is called as

    factory(model, rollout, max_rows=…) -> Engine

with the config's sections ``model`` and ``rollout`` and the greatest number of samples that are
generated at a time, and with ``lora=…`` if ``learner.lora`` is set: the engine then loads adapters. What
it returns must fulfil the contract of :mod:`tandem.rollout.engine`.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from ..common.config import VLLM_RANKS, ModelConfig, RolloutConfig
from ..common.config.learner import LoraConfig
from ..common.errors import ConfigError
from ..common.import_path import is_import_path, load
from .engine import Engine

MIN_ROWS = 256
"""Least value for the number of samples that an engine may run at a time."""
STEP_TOKENS = 2048
"""Tokens that vLLM computes in a step unless it is told otherwise (``vllm/config/scheduler.py``)."""
_METHODS = ("keyed_noise", *(name for name in vars(Engine) if not name.startswith("_")))


def make_engine(
    model: ModelConfig,
    rollout: RolloutConfig,
    *,
    max_rows: int | None = None,
    max_prompt_tokens: int | None = None,
    lora: LoraConfig | None = None,
    versions: int = 2,
    shares_gpu: bool = False,
) -> Engine:
    """Makes the engine with the base model's weights, not yet started.

    Args:
        model: the model and its dtype.
        rollout: the engine and its settings.
        max_rows: greatest number of samples generated at a time; None = a worker's batch, at least
            :data:`MIN_ROWS`.
        max_prompt_tokens: length of the longest prompt that it will get; None = only the model's
            own limit of prompt and response together applies.
        lora: ``learner.lora``: new weights are adapters of the base model, which stays as it is.
        versions: number of versions whose adapters samples may use at the same time, at least two.
        shares_gpu: whether a learner may take and free memory of the engine's GPU (``launch.share_gpu``).

    Raises:
        DataError: the model can't be loaded.
        ConfigError: the engine isn't available here, its import path leads nowhere, or its share of a GPU is too
            small for it.
        TandemError: torch doesn't tell how large a shared GPU is.
    """
    rows = max_rows or max(MIN_ROWS, rollout.groups_per_batch * rollout.group_size)
    if choose_engine(rollout) == "vllm":
        return _vllm(model, rollout, rows, max_prompt_tokens, lora, versions, shares_gpu)
    if is_import_path(rollout.engine):
        return _imported(rollout.engine, model, rollout, rows, lora)
    return _torch(model, rollout, rows, max_prompt_tokens, lora)


def choose_engine(rollout: RolloutConfig) -> str:
    """``torch``, ``vllm`` or an import path, according to ``rollout.engine``."""
    if rollout.engine != "auto":
        return rollout.engine
    from .vllm import vllm_version

    if not vllm_version.installed():
        return "torch"
    import torch

    return "vllm" if torch.cuda.is_available() else "torch"


def load_engine(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Loads the libraries that :func:`make_engine` will need."""
    kind = choose_engine(rollout)
    if kind == "vllm":
        from .vllm import vllm_engine  # noqa: F401
    elif kind == "torch":
        from ..common.models import load_class
        from .decoding import torch_engine  # noqa: F401

        load_class(model.path)


def _torch(
    model: ModelConfig,
    rollout: RolloutConfig,
    rows: int,
    max_prompt_tokens: int | None,
    lora: LoraConfig | None,
) -> Engine:
    import torch

    from ..common.models import load_model, load_tokenizer, warn_of_slow_bfloat16
    from .decoding.torch_engine import TorchEngine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    warn_of_slow_bfloat16(
        "rollout.dtype" if rollout.dtype else "model.dtype", rollout.dtype or model.dtype, device
    )
    # The engine keeps its own cache, which flash attention's kernels can't read.
    attention = model.attention if model.attention in ("eager", "sdpa") else "auto"
    loaded = load_model(
        model.path,
        dtype=rollout.dtype or model.dtype,
        attention=attention,
        device=device,
        flash=False,
    )
    longest = None if max_prompt_tokens is None else max_prompt_tokens + rollout.max_new_tokens
    return TorchEngine(
        loaded,
        load_tokenizer(model.path),
        recompute_kv=rollout.recompute_kv,
        max_rows=rows,
        longest=longest,
        lora=lora,
    )


def _vllm(
    model: ModelConfig,
    rollout: RolloutConfig,
    rows: int,
    max_prompt_tokens: int | None,
    lora: LoraConfig | None,
    versions: int,
    shares_gpu: bool,
) -> Engine:
    from ..common.models import load_tokenizer, resolve
    from .model_facts import model_facts, require_checkpoint_names
    from .vllm import vllm_adapters, vllm_memory, vllm_version
    from .vllm.vllm_engine import VllmEngine
    from .vllm.vllm_process import VllmProcess

    vllm_version.require()
    import torch

    settings = rollout.vllm
    assert settings is not None
    context = settings.max_model_len
    if context is None and max_prompt_tokens is not None:
        context = max_prompt_tokens + rollout.max_new_tokens
    tokenizer = load_tokenizer(model.path)
    path = resolve(model.path)
    dtype = rollout.dtype or model.dtype
    facts = model_facts(path, dtype=dtype, context=context, tokenizer=tokenizer, lora=lora)
    if lora is None:
        require_checkpoint_names(path, facts.specs)
    gpus = torch.cuda.is_available()
    require_adapter_dtype(model, rollout, lora, gpus=gpus)
    cache = None if settings.kv_cache_mb is None else settings.kv_cache_mb << 20
    if cache is None and shares_gpu and gpus:
        adapter = 0 if lora is None else sum(math.prod(spec.shape) for spec in facts.specs)
        held = getattr(torch, dtype).itemsize * (facts.parameters + versions * adapter)
        cache = vllm_memory.beside_a_learner(settings, held // rollout.gpus_per_worker)
    running = settings.max_num_seqs or rows
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": dtype,
        **ranks(rollout, gpus=gpus),
        "max_model_len": facts.context,
        "max_num_seqs": running,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": cache,
        "enforce_eager": settings.enforce_eager,
        **(vllm_adapters.arguments(lora, versions, facts.specs) if lora is not None else {}),
    }
    # A step has a token of each row at least, or vLLM refuses to start; without chunked prefill a whole sample, too.
    whole = facts.context if settings.args.get("enable_chunked_prefill") is False else 0
    tokens = {"max_num_batched_tokens": max(running, whole)} if running > STEP_TOKENS else {}
    return VllmEngine(
        VllmProcess(
            {**tokens, **settings.args, **arguments},
            start_seconds=settings.start_seconds,
        ),
        tokenizer,
        facts,
        recompute_kv=rollout.recompute_kv,
        lora=lora,
        versions=versions,
    )


def require_adapter_dtype(
    model: ModelConfig, rollout: RolloutConfig, lora: LoraConfig | None, *, gpus: bool
) -> None:
    """Raises ``ConfigError`` for vLLM with adapters in a dtype that its kernels on GPUs don't have
    (``vllm/lora/ops/triton_ops/lora_shrink_op.py``)."""
    if lora is not None and gpus and (rollout.dtype or model.dtype) == "float32":
        key = "rollout.dtype" if rollout.dtype else "model.dtype"
        raise ConfigError(
            f"{key}=float32: vLLM's adapters (learner.lora) are float16 or bfloat16 on GPUs: set "
            f"rollout.dtype=bfloat16, or rollout.engine=torch"
        )


def ranks(rollout: RolloutConfig, *, gpus: bool) -> dict[str, int]:
    """How an engine is divided into ranks, as arguments of vLLM.

    Raises:
        ConfigError: there would be more or fewer ranks than GPUs for it.
    """
    args = rollout.vllm.args if rollout.vllm is not None else {}
    given = {name: args[name] for name in VLLM_RANKS if name in args}
    pipeline = int(given.get("pipeline_parallel_size", 1))
    across = max(1, rollout.gpus_per_worker // pipeline) if gpus else 1
    tensor = int(given.get("tensor_parallel_size", across))
    if gpus and tensor * pipeline != rollout.gpus_per_worker:
        arguments = ", ".join(f"{name}: {value}" for name, value in given.items())
        raise ConfigError(
            f"rollout.vllm.args={{{arguments}}} makes {tensor * pipeline} ranks, and rollout.gpus_per_worker is "
            f"{rollout.gpus_per_worker}: set it to {tensor * pipeline}, or leave {' and '.join(given)} out"
        )
    return dict(zip(VLLM_RANKS, (tensor, pipeline), strict=True))


def _imported(
    path: str,
    model: ModelConfig,
    rollout: RolloutConfig,
    max_rows: int,
    lora: LoraConfig | None,
) -> Engine:
    """The engine that the factory at an import path makes."""
    factory = load(path, key="rollout.engine")
    if lora is None:
        engine = factory(model, rollout, max_rows=max_rows)
    else:
        try:
            inspect.signature(factory).bind(model, rollout, max_rows=max_rows, lora=lora)
        except TypeError:
            raise ConfigError(
                f"rollout.engine={path} takes no argument lora, so its engine loads no adapters: set "
                f"learner.lora=null, or rollout.engine to torch or vllm"
            ) from None
        engine = factory(model, rollout, max_rows=max_rows, lora=lora)
    if not isinstance(engine, Engine):
        raise ConfigError(
            f"rollout.engine={path} made a {type(engine).__name__}, which isn't an Engine: it lacks "
            f"{', '.join(name for name in _METHODS if not hasattr(engine, name))}"
        )
    return engine
