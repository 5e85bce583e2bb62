"""DeepSpeed's settings: the learner's own, with the user's, ``learner.deepspeed``, laid over them.

DeepSpeed ignores a mistyped key at the top level, and if two keys contradict each other it silently takes one. So a
user's key is either known here or refused by name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...plain import read_object

if TYPE_CHECKING:
    from ..tree import Config

REDUCE_BUCKET = 500_000_000
"""Most elements whose gradients are reduced at once: DeepSpeed's default."""
AUTO = "auto"
"""In files that were written for Hugging Face's Trainer: the caller's value."""

Settings = Mapping[str, Any]


def content_of(given: Any) -> Any:
    """The settings in the file that is named; settings unchanged.

    Raises:
        ValueError: the file can't be read as a JSON object, or it is something else altogether.
    """
    if given is None or isinstance(given, Mapping):
        return given
    if not isinstance(given, str):
        raise ValueError("name a JSON file, or give the settings themselves, {key: value}")
    path = Path(given).expanduser()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from None
    try:
        return read_object(text, str(path), ConfigError, "write it as DeepSpeed's JSON")
    except ConfigError as error:
        raise ValueError(str(error)) from None


# -- what the learner sets itself ------------------------------------------------------------------


def own_settings(
    config: Config, *, stage: int, trained: int, clip: float, pinned: bool
) -> dict[str, Any]:
    """The learner's own settings of one engine. Every default that affects the result is written out.

    Args:
        config: the run's config.
        stage: the ZeRO stage that is run.
        trained: number of parameters that are trained.
        clip: greatest norm of the gradient; 0 = DeepSpeed doesn't clip.
        pinned: whether host memory is page-locked, so that a GPU can read it directly.
    """
    dtype = config.model.dtype
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        # DeepSpeed makes a buffer of this size, however small the model is.
        "reduce_bucket_size": min(REDUCE_BUCKET, max(1, trained)),
    }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The caller decides where a step ends: any number of backward passes, then one step.
        "managed_gradient_accumulation": False,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {
            "enabled": dtype == "float16",
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            # An update that overflows is repeated at once, which another factor alone can change.
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if dtype != "float32" and stage:
        # Gradients of many micro-batches are summed, and half precision would lose the small ones.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.learner.offload != "none":
        host = {"device": "cpu", "pin_memory": pinned}
        zero["offload_optimizer"] = host
        if config.learner.offload == "parameters":
            zero["offload_param"] = dict(host)
        # The client optimizer steps there too. DeepSpeed's own would have to be compiled.
        settings["zero_force_ds_cpu_optimizer"] = False
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return settings


def settings_of(
    config: Config, *, stage: int, trained: int, clip: float, pinned: bool
) -> dict[str, Any]:
    """:func:`own_settings` with the user's laid over them."""
    own = own_settings(config, stage=stage, trained=trained, clip=clip, pinned=pinned)
    above = _laid_over(config)
    if stage < 2:
        # What is refused for these stages, and that one rank without ZeRO has no use for.
        above.get("zero_optimization", {}).pop("overlap_comm", None)
    return _merged(own, above)


def _merged(below: Settings, above: Settings) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            value = _merged(under, value)
        merged[key] = value
    return merged


# -- a user's settings -----------------------------------------------------------------------------

NUMBER = (int, float)

TOP: Mapping[str, Any] = {
    "communication_data_type": str,
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "disable_python_gc": bool,
    "comms_logger": {
        "enabled": bool,
        "verbose": bool,
        "prof_all": bool,
        "prof_ops": list,
        "debug": bool,
    },
    "flops_profiler": {
        "enabled": bool,
        "recompute_fwd_factor": NUMBER,
        "profile_step": int,
        "module_depth": int,
        "top_modules": int,
        "detailed": bool,
        "output_file": str,
    },
    "zero_optimization": {
        "contiguous_gradients": bool,
        "reduce_scatter": bool,
        "reduce_bucket_size": NUMBER,
        "use_multi_rank_bucket_allreduce": bool,
        "allgather_partitions": bool,
        "allgather_bucket_size": NUMBER,
        "overlap_comm": bool,
        "sub_group_size": NUMBER,
        "ignore_unused_parameters": bool,
        "memory_efficient_linear": bool,
        "log_trace_cache_warnings": bool,
        "enable_sanity_checks": bool,
        "stage3_prefetch_bucket_size": NUMBER,
        "stage3_param_persistence_threshold": NUMBER,
        "stage3_model_persistence_threshold": NUMBER,
        "stage3_max_live_parameters": NUMBER,
        "stage3_max_reuse_distance": NUMBER,
        "stage3_gather_16bit_weights_on_model_save": bool,
        "offload_optimizer": {"pin_memory": bool},
        "offload_param": {"pin_memory": bool},
    },
    "fp16": {
        "loss_scale": NUMBER,
        "initial_scale_power": int,
        "loss_scale_window": int,
        "hysteresis": int,
        "consecutive_hysteresis": bool,
        "min_loss_scale": NUMBER,
    },
    "bf16": {},
    "data_types": {},
}
"""Keys that a user may set, with their types; sections hold keys in turn."""

_DATA_PARALLEL = "the learner's ranks are data-parallel alone"
_BATCHES = (
    "the ledger settles what a step trains on (replay.groups_per_step, learner.micro_batch_tokens)"
)
_CHECKPOINTS = (
    "the trainer writes the checkpoints (learner.checkpoint_every, learner.checkpoints_kept)"
)
_METRICS = (
    "the run's metrics.jsonl has every figure, and log.wandb and log.tensorboard send them on"
)
_REMOVED = "DeepSpeed has removed it"

ELSEWHERE: Mapping[str, str] = {
    "optimizer": "the optimizer is learner.optimizer",
    "scheduler": "the schedule is learner.optimizer.schedule with warmup_steps and final_lr_share",
    "activation_checkpointing": "set learner.gradient_checkpointing",
    "torch_autocast": "the dtype is model.dtype",
    "tensorboard": _METRICS,
    "wandb": _METRICS,
    "csv_monitor": _METRICS,
    "comet": _METRICS,
    "checkpoint": _CHECKPOINTS,
    "datastates_ckpt": _CHECKPOINTS,
    "aio": "learner.offload keeps states in host memory, never on a disk",
    "pipeline": _DATA_PARALLEL,
    "tensor_parallel": _DATA_PARALLEL,
    "expert_parallel": _DATA_PARALLEL,
    "sequence_parallel_size": _DATA_PARALLEL,
    "seq_parallel_communication_data_type": _DATA_PARALLEL,
    "use_data_before_expert_parallelism": _DATA_PARALLEL,
    "data_efficiency": _BATCHES,
    "dataloader_drop_last": _BATCHES,
    "hybrid_engine": "rollout workers sample, with engines of their own",
    "autotuning": "`tandem plan --splits` compares settings",
    "compile": "nothing of the learner is compiled",
    "weight_quantization": "the learner trains whole weights",
    "prescale_gradients": "the learner scales its gradients itself",
    "gradient_predivide_factor": "the learner scales its gradients itself",
    "gradient_allreduce_op": "the learner scales its gradients itself",
    "disable_allgather": "every rank needs the new weights",
    "vocabulary_size": "it does nothing",
    "timers": "it does nothing without DeepSpeed's own training loop",
    "log_level": "the learner shows DeepSpeed's warnings",
    **dict.fromkeys(
        (
            *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients"),
            *("eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"),
            *("curriculum_learning", "progressive_layer_drop"),
        ),
        _REMOVED,
    ),
    **dict.fromkeys(
        ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
        "offload is learner.offload",
    ),
    "zenflow": "it steps on gradients of earlier steps",
    "compute_grad_norm": "train/grad_norm and learner.optimizer.grad_clip need the norm",
    **dict.fromkeys(
        ("leaf_module", "stage3_module_granularity_threshold"),
        "its hooks fail in the learner's backward pass",
    ),
    **dict.fromkeys(
        (
            *("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
            *("zero_quantized_gradients", "zero_hpz_partition_size"),
        ),
        "it needs kernels that are compiled, and rounds what is trained on",
    ),
    **dict.fromkeys(
        ("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"),
        _CHECKPOINTS,
    ),
    "stage3_gather_fp16_weights_on_model_save": "its name is stage3_gather_16bit_weights_on_model_save",
    "legacy_stage1": "the stage is learner.zero_stage",
    **dict.fromkeys(
        (
            *("override_module_apply", "parameter_alignment", "stage3_allgather_sequential"),
            *("stage3_use_all_reduce_for_fetch_params", "save_muon_momentum_buffer_in_memory"),
        ),
        "it was never tried with the learner",
    ),
    **dict.fromkeys(
        ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"), _REMOVED
    ),
    "auto_cast": "the learner casts nothing",
    "fp16_master_weights_and_grads": "master weights stay float32",
    "bf16_master_weights_and_grads": "master weights stay float32",
    "bf16_optimizer_states": "the optimizer's states are float32",
    "immediate_grad_update": "the learner settles when gradients are summed",
    "check_grad_overflow": "a step whose gradient isn't finite is never made",
    "param_dtype": "the dtype is model.dtype",
    "buffer_dtype": "the dtype is model.dtype",
    "keep_in_fp32_modules": "the dtype is model.dtype",
    **dict.fromkeys(
        (
            *("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read"),
            *("pipeline_write", "fast_init"),
        ),
        "learner.offload keeps states in host memory, never on a disk",
    ),
    **dict.fromkeys(
        ("ratio", "super_offload", "cpuadam_cores_perc"),
        "it is an option of an optimizer that has to be compiled; torch's steps here",
    ),
}
"""Further keys of DeepSpeed's, in whatever section, and why they can't be set."""


def _offloads(*kinds: str) -> Callable[[Config], Any]:
    return lambda config: "cpu" if config.learner.offload in kinds else "none"


OWNED: Mapping[str, tuple[str, Callable[[Config], Any]]] = {
    "train_batch_size": (_BATCHES, lambda config: config.learner.ranks),
    "train_micro_batch_size_per_gpu": (_BATCHES, lambda config: 1),
    "gradient_accumulation_steps": (_BATCHES, lambda config: 1),
    "managed_gradient_accumulation": (_BATCHES, lambda config: False),
    "gradient_clipping": (
        "set learner.optimizer.grad_clip",
        lambda config: config.learner.optimizer.grad_clip,
    ),
    "zero_allow_untested_optimizer": (ELSEWHERE["optimizer"], lambda config: True),
    "zero_force_ds_cpu_optimizer": (ELSEWHERE["optimizer"], lambda config: False),
    "zero_optimization.stage": (
        "set learner.zero_stage",
        lambda config: config.learner.zero_stage,
    ),
    "zero_optimization.offload_optimizer.device": (
        "set learner.offload",
        _offloads("optimizer", "parameters"),
    ),
    "zero_optimization.offload_param.device": ("set learner.offload", _offloads("parameters")),
    "zero_optimization.round_robin_gradients": (
        "with true, DeepSpeed's own map of the parameters is wrong, and a checkpoint would hold each under another's name",
        lambda config: False,
    ),
    "fp16.enabled": ("set model.dtype", lambda config: config.model.dtype == "float16"),
    "bf16.enabled": ("set model.dtype", lambda config: config.model.dtype == "bfloat16"),
    "data_types.grad_accum_dtype": ("gradients are summed in float32", lambda config: "fp32"),
}
"""Keys that the learner answers: where its answer comes from, and the answer. A user's must be the same."""

_HAS_OWN = (
    *("steps_per_print", "wall_clock_breakdown", "zero_optimization.reduce_bucket_size"),
    *("zero_optimization.overlap_comm", "zero_optimization.offload_optimizer.pin_memory"),
    *("zero_optimization.offload_param.pin_memory", "bf16", "data_types"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
"""Further keys for which the learner has a value, so that "auto" can stand for it."""


def refusal(config: Config) -> str | None:
    """Why ``learner.deepspeed`` can't be laid over the learner's settings; None if it can, or if there is none."""
    given, stage = config.learner.deepspeed, config.learner.zero_stage
    if given is None:
        return None
    if found := _refusal(config, given, TOP, ""):
        return found
    if stage < 2 and _laid_over(config).get("zero_optimization", {}).get("overlap_comm"):
        return (
            f"learner.deepspeed: zero_optimization.overlap_comm=true overlaps the exchange of gradients with the "
            f"passes, and learner.zero_stage={stage} exchanges them after the last one: leave it out, or set "
            f"learner.zero_stage=2"
        )
    return None


def _refusal(config: Config, given: Settings, known: Mapping[str, Any], prefix: str) -> str | None:
    for key, value in given.items():
        if found := _of_key(config, key, value, known, prefix):
            return f"learner.deepspeed: {found}"
        below = known.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            found = _refusal(config, value, below, f"{prefix}{key}.")
            if found:
                return found
    return None


def _of_key(
    config: Config, key: str, value: Any, known: Mapping[str, Any], prefix: str
) -> str | None:
    """Why one key can't have this value, if that doesn't lie in the keys below it."""
    name = f"{prefix}{key}"
    if name in OWNED:
        whence, answer = OWNED[name]
        own = answer(config)
        # Without a value it is DeepSpeed's own false.
        if value in (AUTO, own) or (value is None and own is False):
            return None
        return f"{name}={_shown(value)} is the learner's to answer, with {_shown(own)}: leave it out; {whence}"
    if key not in known:
        if why := ELSEWHERE.get(key):
            return f"{name} can't be set: leave it out ({why})"
        owned = (one.removeprefix(prefix) for one in OWNED if one.startswith(prefix))
        names = [*known, *(one for one in owned if "." not in one), *ELSEWHERE]
        near = difflib.get_close_matches(key, names, n=1)
        meant = f" (did you mean {prefix}{near[0]}?)" if near else ""
        return f"{name} isn't a setting of DeepSpeed{meant}"
    if value == AUTO:
        if name in _HAS_OWN:
            return None
        return f'{name}="auto" stands for a value of the learner\'s, and it has none: leave it out'
    wanted = known[key]
    if isinstance(wanted, dict):
        return None if isinstance(value, Mapping) else f"{name}={_shown(value)} should be an object"
    right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not right and value is not None:
        kinds = {bool: "true or false", int: "a whole number", str: "text", list: "a list"}
        return f"{name}={_shown(value)} should be {kinds.get(wanted, 'a number')}"
    return None


def _shown(value: Any) -> str:
    return "{…}" if isinstance(value, Mapping) else json.dumps(value)


def _laid_over(config: Config) -> dict[str, Any]:
    """The part of a user's settings that isn't the learner's own anyway."""

    def kept(given: Settings, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in given.items():
            name = f"{prefix}{key}"
            if name in OWNED or value == AUTO:
                continue
            if isinstance(value, Mapping):
                value = kept(value, f"{name}.")
                if not value:
                    continue
            found[key] = value
        return found

    found = kept(config.learner.deepspeed or {}, "")
    if config.model.dtype != "float16":
        # What it says of the loss's scale is read with fp16 alone.
        found.pop("fp16", None)
    zero = found.get("zero_optimization", {})
    if config.learner.offload == "none":
        zero.pop("offload_optimizer", None)
    if config.learner.offload != "parameters":
        zero.pop("offload_param", None)
    return found


def zero_setting(config: Config, name: str, default: int) -> int:
    """A number of the user's ``zero_optimization``, or ``default`` if it isn't set."""
    return int(_laid_over(config).get("zero_optimization", {}).get(name, default))
