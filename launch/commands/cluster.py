"""Write what Slurm, Kubernetes or SkyPilot is given to run a preset: scripts, manifests or a task file.

Without --out they are printed (save passwords). They are templates filled in, to be read and edited; nothing is
submitted. docs/clusters.md explains them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import ConfigError, DataError
from ...common.run_folder import write_atomic, write_private

if TYPE_CHECKING:
    from ..cluster.demand import Job

ENGINES = ("slurm", "kubernetes", "skypilot")
OF_ENGINE = {
    "slurm": ("time", "partition", "account", "qos", "grace", "container", "hetjob"),
    "kubernetes": ("namespace", "storage", "storage_class", "jobset", "image"),
    "skypilot": ("gpu", "image"),
}
"""Options that only some of the engines have."""
PRIVATE = ("secret.yaml", "join.json")
"""Files that hold a password."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", choices=ENGINES, help="who is to run it")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET or KEY=VALUE",
        help="a preset's name (default: miniature) or the path of your own .yaml, and any settings",
    )
    parser.add_argument("--out", metavar="DIR", help="write the files there, in place of printing")
    parser.add_argument(
        "--name",
        help="names jobs and objects (default: the preset's; slurm: with a digest of a run.dir that isn't runs/PRESET)",
    )
    parser.add_argument(
        "--nodes", type=int, default=2, metavar="N", help="nodes of rollout workers (default: 2)"
    )
    parser.add_argument(
        "--workers-per-node",
        type=int,
        metavar="N",
        help="rollout workers of each node (default: 1; skypilot: as many as the rented GPUs serve)",
    )
    parser.add_argument(
        "--templates", metavar="DIR", help="your own templates, which go before Tandem's"
    )
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--time", metavar="LIMIT", help="of each job (default: 1-00:00:00)")
    slurm.add_argument("--partition", metavar="NAME", help="of the jobs (default: the site's)")
    slurm.add_argument(
        "--account", metavar="NAME", help="that the jobs are charged to (default: yours)"
    )
    slurm.add_argument("--qos", metavar="NAME", help="quality of service (default: the site's)")
    slurm.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="time to finish after scancel: the site's KillWait (default: 30)",
    )
    slurm.add_argument(
        "--container",
        metavar="IMAGE",
        help="run in it: a .sqsh file or REGISTRY#NAME by pyxis, anything else by apptainer",
    )
    slurm.add_argument(
        "--hetjob",
        action="store_true",
        default=None,
        help="one job for all, for sites that want it",
    )
    kubernetes = parser.add_argument_group("kubernetes, skypilot")
    kubernetes.add_argument(
        "--image",
        metavar="NAME",
        help="image of the containers (default, kubernetes: tandem:latest; skypilot: none)",
    )
    kubernetes.add_argument("--namespace", metavar="NAME", help="of all objects (default: default)")
    kubernetes.add_argument("--storage", metavar="SIZE", help="size of the volume (default: 100Gi)")
    kubernetes.add_argument(
        "--storage-class", metavar="NAME", help="of the volume (default: the cluster's)"
    )
    kubernetes.add_argument(
        "--jobset", action="store_true", default=None, help="the learner's other hosts as a JobSet"
    )
    kubernetes.add_argument(
        "--gpu", metavar="KIND", help="GPUs that SkyPilot rents (default: H100)"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..cluster.demand import job_of

    for option in {name for names in OF_ENGINE.values() for name in names}:
        if getattr(arguments, option) is not None and option not in OF_ENGINE[arguments.engine]:
            others = [engine for engine, names in OF_ENGINE.items() if option in names]
            raise ConfigError(
                f"--{option.replace('_', '-')} is an option of {' and '.join(others)}, not of {arguments.engine}"
            )
    # Kubernetes' and SkyPilot's heads are told their address after all settings.
    slurm = arguments.engine == "slurm"
    job = job_of(arguments.words, arguments.name, binds=slurm, by_folder=slurm)
    out = Path(arguments.out).expanduser() if arguments.out else None
    if out is not None and out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file: name a folder")
    made, lines = _made(arguments, job, out)
    if out is None:
        _print(made)
    else:
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in made.items():
            (write_private if name in PRIVATE else write_atomic)(out / name, text)
        print("\n".join([f"{out}: {', '.join(made)}", *lines]))
    return 0


def _made(
    arguments: argparse.Namespace, job: Job, out: Path | None
) -> tuple[dict[str, str], list[str]]:
    """The files, and what is typed next."""
    from ..run.opened.record import apart

    words = ["tandem", "cluster", *(apart(word)[0] for word in sys.argv[2:])]
    # It stands in a comment, which a second line would leave.
    command = " ".join(shlex.join(words).splitlines())
    templates = Path(arguments.templates) if arguments.templates else None
    if templates is not None:
        _check_templates(templates, arguments.engine)
    given = arguments.workers_per_node
    workers = 1 if given is None else given
    shared = {
        "command": command,
        "nodes": arguments.nodes,
        "templates": templates,
    }
    notes = list(job.notes)
    if arguments.engine == "slurm":
        from ..cluster import slurm

        # Scripts name the folder of their logs, also where they are printed.
        place = out or Path(f"{job.config.run.dir}-slurm")
        site = slurm.Site(
            out=place,
            time=arguments.time or "1-00:00:00",
            partition=arguments.partition,
            account=arguments.account,
            qos=arguments.qos,
            grace=slurm.KILL_WAIT if arguments.grace is None else arguments.grace,
            container=arguments.container,
            gang=bool(arguments.hetjob),
            workers=workers,
            **shared,
        )
        made = slurm.scripts(job, site)
        lines = slurm.commands(site, list(made))
    elif arguments.engine == "kubernetes":
        from ..cluster import kubernetes

        cluster = kubernetes.Site(
            out=out,
            image=arguments.image or "tandem:latest",
            namespace=arguments.namespace or "default",
            storage=arguments.storage or "100Gi",
            storage_class=arguments.storage_class,
            jobset=bool(arguments.jobset),
            workers=workers,
            **shared,
        )
        made = kubernetes.manifests(job, cluster)
        lines = [f"kubectl apply -k {shlex.quote(str(out))}"]
        notes = kubernetes.notes(job, cluster)
    else:
        from ..cluster import skypilot

        machines = skypilot.Site(
            out=out,
            gpu=arguments.gpu or "H100",
            image=arguments.image,
            workers=given,
            **shared,
        )
        made = skypilot.task(job, machines)
        lines = [f"sky launch {shlex.quote(str(out))}/task.yaml"]
        notes = skypilot.notes(job, machines)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return made, lines


def _check_templates(folder: Path, engine: str) -> None:
    """Says which of a folder's files are used as templates.

    Raises:
        DataError: none of them is.
    """
    from ..cluster.rendering import TEMPLATES

    if not folder.is_dir():
        raise DataError(f"--templates {folder} is no folder")
    known = sorted(path.name for path in (TEMPLATES / engine).iterdir())
    own = [name for name in known if (folder / name).exists()]
    if not own:
        raise DataError(
            f"--templates {folder} has none of {engine}'s templates ({', '.join(known)}): copy those that you change "
            f"from {TEMPLATES / engine}"
        )
    print(f"note: from --templates {folder}: {', '.join(own)}, and no other file", file=sys.stderr)


def _print(made: dict[str, str]) -> None:
    shown = {name: text for name, text in made.items() if name not in PRIVATE}
    first = True
    for name, text in shown.items():
        if name.endswith(".yaml") and not first:
            print("---")
        print(f"# ==== {name}" if not text.startswith("#!") else f"# ==== {name}\n", end="\n")
        print(text, end="")
        first = False
    for name in made.keys() - shown.keys():
        print(f"# ==== {name} holds a password: --out DIR writes it")
