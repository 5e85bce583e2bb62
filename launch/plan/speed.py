"""How fast each role is on paper: an engine's iteration, the learner's step, a version on its way.

With N' the parameters that a token is multiplied with, T tokens and s the mean length of a row:

- forward: ``2·N'·T + 2·L·a·d·s·T`` operations (attention is causal, so half of 4·L·a·d·s);
  training three times that, four with recomputed activations, in each of ``learner.update_epochs``, and
  one for each further pass over the tokens that the objective needs; a critic's besides (Kaplan et al. 2020, arXiv
  2001.08361; attention and MFU: Chowdhery et al. 2022, arXiv 2204.02311, appendix B;
  recomputation: Korthikanti et al. 2022, arXiv 2205.05198);
- decoding is bound by memory: an iteration reads the weights and the cache of all running rows
  (Pope et al. 2022, arXiv 2211.05102), ``(e·N + tokens·kv) / bandwidth``, or by arithmetic if
  that takes longer, ``2·N'·C / FLOP/s`` for C rows, plus some host time;
- new weights pause an engine while it loads them, and while it recomputes the keys and values of
  what is under way (``rollout.recompute_kv``): ``2·N'`` operations per token;
- the optimizer reads and writes 30 bytes per parameter of its share (RMSprop 22); gradients are exchanged once per
  micro-batch with ZeRO-2 and 3, otherwise once per update (ring: twice the bytes, arXiv 1910.02054).

The shares of the data sheet that are actually reached are the constants below. Everything here is
an estimate; tokenising, packing, evaluations and checkpoints are left out. :mod:`.simulation`
computes how long a step takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...common.config.groups import own_rows, rows_of_group
from ...replay.rules.leases import Limits
from .lengths import Lengths
from .memory import (
    cached_token,
    critic_shape,
    element,
    engine_element,
    has_own_gpus,
    moment_bytes,
    teacher_shape,
    vllm_setting,
)
from .node import Node
from .placement import MOST_THREADS
from .simulation import EngineSpeed, LearnerSpeed, Scenario
from .sizes import ModelShape, trained

if TYPE_CHECKING:
    from ...common.config import Config, OptimizerConfig

TRAIN_SHARE = 0.4
"""Share of the peak FLOP/s that training reaches (MFU, with recomputation counted as work)."""
PREFILL_SHARE = 0.5
"""Share of the peak FLOP/s while an engine reads prompts, or decodes many rows."""
BANDWIDTH_SHARE = 0.7
"""Share of the memory bandwidth while decoding and in the optimizer."""
LINK_SHARE = 0.7
"""Share of the bandwidth of a link between two GPUs."""
ITERATION_SECONDS = 0.005
"""Host time of one iteration of an engine: scheduling, sampling, detokenising."""
PINNED_RATE = 20e9
"""Bytes per second between a GPU and pinned host memory (PCIe 4.0 x16; 5.0 has twice that)."""
MEMORY_RATE = 2e9
"""Bytes per second for copying and checking twice in host memory (on 2 CPU cores)."""
GLOO_RATE = 0.3e9
"""Bytes per second through gloo on loopback; 0.13 to 0.56 GB/s were measured."""
GRADED_A_SECOND = 500.0
"""Answers per second and grader process; 130 to 1,200 were measured, depending on the answers' form."""
OPTIMIZER_BYTES = 14
"""Bytes read and written per parameter: gradient 4, master 4 twice, the weight 2; moments are too, twice."""
HOST_STEP_RATE = 10e9
"""Bytes per second and thread that torch's AdamW reads and writes in host memory; 13 were measured with one thread."""
MAX_NUM_SEQS = 256
"""Fewest rows that an engine runs at a time unless ``rollout.vllm.max_num_seqs`` says otherwise."""
RESPONSE_SHARE = 1 / 3
"""Mean response as a share of the limit, unless it is given."""
PROMPT_SHARE = 1 / 4
"""Mean prompt as a share of the limit, unless it is given."""
SPREAD = 0.75
"""Standard deviation of the logarithm of a response's length, unless it is given. With the mean at
a third of the limit, one response in thirty is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of a step."""

    samples: int
    """Own samples that are generated."""
    rows: int
    """Rows that are trained on, expert rows included."""
    groups: int
    """Groups of the step."""
    prompt: float
    """Mean tokens of a prompt."""
    lengths: Lengths
    """Lengths of responses, in tokens."""

    @property
    def response(self) -> float:
        """Mean tokens of a response; expert traces are assumed to be as long."""
        return self.lengths.mean

    @property
    def trained(self) -> float:
        """Tokens of one pass of the learner."""
        return self.rows * (self.prompt + self.response)


