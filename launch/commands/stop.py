"""Drain and checkpoint a run on this host, as a first Ctrl-C in its terminal does."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.run_folder import existing, read_stages
from .options import newest_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR", nargs="?", help="default: the newest in runs/")
    parser.add_argument(
        "--wait", type=float, default=120.0, metavar="SECONDS", help="for it to end (default: 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Sends SIGTERM to the supervisor and waits for it to end."""
    from ..run.ending import ask_to_end, supervising_all

    folder = existing(arguments.run) if arguments.run else newest_run()
    path = Path(arguments.run) if arguments.run else folder.path
    if not arguments.run and read_stages(path.parent) is not None:
        path = path.parent
    process = supervising_all(path)
    if process is None:
        print(f"{folder.path}: no `tandem start` on this host is running it")
        return 0
    seconds = ask_to_end(folder, process, arguments.wait)
    print(f"{folder.path}: stopped in {seconds:.1f} s; the same `start` resumes")
    return 0
