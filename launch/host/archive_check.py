"""Whether an archive fits a run: its groups into the limits of lengths and to the group size, and its rewards to the
objective.

Lengths and sizes are those of all steps that the run trains on, since none of the limits can be changed once it is
under way.
Of rewards it looks at no more steps than a run may be idle in a row (``learner.max_idle``), so that what it
refuses would have ended with that error anyway, later. It reads no samples' tokens, so that it takes a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from ...common.config import Config
from ...common.errors import DataError
from ...common.objectives import OBJECTIVES, ObjectiveConfig, OwnObjective
from ...common.objectives.distillation import Distill
from ...common.objectives.experts import Srft
from ...common.objectives.keys import EQUAL_REWARDS, Entropy, ExpertWeight, Kl, Learned
from ...common.objectives.preferences import Kto, Pairs
from ...common.records import FinishReason
from ...replay import archive
from ...replay.archive import GroupRewards


def check_archive(config: Config, *, anew: bool = True) -> None:
    """Refuses groups that are too long or of another size, and an objective that learns nothing from the steps that a
    run would begin with.

    Args:
        config: the run's.
        anew: whether the run is begun; one that is resumed goes on with the group size that it has.

    Raises:
        DataError: one of these, or ``data.archive`` isn't an archive.
    """
    assert config.data.archive is not None
    folder = Path(config.data.archive).expanduser()
    _check_lengths(config, folder)
    if anew:
        _check_sizes(config, folder)
    most = min(config.learner.max_idle, config.run.steps or config.learner.max_idle)
    objective, negative = config.learner.objective, config.expert.negative
    steps = []
    for where in islice(archive.steps(folder), max(1, most)):
        groups, foreign = archive.rewards(where)
        if learns(objective, groups, foreign=foreign, negative=negative):
            return
        steps.append((groups, foreign))
    if not steps:
        raise DataError(f"data.archive={config.data.archive} has no groups: name another archive")
    able = [
        name
        for name, kind in OBJECTIVES.items()
        if any(learns(kind(), groups, foreign=f, negative=negative) for groups, f in steps)
    ]
    every = [group for groups, _ in steps for group in groups]
    own, traces = sum(len(one.own) for one in every), sum(len(one.expert) for one in every)
    choose = f"choose one of {', '.join(able)}, or " if able else ""
    raise DataError(
        f"learner.objective.name={objective.name} learns nothing from data.archive={config.data.archive}: "
        f"in its first {len(steps)} steps ({len(every):,} groups, {own:,} own samples, {traces:,} expert "
        f"traces) {_why(objective)}: {choose}name another archive"
    )


def _check_lengths(config: Config, folder: Path) -> None:
    found = [archive.longest(where) for where in islice(archive.steps(folder), config.run.steps)]
    prompt, response, episode = (
        (max(lengths) for lengths in zip(*found, strict=True)) if found else (0, 0, 0)
    )
    prompts, responses = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    limits = {
        "data.max_prompt_tokens": (prompts, prompt),
        "rollout.max_new_tokens": (responses, max(response, episode - prompts)),
    }
    wanted = [
        f"{key}={limit:,} to at least {longest:,}"
        for key, (limit, longest) in limits.items()
        if longest > limit
    ]
    if wanted:
        episodes = f", and episodes of up to {episode:,} with theirs" if episode else ""
        raise DataError(
            f"data.archive={config.data.archive} has prompts of up to {prompt:,} tokens and responses of up to "
            f"{response:,}{episodes}: raise {' and '.join(wanted)}"
        )


def _check_sizes(config: Config, folder: Path) -> None:
    """Refuses a group size that isn't that of the largest groups: losses are divided by it, and micro-batches must hold
    it. Single groups may be smaller."""
    found = [archive.sizes(where) for where in islice(archive.steps(folder), config.run.steps)]
    if not any(most for _, most in found):
        return
    rows, most = (max(each) for each in zip(*found, strict=True))
    size = config.rollout.group_size
    fitting = min(max(size, rows), most)
    if fitting != size:
        raise DataError(
            f"data.archive={config.data.archive} has groups of up to {fitting} rows, own samples and expert traces "
            f"together, and rollout.group_size={size}: set rollout.group_size={fitting}"
        )


def _why(objective: ObjectiveConfig) -> str:
    if isinstance(objective, Pairs):
        return "the rewards of each group are equal, so that no response is better than another"
    if isinstance(objective, Distill):
        return "every own sample was cut and is masked, and no group has an expert trace"
    if not isinstance(objective, Learned):
        return "no group has an expert trace"
    silent = f"all that it learns from has the advantage 0 with advantage={objective.baseline}"
    return f"no group has an expert trace, and {silent}" if objective.alone == "always" else silent


def learns(
    objective: ObjectiveConfig, groups: Sequence[GroupRewards], *, foreign: bool, negative: bool
) -> bool:
    """Whether a row of a step can move the gradient.

    Args:
        objective: the objective's settings.
        groups: the step's rewards.
        foreign: whether own samples may hold tokens of an expert.
        negative: whether expert tokens with an advantage below 0 stay in the loss.
    """
    if foreign or isinstance(objective, OwnObjective):
        return True  # Which of its rows count, only the learner can tell.
    rows = [(paid, ends) for group in groups for paid, ends in group.own]
    traces = any(group.expert for group in groups)
    if _without_rewards(objective):
        return bool(rows) or traces
    if objective.alone == "always" and traces:
        return True
    if isinstance(objective, Distill):
        return any(_kept(objective, ends) for _, ends in rows)
    if isinstance(objective, Pairs):
        return any(
            _differ([*(p for p, e in g.own if _kept(objective, e)), *g.expert]) for g in groups
        )
    if not isinstance(objective, Learned):
        return False
    everything = [paid for paid, _ in rows] + [paid for one in groups for paid in one.expert]
    centre = _mean(everything) if _differ(everything) else None
    return any(_moves(objective, group, centre, negative=negative) for group in groups)


def _without_rewards(objective: ObjectiveConfig) -> bool:
    """Whether it has a term that every row moves, whatever it was paid."""
    entropy = isinstance(objective, Entropy) and (
        objective.entropy_coefficient != 0 or objective.entropy_adapt == "stepped"
    )
    # In the loss, only this estimator has a gradient where the policy still is the reference.
    kl = isinstance(objective, Kl) and bool(
        objective.kl_reward_coefficient or (objective.kl_coefficient and objective.kl_form == "kl")
    )
    return entropy or kl or isinstance(objective, Srft)


def _moves(
    objective: Learned, group: GroupRewards, centre_of_step: float | None, *, negative: bool
) -> bool:
    """Whether a row of the group that the objective learns from has an advantage other than 0; for kto without a
    baseline, whether there is a row."""
    if isinstance(objective, Kto) and objective.baseline == "none":
        return bool(group.expert) or any(_kept(objective, ends) for _, ends in group.own)
    own = [paid for paid, _ in group.own]
    baseline, rows = objective.baseline, [*own, *group.expert]
    centre: float | None
    if baseline == "none":
        centre = 0.0
    elif baseline == "reinforce_pp":
        centre = centre_of_step
    elif baseline in ("own_mean", "own_mean_std"):
        centre = _mean(own) if own else None
    else:
        centre = _mean(rows) if _differ(rows) else None
    if centre is None or (baseline == "max_rl" and centre <= EQUAL_REWARDS):
        return False
    if any(
        abs(paid - centre) > EQUAL_REWARDS and _kept(objective, ends) for paid, ends in group.own
    ):
        return True
    if isinstance(objective, Kto):
        return any(abs(paid - centre) > EQUAL_REWARDS for paid in group.expert)
    if not isinstance(objective, ExpertWeight):
        return False
    return any(
        paid - centre > EQUAL_REWARDS or (negative and centre - paid > EQUAL_REWARDS)
        for paid in group.expert
    )


def _kept(objective: ObjectiveConfig, ends: FinishReason) -> bool:
    """Whether a sample that ended so is in the loss."""
    if ends is FinishReason.STOP:
        return True
    late = ends is FinishReason.DEADLINE
    return (objective.stragglers if late else objective.truncation) == "wrong"


def _differ(rewards: Sequence[float]) -> bool:
    return bool(rewards) and max(rewards) - min(rewards) > EQUAL_REWARDS


def _mean(rewards: Sequence[float]) -> float:
    return sum(rewards) / len(rewards)