def load(
    config: Config,
    *,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    spread: float | None = None,
) -> Load:
    """The work of a step of this config; lengths are shares of their limits unless given, at most those limits, and
    those of blocks (``data.pack_tokens``) are theirs."""
    groups = config.replay.groups_per_step
    limit = config.rollout.max_new_tokens
    offline = config.learner.source == "offline"
    block = config.data.pack_tokens
    if block is not None:
        prompt, lengths = 0.0, Lengths(mean=block, limit=block, spread=0.0)
    else:
        longest = config.data.max_prompt_tokens
        prompt = min(longest, prompt_tokens or PROMPT_SHARE * longest)
        lengths = Lengths(
            mean=min(limit, response_tokens or RESPONSE_SHARE * limit),
            limit=limit,
            spread=SPREAD if spread is None else spread,
        )
    return Load(
        samples=0 if offline else groups * own_rows(config),
        rows=groups * rows_of_group(config) if config.learner.train else 0,
        groups=groups,
        prompt=prompt,
        lengths=lengths,
    )


def scenario(
    config: Config, shape: ModelShape, node: Node, work: Load, cache_tokens: int
) -> Scenario:
    """What is simulated for a config on a node with GPUs.

    Args:
        work: the work of a step.
        cache_tokens: tokens that fit into one engine's KV cache.
    """
    own = work.samples // work.groups
    return Scenario(
        limits=Limits(
            groups_per_step=work.groups,
            max_staleness=config.replay.max_staleness,
            window=config.replay.window,
            max_inflight=config.replay.max_inflight,
        ),
        workers=config.rollout.workers if own else 0,
        samples=own,
        batch=config.rollout.groups_per_batch,
        ahead=config.rollout.groups_ahead,
        slots=slots(config, work, cache_tokens),
        lengths=work.lengths,
        prompt=work.prompt,
        engine=engine_speed(config, shape, node),
        learner=learner_speed(config, shape, node, work),
        recompute=config.rollout.recompute_kv and config.learner.train,
        every=config.weights.every,
        graded_a_second=GRADED_A_SECOND * max(1, config.reward.pools * config.reward.graders),
        shared=config.launch.share_gpu,
    )


def learner_speed(config: Config, shape: ModelShape, node: Node, work: Load) -> LearnerSpeed:
    """Speed of the learner, all ranks together. One that trains nothing (``learner.train``) only gives the weights
    that the engines have a new version."""
    if not config.learner.train:
        return LearnerSpeed(step=0.0)
    token = forward_seconds(config, shape, node, 1, work.prompt + work.response)
    return LearnerSpeed(
        step=learner_seconds(config, shape, node, work) - token * work.samples * work.response,
        token=token,
        publish=engine_element(config) * trained(config, shape) / PINNED_RATE,
        transfer=transfer_seconds(config, shape, node),
    )


def slots(config: Config, work: Load, cache_tokens: int) -> int:
    """Rows that an engine runs at a time: as many as it is set to, and as its cache has room for.

    A row that is running at a random moment is likely to be a long one, and half done on average.
    """
    set_to = vllm_setting(config, "max_num_seqs", None) or max(
        MAX_NUM_SEQS, config.rollout.groups_per_batch * config.rollout.group_size
    )
    drawn = work.lengths.draw(256, 16, seed=0)
    of_a_row = work.prompt + float((drawn**2).sum() / drawn.sum()) / 2
    return max(1, min(int(set_to), int(cache_tokens / of_a_row)))


def engine_speed(config: Config, shape: ModelShape, node: Node) -> EngineSpeed:
    """Speed of one engine, on all its GPUs together."""
    e, across = engine_element(config), config.rollout.gpus_per_worker
    flops, bandwidth = PREFILL_SHARE * node.flops * across, BANDWIDTH_SHARE * node.bandwidth
    return EngineSpeed(
        host=ITERATION_SECONDS,
        weights=e * shape.parameters / across / bandwidth,
        cached_token=cached_token(config, shape, "cuda") / bandwidth,
        row=2 * shape.multiplied / flops,
        prompt_token=2 * shape.multiplied / flops,
        load=e * trained(config, shape) / across / PINNED_RATE if config.learner.train else 0.0,
    )


def forward_flops(shape: ModelShape, tokens: float, context: float) -> float:
    """Operations of one forward pass over this many tokens in causal sequences."""
    return 2 * shape.multiplied * tokens + 2 * shape.layers * shape.query_width * context * tokens


