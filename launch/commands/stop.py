"""Drain and checkpoint a run on this host, as a first Ctrl-C in its terminal does."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from ...common.errors import DeadlineError
from .options import existing, newest_run

if TYPE_CHECKING:
    import psutil


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR", nargs="?", help="default: the newest in runs/")
    parser.add_argument(
        "--wait", type=float, default=120.0, metavar="SECONDS", help="for it to end (default: 120)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Sends SIGTERM to the supervisor and waits for it to end."""
    import psutil

    from ..host.folder_lock import supervisor_of

    folder = existing(arguments.run) if arguments.run else newest_run()
    pid = supervisor_of(folder)
    if pid is None:
        print(f"{folder.path}: no `tandem start` of this host runs it")
        return 0
    began = time.monotonic()
    try:
        process = psutil.Process(pid)
        process.terminate()
    except psutil.NoSuchProcess:
        print(f"{folder.path}: it has just ended by itself")
        return 0
    while _goes_on(process):
        if time.monotonic() - began > arguments.wait:
            raise DeadlineError(
                f"process {pid} of {folder.path} is still draining after {arguments.wait:.0f} s: "
                f"`tandem stop` again ends it at once"
            )
        time.sleep(0.05)
    print(f"{folder.path}: stopped in {time.monotonic() - began:.1f} s; the same `start` resumes")
    return 0


def _goes_on(process: psutil.Process) -> bool:
    """Whether a process is still running; a zombie isn't, even if its parent hasn't reaped it."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
