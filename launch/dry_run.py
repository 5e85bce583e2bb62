"""``tandem start --dry-run``: the plan of a run, and what this machine lacks for it."""

from __future__ import annotations

from collections.abc import Sequence

from ..common.errors import ConfigError
from .opening import open_folder
from .plan import planning, text
from .plan.hardware import machine
from .plan.node import node
from .preflight import gpus_needed
from .presets import load, split
from .requirements import disk_wanted, examine, missing


def dry_run(words: Sequence[str], *, fresh: bool, offline: bool) -> int:
    """Prints every process with its GPUs, command and memory; starts and writes nothing.

    The exit code is 0 also where this machine couldn't run it: the plan says why.

    Raises:
        ConfigError: the settings can't be run on any machine.
        DataError: the run's folder is of another run or damaged.
    """
    name, overrides = split(words, "miniature-sft" if offline else "miniature")
    preset = load(name)
    opening = open_folder(preset, overrides, fresh=fresh)
    config = opening.config
    if offline and config.learner.source != "offline":
        raise ConfigError(
            f"preset {preset.name} trains on rollouts (learner.source=ledger): "
            f"`tandem start {name}` runs it, or set learner.source=offline"
        )
    here = machine()
    lacking = missing(examine(config, here, opening.folder.path))
    paper = node(here, needed=gpus_needed(config))
    plan = planning.make(preset.name, config, paper, planning.on_paper(config, here, paper))
    told = [finding.told() for finding in lacking]
    lines = text.dry_run(plan, opening, here, disk_wanted(config), told)
    print("\n".join(lines))
    return 0
