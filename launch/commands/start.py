"""Start a run on this host, or resume it: Redis, reward pool, rollout workers and learner."""

from __future__ import annotations

import argparse

from .options import add_preset_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Preset, overrides, ``--fresh`` and ``--dry-run``."""
    add_preset_words(parser, default="miniature")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over: an existing run's folder is moved aside (<dir>.1, …), never deleted",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="lines instead of the live view (as without a terminal, or with TERM=dumb)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the processes, their GPUs, commands and memory; start and write nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Sees the run to its end."""
    if arguments.dry_run:
        from ..run.dry_run import dry_run

        return dry_run(arguments.words, fresh=arguments.fresh, offline=False)
    from ..run.job import run_job

    return run_job(arguments.words, fresh=arguments.fresh, offline=False, plain=arguments.plain)
