"""Whether this host's part of a run is well, as a scheduler's probes ask: exit code 0 if it is, 1 if not.

`startup`: its processes are members of the run. `readiness`: they were heard of just now, and can serve.
`liveness`: they were heard of in the last minutes, or nobody can tell because Redis is away.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...common.errors import ConfigError, DataError
from ...common.run_folder import JoinInfo, RunFolder, newest_stage, read_join
from .options import newest_run

PROBES = ("startup", "readiness", "liveness")
ROLES = ("head", "rollout", "reward", "learner", "environments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", metavar="DIR", help="the run's folder (default: the newest in runs/)"
    )
    parser.add_argument("--join", metavar="FILE", help="the file that `tandem join-file` wrote")
    parser.add_argument(
        "--role",
        choices=ROLES,
        help="what this host does (default: head with a folder, else rollout)",
    )
    parser.add_argument("--probe", choices=PROBES, default="readiness", help="(default: readiness)")
    parser.add_argument(
        "--host", metavar="NAME", help="host whose processes are meant (default: this one)"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..host.health import health

    if arguments.run is not None and arguments.join is not None:
        raise ConfigError("name the run with one of --run DIR and --join FILE")
    folder: RunFolder | None = None
    file = Path(arguments.join) if arguments.join else None
    if file is None:
        folder = RunFolder(newest_stage(Path(arguments.run))) if arguments.run else newest_run()
        file = folder.join
    role = arguments.role or ("rollout" if folder is None else "head")
    join: JoinInfo | None
    try:
        join = read_join(file)
    except DataError:
        if file.exists():
            raise
        join = None
    found = health(arguments.probe, role, join, folder, arguments.host or "")
    print(f"{role} {arguments.probe}: {'ok' if found.ok else 'no'}: {found.why}", file=sys.stdout)
    return 0 if found.ok else 1
