"""What a config may not ask for although each of its values is valid: choices that would do nothing,
or fail only once the run is under way.

Each rule returns the refusal, with the values and the way out, or None. Rules look only at the
config, so that a refusal comes within seconds, before a process starts. Problems that only the data
show are refused at ingest (:mod:`tandem.launch.ingest.prepare`), those of the machine by the preflight, and
those of the model by the process that loads it.

``RULES`` apply to every config that is made (except one that is read back from a run's folder, which
an older version may have begun); ``START_RULES`` also apply to a run that a person starts, and ``NEW_RULES`` to one that
begins: they are of settings that a resumed run may not change, and with which older runs have begun.
"""

from __future__ import annotations

import difflib
import math

from ...objectives import OBJECTIVES, WITHOUT_GROUP, OwnObjective
from ...objectives.keys import Entropy, Expert
from ...records import Verdict
from ...templates import NONE, OWN
from ..data import DataConfig
from ..groups import (
    LEASES_STOP_SHARE,
    group_bytes,
    has_groups,
    is_online,
    longest_row,
    own_rows,
    replays_own,
    rows_of_group,
)
from ..tree import Config
from .environments import environments
from .evaluations import EVALUATION_RULES
from .launch import LAUNCH_RULES
from .updates import NEW_UPDATE_RULES, UPDATE_RULES, Rule


def _replayed(config: Config) -> str | None:
    if not replays_own(config):
        return None
    said = f"learner.objective.name={config.learner.objective.name} brings one own past success into a group, and "
    if config.expert.per_group != 1:
        return f"{said}expert.per_group={config.expert.per_group}: set it to 1"
    if config.expert.prefix is not None:
        return f"{said}expert.prefix={config.expert.prefix} cuts it: set it to null"
    return None


def _group_baseline(config: Config) -> str | None:
    objective, own = config.learner.objective, own_rows(config)
    least = objective.least_verdicts
    if not is_online(config) or own >= least:
        return None
    traces = f" - expert.per_group={config.expert.per_group}" if config.expert.per_group else ""
    return (
        f"rollout.group_size={config.rollout.group_size}{traces} leaves {own} own sample a group, "
        f"and learner.objective.name={objective.name} with advantage={objective.baseline} compares "
        f"at least {least}: raise rollout.group_size to {config.rollout.group_size + least - own}, "
        f"or choose an objective that compares no rows of a group, such as reinforce_pp "
        f"(learner.objective.advantage: {' or '.join(WITHOUT_GROUP)})"
    )


def _whitened_alone(config: Config) -> str | None:
    rows = config.replay.groups_per_step * rows_of_group(config)
    if config.learner.objective.baseline != "reinforce_pp" or rows > 1:
        return None
    return (
        f"learner.objective.advantage=reinforce_pp whitens rewards over a step's rows, and one row is "
        f"all that a step has: raise replay.groups_per_step from {config.replay.groups_per_step}"
    )


def _traces_after_grading(config: Config) -> str | None:
    expert = config.expert
    if expert.when != "all_failed":
        return None
    if not has_groups(config):
        return (
            f"expert.when=all_failed asks what own samples were graded, and learner.source="
            f"{config.learner.source} has none: set expert.when=always"
        )
    if not expert.per_group:
        return (
            "expert.when=all_failed has no trace to put in the place of a failed sample: set "
            "expert.per_group to 1 or more, or expert.when=always"
        )
    if expert.prefix is not None:
        return (
            f"expert.when=all_failed puts whole traces into groups that were graded, and "
            f"expert.prefix={expert.prefix} begins samples with a part of one: set "
            f"expert.prefix=null, or expert.when=always"
        )
    return None


