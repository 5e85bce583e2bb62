"""What a learner rank and an engine hold in memory, part by part, in bytes.

Sources: Rajbhandari et al. 2019 (ZeRO, arXiv 1910.02054) for weights, gradients and optimizer
states by stage; Korthikanti et al. 2022 (arXiv 2205.05198) for activations and their
recomputation; Kwon et al. 2023 (PagedAttention, arXiv 2309.06180) for the KV cache. All figures
are estimates: only :data:`RUNTIME` allows for fragmentation and for the kernels' own buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.config import VLLM_RANKS
from ...common.config.checks.deepspeed import REDUCE_BUCKET, zero_setting
from ...common.import_path import is_installed
from ...common.longest_pass import longest_pass
from ...rollout.vllm import vllm_memory
from .sizes import ModelShape, shape_of, trained

if TYPE_CHECKING:
    from ...common.config import Config, OptimizerConfig

LIVE_PARAMETERS = 1_000_000_000
"""Elements of weights that ZeRO-3 gathers on a GPU at most (the default of ``stage3_max_live_parameters``)."""
LOGIT_CHUNK = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Bytes of one chunk of float32 logits, as in :mod:`tandem.learner.forward.logprobs`."""
LOGITS_KEPT = {"cpu": 1 << 30, "cuda": 0}
"""Bytes of logits that are kept for the backward pass, as in the same module."""
SHORT_ROWS = 192
"""Longest rows whose scores are kept in bfloat16 on a CPU, as in :mod:`tandem.learner.forward.shared_prompts`."""
CHUNKED_FROM = 8192
"""Vocabulary size from which logits are computed in chunks, as in the same module."""
CHUNK_COPIES = 3
"""Logits, their exponential and their gradient exist at the same time in the backward pass."""
TEACHER_COPIES = 8
"""Tensors of the logits' size that the divergence from a teacher takes, as in :mod:`tandem.learner.forward.divergence`;
its chunks are so much smaller that together they are as large as those of the log-probs."""
RUNTIME = {"cpu": 470 << 20, "cuda": 2 << 30}
"""CUDA context, communication buffers and the allocator's slack; on a CPU, the libraries, of which 410 MB were
measured before a model was loaded, and about 60 MB that came with the first step."""
VLLM_PROCESS = 700 << 20
"""A process of vLLM on a CPU, roughly."""
VLLM_CPU_CACHE_MB = 1024
"""Memory that a rank without a GPU sets aside for keys and values by default."""
VLLM_SHARE = 0.9
"""vLLM's own default of ``gpu_memory_utilization``."""
STAGED = 2
"""Versions that the learner stages in host memory: one is sent while the next one is filled."""
BUCKETS = 2
"""Buckets of new weights that are on a GPU at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The memory that one process holds."""

    device: str
    """``cuda`` or ``cpu``: where :attr:`parts` are."""
    parts: Mapping[str, int]
    """Name to bytes on the device."""
    host: int
    """Bytes of main memory on top of that."""
    pinned: int = 0
    """Bytes of :attr:`host` that are page-locked, so that a GPU can read them directly."""
    cache_tokens: int = 0
    """Tokens that fit into the KV cache; 0 for a learner."""

    @property
    def total(self) -> int:
        """Sum of :attr:`parts`, in bytes."""
        return sum(self.parts.values())


def element(config: Config) -> int:
    """Bytes of one weight in the learner."""
    return 4 if config.model.dtype == "float32" else 2


def engine_element(config: Config) -> int:
    """Bytes of one weight in an engine and on its way there."""
    return 4 if config.engine_dtype == "float32" else 2


def vllm_setting(config: Config, key: str, default: Any) -> Any:
    """A value of ``rollout.vllm``, or ``default`` if it isn't set."""
    value = getattr(config.rollout.vllm, key, None)
    return default if value is None else value


def uses_vllm(config: Config, device: str) -> bool:
    """Whether the engine is vLLM: because it is set, or because ``auto`` finds a GPU."""
    return engine_name(config, device) == "vllm"