def forward_seconds(
    config: Config, shape: ModelShape, node: Node, tokens: float, context: float
) -> float:
    """Seconds of all ranks together for everything that a step computes from this many tokens."""
    flops = learner_passes(config) * forward_flops(shape, tokens, context)
    if config.learner.critic is not None:
        own = critic_shape(config, shape)
        flops += critic_passes(config) * forward_flops(own, tokens, context)
    teacher = teacher_shape(config, shape)
    if teacher is not None:
        flops += config.learner.update_epochs * forward_flops(teacher, tokens, context)
    return flops / (TRAIN_SHARE * node.flops * config.learner.ranks)


def training_passes(config: Config) -> int:
    """Number of forward passes that one pass of training over all tokens is worth: forward and backward."""
    return 3 + config.learner.gradient_checkpointing


def learner_passes(config: Config) -> int:
    """Number of forward passes that the policy's work in a step is worth: ``learner.update_epochs`` times
    forward and backward, and passes without gradient. These are one each under the step's first weights and
    the reference, for the loss and for the reward, if something needs them, and in each epoch one under the
    current weights, if the objective needs it. A frozen base has no gradient of its own, which is a third of
    the forward and backward pass."""
    learner, objective = config.learner, config.learner.objective
    columns = objective.columns & {"proximal", "reference"}
    if learner.stop_kl is not None:
        columns |= {"proximal"}
    scoring = len(columns) + objective.penalises_reward
    each = training_passes(config) + ("current" in objective.columns)
    if learner.lora is not None:
        each -= 1
    return each * learner.update_epochs + scoring


def critic_passes(config: Config) -> int:
    """The same of a critic: its values at the step's start, and forward and backward in each epoch."""
    return training_passes(config) * config.learner.update_epochs + 1


def learner_seconds(config: Config, shape: ModelShape, node: Node, work: Load) -> float:
    """Seconds for forward, backward, exchange of gradients and optimizer, of policy and critic."""
    learner, n = config.learner, shape.parameters
    compute = forward_seconds(config, shape, node, work.trained, work.prompt + work.response)
    t = trained(config, shape)
    updating = _updating_seconds(config, n, t, learner.optimizer, node, work)
    if learner.critic is not None:
        own = critic_shape(config, shape).parameters
        updating += _updating_seconds(config, own, own, learner.critic.optimizer, node, work)
    return compute + updating


def _updating_seconds(
    config: Config, n: int, t: int, wanted: OptimizerConfig, node: Node, work: Load
) -> float:
    """Seconds in a step for exchange of gradients and optimizer of n parameters, t of which are trained."""
    settings, e = config.learner, element(config)
    updates = settings.minibatches * settings.update_epochs
    share = t / settings.ranks if settings.zero_stage else t
    traffic = OPTIMIZER_BYTES + 2 * moment_bytes(wanted)
    optimizer = updates * traffic * share / (BANDWIDTH_SHARE * node.bandwidth)
    micro = math.ceil(work.trained / settings.ranks / settings.micro_batch_tokens)
    micro *= settings.update_epochs
    if settings.offload != "none":
        rate = HOST_STEP_RATE * min(settings.threads or MOST_THREADS, MOST_THREADS)
        # Stepped in host memory; gradients come there, and new weights go back.
        optimizer = updates * share * (traffic / rate + (4 + e) / PINNED_RATE)
    if settings.offload == "parameters":
        # Weights go to the GPU for the forward and for the backward pass.
        optimizer += 2 * micro * e * n / settings.ranks / PINNED_RATE
    exchanges = 0.0
    if settings.ranks > 1:
        exchanges = max(updates, micro) if settings.zero_stage >= 2 else updates
        exchanges *= 2 * 4 * t / (LINK_SHARE * node.link)
        if settings.zero_stage == 3:
            # Weights are gathered for the forward and for the backward pass.
            exchanges += 2 * micro * e * n / (LINK_SHARE * node.link)
    return optimizer + exchanges


def transfer_seconds(config: Config, shape: ModelShape, node: Node) -> float:
    """Seconds from the learner's staged copy in host memory to the last worker's copy.

    The learner sends a version to one worker after the other, except to workers that map its memory.
    """
    size = engine_element(config) * trained(config, shape)
    if has_own_gpus(config, "cuda"):
        # Bucket by bucket up to a GPU, over the link, and down again; the slowest leg counts.
        return config.rollout.workers * size / min(PINNED_RATE, LINK_SHARE * node.link)
    if config.weights.transport in ("auto", "shared_memory"):
        return size / MEMORY_RATE
    return config.rollout.workers * size / GLOO_RATE
