"""What a config may not ask of the learner's updates: rules as those of :mod:`.choices`."""

from __future__ import annotations

from collections.abc import Callable

from ...objectives import OwnObjective
from ...objectives.keys import Clip, Kl, Weighed
from ..groups import has_groups, is_online
from ..tree import Config
from .deepspeed import refusal

Rule = Callable[[Config], str | None]
"""Returns the refusal of a config with the way out, or None."""


def _no_ratio(config: Config) -> str | None:
    learner = config.learner
    objective, updates = learner.objective, learner.minibatches * learner.update_epochs
    if updates == 1 or objective.has_ratio:
        return None
    raised = [key for key in ("minibatches", "update_epochs") if getattr(learner, key) > 1]
    given = " and ".join(f"learner.{key}={getattr(learner, key)}" for key in raised)
    makes = "makes" if len(raised) == 1 else "make"
    return (
        f"{given} {makes} {updates} updates of a step, and learner.objective.name={objective.name} "
        f"has no ratio for tokens that the weights before the first of them sampled: set "
        f"{' and '.join(f'learner.{key}=1' for key in raised)}, choose an objective with a clip, such as "
        f"grpo, or for the plain gradient of all updates cispo with learner.objective.clip_low=1e-6 and "
        f"clip_high=1e-6, which leave every token the weight 1"
    )


def _fresh(config: Config) -> str | None:
    objective = config.learner.objective
    if not objective.fresh_only or not is_online(config) or not config.replay.max_staleness:
        return None
    return (
        f"learner.objective.name={objective.name} neither clips nor weights own tokens, so it needs fresh samples: set "
        f"replay.max_staleness=0, or learner.objective.clip_low and clip_high where it has a ratio"
    )


def _unclipped(config: Config) -> str | None:
    objective, staleness = config.learner.objective, config.replay.max_staleness
    if not is_online(config) or not staleness or not isinstance(objective, Clip):
        return None
    # A correction bounds the weight of stale tokens by itself.
    if objective.clip_low or objective.clip_high or isinstance(objective, Weighed):
        return None
    return (
        f"learner.objective.clip_low=null and clip_high=null leave nothing that bounds the ratio of stale tokens, and "
        f"replay.max_staleness={staleness}: set it to 0, give learner.objective.clip_high a value (1e9 if "
        f"nothing is to be clipped), or choose tis, which bounds their weight"
    )


def _stop_kl(config: Config) -> str | None:
    learner = config.learner
    if learner.stop_kl is None:
        return None
    if learner.minibatches * learner.update_epochs == 1:
        return (
            f"learner.stop_kl={learner.stop_kl:g} leaves out updates after a step's first, and a step has "
            f"one: raise learner.update_epochs or learner.minibatches, or set learner.stop_kl=null"
        )
    if not has_groups(config):
        return (
            f"learner.stop_kl={learner.stop_kl:g} is measured on own tokens, and learner.source=offline has "
            f"only stored responses: set learner.stop_kl=null"
        )
    return None


def _critic(config: Config) -> str | None:
    objective, critic = config.learner.objective, config.learner.critic
    if critic is None:
        return None
    name = objective.name
    if "values" not in objective.needs and not isinstance(objective, OwnObjective):
        return (
            f"learner.critic has settings, and learner.objective.name={name} has no critic: set "
            f"learner.critic=null, or learner.objective.name=ppo"
        )
    if config.expert.per_group:
        return (
            f"learner.objective.name={name} learns from own samples alone, since a critic's values are of "
            f"the run's own policy, and expert.per_group={config.expert.per_group} puts traces in their "
            f"place: set expert.per_group=0, or choose an objective such as luffy"
        )
    steps = config.run.steps
    if steps is not None and critic.warmup_steps >= steps:
        return (
            f"learner.critic.warmup_steps={critic.warmup_steps} leaves the policy as it is in all of "
            f"run.steps={steps}: lower the first or raise the second"
        )
    return None


def _correction(config: Config) -> str | None:
    objective = config.learner.objective
    if not isinstance(objective, Weighed):
        return None
    if objective.correction == "none":
        return (
            f"learner.objective.correction=none leaves the stale tokens of {objective.name} without "
            f"any weight: choose truncate or mask, or the objective reinforce for fresh samples"
        )
    low, high = objective.correction_low, objective.correction_high
    if objective.correction == "mask" and low >= high:
        return (
            f"learner.objective.correction=mask keeps weights from correction_low={low:g} to "
            f"correction_high={high:g}, which are none: lower the first or raise the second"
        )
    return None


def _max_rl(config: Config) -> str | None:
    objective = config.learner.objective
    if not isinstance(objective, Kl) or objective.baseline != "max_rl":
        return None
    beta = objective.kl_reward_coefficient
    if not beta:
        return None
    return (
        f"learner.objective.advantage=max_rl divides by a group's mean reward, which tells how much of it is "
        f"solved, and learner.objective.kl_reward_coefficient={beta:g} changes the rewards: set "
        f"learner.objective.kl_reward_coefficient=0 and kl_coefficient={beta:g}, which is in the loss, or "
        f"learner.objective.advantage=group_mean"
    )


def _offload(config: Config) -> str | None:
    learner = config.learner
    if learner.offload == "none" or not learner.train:
        return None
    least = 3 if learner.offload == "parameters" else 1
    if learner.zero_stage >= least:
        return None
    managers = "only ZeRO-3 manages" if least == 3 else "ZeRO-1, 2 and 3 manage"
    other = (
        ", or learner.offload=optimizer"
        if learner.offload == "parameters" and learner.zero_stage
        else ""
    )
    return (
        f"learner.offload={learner.offload} moves to host memory what {managers}, and "
        f"learner.zero_stage={learner.zero_stage}: set learner.zero_stage={least}, which one rank may run too{other}"
    )


def _float16(config: Config) -> str | None:
    if config.model.dtype != "float16" or not config.learner.train:
        return None
    if not config.learner.zero_stage:
        return (
            "model.dtype=float16 needs the float32 weights that ZeRO keeps, and learner.zero_stage=0: set "
            "learner.zero_stage=1, which one rank may run too"
        )
    if config.launch.gpus == "none":
        return (
            "model.dtype=float16 trains only on GPUs, and launch.gpus=none: set model.dtype=bfloat16, which has the "
            "range of float32, or launch.gpus=required"
        )
    return None


STALE_RULES: tuple[Rule, ...] = (_no_ratio, _fresh)
"""Rules about how stale the tokens may be that an objective learns from. Those of an objective of the user's own only the
learner knows, which asks them again (:mod:`tandem.learner.updates.updates`)."""
UPDATE_RULES: tuple[Rule, ...] = (
    *STALE_RULES,
    _stop_kl,
    _critic,
    _correction,
    _max_rl,
    _offload,
    _float16,
    refusal,
)
"""Rules about the learner's objective, its updates, its critic, its memory and DeepSpeed's own settings."""
NEW_UPDATE_RULES: tuple[Rule, ...] = (_unclipped,)
"""Rules of the same kind for runs that begin."""
