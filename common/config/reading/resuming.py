"""The settings that a resumed run may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import xxhash

from ..tree import Config

CHANGEABLE: tuple[str, ...] = (
    "run.dir",
    "run.steps",
    "run.passes",
    "run.last_step",
    "run.callback*",
    "rollout.workers",
    "rollout.threads",
    # What an engine needs of its GPUs, as those of another host may need it; not what it samples.
    "rollout.gpus_per_worker",
    "rollout.vllm.gpu_memory_utilization",
    "rollout.vllm.kv_cache_mb",
    "rollout.vllm.max_num_seqs",
    "rollout.vllm.start_seconds",
    # How many episodes are played at a time and how long they may take; not what is played.
    "environments.servers",
    "environments.episodes",
    "environments.*_seconds",
    "environments.retries",
    "environments.memory_mb",
    "environments.port",
    "reward.pools",
    "reward.graders",
    "reward.memory_mb",
    # Where a judge is, and how often it is asked; not what it is asked.
    "reward.components.*.params.url",
    "reward.components.*.params.api_key_env",
    "reward.components.*.params.retries",
    "reward.components.*.params.parallel",
    # Other kernels of the same attention, as another host may need them.
    "model.attention",
    "model.kernels",
    "replay.redis_*",
    "replay.durability",
    "replay.dynamic_sampling*",
    "replay.lease_seconds",
    "replay.group_deadline_seconds",
    "replay.max_inflight",
    "replay.maxmemory_mb",
    # A checkpoint is the same for every number of ranks and stage.
    "learner.ranks",
    "learner.hosts",
    "learner.checkpoints",
    "learner.zero_stage",
    "learner.offload",
    "learner.gradient_checkpointing",
    # It may name the stage, and what may be set changes no more than the order of sums.
    "learner.deepspeed*",
    "learner.threads",
    "learner.micro_batch_tokens",
    "learner.max_idle",
    "learner.ratio_check.*",
    "learner.checkpoint_every",
    "learner.checkpoints_kept",
    # All but its name, since another optimizer can't go on from its state.
    "learner.optimizer.[!n]*",
    "learner.critic.optimizer.[!n]*",
    "evaluate.*",
    "launch.*",
    "log.*",
    # How weights travel, and not what.
    "weights.transport",
    "weights.topology",
    "weights.bucket_mb",
    "weights.snapshot_*",
    "weights.*_seconds",
    "weights.interface",
    "weights.check_bound",
)
"""Patterns of the keys that may differ when a run is resumed: schedule, logging, counts."""


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested tree as ``{"a.b.c": value}``; entries of a list of sections are ``a.0.b``, other lists leaves."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            value = {str(place): one for place, one in enumerate(value)}
        if isinstance(value, Mapping) and value:
            values.update(leaves(value, f"{name}."))
        else:
            values[name] = value
    return values


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ: ``{"a.b": (old, new)}``."""
    before = leaves(old.model_dump(mode="json"))
    after = leaves(new.model_dump(mode="json"))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def frozen_differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The part of :func:`differences` that a resumed run may not change."""
    return {key: values for key, values in differences(old, new).items() if not _may_change(key)}


def reward_digest(config: Config) -> str:
    """Tells the section ``reward`` from one with other settings of those that a resumed run may not change.

    Settings at their defaults are left out, since later versions have more of them.
    """
    tree = config.model_dump(mode="json", include={"reward"}, exclude_defaults=True)
    frozen = {key: value for key, value in leaves(tree).items() if not _may_change(key)}
    return xxhash.xxh3_64_hexdigest(json.dumps(frozen, sort_keys=True).encode())


def _may_change(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in CHANGEABLE)
