"""One look at a run from outside: at its folder, and into Redis if it is up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ...common.config.reading.text import parse_yaml
from ...common.errors import ConfigError, DataError, StoreError
from ...common.plain import read_object
from ...common.run_folder import RunFolder, read_join, wall_seconds
from ...replay.connection import connect
from ..host.folder_lock import supervisor_elsewhere, supervisor_of, taken_at
from ..wording import shown
from .assembly import assemble
from .facts import Facts, ask
from .history import History, read
from .on_disk import read_restarts
from .snapshot import Known, Snapshot

ANSWER_SECONDS = 8.0
"""How long Redis may take to answer a person who asks about the run."""
ENDED = ("finished", "failed", "stopped")
"""States that ``run.json`` has of a run that isn't under way."""


def look(folder: RunFolder | None, join_file: Path) -> Snapshot:
    """Makes a snapshot from Redis and the folder.

    If the run isn't up, or its Redis doesn't answer (it may be restarting), the folder alone is
    used; in the latter case ``problem`` says so. Of a run that another host supervises only its Redis can
    tell whether it lives.

    Raises:
        StoreError: there is no folder, and Redis doesn't answer.
        DataError: there is no folder, and the join file is missing or damaged; or the folder's record is.
    """
    known = Known(run=str(join_file)) if folder is None else known_of(folder)
    facts: Facts | None = None
    problem = ""
    # The run's own redis-server ends with its supervisor.
    if folder is None or may_answer(folder, known):
        try:
            facts = _ask(join_file)
        except (StoreError, DataError) as error:
            if folder is None:
                raise
            # The run may have ended in the meantime.
            known = known_of(folder)
            if known.elsewhere:
                problem = (
                    f"supervised by {known.elsewhere}, whose Redis doesn't answer here: {error}"
                )
            elif known.supervisor is not None or isinstance(error, DataError):
                problem = str(error)
    return assemble(
        known,
        read(folder.metrics) if folder is not None else History(),
        facts,
        restarts=read_restarts(folder) if folder is not None else [],
        problem=problem,
        now=time.time(),
    )


def known_of(folder: RunFolder) -> Known:
    """What a run's folder says about it."""
    record = folder.read_run()
    supervisor = supervisor_of(folder)
    state = record.get("state")
    # A head leaves its name in the lock, so the record says whether it has ended.
    elsewhere = "" if state in ENDED else supervisor_elsewhere(folder)
    elapsed = wall_seconds(record)
    if supervisor is not None and 0 < _seconds(record.get("alive")) < taken_at(folder):
        # The start that is under way hasn't written anything yet: the record is as the one before has left it.
        state = "starting"
    elif supervisor is not None and state not in ENDED:
        elapsed = _seconds(record.get("wall_seconds"))
        elapsed += max(0.0, time.time() - (_seconds(record.get("began")) or time.time()))
    elif supervisor is None and state not in ENDED and not elsewhere:
        state = "stopped"
    settings = _settings(folder)
    run = _part(settings, "run")
    ends = [run[name] for name in ("steps", "last_step") if type(run.get(name)) is int]
    summary = _summary(folder) if state == "finished" else {}
    return Known(
        run=shown(folder.path),
        preset=record.get("preset"),
        state=state,
        supervisor=supervisor,
        elsewhere=elsewhere,
        elapsed_seconds=elapsed,
        total_steps=min(ends, default=None),
        held_out=tuple(_sets(settings)),
        limit=_part(settings, "replay").get("max_staleness"),
        ledger=_part(summary, "ledger"),
        idle=_part(summary, "idle_shares"),
        dead_letters=tuple(_letters(summary)),
    )


def _ask(join_file: Path) -> Facts:
    store = connect(read_join(join_file), deadline=ANSWER_SECONDS, name="status")
    try:
        return ask(store, dead_letters=True)
    finally:
        store.close()


def may_answer(folder: RunFolder, known: Known) -> bool:
    """Whether a run's Redis may be up: its own ends with the run, before the report is drawn."""
    supervised = known.supervisor is not None and known.state not in ENDED
    under_way = supervised or bool(known.elsewhere)
    return under_way or _part(_settings(folder), "replay").get("redis_url") is not None


def _settings(folder: RunFolder) -> dict[str, Any]:
    try:
        content = parse_yaml(folder.config.read_text(encoding="utf-8"), str(folder.config))
    except (OSError, ValueError, ConfigError):
        return {}  # The run was killed before its config was written.
    return content if isinstance(content, dict) else {}


def _summary(folder: RunFolder) -> dict[str, Any]:
    try:
        return read_object(folder.summary.read_bytes(), str(folder.summary), DataError)
    except (OSError, DataError):
        return {}


def _part(content: dict[str, Any], name: str) -> dict[str, Any]:
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _sets(settings: dict[str, Any]) -> list[str]:
    sets = _part(settings, "data").get("evaluate")
    named = sets if isinstance(sets, list) else []
    return [str(one["name"]) for one in named if isinstance(one, dict) and "name" in one]


def _letters(summary: dict[str, Any]) -> list[dict[str, Any]]:
    letters = summary.get("dead_letters")
    return [one for one in letters if isinstance(one, dict)] if isinstance(letters, list) else []


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
