"""How long a step takes each role, on paper.

With N' the parameters that a token is multiplied with, T tokens and s the mean length of a row:

- forward: ``2·N'·T + 2·L·a·d·s·T`` operations (attention is causal, so half of 4·L·a·d·s);
  training three times that, four with recomputed activations, and one for each further look at
  the tokens that the objective asks for (Kaplan et al. 2020, arXiv
  2001.08361; attention and MFU: Chowdhery et al. 2022, arXiv 2204.02311, appendix B;
  recomputation: Korthikanti et al. 2022, arXiv 2205.05198);
- decoding is bound by memory: an iteration reads the weights and the cache of all running rows
  (Pope et al. 2022, arXiv 2211.05102), ``(e·N + C·s·kv) / bandwidth``, or by arithmetic where
  that is longer, ``2·N'·C / FLOP/s``, and some time of the host;
- the optimizer reads and writes 30 bytes a parameter of its share; gradients are exchanged once a
  micro-batch with ZeRO-2 and 3, once an update below (ring: twice the bytes, arXiv 1910.02054).

The shares of the data sheet that are really reached are the constants below. Everything here is
an estimate; tokenising, packing and waiting for stragglers beyond the longest row are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...common.config.choices import own_rows
from .memory import element, engine_element, stages_on_gpu, vllm_setting
from .node import Node
from .sizes import ModelShape

if TYPE_CHECKING:
    from ...common.config import Config

TRAIN_SHARE = 0.4
"""Of the peak FLOP/s while training (MFU, recomputation counted as work)."""
PREFILL_SHARE = 0.5
"""Of the peak FLOP/s while an engine reads prompts, or decodes many rows."""
BANDWIDTH_SHARE = 0.7
"""Of the memory bandwidth while decoding and in the optimizer."""
LINK_SHARE = 0.7
"""Of a link between two GPUs."""
ITERATION_SECONDS = 0.005
"""Of the host for one iteration of an engine: scheduling, sampling, detokenising."""
MEMORY_RATE = 2e9
"""Copying, checking and checking again in the host's memory, bytes a second (2 CPU cores)."""
GLOO_RATE = 0.3e9
"""Bytes a second through gloo on loopback; 0.13 to 0.56 GB/s were seen."""
GRADED_A_SECOND = 500.0
"""Answers a second and grader process; 130 to 1,200 were seen, by how an answer is written."""
OPTIMIZER_BYTES = 30
"""Read and written a parameter: gradient 4, master and moments 12 twice, the weight 2."""
MAX_NUM_SEQS = 256
"""Rows that vLLM runs at a time unless ``rollout.vllm.max_num_seqs`` says otherwise."""
RESPONSE_SHARE = 1 / 3
"""Mean response as a share of the limit, where nobody says better."""
PROMPT_SHARE = 1 / 4
"""Mean prompt likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a step consists of."""

    samples: int
    """Own ones that are generated."""
    rows: int
    """That are trained on, expert rows included."""
    groups: int
    """Of the step."""
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response."""
    longest: int
    """Tokens of the longest response: the limit."""

    @property
    def trained(self) -> float:
        """Tokens of one pass of the learner."""
        return self.rows * (self.prompt + self.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of a step by role."""

    seconds: Mapping[str, float]
    """``rollout``, ``reward``, ``learner`` and ``weights``."""
    step: float
    """Between two steps."""
    running: int
    """Rows that an engine decodes at a time."""
    tokens_per_second: float
    """Generated, all engines together."""
    overlap: bool
    """Rollout and learner work at the same time."""


