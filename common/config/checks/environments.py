"""Choices about environments that would do nothing, or fail only once a run is under way."""

from __future__ import annotations

from ...templates import OWN
from ..tree import Config


def _of_turns(config: Config) -> str | None:
    """Settings about turns where nothing has any; an archive may hold episodes."""
    if config.learner.source != "ledger":
        return None
    discount = getattr(config.learner.objective, "turn_discount", None)
    for named, is_set in (
        (f"learner.objective.turn_discount={discount}", discount is not None),
        ("environments.mask_malformed=true", config.environments.mask_malformed),
    ):
        if is_set:
            return (
                f"{named} is about the turns of episodes, and environments.use is empty: describe an "
                f"environment there, or leave it out"
            )
    return None


def environments(config: Config) -> str | None:
    """Why a config's environments can't be played or can't pay; None if they can."""
    pays = [c.name for c in config.reward.components if c.name == "environment"]
    if not config.environments.is_on:
        # An archive's samples may be episodes, and are graded anew without being played.
        if not pays or config.learner.source != "ledger":
            return _of_turns(config)
        return (
            "reward.components names environment, which pays what an environment gives an episode, and "
            "environments.use is empty: describe an environment there, or leave the component out"
        )
    if config.learner.source != "ledger":
        named = " and environments.default=null" if config.environments.default else ""
        return (
            f"environments.use is played by rollout workers, and learner.source={config.learner.source} has "
            f"none: set environments.use={{}}{named}"
        )
    for named, is_set in (
        (f"data.template={config.data.template}", config.data.template != OWN),
        (f"data.prefill={config.data.prefill!r}", config.data.prefill),
        *(
            (f"data.evaluate.{number}.template={one.template}", one.template not in (None, OWN))
            for number, one in enumerate(config.data.evaluate)
        ),
    ):
        if is_set:
            return (
                f"{named} is about prompts that are answered once, and messages of episodes are rendered by the "
                f"model's own chat template: leave it out, or set environments.use={{}}"
            )
    port, workers = config.environments.port, config.rollout.workers
    if port and workers > 1:
        return (
            f"environments.port={port} is the port of every worker's token endpoint, and of rollout.workers={workers} "
            f"on one host only one can listen there: set environments.port=0, which takes free ones, or rollout.workers=1"
        )
    if config.rollout.min_new_tokens:
        return (
            f"rollout.min_new_tokens={config.rollout.min_new_tokens} is about responses of one turn: leave it out, "
            f"or set environments.use={{}}"
        )
    if config.expert.per_group:
        return (
            f"expert.per_group={config.expert.per_group}: an expert's trace continues a row's prompt, and an "
            f"episode begins with what its environment shows: set expert.per_group=0, or environments.use={{}}"
        )
    return None