def _dynamic_sampling(config: Config) -> str | None:
    objective, most = config.learner.objective, config.replay.dynamic_sampling
    means = config.replay.dynamic_sampling_means
    if means and means[0] > means[1]:
        return (
            f"replay.dynamic_sampling_means={list(means)} leaves no group: give the least mean reward first, "
            f"then the greatest"
        )
    if means and not most and is_online(config):
        return (
            f"replay.dynamic_sampling_means={list(means)} has no effect while no group may be left out: set "
            f"replay.dynamic_sampling to the greatest number of groups a step that may be"
        )
    if not most or not is_online(config):
        return None
    if means and config.expert.per_group and config.expert.when == "all_failed":
        return (
            f"replay.dynamic_sampling_means={list(means)} compares the mean reward of a group's rows before any of "
            f"them gives way to a trace, as expert.when=all_failed has it: set one of the two to its default"
        )
    said = f"replay.dynamic_sampling={most} leaves out groups whose rows all have one reward, and "
    name = f"learner.objective.name={objective.name}"
    if objective.least_verdicts < 2:
        return (
            f"{said}{name} with advantage={objective.baseline} learns from these too, since it compares no "
            f"rows of a group: set it to 0, or choose an advantage that does"
        )
    if objective.alone == "always" and config.expert.per_group:
        return f"{said}{name} learns from their expert rows whatever they are paid: set it to 0"
    if objective.penalises_reward:
        return (
            f"{said}learner.objective.kl_reward_coefficient pays their rows differently: set one of the "
            f"two to 0"
        )
    if getattr(objective, "turn_discount", None) is not None:
        return f"{said}with learner.objective.turn_discount their turns may differ: set it to 0"
    return None


RULES: tuple[Rule, ...] = (
    _dynamic_sampling,
    environments,
    _traces_after_grading,
    _group_baseline,
    _whitened_alone,
    *UPDATE_RULES,
)


def why_refused(config: Config) -> str | None:
    """The first refusal by :data:`RULES`, or None."""
    return _first(RULES, config)


# -- of a run that is started ----------------------------------------------------------------------


def micro_batch_refusal(config: Config, *, unit: str, what: str = "") -> str | None:
    """Why the budget of a micro-batch can't hold every unit that may come; None if it can.

    Args:
        config: the run's config.
        unit: what is never split: a row, or a pair or group, which take the rows of a whole group.
        what: names in the message what never splits them: the objective.
    """
    rows = 1 if unit == "row" else rows_of_group(config)
    least = rows * longest_row(config)
    budget = config.learner.micro_batch_tokens
    if least <= budget:
        return None
    times = f"{rows} rows of a group, which {what} never splits, x " if rows > 1 else ""
    fewer = "rollout.group_size, " if rows > 1 and has_groups(config) else ""
    return (
        f"learner.micro_batch_tokens={budget:,} is less than the longest that may come: {times}"
        f"{longest_row(config):,} tokens (data.max_prompt_tokens={config.data.max_prompt_tokens:,} + "
        f"rollout.max_new_tokens={config.rollout.max_new_tokens:,} - 1): raise it to at least "
        f"{least:,}, or lower {fewer}data.max_prompt_tokens or rollout.max_new_tokens"
    )


def _micro_batch(config: Config) -> str | None:
    objective = config.learner.objective
    unit, what = objective.unit, objective.name
    if config.data.heldout_pairs and unit == "row":
        # An objective on single rows compares the two of a held-out pair all the same.
        unit, what = "group", "the comparison of data.heldout_pairs"
    return micro_batch_refusal(config, unit=unit, what=what)


def _half_sums(config: Config) -> str | None:
    learner = config.learner
    if learner.zero_stage or config.model.dtype == "float32":
        return None
    groups = math.ceil(config.replay.groups_per_step / learner.minibatches)
    tokens = groups * rows_of_group(config) * longest_row(config)
    if tokens <= learner.micro_batch_tokens:
        return None
    return (
        f"learner.zero_stage=0 adds up the gradients of an update's micro-batches in "
        f"model.dtype={config.model.dtype}, which is off by some percent (1.5e-2 measured with bfloat16); an update has up to "
        f"{tokens:,} tokens, and learner.micro_batch_tokens={learner.micro_batch_tokens:,}: set "
        f"learner.zero_stage=1, which adds up in float32 and rounds once"
    )