def engine_name(config: Config, device: str) -> str:
    """``torch``, ``vllm`` or an import path; ``auto`` is resolved as on a machine that has what it needs."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    return "vllm" if device == "cuda" else "torch"


def has_own_gpus(config: Config, device: str) -> bool:
    """Whether new weights go from GPU to GPU: learner and engines have separate GPUs, and NCCL may
    carry the weights."""
    return device == "cuda" and config.may_use_nccl


def buckets_on_gpu(config: Config, device: str) -> int:
    """Bytes of new weights on a GPU that is sending or receiving them."""
    return BUCKETS * (config.weights.bucket_mb << 20) if has_own_gpus(config, device) else 0


def learner(config: Config, shape: ModelShape, device: str, *, rank: int = 0) -> Holding:
    """The memory of one rank of the learner.

    Weights, gradients and optimizer: :func:`states`. Every rank holds a whole reference model if the
    objective needs one, and a whole teacher. A critic holds its own weights, gradients and optimizer; its passes come before the
    policy's, so that of its activations and the policy's only the greater ones count. New weights are
    staged in host memory and pass through a GPU bucket by bucket.

    With adapters the gradients, optimizer and staging are theirs, and the reference is the model itself
    without them. What is offloaded lies in host memory (:func:`offloaded`). At the start, while it is tried, the
    whole model is on the device, whatever ZeRO-3 then takes away again. With ``learner.train=false`` there is no pass.
    """
    n, ranks, e = shape.parameters, config.learner.ranks, element(config)
    stage, t = config.zero_stage(), trained(config, shape)
    staged = STAGED * engine_element(config) * t if rank == 0 else 0
    parts = {
        **states(config, n, t, config.learner.optimizer),
        **(of_a_pass(config, shape, device) if config.learner.train else {}),
        "weight staging": staged
        if device == "cpu"
        else (rank == 0) * buckets_on_gpu(config, device),
        "runtime": RUNTIME[device],
    }
    if config.learner.lora is not None:
        parts["adapters"] = e * t // (ranks if stage == 3 else 1)
    elif config.learner.objective.needs_reference:
        parts["reference"] = e * n
    on_the_way = at_start = e * n
    away = offloaded(config, n, t, config.learner.optimizer)
    teacher = teacher_shape(config, shape)
    if teacher is not None:
        parts["teacher"] = e * teacher.parameters
        on_the_way = max(on_the_way, e * teacher.parameters)
    critic = config.learner.critic
    if critic is not None:
        own = critic_shape(config, shape)
        size = own.parameters
        parts["critic"] = sum(states(config, size, size, critic.optimizer).values())
        of_critic = offloaded(config, size, size, critic.optimizer)
        away = (away[0] + of_critic[0], away[1] + of_critic[1])
        at_start += e * size
        on_the_way = max(on_the_way, e * size)
    if device == "cpu":
        if config.learner.offload != "none":
            parts["offloaded"] = away[0]
        return Holding(device=device, parts=parts, host=0)
    later = sum(parts.values()) - parts["runtime"]
    if stage == 3 and at_start > later:
        parts["model at the start"] = at_start - later
    # Libraries, and at the start the weights on their way to the GPU, before anything is staged.
    host = (3 << 30) + max(on_the_way, staged) + away[0]
    return Holding(device=device, parts=parts, host=host, pinned=staged + away[1])


def of_a_pass(config: Config, shape: ModelShape, device: str) -> dict[str, int]:
    """Activations and logits of the largest micro-batch, and the weights that ZeRO-3 gathers from other ranks, which stay
    beside a rank's own share. A critic's passes come before the policy's, so that only the greater ones of the two count."""
    n = shape.parameters
    found, own = activations(config, shape, device), trained(config, shape)
    if config.learner.critic is not None:
        of_critic = critic_shape(config, shape)
        found = max(found, activations(config, of_critic, device))
        own += of_critic.parameters
        n = max(n, of_critic.parameters)
    if device == "cpu":
        # Gradients are freed in each step and made anew between activations, which have taken parts of their places
        # in glibc's heap by then, so that it has room for both.
        found += element(config) * own
    parts = {"activations": found, "logits": logits(config, shape, device)}
    if config.zero_stage() == 0 and (config.learner.ranks > 1 or element(config) == 2):
        # ZeRO-0 copies gradients into one piece to sum them over ranks, when there are no activations any more.
        copied = element(config) * min(REDUCE_BUCKET, trained(config, shape))
        parts["logits"] = max(parts["logits"], copied - parts["activations"])
    learner = config.learner
    # Of offloaded weights they are all that is on the device, which counts as its weights.
    if config.zero_stage() == 3 and learner.ranks > 1 and learner.offload != "parameters":
        parts["gathered weights"] = element(config) * live_parameters(config, n)
    return parts


