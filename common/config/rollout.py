"""``rollout``: the rollout workers, their engine and what they sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..import_path import is_import_path
from .section import NonNegative, Positive, Seconds, Section

ENGINES = ("auto", "torch", "vllm")
"""Engines by name; any other engine is named by its import path."""


def may_be_vllm(engine: Any) -> bool:
    """Whether ``rollout.engine`` is vLLM, or may resolve to it."""
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
    "enable_lora": "learner.lora",
    "max_lora_rank": "learner.lora.rank",
    "max_loras": "replay.max_staleness",
    "max_cpu_loras": "replay.max_staleness",
    "lora_target_modules": "learner.lora.targets",
    "lora_dtype": "rollout.dtype",
}
"""vLLM's engine arguments that are settings of Tandem's, with these settings."""
VLLM_FIXED = ("generation_config", "logprobs_mode", "skip_tokenizer_init", "worker_extension_cls")
"""Arguments of vLLM's on which the correctness of log-probs and weights depends."""

VLLM_RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
"""Arguments whose product is the number of an engine's ranks."""
VLLM_COLDEST = 0.01
"""The lowest temperature above 0 at which vLLM samples."""
VLLM_HOTTEST = 2.0
"""The highest one."""


def beyond_vllm(key: str, temperature: float) -> str | None:
    """Why vLLM can't sample at the temperature that ``key`` asks for; None if it can."""
    if temperature > VLLM_HOTTEST:
        return f"{key}={temperature:g} is more than vLLM samples at: {VLLM_HOTTEST:g} is the most"
    if not 0 < temperature < VLLM_COLDEST:
        return None
    return (
        f"{key}={temperature:g} is less than vLLM samples at, and it would sample at {VLLM_COLDEST:g} without "
        f"saying so"
    )


def _no_settings(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checks that vLLM's arguments include none that Tandem sets itself."""
    for name in args:
        if name in VLLM_SETTINGS:
            raise ValueError(f"{name} is set by {VLLM_SETTINGS[name]}")
        if name in VLLM_FIXED:
            raise ValueError(f"{name} is set by Tandem: correct log-probs and weights depend on it")
        if name in VLLM_RANKS and (type(args[name]) is not int or args[name] < 1):
            raise ValueError(f"{name} should be a positive number, not {args[name]!r}")
    return args


class VllmConfig(Section):
    """The vLLM engine of a rollout worker; not read by the torch engine."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory for weights and KV cache, which must be free when vLLM starts; lower it if a learner
    shares the GPU."""
    kv_cache_mb: Positive | None = None
    """Memory for keys and values on each GPU, MiB; null = what ``gpu_memory_utilization`` leaves (with
    ``launch.share_gpu`` by the figures of ``tandem plan``, else as vLLM measures it), or 1024 without a GPU."""
    max_model_len: Positive | None = None
    """Greatest number of tokens of prompt and response; null = ``data.max_prompt_tokens`` plus
    ``rollout.max_new_tokens``."""
    max_num_seqs: Positive | None = None
    """Greatest number of samples that run at a time; null = the samples of ``groups_per_batch``
    groups, but at least 256."""
    enforce_eager: bool | None = None
    """Whether to run without compilation and CUDA graphs, for a quicker start and slower sampling;
    null = only without a GPU."""
    start_seconds: Seconds = 900.0
    """Deadline for vLLM to load the model and be ready."""
    args: Annotated[Mapping[str, Any], AfterValidator(_no_settings)] = Field(default_factory=dict)
    """Further fields of vLLM's ``AsyncEngineArgs``, passed on unchanged, such as
    ``quantization: fp8`` or, for ranks on CPUs, ``tensor_parallel_size: 2``."""


class RolloutConfig(Section):
    """Rollout workers and what they sample."""

    engine: EngineName = "auto"
    """``auto``: vLLM if it is installed and there is a GPU, else the torch engine. ``torch``,
    ``vllm``, or ``package.module:factory``, an engine of your own (:mod:`tandem.rollout.engines`)."""
    workers: NonNegative = 1
    """Number of workers that ``start_all.sh`` starts."""
    gpus_per_worker: Positive = 1
    """Tensor-parallel size of each engine, if there are GPUs."""
    group_size: Positive = 8
    """G: rows of a group, expert traces included."""
    groups_per_batch: Positive = 8
    """Greatest number of groups that one worker holds at a time."""
    max_new_tokens: Positive = 1024
    """Greatest number of tokens of a response."""
    min_new_tokens: NonNegative = 0
    """Least number of tokens of a training response, its prefix not counted: before it no end token is drawn. The
    log-probs are those of the distribution without it, so ratios are under 1 (``ratio/alarm`` may say so) where the
    model would often have ended. A stop string ends a response all the same."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature of training rollouts; vLLM takes 0.01 to 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Training refuses anything under 1 (the learner's log-probs are over all tokens)."""
    threads: Positive = 1
    """CPU threads of one worker."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the engine's weights and arithmetic, and so of new weights on their way to it; null =
    ``model.dtype``."""
    recompute_kv: bool = True
    """Whether the KV cache of running requests is recomputed when the weights change. If not, they go on
    with the cache of the old weights; those of vLLM with ``learner.lora`` end with the old adapter."""
    update_wait_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long new weights may wait for running samples to end before they replace the old ones in
    flight; no sample begins in the meantime, and the next groups are leased for them. At most three quarters of
    ``weights.commit_seconds``. Worthwhile if samples are short and recomputing the cache is expensive."""
    groups_ahead: NonNegative = 0
    """Number of groups leased beyond ``groups_per_batch``, so that the engine never waits for a lease;
    needs ``replay.max_staleness`` of 2 or more to have them admitted while a step is trained on."""
    vllm: VllmConfig | None = VllmConfig()
    """Settings of the vLLM engine; null if ``engine`` is another one."""

    @model_validator(mode="before")
    @classmethod
    def _of_its_engine(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("vllm") is not None:
            return given
        others = {key: value for key, value in given.items() if key != "vllm"}
        return others if may_be_vllm(given.get("engine", "auto")) else {**others, "vllm": None}

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is over max_new_tokens={self.max_new_tokens}: lower "
                f"the first or raise the second"
            )
        return self
