"""Where a run stands: groups by ledger state, members and their versions, restarts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...common.run_folder import RunFolder
from ..options import existing, newest_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("dir", metavar="DIR", nargs="?", help="default: the newest in runs/")
    parser.add_argument("--run", metavar="DIR", help="the same")
    parser.add_argument("--join", metavar="FILE", help="the file that `tandem join-file` wrote")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints it."""
    from .. import standing

    if arguments.join:
        found = standing.look(None, Path(arguments.join))
    else:
        path = arguments.dir or arguments.run
        folder: RunFolder = existing(path) if path else newest_run()
        found = standing.look(folder, folder.join)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for line in standing.lines(found):
            print(line)
    return 0