def live_parameters(config: Config, n: int) -> int:
    """How many of n parameters ZeRO-3 keeps whole on a device while it computes."""
    return min(n, zero_setting(config, "stage3_max_live_parameters", LIVE_PARAMETERS))


def states(config: Config, n: int, t: int, optimizer: OptimizerConfig) -> dict[str, int]:
    """Weights, gradients and optimizer of n parameters on one rank's device, t of which are trained.

    Weights: ``e·N``; offloaded ones as far as ZeRO-3 keeps them there. Gradients: fp32, accumulated over
    micro-batches; ZeRO-1 keeps all of them and those that the backward pass leaves (e·T), ZeRO-2 and 3
    a rank's share and one bucket. Optimizer: its moments (:func:`moment_bytes`), and the fp32 master copy of
    half-precision weights (and of fp32 ones under ZeRO), unless they are offloaded. Each is divided by the
    number of ranks from its ZeRO stage on: optimizer 1, gradients 2, weights 3.

    With ``learner.train=false`` there are no moments and no gradients of a backward pass. Sums of gradients and the
    master copy remain, since DeepSpeed makes them at the start (the sums of ZeRO-2 it gives up again).
    """
    learner, e, stage = config.learner, element(config), config.zero_stage()
    ranks = learner.ranks
    weights = e * n // (ranks if stage == 3 else 1)
    if learner.offload == "parameters":
        weights = e * live_parameters(config, n)
    gradients = (4 if e == 2 and stage else e) * t
    if stage >= 2:
        shared = 0 if stage == 3 and learner.offload != "none" else gradients // ranks
        gradients = shared + 4 * min(zero_setting(config, "reduce_bucket_size", REDUCE_BUCKET), t)
    elif not learner.train:
        gradients = gradients if stage == 1 else 0
    elif stage == 1:
        gradients += e * t
    moments = moments_of(config, optimizer, t)
    own = (moments + (4 * t if stage or e == 2 else 0)) // (ranks if stage else 1)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": own if learner.offload == "none" else 0,
    }


def offloaded(config: Config, n: int, t: int, optimizer: OptimizerConfig) -> tuple[int, int]:
    """Bytes of host memory in which one rank keeps what is offloaded (``learner.offload``), and how many of them
    are pinned, for n parameters of which t are trained.

    Of each trained parameter: the optimizer's moments, the fp32 master copy, its fp32 gradient, and either the copy
    of the new weight on its way back (ZeRO-1 and 2; with fp32 weights ZeRO-2 also sums gradients there) or the sum of
    its gradients (ZeRO-3). Weights, if they are offloaded too: ``e·N``. All but the moments is pinned, and all is divided by the
    number of ranks.
    """
    learner, e, stage = config.learner, element(config), config.zero_stage()
    if learner.offload == "none":
        return 0, 0
    further = 4 if stage == 3 else 2 * e if (stage, e) == (2, 4) else e
    pinned = (4 + 4 + further) * t + (e * n if learner.offload == "parameters" else 0)
    return (moments_of(config, optimizer, t) + pinned) // learner.ranks, pinned // learner.ranks


def moments_of(config: Config, optimizer: OptimizerConfig, t: int) -> int:
    """Bytes of the moments of t trained parameters; the first step makes them, so that without steps there are none."""
    return moment_bytes(optimizer) * t if config.learner.train else 0


def critic_shape(config: Config, shape: ModelShape) -> ModelShape:
    """Sizes of the critic's model: those of the policy's unless another one is named whose sizes are known."""
    critic = config.learner.critic
    if critic is None or critic.model is None:
        return shape
    return shape_of(critic.model, "learner.critic.model") or shape


def teacher_shape(config: Config, shape: ModelShape) -> ModelShape | None:
    """Sizes of the teacher, those of the policy if they aren't known; None if there is no teacher."""
    teacher = config.learner.teacher
    return None if teacher is None else shape_of(teacher, "learner.teacher") or shape


MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2, "rmsprop": 4}
"""Bytes that an optimizer keeps of each parameter, without the master copy. Each 256 moments of 8 bits have a scale of
4 bytes, which is left out."""


