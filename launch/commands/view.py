"""Read samples in Inspect's viewer: an evaluation's, or those that a run has kept, also while it goes on."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import NoReturn

from ...common.errors import ConfigError, DataError
from ...common.run_folder import RunFolder, newest_stage

PORT = 7575
"""Inspect's own."""
LOGS = "*.eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", metavar="FOLDER", help="of an evaluation, of a run, or with Inspect's logs"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"of the viewer ({PORT})")
    parser.add_argument(
        "--inspect",
        metavar="PROGRAM",
        help="Inspect's command, of an environment of its own (default: this environment's, or that on PATH)",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the logs that are missing, and open no viewer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the logs that are missing, and becomes the viewer."""
    viewer = None if arguments.write else _viewer(arguments.inspect)
    place, count = _logs(Path(arguments.dir).expanduser())
    print(f"{count} log{'s' * (count != 1)} in {place}", flush=True)
    if viewer is None:
        return 0
    _check_port(arguments.port)
    where = ("--log-dir", str(place), "--host", "127.0.0.1", "--port", str(arguments.port))
    _become([*viewer, "view", "start", *where])


def _logs(path: Path) -> tuple[Path, int]:
    """Writes what is missing; returns the folder for the viewer and its number of logs.

    Raises:
        DataError: there is nothing to look at.
    """
    from ...common.config import build, read_yaml
    from ...replay.evaluating.evaluated import EvaluationFolder
    from ...replay.inspecting.rows import evaluation_logs, run_logs

    evaluation = EvaluationFolder(path)
    if evaluation.plan_json.exists():
        count = len(list(evaluation_logs(evaluation)))
        if not count:
            raise DataError(f"{path}: no cell of the evaluation has finished yet")
        return path, count
    folder = RunFolder(newest_stage(path))
    if folder.run_json.exists():
        config = build(read_yaml(folder.config), stored=True)
        count = len(run_logs(folder, config))
        if not count:
            raise DataError(
                f"{path} has kept no samples yet: a run keeps log.samples_per_step groups of each step"
            )
        return folder.inspect, count
    count = sum(1 for _ in path.rglob(LOGS)) if path.is_dir() else 0
    if not count:
        raise DataError(
            f"{path} is neither a run's folder nor an evaluation's (`tandem evaluate --to` makes one), and "
            f"has no logs ({LOGS})"
        )
    return path, count


def _viewer(named: str | None) -> list[str]:
    """Inspect's command.

    Raises:
        ConfigError: it isn't installed.
    """
    if named is not None:
        program = shutil.which(named)
        if program is None:
            raise ConfigError(f"--inspect {named}: there is no such program")
        return [program]
    if importlib.util.find_spec("inspect_ai") is not None:
        return [sys.executable, "-m", "inspect_ai"]
    program = shutil.which("inspect")
    if program is None:
        raise ConfigError(
            "Inspect's viewer isn't installed; in an environment of its own it changes nothing here: `python3 -m "
            "venv ~/inspect && ~/inspect/bin/pip install inspect-ai`, then `tandem view … --inspect "
            "~/inspect/bin/inspect`"
        )
    return [program]


def _check_port(port: int) -> None:
    """Refuses a port that is taken: the viewer says so only after a traceback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            raise ConfigError(
                f"--port {port}: the viewer can't listen there; name a port that is free"
            ) from None


def _become(command: list[str]) -> NoReturn:
    """Runs a command in place of this process, which Ctrl-C then ends."""
    sys.stdout.flush()
    os.execv(command[0], command)
