"""Writes every group that a run has trained on as parquet files, which read back to equal records.

The run must have kept them (log.archive=true). docs/data.md describes the columns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ...common.errors import DataError
from ..wording import human, shown
from .options import existing, newest_run
from .progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR", nargs="?", help="(default: the newest run in runs/)")
    parser.add_argument("--out", metavar="DIR", required=True, help="a folder that is made")


def run(arguments: argparse.Namespace) -> int:
    from ...learner.resume.journal import trained
    from ...replay import archive

    folder = existing(arguments.run) if arguments.run else newest_run()
    steps = sorted(trained(folder.journal)) if folder.journal.exists() else []
    if not steps:
        raise DataError(f"{shown(folder.path)} has trained no step yet")
    files = {step: folder.archive / archive.file_name(step) for step in steps}
    there = [file for file in files.values() if file.exists()]
    if not there:
        raise DataError(
            f"{shown(folder.path)} has kept none of its groups: set log.archive=true when it starts"
        )
    progress = Progress(sys.stderr, "archived groups:", None)
    out = Path(arguments.out).expanduser()
    groups, written = archive.join(there, out, progress.add)
    progress.end()
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{groups:,} groups of {len(there):,} steps in {shown(out.absolute())}: {written} file(s), "
        f"{human(size)}"
    )
    if len(there) < len(steps):
        print(
            f"{len(steps) - len(there):,} steps are missing, since log.archive was off then",
            file=sys.stderr,
        )
    return 0