def moment_bytes(optimizer: OptimizerConfig) -> int:
    """Bytes that an optimizer keeps of each parameter, without the master copy."""
    return MOMENT_BYTES[optimizer.name]


def activations(config: Config, shape: ModelShape, device: str) -> int:
    """Activations of the largest micro-batch, in bytes: :func:`kept_by_layer` for each layer. With recomputation
    each layer keeps only its input (H), and one layer at a time keeps everything. Adapters keep the same inputs, as
    the gradient of A needs them; what is between A and B is left out."""
    layer = kept_by_layer(config, shape, device)
    if config.learner.gradient_checkpointing:
        line = _lines(config, device)[0]
        kept = element(config) * line * shape.layers * shape.hidden + layer
    else:
        kept = shape.layers * layer
    return int(slack(config, device) * kept)


def kept_by_layer(config: Config, shape: ModelShape, device: str) -> int:
    """Bytes that autograd keeps of one Qwen2 layer, for the tokens of the largest micro-batch.

    For each token the elements are, with transformers' operations: of both norms their inputs, what is normalised and their outputs (6·H; of bf16
    inputs the fp32 copies instead, which makes 8·H), the attention's output (a·d), the MLP's four products (4·I, with I + k·M of a mixture in place of I), and fp32
    statistics of norms (4). Attention itself keeps queries, output, keys and values (2·a·d + 2·kv) and fp32
    statistics of its softmax (2·a), as it never materialises its scores (flash or memory-efficient). Its output is
    kept once on a GPU, where it has the form in which the next product takes it. Liger's norms keep inputs and outputs (4·H),
    and its MLP is without one of the products (3·I).

    On a CPU the rows of a group share their prompt in everything but attention, which works on padded rows, and
    whose keys and values are repeated for each query head (4·a·d); of short rows in bfloat16 it keeps queries, keys, values
    and the softmax of each head's scores instead. ``eager`` keeps the scores of each head besides,
    and shares no prompt.
    """
    e = element(config)
    line, padded = _lines(config, device)
    if fuses(config, device):
        by_token = 4 * shape.hidden + 3 * shape.mlp_width + 4
    else:
        by_token = (8 if e == 2 else 6) * shape.hidden + 4 * shape.mlp_width + 4
    wide = 2 * shape.query_width + 2 * shape.kv_width
    if device == "cpu":
        by_token += shape.query_width
        wide = 4 * shape.query_width
        width = longest_pass(config).width
        half = config.model.dtype == "bfloat16"
        if half and width <= SHORT_ROWS and _shares_prompts(config, device):
            wide = shape.query_width + 2 * shape.kv_width + shape.heads * width
    if config.model.attention == "eager":
        wide += shape.heads * longest_pass(config).width
    return e * (line * by_token + padded * (wide + 2 * shape.heads))


def fuses(config: Config, device: str) -> bool:
    """Whether the learner's layers have Liger's kernels: on a GPU, if they are asked for, or this host has them."""
    if device != "cuda" or config.model.kernels == "plain":
        return False
    return config.model.kernels == "liger" or is_installed("liger_kernel")


def _lines(config: Config, device: str) -> tuple[int, int]:
    """Tokens of the largest micro-batch in everything but attention, and in attention."""
    largest = longest_pass(config)
    return largest.line if _shares_prompts(config, device) else largest.tokens, largest.tokens


def _shares_prompts(config: Config, device: str) -> bool:
    """Whether the rows of a group share their prompt."""
    return device == "cpu" and config.model.attention in ("auto", "sdpa")


def slack(config: Config, device: str) -> float:
    """What activations take by what autograd keeps of them.

    On a CPU freed blocks of under 32 MB stay in glibc's heap, below others that are still in use, more so when an
    update has several passes, of which the first leaves its gradients between what it frees. Products of bf16 convert
    their operands; a layer's output, that of its adapter and their sum exist at the same time. The factors are those
    that ``tests/benchmarks/memory.py`` found. A GPU's allocator uses freed blocks again; :data:`RUNTIME` allows
    for the rest.
    """
    if device != "cpu":
        return 1.0
    alone, wide = longest_pass(config).alone, element(config) == 4
    factor = (1.15 if alone else 1.35) if wide else (1.3 if alone else 1.6)
    if config.model.attention == "eager" and wide:
        # Of a row of 256 tokens and six heads the scores are 1.5 MB, and each layer makes some copies of them.
        factor *= 1.3
    if config.learner.lora is None:
        return factor
    # In float32 a second pass took nearly as much again as the first; why is not known.
    return factor * (1.65 if wide and not alone else 1.15)


