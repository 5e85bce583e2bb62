"""What a learner rank and an engine hold in memory, part by part, in bytes.

Sources: Rajbhandari et al. 2019 (ZeRO, arXiv 1910.02054) for weights, gradients and optimizer
states by stage; Korthikanti et al. 2022 (arXiv 2205.05198) for activations and their
recomputation; Kwon et al. 2023 (PagedAttention, arXiv 2309.06180) for the KV cache. All of them
are estimates: fragmentation and what kernels use on the way are covered by :data:`RUNTIME` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.config import VLLM_RANKS
from .sizes import ModelShape

if TYPE_CHECKING:
    from ...common.config import Config

BUCKET = 500_000_000
"""Elements of DeepSpeed's reduction bucket (``reduce_bucket_size``, its default)."""
LOGIT_CHUNK = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Bytes of one chunk of float32 logits, as in :mod:`tandem.learner.forward.logprobs`."""
CHUNKED_FROM = 8192
"""Vocabulary from which logits are made chunk by chunk, likewise."""
CHUNK_COPIES = 3
"""Logits, their exponential and their gradient stand side by side in the backward pass."""
RUNTIME = {"cpu": 700 << 20, "cuda": 2 << 30}
"""CUDA context, communication buffers and the allocator's slack; on a CPU the libraries."""
VLLM_WORKSPACE = 2 << 30
"""What vLLM keeps of its share for activations and CUDA graphs, roughly."""
VLLM_CPU_CACHE_MB = 1024
"""What a rank sets apart for keys and values without a GPU, where nothing is set."""
VLLM_SHARE = 0.9
"""vLLM's own default of ``gpu_memory_utilization``."""
STAGED = 2
"""Versions that the learner stages in the host's memory: one is sent while the next is filled."""
BUCKETS = 2
"""Buckets of new weights that are under way on a GPU at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one process holds."""

    device: str
    """``cuda`` or ``cpu``: where :attr:`parts` lie."""
    parts: Mapping[str, int]
    """Name to bytes, on the device."""
    host: int
    """Bytes of main memory beside it."""
    pinned: int = 0
    """Bytes of :attr:`host` that stay where they are, so that a GPU can read them by itself."""
    cache_tokens: int = 0
    """Tokens that fit into the KV cache; 0 for a learner."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


def element(config: Config) -> int:
    """Bytes of one weight."""
    return 2 if config.model.dtype == "bfloat16" else 4


def engine_element(config: Config) -> int:
    """Bytes of one weight in an engine and on its way there."""
    return 2 if config.engine_dtype == "bfloat16" else 4


def vllm_setting(config: Config, key: str, default: Any) -> Any:
    """A value of ``rollout.vllm``, or what it is where it isn't set."""
    found = getattr(config.rollout.vllm, key, None)
    return default if found is None else found


def uses_vllm(config: Config, device: str) -> bool:
    """Whether the engine is vLLM: asked for, or found on a GPU under ``auto``."""
    return engine_name(config, device) == "vllm"


def engine_name(config: Config, device: str) -> str:
    """``torch``, ``vllm`` or an import path: what ``auto`` takes on a machine that has what it wants."""
    if config.rollout.engine != "auto":
        return config.rollout.engine
    return "vllm" if device == "cuda" else "torch"


def has_own_gpus(config: Config, device: str) -> bool:
    """Whether new weights go from GPU to GPU: learner and engines have GPUs of their own, and NCCL may
    carry weights between them."""
    return device == "cuda" and config.may_use_nccl


def buckets_on_gpu(config: Config, device: str) -> int:
    """Bytes of new weights on a GPU that sends or receives them."""
    return BUCKETS * (config.weights.bucket_mb << 20) if has_own_gpus(config, device) else 0


