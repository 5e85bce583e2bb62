"""The state of a run: the live view's figures once, then processes, evaluations and restarts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ...common.errors import ConfigError
from ...common.run_folder import RunFolder
from .options import add_folder, named_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument("--join", metavar="FILE", help="the file that `tandem join-file` wrote")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..board.inspection import inspect
    from ..board.look import ANSWER_SECONDS, look

    folder: RunFolder | None = None
    if arguments.join:
        if arguments.dir or arguments.run:
            raise ConfigError("name the run with its folder or with --join FILE, not with both")
        join = Path(arguments.join)
    else:
        folder = named_folder(arguments)
        join = folder.join
    snapshot = look(folder, join)
    inspection = inspect(
        folder, join, redis_answers=snapshot.term is not None, deadline=ANSWER_SECONDS
    )
    if arguments.json:
        print(json.dumps({**snapshot.to_json(), **inspection.to_json()}, indent=1))
    else:
        from ..board.page import show

        show(snapshot, sys.stdout, inspection)
    return 0