def _offline(config: Config) -> str | None:
    objective = config.learner.objective
    # Files that the miniature writes into the run's folder have no pairs; of others only their rows tell.
    may_have_pairs = any("{run}/data/" not in source.path for source in config.data.train)
    if objective.rejects and may_have_pairs:
        return None
    if has_groups(config):
        return None
    if objective.alone == "nothing":
        able = ", ".join(n for n, kind in OBJECTIVES.items() if kind.alone == "always")
        return (
            f"learner.objective.name={objective.name} learns nothing from an expert's trace that is "
            f"alone in its group, which is all that learner.source=offline has: choose one of {able}, "
            f"dpo, cpo or orpo for pairs of responses, or luffy with learner.objective.advantage=none; or sample with learner.source=ledger"
        )
    if objective.alone == "by advantage" and objective.baseline not in WITHOUT_GROUP:
        return (
            f"learner.objective.name={objective.name} with advantage={objective.baseline} gives a "
            f"trace that is alone in its group the advantage 0, and learner.source=offline has no "
            f"other rows: set learner.objective.advantage=none, or choose sft"
        )
    return None


def _archive(config: Config) -> str | None:
    if config.data.archive is None or not is_online(config):
        return None
    return (
        f"data.archive={config.data.archive} is trained on without rollouts: set learner.source=offline "
        f"(`tandem offline`), or leave data.archive out"
    )


def _only_samples(config: Config) -> str | None:
    if config.learner.train:
        return None
    if not is_online(config):
        return (
            f"learner.train=false only samples, and learner.source={config.learner.source} has no rollout "
            f"worker: set learner.source=ledger"
        )
    if not config.log.archive:
        return (
            "learner.train=false only samples, and nothing keeps the samples: set log.archive=true"
        )
    return None


def _supervised(config: Config) -> str | None:
    if config.learner.objective.name != "sft" or not is_online(config) or config.expert.per_group:
        return None
    return (
        "learner.objective.name=sft learns from expert traces alone, and expert.per_group=0 lets none "
        "into a group: set expert.per_group=1, or learner.source=offline (`tandem offline`)"
    )


def _teacher(config: Config) -> str | None:
    objective, teacher = config.learner.objective, config.learner.teacher
    if isinstance(objective, OwnObjective):
        return None  # Whether it has one, only the learner can tell.
    name = f"learner.objective.name={objective.name}"
    if "divergence" not in objective.needs:
        if teacher is None:
            return None
        return (
            f"learner.teacher={teacher} has nothing to teach, since {name} has no teacher: set "
            f"learner.teacher=null, or learner.objective.name=distill"
        )
    if teacher is None:
        return f"{name} needs a teacher: set learner.teacher to a model with the policy's tokenizer"
    coefficient = getattr(objective, "sft_coefficient", 0.0)
    if coefficient and is_online(config) and not config.expert.per_group:
        return (
            f"learner.objective.sft_coefficient={coefficient:g} is of expert tokens, and expert.per_group=0 lets "
            f"none into a group: set learner.objective.sft_coefficient=0, or expert.per_group=1"
        )
    return None


def _no_reward(config: Config) -> str | None:
    reward = config.reward
    if not is_online(config):
        return None
    if reward.own_reward is not None:
        if config.learner.objective.least_verdicts > 1 and not config.expert.per_group:
            return (
                f"reward.own_reward={reward.own_reward:g} pays every sample alike, so that no group "
                f"teaches anything: leave it null, or let traces in with expert.per_group"
            )
    elif "divergence" in config.learner.objective.needs:
        return None  # A teacher's word takes the place of rewards.
    elif not any(component.weight for component in reward.components):
        return (
            "no component of reward.components has a weight, so that every sample is paid 0: give one "
            "a weight, such as {name: accuracy, weight: 1}"
        )
    return None


