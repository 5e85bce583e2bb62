"""How the samples of a group begin: with a part of an expert's trace, or with nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.config import Config
from ..common.prefixes import prefix_length, prefix_shares
from ..common.records import ExpertTrace, Float32Array, Int32Array
from ..common.seeds import keyed_generator
from .engine import no_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefixes:
    """How each sample of a group begins, one entry per sample."""

    tokens: tuple[Int32Array, ...]
    """``[L]`` token ids each."""
    logprobs: tuple[Float32Array | None, ...]
    """``[L]`` nats each: the expert's log-probs, None if its trace has none recorded."""


def prefixes(config: Config, group_id: str, step: int, traces: Sequence[ExpertTrace]) -> Prefixes:
    """The beginnings of a group's samples; the last samples begin with the traces.

    Drawn by (run seed, group id). At least one token is left to the policy, both of the trace and
    of ``rollout.max_new_tokens``, which bounds prefix and continuation together.

    Args:
        config: the run's config, with ``expert.prefix`` set.
        group_id: the group's id.
        step: step of the worker's weights.
        traces: the traces to begin with, at most ``expert.per_group``.
    """
    expert, rollout = config.expert, config.rollout
    assert expert.prefix is not None
    rng = keyed_generator("prefix", config.run.seed, group_id)
    shares = prefix_shares(
        expert.prefix,
        len(traces),
        lambda count: rng.random(count).tolist(),
        step=step,
        steps=expert.prefix_steps or config.run.steps or 1,
        low=expert.prefix_low,
        high=expert.prefix_high,
    )
    begun: list[Int32Array] = []
    known: list[Float32Array | None] = []
    for trace, share in zip(traces, shares, strict=True):
        length = len(trace.tokens)
        most = max(0, min(prefix_length(length, share), length - 1, rollout.max_new_tokens - 1))
        begun.append(trace.tokens[:most])
        known.append(None if trace.logprobs is None else trace.logprobs[:most])
    free = rollout.group_size - len(begun)
    return Prefixes(tokens=(*([no_tokens()] * free), *begun), logprobs=(*([None] * free), *known))
