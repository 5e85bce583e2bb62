"""Scripts for Slurm: a head, an array of workers that come and go, and an array of the learner's other hosts."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from ...common.config.launch import LaunchConfig
from ...common.errors import ConfigError
from ..host.redis_server import PASSWORD_VARIABLE, password_in
from .demand import PRESET, Demand, Job
from .rendering import Values, render

KILL_WAIT = 30.0
"""Slurm's default of ``KillWait``: seconds between SIGTERM and SIGKILL."""
MARGIN = 5.0
"""Seconds of the grace that are left for processes to be gone."""
LEAST_GRACE = 10.0
WARNING = 60
"""Seconds before the time limit at which draining begins, besides the grace."""
MOST_WARNING = 65535
"""Most seconds that Slurm takes in ``--signal``."""
PATIENCE = 600
"""Seconds for which a worker's script waits for the join file; then it asks to be queued again."""
STARTS = 24
"""Number of times that Slurm has started a worker again after which it no longer asks."""
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the command line says about the cluster."""

    out: Path
    """Folder of scripts and logs, on a file system that all nodes share."""
    command: str
    """The command line, for the scripts' first lines."""
    nodes: int
    """Nodes of workers to begin with."""
    workers: int
    """Rollout workers on each of them."""
    time: str
    """Time limit of each job, as Slurm writes it."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    grace: float = KILL_WAIT
    """The site's ``KillWait``, in seconds."""
    container: str | None = None
    """An image: a ``.sqsh`` file or ``registry#name`` for pyxis, anything else for apptainer."""
    gang: bool = False
    """One heterogeneous job in place of head and array."""
    templates: Path | None = None
    """A folder of templates that go before Tandem's."""


def scripts(job: Job, site: Site) -> dict[str, str]:
    """File name to content.

    Raises:
        ConfigError: an option makes no sense.
        DataError: a template of the user's own can't be filled.
    """
    _check(job, site)
    demands, hosts = job.demands, job.demands.hosts
    run = str(Path(job.config.run.dir or "").absolute())
    here = str(site.out.absolute())
    drain = f"{site.grace - MARGIN:g}"
    # A container sees few of the host's folders, in none of which the preset or those that it inherits from need lie.
    preset_text = None if site.container is None else job.preset_text
    preset = job.preset if preset_text is None else f"{here}/{PRESET}"
    head_words = ["start", preset, "--head", *job.overrides]
    if not any(word.startswith("run.dir=") for word in job.overrides):
        # Quoted, since YAML reads some names otherwise than they are written.
        head_words.append(f"run.dir={json.dumps(run, ensure_ascii=False)}")
    own_bind = job.config.launch.bind == LaunchConfig().bind and not any(
        word.startswith("launch.bind=") for word in job.overrides
    )
    common: Values = {
        "name": job.name,
        "command": site.command,
        "here": shlex.quote(here),
        # Slurm replaces %j and the like in the names of logs.
        "logs": _option(here.replace("%", "%%")),
        "partition": _option(site.partition),
        "account": _option(site.account),
        "qos": _option(site.qos),
        "time": site.time,
        "warning": int(site.grace + WARNING),
        "directory": _option(str(Path.cwd())),
        "tandem": " ".join(map(_quoted, _program(site, run))),
        "join": shlex.quote(f"{run}/join.json"),
        "patience": PATIENCE,
        "starts": STARTS,
        "drain": drain,
        "nodes": site.nodes,
        # Which address the head has, only its node knows.
        "address": "$(hostname -I | cut -d ' ' -f 1)" if own_bind else None,
        "bind_word": 'launch.bind="$address"' if own_bind else "",
        "head_words": shlex.join(head_words),
        **_asked("head_", demands.head),
    }

    def workers(role: str, what: str, array: str, demand: Demand, count: int, *more: str) -> Values:
        words = ["--role", role, *more, "--drain", drain]
        # The job's shell replaces its own variables, and nothing of the folder's name.
        logs = shlex.quote(f"{here}/hosts/{role}-")
        logs += '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
        folder = "" if site.gang else f" --folder {logs}"
        return {
            **common,
            "file": f"{role}.sbatch",
            "what": what,
            "role": role,
            "array": array,
            "worker_words": f'join "$join" {shlex.join(words)}{folder}',
            **_asked("", demand, count),
        }

    rollout = workers(
        "rollout",
        "Rollout workers",
        f"1-{site.nodes}",
        demands.rollout,
        site.workers,
        *("--workers", str(site.workers)),
    )
    made = {} if preset_text is None else {PRESET: preset_text}
    if site.gang:
        made["gang.sbatch"] = render("slurm/gang.sbatch", rollout, site.templates)
        return made
    made["head.sbatch"] = render("slurm/head.sbatch", common, site.templates)
    made["rollout.sbatch"] = render("slurm/workers.sbatch", rollout, site.templates)
    if hosts > 1:
        learner = workers(
            *("learner", "The learner's other hosts", f"1-{hosts - 1}", demands.learner, 1)
        )
        made["learner.sbatch"] = render("slurm/workers.sbatch", learner, site.templates)
    return made


