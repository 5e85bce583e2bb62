"""Put dead letters back: groups that were given up after too many failed attempts are leased again.

They queue behind the groups that are already under way, and their failures no longer count;
`tandem status` lists them. Exits with 1 if a named group is not a dead letter.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError, StoreError
from ...common.run_folder import JoinInfo, RunFolder, existing, read_join
from .options import newest_run

if TYPE_CHECKING:
    from ...replay.ledger import Ledger

ANSWER_SECONDS = 8.0
"""How long Redis may take to answer; a person is waiting."""
GROUP_ID = re.compile(r"\d+-\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        metavar="[DIR] [GROUP ...]",
        nargs="*",
        help="the run's folder (default: the newest in runs/) and ids of groups, such as 0-12",
    )
    parser.add_argument("--all", action="store_true", help="every dead letter of the run")
    parser.add_argument(
        "--run", metavar="DIR", help="the run's folder, even if its name looks like 0-12"
    )
    parser.add_argument("--join", metavar="FILE", help="the file that `tandem join-file` wrote")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    folder, join, groups = _asked(arguments)
    if folder is not None:
        _refuse_stopped(folder)
    from ...replay.connection import connect
    from ...replay.dead_letters import retry
    from ...replay.ledger import Ledger

    store = connect(join, deadline=ANSWER_SECONDS, name="retry")
    try:
        ledger = Ledger(store, "retry")
        dead, rows = _dead_letters(ledger)
        if not groups and not arguments.all:
            raise ConfigError(
                f"name the groups to put back, or --all for all {len(dead):,} dead letters "
                f"(`tandem status` lists them)"
            )
        done = retry(ledger, groups or list(dead))
    finally:
        store.close()
    if arguments.json:
        as_json = {
            "returned": [dead.get(name, {"group_id": name}) for name in done.returned],
            "refused": [{"group_id": name, "why": why} for name, why in done.refused.items()],
            "quarantined_rows": rows,
        }
        print(json.dumps(as_json, indent=1))
    else:
        for name in done.returned:
            print(f"{name:<10} put back  {_before(dead.get(name, {}))}".rstrip())
        for name, why in done.refused.items():
            print(f"{name:<10} not       {why}")
        if arguments.all and rows:
            steps = ", ".join(str(row["step"]) for row in rows)
            print(
                f"note: the groups of quarantined steps ({steps}) stay as they are: an id is in one "
                f"row only"
            )
        print(f"{len(done.returned):,} group(s) put back, {len(done.refused):,} not")
    # With --all, somebody else may have been quicker; that is no mistake of the user's.
    return 1 if done.refused and not arguments.all else 0


def _asked(arguments: argparse.Namespace) -> tuple[RunFolder | None, JoinInfo, list[str]]:
    """The run's folder and address, and the groups that were named."""
    words, path = list(arguments.words), arguments.run
    if path is not None and arguments.join is not None:
        raise ConfigError("name the run with one of --run DIR and --join FILE")
    if words and path is None and arguments.join is None and not GROUP_ID.fullmatch(words[0]):
        path = words.pop(0)
        if not Path(path).is_dir():
            raise ConfigError(
                f"{path!r} is neither the folder of a run nor the id of a group, such as 0-12"
            )
    wrong = [word for word in words if not GROUP_ID.fullmatch(word)]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} isn't a group id: <pass>-<position>, such as 0-12")
    if words and arguments.all:
        raise ConfigError(f"--all takes no group ids ({words[0]})")
    if arguments.join is not None:
        return None, read_join(Path(arguments.join)), words
    folder = existing(path) if path is not None else newest_run()
    return folder, read_join(folder.join), words


def _refuse_stopped(folder: RunFolder) -> None:
    """Raises ``StoreError`` with the way out if the run is stopped or finished, so that its own Redis is down."""
    from ..board.look import known_of, may_answer

    known = known_of(folder)
    if may_answer(folder, known):
        return
    way_out = (
        "it is finished: let it go on with more steps (`tandem start … run.steps=N`)"
        if known.state == "finished"
        else "`tandem start` resumes it"
    )
    raise StoreError(
        f"{known.run} isn't running, and its ledger is up only while it does: {way_out}, then put "
        f"the groups back"
    )


def _dead_letters(ledger: Ledger) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Dead letters by group id, and quarantined rows."""
    letters = ledger.dead_letters()
    groups = {str(one["group_id"]): one for one in letters if "group_id" in one}
    return groups, [one for one in letters if "group_id" not in one]


def _before(letter: dict[str, Any]) -> str:
    from ..board.page import failures

    if not letter:
        return ""
    return f"after {failures(letter)}, the last with {letter['worker']}: {letter['reason']}"
