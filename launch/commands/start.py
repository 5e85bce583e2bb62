"""Start a run on this host, or resume it: Redis, reward pool, rollout workers and learner."""

from __future__ import annotations

import argparse

from .options import add_start_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_start_options(parser, default="miniature")
    parser.add_argument(
        "--head",
        action="store_true",
        help="start no rollout worker here: they join from other hosts (the same as rollout.workers=0)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.head:
        arguments.words.append("rollout.workers=0")
    if arguments.dry_run:
        from ..run.dry_run import dry_run

        return dry_run(arguments.words, fresh=arguments.fresh, offline=False)
    from ..run.several.stages import run_words

    return run_words(arguments.words, fresh=arguments.fresh, offline=False, plain=arguments.plain)