def _bounds(config: Config) -> str | None:
    objective = config.learner.objective
    if isinstance(objective, Expert):
        low, high = objective.expert_clip_low, objective.expert_clip_high
        if low is not None and high is not None and low > high:
            return (
                f"learner.objective.expert_clip_low={low:g} is over expert_clip_high={high:g}: swap "
                f"them, or set one to null"
            )
    if (
        isinstance(objective, Entropy)
        and objective.scales_entropy
        and not objective.entropy_coefficient
    ):
        return (
            f"learner.objective.entropy_target={objective.entropy_target:g} scales the coefficient, and "
            f"entropy_coefficient=0: set learner.objective.entropy_coefficient, or "
            f"entropy_adapt=stepped, which may begin at 0"
        )
    return None


def memory_refusal(config: Config, problem_bytes: int = 0) -> str | None:
    """Why the run's own Redis has no room for one group; None if it has. The problem's bytes: see :func:`group_bytes`."""
    limit, group = config.replay.maxmemory_mb << 20, group_bytes(config, problem_bytes)
    if config.replay.redis_url is not None or not is_online(config):
        return None
    if group <= LEASES_STOP_SHARE * limit:
        return None
    known = f", {problem_bytes / 2**20:.1f} of them its problem" if problem_bytes else ""
    return (
        f"replay.maxmemory_mb={config.replay.maxmemory_mb} has no room for one group: leases stop at "
        f"{LEASES_STOP_SHARE:.0%} of it, and a group of rollout.group_size="
        f"{config.rollout.group_size} may take {math.ceil(group / 2**20)} MiB{known}: raise it to "
        f"{math.ceil(group / LEASES_STOP_SHARE / 2**20)} or more"
    )


def _context(config: Config) -> str | None:
    vllm, longest = config.rollout.vllm, longest_row(config) + 1
    given = None if vllm is None else vllm.max_model_len
    if given is None or given >= longest:
        return None
    return (
        f"rollout.vllm.max_model_len={given:,} is less than data.max_prompt_tokens="
        f"{config.data.max_prompt_tokens:,} + rollout.max_new_tokens={config.rollout.max_new_tokens:,}: "
        f"raise it to at least {longest:,}, or leave it null"
    )


