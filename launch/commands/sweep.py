"""Run a preset with every combination of some settings' values and several seeds; print one table.

A setting with several values, separated by commas, varies: learner.optimizer.lr=1e-4,3e-4. What is in
brackets or quotes is one value: key=[a,b] is a list, and key=[a,b],[c] varies over two lists. Entries of a
list are settings too: data.train.0.limit=4,16. The same command again skips runs that are finished and resumes the others.
"""

from __future__ import annotations

import argparse

from .options import add_preset_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_words(parser, default="miniature")
    parser.add_argument(
        "--seeds",
        default="3",
        metavar="N or A,B,…",
        help="run.seed of the runs: a number of seeds from 0 (default: 3), or the seeds themselves "
        "(0,7,9; a single one with a comma: 7,)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs side by side at most, which share this machine's cores; each has GPUs of its own and waits "
        "until enough are free (default: 1)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder of the runs, sweep.md and sweep.json (default: runs/sweep-PRESET)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs; start and write nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..run.several.sweep import dry_run, plan

    sweep = plan(arguments.words, seeds=arguments.seeds, out=arguments.out, jobs=arguments.jobs)
    if arguments.dry_run:
        return dry_run(sweep)
    from ..run.several.sweep_runs import run_sweep

    return run_sweep(sweep, jobs=arguments.jobs)
