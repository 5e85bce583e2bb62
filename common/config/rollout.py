"""``rollout``: the rollout workers, their engine and what they sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ..import_path import is_import_path
from .section import NonNegative, Positive, Seconds, Section

ENGINES = ("auto", "torch", "vllm")
"""Engines by name; any other is named by its import path."""


def may_be_vllm(engine: Any) -> bool:
    """Whether ``rollout.engine`` is vLLM, or may turn out to be."""
    return engine in ("auto", "vllm")


def _engine(name: str) -> str:
    if name in ENGINES or is_import_path(name):
        return name
    raise ValueError(f"should be {', '.join(ENGINES)}, or an import path package.module:factory")


EngineName = Annotated[str, AfterValidator(_engine)]


VLLM_SETTINGS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    **{
        name: f"rollout.vllm.{name}"
        for name in ("max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager")
    },
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_mb",
    "data_parallel_size": "rollout.workers",
}
"""Engine arguments of vLLM's that are settings of Tandem's."""
VLLM_FIXED = ("generation_config", "logprobs_mode", "skip_tokenizer_init", "worker_extension_cls")
"""Those on whose values its correctness rests."""

VLLM_RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
"""Their product is an engine's ranks."""


def _no_settings(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM's arguments, none of which Tandem sets itself."""
    for name in args:
        if name in VLLM_SETTINGS:
            raise ValueError(f"{name} is set by {VLLM_SETTINGS[name]}")
        if name in VLLM_FIXED:
            raise ValueError(f"{name} is Tandem's to set: right log-probs and weights rest on it")
        if name in VLLM_RANKS and (type(args[name]) is not int or args[name] < 1):
            raise ValueError(f"{name} should be a positive number, not {args[name]!r}")
    return args


class VllmConfig(Section):
    """The vLLM engine of a rollout worker; not read by the torch engine."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory for weights and keys and values; lower where a learner shares
    the card."""
    kv_cache_mb: Positive | None = None
    """Memory for keys and values, MiB; None = what ``gpu_memory_utilization`` leaves, and 1024
    without a GPU."""
    max_model_len: Positive | None = None
    """Most tokens of prompt and response; None = ``data.max_prompt_tokens`` and
    ``rollout.max_new_tokens`` together."""
    max_num_seqs: Positive | None = None
    """Most samples that run at a time; None = those of ``groups_per_batch`` groups, and at least
    256."""
    enforce_eager: bool | None = None
    """Without compilation and CUDA graphs: a quicker start, slower sampling. None = only without
    a GPU."""
    start_seconds: Seconds = 900.0
    """Deadline for vLLM to load the model and to be ready."""
    args: Annotated[Mapping[str, Any], AfterValidator(_no_settings)] = Field(default_factory=dict)
    """Further fields of vLLM's ``AsyncEngineArgs``, passed on as they are, such as
    ``quantization: fp8`` or, for ranks on CPUs, ``tensor_parallel_size: 2``."""


class RolloutConfig(Section):
    """Rollout workers and what they sample."""

    engine: EngineName = "auto"
    """``auto``: vLLM where it is installed and a GPU is there, else the torch engine. ``torch``,
    ``vllm``, or ``package.module:factory``, an engine of your own (:mod:`tandem.rollout.engines`)."""
    workers: NonNegative = 1
    """Processes that ``start_all.sh`` starts."""
    gpus_per_worker: Positive = 1
    """Tensor-parallel size of each engine, where there are GPUs."""
    group_size: Positive = 8
    """G: rows of a group, expert traces included."""
    groups_per_batch: Positive = 8
    """Most groups that one worker holds at a time."""
    max_new_tokens: Positive = 1024
    """Most tokens of a response."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Of training rollouts; vLLM takes none over 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Training refuses anything under 1 (the learner's log-probs are over all tokens)."""
    threads: Positive = 1
    """CPU threads of one worker."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the engine's weights and arithmetic, and so of new weights on their way to it; None =
    ``model.dtype``."""
    recompute_kv: bool = True
    """Recompute the KV cache of running requests when the weights change."""
    update_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Longest that new weights wait for the running samples to end before they change them in
    flight; meanwhile no sample begins. Pays where samples are short and the cache dear."""
    groups_ahead: NonNegative = 0
    """Groups leased beyond ``groups_per_batch``, so that the engine never waits for a lease;
    they need ``replay.max_staleness`` of 2 or more to be admitted while a step is trained on."""
    vllm: VllmConfig | None = VllmConfig()
    """Settings of the vLLM engine; null where ``engine`` is another one."""

    @model_validator(mode="before")
    @classmethod
    def _of_its_engine(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("vllm") is not None:
            return given
        others = {key: value for key, value in given.items() if key != "vllm"}
        return others if may_be_vllm(given.get("engine", "auto")) else {**others, "vllm": None}