def load(
    config: Config, *, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> Load:
    """A step of the config; lengths are shares of their limits unless given."""
    groups = config.replay.groups_per_step
    own = own_rows(config)
    limit = config.rollout.max_new_tokens
    offline = config.learner.source == "offline"
    return Load(
        samples=0 if offline else groups * own,
        rows=groups * (1 if offline else config.rollout.group_size),
        groups=groups,
        prompt=prompt_tokens or PROMPT_SHARE * config.data.max_prompt_tokens,
        response=min(limit, response_tokens or RESPONSE_SHARE * limit),
        longest=limit,
    )


def pace(config: Config, shape: ModelShape, node: Node, work: Load, cache_tokens: int) -> Pace:
    """Seconds of a step on a node with GPUs.

    Args:
        config: The run's.
        shape: The model's sizes.
        node: What it runs on.
        work: The step.
        cache_tokens: That fit into one engine's KV cache.
    """
    rollout, running = _rollout(config, shape, node, work, cache_tokens)
    seconds = {
        "rollout": rollout,
        "reward": _reward(config, work),
        "learner": learner_seconds(config, shape, node, work),
        "weights": _weights(config, shape, node) if work.samples else 0.0,
    }
    overlap = config.replay.max_staleness > 0 and work.samples > 0
    if overlap:
        # Engines pause for a commit alone, and grading goes on beside generation.
        step = max(seconds["rollout"], seconds["learner"], seconds["weights"])
        if config.launch.share_gpu:
            step = max(seconds["rollout"] + seconds["learner"], seconds["weights"])
    else:
        step = sum(seconds.values())
    made = work.samples * work.response
    return Pace(
        seconds=seconds,
        step=step,
        running=running,
        tokens_per_second=made / rollout if rollout else 0.0,
        overlap=overlap,
    )


def _rollout(
    config: Config, shape: ModelShape, node: Node, work: Load, cache_tokens: int
) -> tuple[float, int]:
    workers = config.rollout.workers
    if not work.samples or not workers:
        return 0.0, 0
    e, across = engine_element(config), config.rollout.gpus_per_worker
    samples = work.samples / workers
    own = own_rows(config)
    running = max(
        1,
        min(
            math.ceil(samples),
            config.rollout.groups_per_batch * own,
            int(vllm_setting(config, "max_num_seqs", MAX_NUM_SEQS)),
            int(cache_tokens / (work.prompt + work.response)) if cache_tokens else 1,
        ),
    )
    context = work.prompt + work.response / 2
    flops = PREFILL_SHARE * node.flops * across
    bandwidth = BANDWIDTH_SHARE * node.bandwidth * across
    read = e * shape.parameters + running * context * shape.kv_bytes(e)
    iteration = max(read / bandwidth, 2 * shape.multiplied * running / flops)
    iteration += ITERATION_SECONDS
    alone = e * shape.parameters / bandwidth + ITERATION_SECONDS
    # A group's prompt is read once: its samples share the prefix.
    prefill = 2 * shape.multiplied * work.prompt * work.groups / workers / flops
    decode = samples * work.response / running * iteration
    return prefill + max(decode, work.longest * alone), running


def _reward(config: Config, work: Load) -> float:
    graders = max(1, config.reward.pools * config.reward.graders)
    return work.samples / (GRADED_A_SECOND * graders)


def forward_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """Operations of one forward pass over causal sequences of so many tokens."""
    return 2 * shape.multiplied * tokens + 2 * shape.layers * shape.query_width * context * tokens


def learner_passes(config: Config) -> int:
    """Forward passes that a step's work in the learner is worth: forward and backward, and one
    without gradient under the step's first weights, the present ones, and the reference for the
    loss and for the reward, where the objective asks for them."""
    objective = config.learner.objective
    columns = objective.columns & {"proximal", "current", "reference"}
    scoring = len(columns) + (objective.kl_reward_coefficient > 0)
    return (4 if config.learner.gradient_checkpointing else 3) + scoring


def learner_seconds(config: Config, shape: ModelShape, node: Node, work: Load) -> float:
    """Forward, backward, exchange of gradients and optimizer."""
    settings, n, e = config.learner, shape.parameters, element(config)
    flops = learner_passes(config) * forward_flops(shape, work.trained, work.prompt + work.response)
    compute = flops / (TRAIN_SHARE * node.flops * settings.ranks)
    updates = settings.minibatches
    share = n / settings.ranks if settings.zero_stage else n
    optimizer = updates * OPTIMIZER_BYTES * share / (BANDWIDTH_SHARE * node.bandwidth)
    exchanges = 0.0
    if settings.ranks > 1:
        micro = math.ceil(work.trained / settings.ranks / settings.micro_batch_tokens)
        exchanges = max(updates, micro) if settings.zero_stage >= 2 else updates
        exchanges *= 2 * 4 * n / (LINK_SHARE * node.link)
        if settings.zero_stage == 3:
            # Weights are gathered for the forward and for the backward pass.
            exchanges += 2 * micro * e * n / (LINK_SHARE * node.link)
    return compute + optimizer + exchanges


def _weights(config: Config, shape: ModelShape, node: Node) -> float:
    if stages_on_gpu(config, "cuda"):
        rate = LINK_SHARE * node.link
    else:
        rate = MEMORY_RATE if config.weights.transport in ("auto", "shared_memory") else GLOO_RATE
    return engine_element(config) * shape.parameters / rate / config.weights.every
