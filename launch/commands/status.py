"""The state of a run: the live view's figures once, then processes, evaluations and restarts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ...common.run_folder import RunFolder, existing
from .options import newest_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", nargs="?", help="default: the newest in runs/")
    parser.add_argument("--run", metavar="DIR", help="the same")
    parser.add_argument("--join", metavar="FILE", help="the file that `tandem join-file` wrote")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ..board.inspection import inspect
    from ..board.look import ANSWER_SECONDS, look

    folder: RunFolder | None = None
    if arguments.join:
        join = Path(arguments.join)
    else:
        path = arguments.dir or arguments.run
        folder = existing(path) if path else newest_run()
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
