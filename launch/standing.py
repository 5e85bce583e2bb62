"""Where a run stands, as plain data and as lines: what ``tandem status`` tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.errors import StoreError, TandemError
from ..common.run_folder import RunFolder, read_join
from .folder_lock import supervisor_of
from .progress import MetricsTail
from .supervision import shown


def look(folder: RunFolder | None, join_file: Path) -> dict[str, Any]:
    """Asks Redis and the folder; a run that isn't up is told from its folder alone.

    Raises:
        StoreError: without a folder, Redis can't be reached.
    """
    found: dict[str, Any] = {"run": shown(folder.path) if folder else str(join_file)}
    if folder is not None:
        record = folder.read_run()
        found["preset"] = record.get("preset")
        found["state"] = record.get("state")
        found["supervisor"] = supervisor_of(folder)
        records = MetricsTail(folder.metrics).read()
        found["step"] = max((r["step"] for r in records if "step" in r), default=0)
        from .summary import read_restarts

        found["restarts"] = read_restarts(folder)
        if found["supervisor"] is None and record.get("state") not in ("finished", "failed"):
            found["state"] = "stopped"
    try:
        found |= _ask(join_file, deadline=2.0 if folder else 10.0)
    except StoreError:
        if folder is None or found["supervisor"] is not None:
            raise
    return found


def _ask(join_file: Path, deadline: float) -> dict[str, Any]:
    from ..replay.connection import connect
    from ..replay.ledger import Ledger
    from ..replay.members import Members
    from ..replay.store import RunStore

    store = connect(read_join(join_file), deadline=deadline, name="status")
    try:
        ledger, runs = Ledger(store, "status"), RunStore(store)
        answer: dict[str, Any] = {
            "ledger": ledger.counts(),
            "journalled": ledger.journalled(),
            "term": ledger.term(),
            "members": [
                {
                    "member": member.member,
                    "role": member.role,
                    "age": round(member.age, 1),
                    "pid": member.info.get("pid"),
                    "host": member.info.get("host"),
                    "version": member.info.get("version"),
                }
                for member in Members(store).live()
            ],
            "evaluations": [
                {"set": e.set_name, "step": e.step, "accuracy": e.accuracy, "problems": e.problems}
                for e in runs.evaluations()
            ],
            "grader_restarts": len(runs.restarts()),
            "dead_letters": ledger.dead_letters(),
        }
        answer["state"] = runs.state()
        try:
            answer["waiting_for"] = ledger.waiting_for()
        except TandemError as error:
            answer["waiting_for"] = str(error)
        return answer
    finally:
        store.close()


def lines(found: dict[str, Any]) -> list[str]:
    """The same for a person."""
    told = [f"{found['run']}: {found.get('state')}"]
    if found.get("supervisor"):
        told[0] += f" (supervisor {found['supervisor']})"
    if "step" in found:
        told.append(f"step {found['step']}, preset {found.get('preset')}")
    if "ledger" in found:
        states = ", ".join(f"{state} {count}" for state, count in found["ledger"].items() if count)
        told.append(f"groups: {states or 'none yet'}; {found['journalled']} rows journalled")
        told.append(found["waiting_for"])
        for member in found["members"]:
            version = member.get("version")
            held = f"  version {'.'.join(map(str, version))}" if version else ""
            told.append(
                f"  {member['member']:<14} pid {member['pid']}  heard of {member['age']} s ago{held}"
            )
        for one in found["evaluations"]:
            told.append(
                f"  {one['set']} at step {one['step']}: {100 * one['accuracy']:.1f}% of "
                f"{one['problems']}"
            )
        if found["grader_restarts"]:
            told.append(f"grader restarts: {found['grader_restarts']}")
        for letter in found["dead_letters"][:5]:
            told.append(f"given up: {letter}")
    for restart in found.get("restarts", [])[-10:]:
        told.append(f"restart: {restart['process']} at {restart['time']} ({restart['exit']})")
    return told
