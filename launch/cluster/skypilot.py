"""A task file for SkyPilot: the first node is the head, the others are workers."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import ConfigError
from .demand import PRESET, Job, notes_on_files
from .join import FIRST_SECONDS, new_join, note_on_password, port_range, read_kept, text_of
from .rendering import Values, quoted, render

if TYPE_CHECKING:
    from ...common.run_folder import JoinInfo

JOIN = "join.json"
COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs with which clouds rent machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the command line says about the machines."""

    out: Path | None
    """Folder of the task and its join file; None = the task is printed."""
    command: str
    nodes: int
    """Machines with rollout workers."""
    workers: int | None
    """Rollout workers on each of them; None = as many as the rented GPUs serve."""
    gpu: str
    """Kind of the GPUs, as SkyPilot writes it."""
    image: str | None = None
    """``docker:…``; None = the cloud's own."""
    templates: Path | None = None


def task(job: Job, site: Site) -> dict[str, str]:
    """File name to content; the join file holds a password.

    Raises:
        ConfigError: an option makes no sense.
        DataError: the join file of an earlier call is damaged.
    """
    if site.nodes < 1 or (site.workers is not None and site.workers < 1):
        raise ConfigError("--nodes and --workers-per-node are numbers from 1")
    demands, config = job.demands, job.config
    ports = port_range(config)
    fixed = [demands.head, demands.learner]
    each = demands.rollout.gpus
    needed = max([each * (site.workers or 1), *(one.gpus for one in fixed)])
    gpus = next((count for count in COUNTS if count >= needed), needed) if needed else 0
    workers = site.workers or (gpus // each if each else 1)
    cpus = max([demands.rollout.cpus * workers, *(one.cpus for one in fixed)])
    sizes = [demands.rollout.gibibytes, *(one.gibibytes for one in fixed)]
    known = [size for size in sizes if size is not None]
    memory = max(known[0] * workers, *known[1:]) if len(known) == len(sizes) else None
    here = "." if site.out is None else str(site.out)
    # The machines have neither the preset's file nor those that it inherits from.
    is_own = job.preset_text is not None
    preset = f'"$HOME/{job.name}.yaml"' if is_own else shlex.quote(job.preset)
    head = ["--head", *job.overrides, f"launch.ports={ports[0]}-{ports[-1]}"]
    values: Values = {
        "name": job.name,
        "command": site.command,
        "here": shlex.quote(here),
        "all_nodes": demands.hosts + site.nodes,
        "accelerators": f"{site.gpu}:{gpus}" if gpus else None,
        "cpus": quoted(f"{cpus}+"),
        "memory": None if memory is None else quoted(f"{memory}+"),
        "image": site.image,
        "join_file": quoted(f"{here}/{JOIN}"),
        "preset_file": quoted(f"{here}/{PRESET}") if is_own else None,
        # A line break, which is always quoted, would end the task's line.
        "head_words": f"start {preset} {shlex.join(head)}".replace("\n", "'$'\\n''"),
        # Of an existing Redis, the join file has the address.
        "host_words": "" if config.replay.redis_url else '--host "$head"',
        "hosts": demands.hosts,
        "workers_word": "" if site.workers is None else f"--workers {site.workers} ",
        "wait": FIRST_SECONDS,
        "drain": f"{config.launch.drain_seconds:g}",
    }
    made = {"task.yaml": render("skypilot/task.yaml", values, site.templates)}
    if job.preset_text is not None:
        made[PRESET] = job.preset_text
    # The address of a head that has the run's Redis is known when it runs: `tandem join-file --from` puts it in.
    return {**made, JOIN: text_of(new_join(config, "127.0.0.1", _kept(site)))}


def _kept(site: Site) -> JoinInfo | None:
    return None if site.out is None else read_kept(site.out / JOIN, in_secret=False)


def notes(job: Job, site: Site) -> list[str]:
    """What the user should know, a sentence each."""
    copied = "copy it by file_mounts in task.yaml"
    return [
        *job.notes,
        *note_on_password(job.config, _kept(site), JOIN),
        *notes_on_files(
            job.config,
            copied=f"{copied}, unless it is in the working directory and git doesn't ignore it",
            certificate=copied,
            environment="envs in task.yaml",
        ),
    ]