def _accepted(config: Config) -> str | None:
    usable = [verdict.value for verdict in Verdict if not verdict.leaves_baseline]
    for name in config.expert.accept:
        if name not in usable:
            near = difflib.get_close_matches(name, usable, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            return f"expert.accept names {name!r}, which isn't one of {', '.join(usable)}{meant}"
    return None


def whole_conversations(data: DataConfig) -> str | None:
    """Why all answers of conversations can't be told apart in prompts of these settings; None if they can."""
    said = "turns=all tells answers apart by the model's own chat template, and"
    if data.template != OWN:
        return f"{said} data.template={data.template}: set data.template=own, or turns=last"
    if data.prefill:
        return (
            f"{said} data.prefill={data.prefill!r} would begin the first answer alone: leave it out, or set "
            f"turns=last"
        )
    return None


def _turns(config: Config) -> str | None:
    data, expert, objective = config.data, config.expert, config.learner.objective
    if (source := next((one for one in data.train if one.turns == "all"), None)) is None:
        return None
    said = f"data.train {source.short_name}: turns=all"
    if data.archive is not None or (
        is_online(config) and (not expert.per_group or replays_own(config))
    ):
        return (
            f"{said} says which answers are learned from, and this run learns from no answer of its data: leave it "
            f"out, or set learner.source=offline (`tandem offline`) without data.archive"
        )
    if expert.prefix is not None:
        return (
            f"{said} makes traces that users and tools wrote a part of, and expert.prefix={expert.prefix} would begin "
            f"samples with these parts as well: set expert.prefix=null, or turns=last"
        )
    if data.pack_tokens is not None:
        return (
            f"{said} learns from answers alone, and data.pack_tokens={data.pack_tokens} from all tokens: set it to "
            f"null, or turns=last"
        )
    if objective.unit == "group" and not has_groups(config):
        return (
            f"{said} makes one trace of a conversation, and learner.objective.name={objective.name} compares two "
            f"responses to one question: choose sft, or set turns=last"
        )
    return whole_conversations(data)


def _system_prompt(config: Config) -> str | None:
    data = config.data
    used = {data.template, *(one.template or data.template for one in data.evaluate)}
    if data.system_prompt is None or used & {OWN, NONE}:
        return None
    return (
        f"data.system_prompt={data.system_prompt[:40]!r} does nothing with data.template={data.template}, which holds "
        f"the question alone: set data.system_prompt=null, or data.template=own, or write it into a template of your own"
    )


def _unused_prefix(config: Config) -> str | None:
    expert, fresh = config.expert, type(config.expert)()
    if expert.prefix in (None, "fixed", "random") and expert.prefix_steps is not None:
        return (
            f"expert.prefix_steps={expert.prefix_steps} is read by the schedules in time alone, and "
            f"expert.prefix={expert.prefix or 'null'}: leave it null, or set expert.prefix=linear"
        )
    if expert.prefix is None:
        for name in ("prefix_low", "prefix_high"):
            if getattr(expert, name) != getattr(fresh, name):
                return (
                    f"expert.{name}={getattr(expert, name):g} is a share of a trace that samples begin "
                    f"with, and expert.prefix=null begins none: set expert.prefix=fixed, or leave it"
                )
    return None


def _twice(config: Config) -> str | None:
    for key, names in (
        ("data.train", [source.short_name for source in config.data.train]),
        ("data.evaluate", [one.name for one in config.data.evaluate]),
    ):
        for name in names:
            if names.count(name) > 1:
                return f"{key} has two entries named {name!r}: give each its own name"
    return None


def _attention(config: Config) -> str | None:
    attention = config.model.attention
    if attention not in ("flash_attention_2", "flex"):
        return None
    if attention == "flash_attention_2" and config.model.dtype == "float32":
        return (
            "model.attention=flash_attention_2 computes in half precision alone, and "
            "model.dtype=float32: set model.dtype=bfloat16, or model.attention=sdpa"
        )
    if config.launch.gpus == "none":
        return (
            f"model.attention={attention} needs a GPU, and launch.gpus=none: set "
            f"model.attention=sdpa, or launch.gpus=required"
        )
    return None


def _kernels(config: Config) -> str | None:
    if config.model.kernels == "liger" and config.launch.gpus == "none":
        return "model.kernels=liger needs a GPU, and launch.gpus=none: set model.kernels=auto"
    return None


def _seed(config: Config) -> str | None:
    seed = config.run.seed
    if not is_online(config) or abs(seed) <= MOST_SEED:
        return None
    return f"run.seed={seed} is over {MOST_SEED:,}, the greatest that the ledger can hold: choose a smaller one"


def _grader_memory(config: Config) -> str | None:
    memory = config.reward.memory_mb
    if memory >= LEAST_GRADER_MB:
        return None
    return f"reward.memory_mb={memory}: a grader needs {LEAST_GRADER_MB} MiB to start: raise it"


MOST_SEED = 1 << 53
"""Greatest seed: the ledger's scripts compute with doubles, which don't tell greater whole numbers apart."""
LEAST_GRADER_MB = 80
"""Address space with which a grader starts; at 64 MiB it dies."""


START_RULES: tuple[Rule, ...] = (
    *LAUNCH_RULES,
    _micro_batch,
    _half_sums,
    _offline,
    _archive,
    _only_samples,
    _supervised,
    _teacher,
    _no_reward,
    _bounds,
    memory_refusal,
    _context,
    _accepted,
    _turns,
    _unused_prefix,
    *EVALUATION_RULES,
    _twice,
    _replayed,
    _attention,
    _kernels,
)
NEW_RULES: tuple[Rule, ...] = (_system_prompt, _seed, _grader_memory, *NEW_UPDATE_RULES)


def why_not_started(config: Config, *, anew: bool = True) -> str | None:
    """The first refusal by :data:`START_RULES`, and for a run that begins anew by :data:`NEW_RULES`, or None."""
    return _first((*START_RULES, *(NEW_RULES if anew else ())), config)


def _first(rules: tuple[Rule, ...], config: Config) -> str | None:
    return next((refusal for rule in rules if (refusal := rule(config))), None)
