"""Join a run with processes of one role: starts them here, keeps them running, and ends with the run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.errors import ConfigError
from .options import add_drain, drain_of

ROLES = ("rollout", "reward", "learner", "environments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file that `tandem join-file` wrote")
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="rollout",
        help="what the processes do (default rollout); a host of the learner runs its share of the ranks",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of processes (default: as many as this host's GPUs serve, or 1)",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="where their logs go, private to this host (default: a new folder in ./hosts)",
    )
    add_drain(parser)
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="time for the run's Redis to answer at first (default 30); give more where this host is started "
        "together with the head of a new run, which reads its data before it starts Redis",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="ask the run for its settings, and say what would be started here; start and write nothing",
    )
    parser.add_argument("--name", help="what others call this host (default: its host name)")


def run(arguments: argparse.Namespace) -> int:
    """Works until the run has ended or it is asked to drain."""
    if arguments.workers is not None and arguments.workers < 1:
        raise ConfigError(f"--workers {arguments.workers} should be at least 1")
    if arguments.wait is not None and not 0 < arguments.wait < float("inf"):
        raise ConfigError(f"--wait {arguments.wait:g} should be over 0 seconds, and finite")
    from ...common import disk
    from ..board.terminal import Terminal
    from ..run.joining import FIRST_SECONDS, Joining, join

    disk.keep_streams()
    joining = Joining(
        file=Path(arguments.file),
        role=arguments.role,
        workers=arguments.workers,
        folder=None if arguments.folder is None else Path(arguments.folder),
        drain_seconds=drain_of(arguments),
        name=arguments.name,
        wait_seconds=FIRST_SECONDS if arguments.wait is None else arguments.wait,
        dry_run=arguments.dry_run,
    )
    return join(joining, Terminal(plain=True))
