"""Train on stored expert traces: Redis and learner alone, no rollout workers."""

from __future__ import annotations

import argparse

from .options import add_start_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_start_options(parser, default="miniature-sft")


def run(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        from ..run.dry_run import dry_run

        return dry_run(arguments.words, fresh=arguments.fresh, offline=True)
    from ..run.job import run_job

    return run_job(arguments.words, fresh=arguments.fresh, offline=True, plain=arguments.plain)
