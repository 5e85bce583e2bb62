"""Asks the supervisor of a run on this host to end, from outside."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from ...common.errors import DeadlineError
from ...common.run_folder import RunFolder, newest_stage
from ..host.folder_lock import supervisor_of

LOOK_SECONDS = 0.05
"""Time between two looks whether it has ended."""
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to stop."""


def supervising(folder: RunFolder) -> psutil.Process | None:
    """The process that runs a folder on this host; None if there is none."""
    pid = supervisor_of(folder)
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def supervising_all(path: Path) -> psutil.Process | None:
    """The process that runs a folder or the stages in it on this host; None if there is none.

    Between two stages, and while it sums them up, it holds the common folder alone.

    Raises:
        DataError: ``stages.json`` is damaged.
    """
    return supervising(RunFolder(newest_stage(path))) or supervising(RunFolder(path))


def ask_to_end(folder: RunFolder, process: psutil.Process, seconds: float) -> float:
    """Sends SIGTERM to the supervisor and waits for its end; returns the seconds that it took.

    Raises:
        DeadlineError: it is still draining after ``seconds``.
    """
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return 0.0
    return await_end(folder, process, seconds)


def await_end(folder: RunFolder, process: psutil.Process, seconds: float) -> float:
    """Waits for the end of a supervisor that was asked to; returns the seconds that it took.

    Raises:
        DeadlineError: it is still draining after ``seconds``.
    """
    began = time.monotonic()
    while goes_on(process):
        if time.monotonic() - began > seconds:
            raise DeadlineError(
                f"process {process.pid} of {folder.path} is still draining after {seconds:.0f} s: "
                f"`tandem stop` again ends it at once"
            )
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - began


def was_stopped(code: int) -> bool:
    """Whether a run's exit code is of one that was asked to stop: 128 and the signal's number, or the signal itself
    if it came before the run heeded any."""
    return code > 128 or -code in STOPS


def goes_on(process: psutil.Process) -> bool:
    """Whether a process is still running; a zombie isn't, even if its parent hasn't reaped it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
