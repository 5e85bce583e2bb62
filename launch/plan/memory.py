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
from .sizes import ModelShape, shape_of, trained

if TYPE_CHECKING:
    from ...common.config import Config, OptimizerConfig

BUCKET = 500_000_000
"""Elements of DeepSpeed's reduction bucket (the default of ``reduce_bucket_size``)."""
LOGIT_CHUNK = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Bytes of one chunk of float32 logits, as in :mod:`tandem.learner.forward.logprobs`."""
CHUNKED_FROM = 8192
"""Vocabulary size from which logits are computed in chunks, as in the same module."""
CHUNK_COPIES = 3
"""Logits, their exponential and their gradient exist at the same time in the backward pass."""
RUNTIME = {"cpu": 700 << 20, "cuda": 2 << 30}
"""CUDA context, communication buffers and the allocator's slack; on a CPU, the libraries."""
VLLM_WORKSPACE = 2 << 30
"""Part of vLLM's share that it keeps for activations and CUDA graphs, roughly."""
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
    return 2 if config.model.dtype == "bfloat16" else 4


def engine_element(config: Config) -> int:
    """Bytes of one weight in an engine and on its way there."""
    return 2 if config.engine_dtype == "bfloat16" else 4


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
    objective needs one. A critic holds its own weights, gradients and optimizer; its passes come before the
    policy's, so that of its activations and the policy's only the greater ones count. New weights are
    staged in host memory and pass through a GPU bucket by bucket.

    With adapters the gradients, optimizer and staging are theirs, and the reference is the model itself
    without them.
    """
    n, ranks, e = shape.parameters, config.learner.ranks, element(config)
    stage, t = config.zero_stage(), trained(config, shape)
    staged = STAGED * engine_element(config) * t if rank == 0 else 0
    parts = {
        **states(config, n, t, moments_of(config.learner.optimizer)),
        "activations": activations(config, shape),
        "logits": logits(config, shape, device),
        "weight staging": staged
        if device == "cpu"
        else (rank == 0) * buckets_on_gpu(config, device),
        "runtime": RUNTIME[device],
    }
    if config.learner.lora is not None:
        parts["adapters"] = e * t // (ranks if stage == 3 else 1)
    elif config.learner.objective.needs_reference:
        parts["reference"] = e * n
    on_the_way = e * n
    critic = config.learner.critic
    if critic is not None:
        own = critic_shape(config, shape)
        size = own.parameters
        of_critic = states(config, size, size, moments_of(critic.optimizer))
        parts["critic"] = sum(of_critic.values())
        parts["activations"] = max(parts["activations"], activations(config, own))
        on_the_way = max(on_the_way, e * size)
    if device == "cpu":
        return Holding(device=device, parts=parts, host=0)
    # Libraries, and at the start the weights on their way to the GPU, before anything is staged.
    host = (3 << 30) + max(on_the_way, staged)
    return Holding(device=device, parts=parts, host=host, pinned=staged)


def states(config: Config, n: int, t: int, moments: int) -> dict[str, int]:
    """Weights, gradients and optimizer of n parameters on one rank, t of which are trained.

    Weights: ``e·N``. Gradients: fp32, accumulated over micro-batches; ZeRO-1 keeps all of them
    and the bf16 ones that the backward pass leaves, ZeRO-2 and 3 a rank's share and one bucket.
    Optimizer: the two moments of AdamW or the one of RMSprop, and the fp32 master copy of bf16 weights
    (and of fp32 ones under ZeRO). Each is divided by the number of ranks from its ZeRO stage on: optimizer 1,
    gradients 2, weights 3.
    """
    ranks, e, stage = config.learner.ranks, element(config), config.zero_stage()
    gradients = (4 if e == 2 and stage else e) * t
    if stage >= 2:
        gradients = gradients // ranks + 4 * min(BUCKET, t)
    elif stage == 1 and e == 2:
        gradients += 2 * t
    return {
        "weights": e * n // (ranks if stage == 3 else 1),
        "gradients": gradients,
        "optimizer": (4 * moments * t + (4 * t if stage else 0)) // (ranks if stage else 1),
    }


def critic_shape(config: Config, shape: ModelShape) -> ModelShape:
    """Sizes of the critic's model: those of the policy's unless another one is named whose sizes are known."""
    critic = config.learner.critic
    if critic is None or critic.model is None:
        return shape
    return shape_of(critic.model) or shape


def moments_of(optimizer: OptimizerConfig) -> int:
    """Number of fp32 values that an optimizer keeps of each parameter, without the master copy."""
    return 1 if optimizer.name == "rmsprop" else 2


def micro_batch_tokens(config: Config) -> int:
    """Tokens of one forward pass: the budget, or a rank's share of an update if that is less."""
    rows = config.replay.groups_per_step * config.rollout.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    share = -(-rows // (config.learner.minibatches * config.learner.ranks))
    return min(config.learner.micro_batch_tokens, share * longest)


def activations(config: Config, shape: ModelShape) -> int:
    """Activations of one micro-batch, with attention that never materialises its scores (flash or
    memory-efficient), in bytes.

    What autograd keeps of a Qwen2 layer for one token, in elements: inputs and outputs of both norms
    with their fp32 copies (8·H), queries and the attention's output (2·a·d), keys and values
    (2·kv), the MLP's four products (4·I), and fp32 statistics of norms and softmax (2·a + 4). With
    recomputation each layer keeps only its input (H), and one layer at a time keeps everything. Adapters
    keep the same inputs, as the gradient of A needs them; what is between A and B is left out.
    """
    tokens, e = micro_batch_tokens(config), element(config)
    inner = kept_by_layer(shape)
    if config.learner.gradient_checkpointing:
        return e * tokens * (shape.layers * shape.hidden + inner)
    return e * tokens * shape.layers * inner


def kept_by_layer(shape: ModelShape) -> int:
    """Elements that autograd keeps of one layer per token, see :func:`activations`."""
    attention = 2 * shape.query_width + 2 * shape.kv_width + 2 * shape.heads
    return 8 * shape.hidden + attention + 4 * shape.intermediate + 4


def logits(config: Config, shape: ModelShape, device: str) -> int:
    """Chunks of logits, the hidden states that they are computed from with their gradient, and the
    fp32 gradient of the output matrix unless that is frozen, in bytes. A small vocabulary is computed at
    once."""
    tokens = micro_batch_tokens(config)
    if shape.vocabulary < CHUNKED_FROM:
        return CHUNK_COPIES * 4 * tokens * shape.vocabulary
    hidden = 2 * element(config) * tokens * shape.hidden
    matrix = 4 * shape.vocabulary * shape.hidden if config.learner.lora is None else 0
    return CHUNK_COPIES * LOGIT_CHUNK[device] + hidden + matrix


def engine(config: Config, shape: ModelShape, device: str, memory: int) -> Holding:
    """The memory of one GPU of an engine, or of an engine on CPUs.

    vLLM claims ``rollout.vllm.gpu_memory_utilization`` of the GPU's memory and gives the KV cache
    what weights and workspace leave of it. The torch engine's cache grows with its rows. New
    weights, or adapters, are staged in host memory.
    """
    n, e = shape.parameters, engine_element(config)
    across = config.rollout.gpus_per_worker if device == "cuda" else 1
    weights = e * n // across
    per_token = max(1, shape.kv_bytes(e) // across)
    rows = config.rollout.groups_per_batch * config.rollout.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if uses_vllm(config, device) and device == "cpu":
        # Front end, engine core, and a process for each rank if there are several.
        ranks = math.prod(int(vllm_setting(config, "args", {}).get(name, 1)) for name in VLLM_RANKS)
        processes = 2 + (ranks if ranks > 1 else 0)
        cache = ranks * (int(vllm_setting(config, "kv_cache_mb", VLLM_CPU_CACHE_MB)) << 20)
        work = processes * RUNTIME[device]
    elif uses_vllm(config, device):
        share = float(vllm_setting(config, "gpu_memory_utilization", VLLM_SHARE))
        cache = max(0, int(share * memory) - weights - VLLM_WORKSPACE)
        work = VLLM_WORKSPACE
    else:
        cache, work = rows * longest * per_token, RUNTIME[device]
    received = e * trained(config, shape)
    staging = received if device == "cpu" else buckets_on_gpu(config, device)
    parts = {
        "weights": weights,
        "KV cache": cache,
        "runtime": work,
        "weight staging": staging,
    }
    if config.learner.lora is not None:
        parts["adapters"] = received // across
    host = 0 if device == "cpu" else (3 << 30) + received
    return Holding(device=device, parts=parts, host=host, cache_tokens=cache // per_token)
