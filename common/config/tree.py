"""The whole config of a run, and what its sections require of one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from ..objectives import OwnObjective
from .data import DataConfig
from .environments import EnvironmentsConfig
from .evaluate import EvaluateConfig
from .expert import ExpertConfig
from .launch import LaunchConfig
from .learner import LearnerConfig
from .log import LogConfig
from .model import ModelConfig
from .replay import ReplayConfig
from .reward import RewardConfig
from .rollout import RolloutConfig, may_be_vllm
from .run import RunConfig
from .section import Section
from .weights import WeightsConfig

DETERMINISTIC: Mapping[str, Any] = {
    # Every group of a step is sampled by the version before it, and by no other.
    "replay.max_staleness": 0,
    "replay.window": 1,
    "weights.every": 1,
    # A sample's last bits depend on what else is in the engine's batch.
    "rollout.groups_per_batch": 1,
    "rollout.groups_ahead": 0,
    # A year, since a slow worker must not change a group.
    "replay.group_deadline_seconds": 31_536_000.0,
}
"""Settings that ``run.deterministic=true`` makes, whatever the preset says."""


class Config(Section):
    """The whole config of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    expert: ExpertConfig = ExpertConfig()
    rollout: RolloutConfig = RolloutConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    reward: RewardConfig = RewardConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    launch: LaunchConfig = LaunchConfig()
    log: LogConfig = LogConfig()

    @property
    def engine_dtype(self) -> str:
        """Dtype of the engines' weights."""
        return self.rollout.dtype or self.model.dtype

    @property
    def weights_interface(self) -> str:
        """Address or interface that the weight channel binds."""
        # A wildcard names no interface, and a channel without credentials never binds all of them.
        bind = "127.0.0.1" if self.launch.binds_all else self.launch.bind
        return self.weights.interface or bind

    @property
    def weights_bound(self) -> WeightsConfig:
        """``weights`` with :attr:`weights_interface` filled in."""
        return self.weights.model_copy(update={"interface": self.weights_interface})

    def facing(self, redis: str) -> str:
        """The host towards which a process chooses its own address: the head.

        Args:
            redis: where the run's Redis is reached. That of a head may be elsewhere than the head says, behind a
                tunnel for instance; an existing one (``replay.redis_url``) needs to be nowhere near the head.
        """
        return redis if self.replay.redis_url is None else self.launch.bind

    @property
    def ranks_per_host(self) -> int:
        """The learner's ranks on each of its hosts."""
        return self.learner.ranks // self.learner.hosts

    def zero_stage(self, ranks: int | None = None) -> int:
        """The ZeRO stage that ``ranks`` ranks actually run; None = the config's ranks.

        One float32 rank has nothing to partition, and stages 1 and 2 would only copy gradients and
        parameters back and forth (3 ms per update on the miniature). With ``learner.offload`` it is they that
        keep the optimizer's states in host memory.
        """
        stage, ranks = self.learner.zero_stage, ranks or self.learner.ranks
        alone = ranks == 1 and self.model.dtype == "float32" and self.learner.offload == "none"
        return 0 if alone and stage in (1, 2) else stage

    @property
    def may_use_nccl(self) -> bool:
        """Whether NCCL may carry weights on GPUs, which learner and engine then don't share."""
        return self.weights.transport in ("auto", "nccl") and not self.launch.share_gpu

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        online = self.learner.source == "ledger"
        if self.run.deterministic and self.rollout.engine == "vllm":
            raise ValueError(
                "run.deterministic=true needs rollout.engine=torch: vLLM's samples depend on what "
                "else is in its batch"
            )
        rollout = self.rollout
        if rollout.vllm is not None and not may_be_vllm(rollout.engine):
            given = sorted(rollout.vllm.model_fields_set) or [""]
            raise ValueError(
                f"{'.'.join(('rollout.vllm', given[0])).rstrip('.')} is a setting of vLLM, and "
                f"rollout.engine={rollout.engine} reads none: leave it out, or set rollout.engine=vllm"
            )
        if (self.run.steps is None) == (self.run.passes is None):
            raise ValueError("set exactly one of run.steps and run.passes")
        if not self.data.train:
            raise ValueError("data.train is empty: name at least one source with a path")
        if online and (self.rollout.top_p < 1.0 or self.rollout.temperature == 0):
            raise ValueError(
                "training samples from the whole distribution: rollout.top_p must be 1 and "
                "rollout.temperature above 0 (the learner's log-probs are over all tokens); "
                "evaluations have evaluate.top_p and evaluate.temperature"
            )
        objective, share = self.learner.objective, self.data.heldout_pairs
        if share and (online or self.data.archive is not None or not objective.rejects):
            stored = not online and self.data.archive is None
            own = ", or set learner.objective.rejected=true if it learns from pairs"
            way_out = own if stored and isinstance(objective, OwnObjective) else ""
            raise ValueError(
                f"data.heldout_pairs={share:g} measures pairs of stored responses, and this run with "
                f"learner.objective.name={objective.name} has none: set it to 0{way_out}"
            )
        learner = self.learner
        if learner.ranks % learner.hosts:
            raise ValueError(
                f"learner.hosts={learner.hosts} doesn't divide learner.ranks={learner.ranks}: every host "
                f"has as many ranks as the others"
            )
        if learner.hosts > 1 and self.launch.binds_all:
            raise ValueError(
                f"learner.hosts={learner.hosts} meet at launch.bind={self.launch.bind}, without credentials: "
                f"set launch.bind to one private address of the head"
            )
        if online and self.expert.per_group >= self.rollout.group_size:
            raise ValueError(
                f"expert.per_group={self.expert.per_group} leaves no own sample in a group of "
                f"rollout.group_size={self.rollout.group_size}"
            )
        if self.expert.prefix is not None:
            self._check_prefix()
        if self.data.pack_tokens is not None:
            self._check_packing(self.data.pack_tokens)
        if self.weights.every - 1 > self.replay.max_staleness:
            raise ValueError(
                f"weights.every={self.weights.every} needs replay.max_staleness >= "
                f"{self.weights.every - 1}, and it is {self.replay.max_staleness}"
            )
        if self.launch.share_gpu and self.weights.transport == "nccl":
            raise ValueError(
                "launch.share_gpu=true puts the learner and an engine on one GPU, and two ranks "
                "of weights.transport=nccl can't share one: set weights.transport=auto"
            )
        limit = self.replay.max_staleness + 1
        if self.replay.window > limit:
            raise ValueError(
                f"replay.window={self.replay.window} is over replay.max_staleness + 1 = {limit}"
            )
        if self.replay.groups_per_step % self.learner.minibatches:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} doesn't divide "
                f"replay.groups_per_step={self.replay.groups_per_step}"
            )
        return self

    def _check_prefix(self) -> None:
        expert = self.expert
        if not expert.per_group or self.learner.source != "ledger":
            raise ValueError(
                f"expert.prefix={expert.prefix} has no trace to cut: it needs expert.per_group of 1 "
                f"or more and learner.source=ledger"
            )
        if expert.prefix_low > expert.prefix_high:
            raise ValueError(
                f"expert.prefix_low={expert.prefix_low} is over expert.prefix_high="
                f"{expert.prefix_high}"
            )
        timed = expert.prefix not in ("fixed", "random")
        if timed and expert.prefix_steps is None and self.run.steps is None:
            raise ValueError(
                f"expert.prefix={expert.prefix} changes over the run's steps, and a run that is "
                f"set in passes doesn't know their number: set expert.prefix_steps"
            )

    def _check_packing(self, tokens: int) -> None:
        name, longest = self.learner.objective.name, self.rollout.max_new_tokens
        stored = self.learner.source == "offline" and self.data.archive is None
        if name != "sft" or not stored:
            raise ValueError(
                f"data.pack_tokens={tokens} joins stored responses for learner.objective.name=sft with "
                f"learner.source=offline, and this run has learner.objective.name={name}, "
                f"learner.source={self.learner.source} and data.archive={self.data.archive or 'null'}: set "
                f"data.pack_tokens=null"
            )
        if tokens > longest:
            raise ValueError(
                f"data.pack_tokens={tokens:,} is over the longest response that is trained on, "
                f"rollout.max_new_tokens={longest:,}: raise the second or lower the first"
            )
        for source in self.data.train:
            if source.weight != 1:
                raise ValueError(
                    f"data.pack_tokens joins each document once, and {source.short_name} has the weight "
                    f"{source.weight}, which would do nothing: leave the weights out"
                )
