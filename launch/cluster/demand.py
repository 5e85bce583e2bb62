"""What head, learner hosts and rollout workers ask a scheduler for, from the plan of a run."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError
from ..host.redis_server import password_in, without_password
from ..plan import planning
from ..plan.hardware import machine
from ..plan.node import node
from ..plan.placement import MOST_THREADS, gpus_needed

if TYPE_CHECKING:
    from ...common.config import Config
    from ..plan.planning import Plan, Planned

PRESET = "preset.yaml"
"""The file of a preset that the run's machines don't have."""
SLACK = 1.3
"""Main memory that is asked for, relative to the plan's, which is an estimate."""
LEAST_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The resources of one host, or of one pod."""

    cpus: int
    gpus: int
    memory: int | None
    """Bytes of main memory; None if the plan doesn't know the model's sizes."""

    @property
    def gibibytes(self) -> int | None:
        """Memory in GiB, rounded up."""
        return None if self.memory is None else math.ceil(self.memory / (1 << 30))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What each kind of host asks for."""

    head: Demand
    """Redis, reward pools, environment servers and the learner's ranks of the first host."""
    learner: Demand
    """The ranks of one more host of the learner."""
    rollout: Demand
    """One rollout worker."""
    hosts: int
    """Hosts of the learner, the head included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that is to be put on a cluster."""

    name: str
    """Names jobs and objects: a DNS label."""
    preset: str
    """The preset as the command line takes it, where this machine's files are."""
    preset_text: str | None
    """All settings of a preset of the user's own as one file, for where they aren't; None for one of Tandem's."""
    overrides: tuple[str, ...]
    """Settings as they may be shown: without a password."""
    config: Config
    """It still has the password of ``replay.redis_url``."""
    demands: Demands
    notes: tuple[str, ...] = field(default=())
    """What the user should know, a sentence each."""


def label(name: str) -> str:
    """A name as a DNS label of at most 32 characters; a longer one ends with a digest of the whole, for names may differ
    in their ends alone.

    >>> label("Qwen2.5_math")
    'qwen2-5-math'
    >>> label("qwen2.5-math-7b-luffy-lr1e-6-seed1")
    'qwen2-5-math-7b-luffy-lr1e-b41f'
    """
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(found) > 32:
        digest = hashlib.sha256(name.encode()).hexdigest()[:4]
        found = f"{found[:27].rstrip('-')}-{digest}"
    return found or "run"


def job_of(
    words: Iterable[str],
    name: str | None = None,
    *,
    binds: bool = True,
    by_folder: bool = False,
) -> Job:
    """A preset and its overrides as a job.

    Args:
        words: the preset's name and settings.
        name: names jobs and objects; None = the preset's.
        binds: whether the head binds ``launch.bind``, and not an address that it is told when it starts.
        by_folder: whether a digest of ``run.dir`` goes into the default name unless it is the default folder, so that
            runs of one preset differ.

    Raises:
        ConfigError: the preset or an override is wrong, it has stages or trains offline, or a start would refuse it.
    """
    from ...common.config.checks.choices import why_not_started
    from ...common.config.launch import LaunchConfig
    from ..run.opened.presets import is_own, load, split
    from ..run.opened.record import as_kept

    preset_name, overrides = split(list(words), "miniature")
    preset = load(preset_name)
    if preset.stages:
        raise ConfigError(
            f"{preset_name} makes several runs one after another: name one that is a single run"
        )
    config = preset.resolve(overrides)
    preset.tell_unread(overrides)
    if config.learner.source == "offline":
        raise ConfigError(
            f"{preset_name} trains on what is stored, without rollout workers (learner.source=offline): one host runs "
            f"it by `tandem offline {preset_name}`"
        )
    # As `--head` starts it, without workers of its own.
    head: dict[str, Any] = {"rollout": config.rollout.model_copy(update={"workers": 0})}
    if not binds:
        head["launch"] = config.launch.model_copy(update={"bind": LaunchConfig().bind})
    if refusal := why_not_started(config.model_copy(update=head)):
        raise ConfigError(refusal)
    own = is_own(preset_name)
    notes = []
    demands = demands_of(preset.name, config)
    if demands.rollout.memory is None:
        notes.append(
            f"the sizes of {config.model.path} aren't known here, so no memory is asked for: add it by hand"
        )
    named = preset.name
    folder = Path(str(config.run.dir)).absolute()
    if by_folder and folder != Path(f"runs/{named}").absolute():
        named += f"-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:6]}"
    return Job(
        name=f"tandem-{label(name or named)}",
        # Those that are joined by + are found from the working directory alone, in which Slurm's jobs run.
        preset=str(preset.path) if own and preset.path.exists() else preset_name,
        preset_text=_text(preset.tree, str(config.run.dir)) if own else None,
        overrides=tuple(as_kept(word) for word in overrides),
        config=config,
        demands=demands,
        notes=tuple(notes),
    )


