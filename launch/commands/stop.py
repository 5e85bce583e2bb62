"""Drain and checkpoint a run or a sweep on this host, as a first Ctrl-C in its terminal does."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.run_folder import RunFolder, existing, read_stages
from .options import newest_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="DIR", nargs="?", help="of a run or a sweep (default: the newest in runs/)"
    )
    parser.add_argument(
        "--wait", type=float, default=120.0, metavar="SECONDS", help="for it to end (default: 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Sends SIGTERM to the supervisor and waits for it to end."""
    from ..run.ending import ask_to_end, supervising_all

    if arguments.run and (Path(arguments.run) / "sweep.json").exists():
        folder, command = RunFolder(arguments.run), "sweep"
    else:
        folder, command = existing(arguments.run) if arguments.run else newest_run(), "start"
    path = Path(arguments.run) if arguments.run else folder.path
    if not arguments.run and read_stages(path.parent) is not None:
        path = path.parent
    process = supervising_all(path)
    if process is None:
        print(f"{folder.path}: no `tandem {command}` on this host is running it")
        return 0
    seconds = ask_to_end(folder, process, arguments.wait)
    print(f"{folder.path}: stopped in {seconds:.1f} s; the same `{command}` resumes")
    return 0