def logits(config: Config, shape: ModelShape, device: str) -> int:
    """Logits of the largest micro-batch, in bytes.

    A small vocabulary is computed at once, for all tokens of responses. Otherwise there are chunks of logits, those
    that a CPU keeps for the backward pass, the hidden states that they are computed from with their gradient
    (fp32), and the gradient of the output matrix unless that is frozen; it waits for that of the input embedding
    where the two are tied. A teacher's hidden states are there, too.
    """
    largest, e = longest_pass(config), element(config)
    tokens = largest.rows * largest.response
    whole = 4 * tokens * shape.vocabulary
    teacher = teacher_shape(config, shape)
    taught = 0 if teacher is None else e * tokens * teacher.hidden
    if shape.vocabulary < CHUNKED_FROM:
        return (CHUNK_COPIES if teacher is None else TEACHER_COPIES) * whole + taught
    hidden = (2 * e + 4) * tokens * shape.hidden
    matrix = 0
    if config.learner.lora is None:
        matrix = e * shape.vocabulary * shape.hidden * (2 if shape.tied else 1)
    chunks = CHUNK_COPIES * min(LOGIT_CHUNK[device], whole)
    kept = min(LOGITS_KEPT[device], whole) + hidden + matrix + taught
    return int(slack(config, device) * (chunks + kept))


def cached_token(config: Config, shape: ModelShape, device: str) -> int:
    """Bytes of one token's keys and values on each GPU of an engine, whose pipeline divides the layers."""
    across = config.rollout.gpus_per_worker if device == "cuda" else 1
    pipeline = int(vllm_setting(config, "args", {}).get("pipeline_parallel_size", 1))
    pipeline = min(pipeline, across)
    return max(1, shape.kv_bytes(engine_element(config), across // pipeline) // pipeline)


def engine(config: Config, shape: ModelShape, device: str, memory: int) -> Holding:
    """The memory of one GPU of an engine, or of an engine on CPUs.

    vLLM claims ``rollout.vllm.gpu_memory_utilization`` of the GPU's memory and gives the KV cache
    what weights, adapters and workspace leave of it, unless ``rollout.vllm.kv_cache_mb`` says how much. The torch
    engine's cache grows with its rows. New weights, or adapters, are staged in host memory.
    """
    n, e = shape.parameters, engine_element(config)
    across = config.rollout.gpus_per_worker if device == "cuda" else 1
    weights = e * n // across
    per_token = cached_token(config, shape, device)
    rows = config.rollout.groups_per_batch * config.rollout.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    received = e * trained(config, shape)
    adapters = 0 if config.learner.lora is None else received // across
    if uses_vllm(config, device) and device == "cpu":
        # Front end, engine core, and a process for each rank if there are several.
        ranks = math.prod(int(vllm_setting(config, "args", {}).get(name, 1)) for name in VLLM_RANKS)
        processes = 2 + (ranks if ranks > 1 else 0)
        cache = ranks * (int(vllm_setting(config, "kv_cache_mb", VLLM_CPU_CACHE_MB)) << 20)
        work = processes * VLLM_PROCESS
    elif uses_vllm(config, device):
        # It reserves room for all versions whose adapters samples may use at the same time.
        adapters *= config.replay.max_staleness + 2
        share = float(vllm_setting(config, "gpu_memory_utilization", VLLM_SHARE))
        given = vllm_setting(config, "kv_cache_mb", None)
        left = vllm_memory.cache_bytes(share, memory, weights + adapters)
        cache = left if given is None else int(given) << 20
        work = vllm_memory.WORKSPACE
    else:
        cache, work = rows * longest * per_token, RUNTIME[device]
    staging = received if device == "cpu" else buckets_on_gpu(config, device)
    parts = {
        "weights": weights,
        "KV cache": cache,
        "runtime": work,
        "weight staging": staging,
    }
    if config.learner.lora is not None:
        parts["adapters"] = adapters
    host = 0 if device == "cpu" else (3 << 30) + received
    return Holding(device=device, parts=parts, host=host, cache_tokens=cache // per_token)