def notes_on_files(config: Config, *, copied: str, certificate: str, environment: str) -> list[str]:
    """What is said of files that the config names and that this machine has, where others run it: a sentence each.

    Args:
        config: the run's.
        copied: how data and models get there.
        certificate: how the files of TLS do.
        environment: where a variable is set that names one of these there.
    """
    from ...common.evaluation_sets import home
    from ...common.models import SHIPPED
    from ...replay.reaching import VARIABLES

    critic = config.learner.critic
    models = [config.model.path, config.learner.teacher, critic.model if critic else None]
    paths = [path for path in models if path and path not in SHIPPED]
    paths += [source.path for source in config.data.train]
    # The run fetches known sets by itself that it doesn't find there.
    known = {one.path: home() / one.name for one in config.data.evaluate}
    paths += [path for path, fetched in known.items() if Path(path) != fetched]
    found = [
        f"{path} is on this machine: {copied}, and name it by its path there"
        for path in dict.fromkeys(paths)
        if _is_here(path)
    ]
    for name, variable in VARIABLES.items():
        path = getattr(config.replay, f"redis_{name}")
        if path and _is_here(path):
            found.append(
                f"{path} is on this machine: {certificate}, and its path there into {environment}, as {variable}"
            )
    return found


def _is_here(path: str) -> bool:
    """Whether this machine has a file or folder; one that can't be looked at, or of a user who isn't known, counts as
    elsewhere."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError):
        return False


def _text(tree: Mapping[str, Any], run_dir: str) -> str:
    """A preset with all that it inherits as a file that everybody may read, whatever that file's own name will be."""
    from ...common.config import yaml_text
    from ...common.config.checks.deepspeed import content_of

    tree = {**tree, "run": {**tree.get("run", {}), "dir": run_dir}}
    if (given := tree.get("learner", {}).get("deepspeed")) is not None:
        # Of the file, which the hosts of the run may not have.
        tree["learner"] = {**tree["learner"], "deepspeed": content_of(given)}
    url = tree.get("replay", {}).get("redis_url")
    if url is not None and password_in(url) is not None:
        tree["replay"] = {**tree["replay"], "redis_url": without_password(url)}
    return yaml_text(tree)


def demands_of(name: str, config: Config) -> Demands:
    """What the hosts of a run ask for, one rollout worker counted whatever ``rollout.workers`` says."""
    rollout = config.rollout.model_copy(update={"workers": 1})
    config = config.model_copy(update={"rollout": rollout})
    needed = gpus_needed(config)
    # Other machines run it: how many GPUs this one has doesn't matter.
    paper = node(machine(), needed=needed, gpus=needed)
    plan = planning.make(name, config, paper, planning.for_node(config, paper))
    hosts = config.learner.hosts
    ranks = config.learner.ranks // hosts
    learner = [p for p in plan.processes if p.name.startswith("learner")][:ranks]
    workers = [p for p in plan.processes if p.name.startswith("rollout")]
    others = [p for p in plan.processes if not p.name.startswith(("learner", "rollout"))]
    served = config.reward.pools * (1 + config.reward.graders)
    environments = config.environments.servers if config.environments.is_on else 0
    # By default they take what the host has; an optimizer that steps there is what needs more than one.
    offloads = config.learner.offload != "none"
    on_ranks = ranks * (config.learner.threads or (MOST_THREADS if offloads else 1))
    return Demands(
        head=_demand(plan, [*others, *learner], 1 + on_ranks + served + environments),
        learner=_demand(plan, learner, on_ranks),
        rollout=_demand(plan, workers, config.rollout.threads),
        hosts=hosts,
    )


def _demand(plan: Plan, processes: list[Planned], cpus: int) -> Demand:
    gpus = {gpu for planned in processes for gpu in planned.gpus}
    held = [planned.holding for planned in processes]
    memory: int | None = 0
    for holding in held:
        if holding is None or memory is None:
            memory = None
        else:
            memory += holding.host + (holding.total if holding.device == "cpu" else 0)
    if memory is not None:
        memory = max(LEAST_BYTES, int(SLACK * (memory + planning.SMALL_BYTES)))
    return Demand(cpus=max(1, cpus), gpus=len(gpus) if plan.device == "cuda" else 0, memory=memory)
