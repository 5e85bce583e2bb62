"""The objective that a run's config names, and what only the objective itself tells of the config."""

from __future__ import annotations

import logging

from ...common.config import Config
from ...common.config.checks.updates import STALE_RULES
from ...common.config.groups import has_groups
from ...common.errors import ConfigError
from ...common.objectives import OwnObjective
from ...common.objectives.keys import WITHOUT_GROUP, Kl
from . import Distill, Objective, Ppo, make
from .preference import Preference

log = logging.getLogger("tandem.learner")


def objective_of(config: Config) -> Objective:
    """The configured objective.

    Raises:
        ConfigError: there is none of that name, or it needs a column that nothing fills.
    """
    wanted = config.learner.objective
    objective = make(wanted.name, wanted, expert_negative=config.expert.negative)
    if "values" in objective.columns and not isinstance(objective, Ppo):
        raise ConfigError(
            f"learner.objective.name={wanted.name} needs the values of a critic, which only ppo and classes "
            f"that derive from tandem.learner.objectives.Ppo can train: derive it from Ppo"
        )
    if isinstance(objective, Ppo) and config.learner.critic is None:
        raise ConfigError(
            f"learner.objective.name={wanted.name} needs a critic: set learner.critic={{}}, or values of its own"
        )
    if config.learner.critic is not None and not isinstance(objective, Ppo):
        raise ConfigError(
            f"learner.critic has settings, and learner.objective.name={wanted.name} has no critic: set "
            f"learner.critic=null, or derive the objective from tandem.learner.objectives.Ppo"
        )
    if "divergence" in objective.columns and not isinstance(objective, Distill):
        raise ConfigError(
            f"learner.objective.name={wanted.name} needs the divergence from a teacher, whose kind only distill and "
            f"classes that derive from tandem.learner.objectives.Distill say: derive it from Distill"
        )
    if isinstance(objective, Distill) != (config.learner.teacher is not None):
        raise ConfigError(
            f"learner.objective.name={wanted.name} needs a teacher: set learner.teacher"
            if config.learner.teacher is None
            else f"learner.teacher={config.learner.teacher} has nothing to teach, since learner.objective.name="
            f"{wanted.name} has no teacher: set learner.teacher=null, or derive the objective from "
            f"tandem.learner.objectives.Distill"
        )
    if config.data.heldout_pairs and not isinstance(objective, Preference):
        raise ConfigError(
            f"data.heldout_pairs={config.data.heldout_pairs:g} measures pairs, and learner.objective.name={wanted.name} "
            f"has no margin: set it to 0, or derive the objective from tandem.learner.objectives.Dpo, Cpo, Orpo or Kto"
        )
    return objective


def check_own(objective: Objective, config: Config) -> None:
    """Refuses what a run can't begin with because of an objective of the user's own, which only the objective tells, and
    warns of a ledger that takes it for another one.

    Raises:
        ConfigError: nothing in it bounds stale tokens, and some may come; it would learn nothing from pairs; or nothing
            adds the KL that is configured.
    """
    wanted, settings = config.learner.objective, objective.settings
    if not isinstance(wanted, OwnObjective):
        return
    learner = config.learner.model_copy(update={"objective": settings})
    as_derived = config.model_copy(update={"learner": learner})
    refusal = next((why for rule in STALE_RULES if (why := rule(as_derived))), None)
    # A loss of its own may bound stale tokens in its own way.
    if refusal and not _has_own_loss(objective):
        raise ConfigError(f"{refusal} (its own settings are in learner.objective.params)")
    named = f"learner.objective.name={wanted.name}"
    least = wanted.least_verdicts
    if settings.least_verdicts != least and config.learner.source == "ledger":
        compared = settings.least_verdicts > 1
        # A preference compares rows whatever its advantage.
        fits = (
            "group_mean" if compared and settings.baseline in WITHOUT_GROUP else settings.baseline
        )
        log.warning(
            f"{named} {'compares the' if compared else 'compares no'} rows of a group, by its class or by "
            f"learner.objective.params, and the ledger, which can't look there, keeps groups of {least} or more verdicts, "
            f"as for advantage={wanted.baseline}: set learner.objective.advantage={fits} in a new run"
        )
    if isinstance(objective, Preference) and not has_groups(config) and not wanted.rejected:
        raise ConfigError(
            f"{named} learns from worse responses too, and learner.objective.rejected=false leaves them out of the data: "
            f"set it to true, and start over with --fresh"
        )
    if (
        isinstance(settings, Kl)
        and settings.kl_coefficient
        and "reference" not in objective.columns
    ):
        raise ConfigError(
            f"learner.objective.kl_coefficient={settings.kl_coefficient:g} does nothing with {named}, which asks for no "
            f"log-probs of a reference: set it to 0, or add 'reference' to its columns and the penalty to its loss"
        )


def _has_own_loss(objective: Objective) -> bool:
    shipped = Objective.__module__.rpartition(".")[0]
    own = [cls for cls in type(objective).__mro__ if not cls.__module__.startswith(shipped)]
    return any({"loss", "own_losses"} & vars(cls).keys() for cls in own)