def learner(config: Config, shape: ModelShape, device: str, *, rank: int = 0) -> Holding:
    """One rank of the learner.

    Weights ``e·N``. Gradients: fp32, in which those of many micro-batches are summed; ZeRO-1
    keeps all of them and the bf16 ones that the backward pass leaves, ZeRO-2 and 3 a rank's
    share and one bucket. Optimizer: two moments of AdamW, and the fp32 master copy of bf16
    weights (and of fp32 ones under ZeRO). Each is divided by the ranks from its ZeRO stage on:
    optimizer 1, gradients 2, weights 3. A reference model, where the objective asks for one, is
    held whole by every rank. New weights are staged in the host's memory, and pass through a GPU
    bucket by bucket.
    """
    n, ranks, e = shape.parameters, config.learner.ranks, element(config)
    stage = config.zero_stage()
    moments = 8 * n if e == 4 and stage == 0 else 12 * n
    if e == 2 and stage == 0:
        moments = 8 * n
    gradients = (4 if e == 2 and stage else e) * n
    staged = STAGED * engine_element(config) * n if rank == 0 else 0
    if stage >= 2:
        gradients = gradients // ranks + 4 * min(BUCKET, n)
    elif stage == 1 and e == 2:
        gradients += 2 * n
    parts = {
        "weights": e * n // (ranks if stage == 3 else 1),
        "gradients": gradients,
        "optimizer": moments // (ranks if stage else 1),
        "activations": activations(config, shape),
        "logits": logits(config, shape, device),
        "weight staging": staged
        if device == "cpu"
        else (rank == 0) * buckets_on_gpu(config, device),
        "runtime": RUNTIME[device],
    }
    if config.learner.objective.needs_reference:
        parts["reference"] = e * n
    if device == "cpu":
        return Holding(device=device, parts=parts, host=0)
    # Libraries, and the weights on their way to the GPU at the start, before anything is staged.
    host = (3 << 30) + max(e * n, staged)
    return Holding(device=device, parts=parts, host=host, pinned=staged)


def micro_batch_tokens(config: Config) -> int:
    """Of one forward pass: the budget, or all that a rank has in an update where that is less."""
    rows = config.replay.groups_per_step * config.rollout.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    share = -(-rows // (config.learner.minibatches * config.learner.ranks))
    return min(config.learner.micro_batch_tokens, share * longest)


def activations(config: Config, shape: ModelShape) -> int:
    """Of one micro-batch, with attention that never makes its scores (flash or memory-efficient).

    What autograd keeps of a Qwen2 layer for a token, in elements: inputs and outputs of both norms
    with their fp32 copies (8·H), queries and the attention's output (2·a·d), keys and values
    (2·kv), the MLP's four products (4·I), and fp32 statistics of norms and softmax (2·a + 4). With
    recomputation each layer keeps its input (H), and one layer at a time all of it.
    """
    tokens, e = micro_batch_tokens(config), element(config)
    inner = kept_by_layer(shape)
    if config.learner.gradient_checkpointing:
        return e * tokens * (shape.layers * shape.hidden + inner)
    return e * tokens * shape.layers * inner


def kept_by_layer(shape: ModelShape) -> int:
    """Elements that autograd keeps of one layer for one token, see :func:`activations`."""
    attention = 2 * shape.query_width + 2 * shape.kv_width + 2 * shape.heads
    return 8 * shape.hidden + attention + 4 * shape.intermediate + 4


def logits(config: Config, shape: ModelShape, device: str) -> int:
    """Chunks of logits, the hidden states that they are made from with their gradient, and the
    fp32 gradient of the output matrix. A small vocabulary is done at once."""
    tokens = micro_batch_tokens(config)
    if shape.vocabulary < CHUNKED_FROM:
        return CHUNK_COPIES * 4 * tokens * shape.vocabulary
    hidden = 2 * element(config) * tokens * shape.hidden
    return CHUNK_COPIES * LOGIT_CHUNK[device] + hidden + 4 * shape.vocabulary * shape.hidden


def engine(config: Config, shape: ModelShape, device: str, memory: int) -> Holding:
    """One GPU of an engine, or an engine on CPUs.

    vLLM claims ``rollout.vllm.gpu_memory_utilization`` of the GPU's memory and gives the KV
    cache what weights and workspace leave of it. The torch engine's cache grows to what its
    rows need. New weights are staged in the host's memory.
    """
    n, e = shape.parameters, engine_element(config)
    across = config.rollout.gpus_per_worker if device == "cuda" else 1
    weights = e * n // across
    per_token = max(1, shape.kv_bytes(e) // across)
    rows = config.rollout.groups_per_batch * config.rollout.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if uses_vllm(config, device) and device == "cpu":
        # Front end, engine core, and a process for each rank where there are several.
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
    staging = e * n if device == "cpu" else buckets_on_gpu(config, device)
    parts = {
        "weights": weights,
        "KV cache": cache,
        "runtime": work,
        "weight staging": staging,
    }
    host = 0 if device == "cpu" else (3 << 30) + e * n
    return Holding(device=device, parts=parts, host=host, cache_tokens=cache // per_token)