def commands(site: Site, names: list[str]) -> list[str]:
    """How the scripts are submitted."""
    where = shlex.quote(str(site.out))
    if "gang.sbatch" in names:
        return [f"sbatch {where}/gang.sbatch"]
    lines = [f"head=$(sbatch --parsable {where}/head.sbatch)"]
    for name in names:
        if name not in ("head.sbatch", PRESET):
            lines.append(f"sbatch --dependency=after:$head {where}/{name}")
    return lines


def _check(job: Job, site: Site) -> None:
    if password_in(job.config.replay.redis_url or ""):
        raise ConfigError(
            f"replay.redis_url holds a password, which everybody could read in Slurm's scripts: leave it out there, "
            f"export {PASSWORD_VARIABLE} in the shell that runs sbatch, and name it in head.sbatch "
            f"(--export={PASSWORD_VARIABLE})"
        )
    if not _TIME.fullmatch(site.time):
        raise ConfigError(
            f"--time {site.time}: write it as Slurm does, e.g. 12:00:00 or 2-00:00:00, or 0 for no limit"
        )
    if site.grace > MOST_WARNING - WARNING:
        raise ConfigError(
            f"--grace {site.grace:g}: Slurm warns at most {MOST_WARNING} s before a time limit, and the scripts want "
            f"{WARNING} s and the grace: give at most {MOST_WARNING - WARNING}"
        )
    if not site.grace >= LEAST_GRACE:
        raise ConfigError(
            f"--grace {site.grace:g}: draining needs {LEAST_GRACE:g} s at least; `scontrol show config | grep "
            f"KillWait` says what the site gives"
        )
    # Slurm may warn a minute early.
    least = site.grace + WARNING + 60
    if 0 < _seconds(site.time) < least:
        raise ConfigError(
            f"--time {site.time} is {_seconds(site.time)} s, and draining begins {site.grace + WARNING:g} s before its "
            f"end, or a minute earlier: give {math.ceil(least / 60)} minutes at least, or 0 for none"
        )
    if site.nodes < 1 or site.workers < 1:
        raise ConfigError("--nodes and --workers-per-node are numbers from 1")
    if site.gang and job.demands.hosts > 1:
        raise ConfigError(
            f"--hetjob has no place for learner.hosts={job.demands.hosts}: leave it out, and submit the head, the "
            f"rollout workers and the learner's other hosts by themselves"
        )
    if site.gang and _is_pyxis(site.container):
        raise ConfigError(
            f"--hetjob starts its steps by srun, and so does pyxis for --container {site.container}: name an image for "
            f"apptainer, or leave --hetjob out"
        )


def _seconds(time: str) -> int:
    """A time limit as Slurm reads it.

    >>> (
    ...     _seconds("90"),
    ...     _seconds("90:30"),
    ...     _seconds("1:30:00"),
    ...     _seconds("1-12"),
    ...     _seconds("1-12:30"),
    ... )
    (5400, 5430, 5400, 129600, 131400)
    """
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    # Behind days the first number is hours; without them one or two numbers are minutes and seconds.
    if not dash and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _asked(prefix: str, demand: Demand, count: int = 1) -> dict[str, str | int | None]:
    gibibytes = demand.gibibytes
    return {
        f"{prefix}cpus": demand.cpus * count,
        f"{prefix}gpus": demand.gpus * count or None,
        f"{prefix}memory": None if gibibytes is None else f"{gibibytes * count}G",
    }


def _program(site: Site, run: str) -> list[str]:
    """The words before ``tandem``'s own."""
    if site.container is None:
        return [str(Path(sys.executable).with_name("tandem"))]
    mounts = dict.fromkeys([str(Path.cwd()), str(Path(run).parent), str(site.out.absolute())])
    if _is_pyxis(site.container):
        # pyxis, a plug-in of srun.
        pairs = ",".join(f"{mount}:{mount}" for mount in mounts)
        return [
            *("srun", "--ntasks=1", f"--container-image={site.container}"),
            *(f"--container-mounts={pairs}", f"--container-workdir={Path.cwd()}", "tandem"),
        ]
    binds = [f"--bind={mount}" for mount in mounts]
    return ["apptainer", "exec", "--nv", f"--pwd={Path.cwd()}", *binds, site.container, "tandem"]


def _is_pyxis(container: str | None) -> bool:
    return container is not None and (container.endswith(".sqsh") or "#" in container)


def _option(value: str | None) -> str | None:
    """The value of an ``#SBATCH`` option, as Slurm reads it: backslashes escape, and a blank or a # ends it."""
    if value is None or re.fullmatch(r"[\w@%+=:,./~-]*", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def _quoted(word: str) -> str:
    """A word of an array of bash's, whose commas a reader of arrays could take for separators."""
    return f"'{word}'" if "," in word and "'" not in word else shlex.quote(word)
