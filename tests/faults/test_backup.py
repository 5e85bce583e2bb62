"""A run's folder, copied while it is stopped, is the whole run; and a copy is a run of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from audit import examine, gather, journal_of
from processes import Run, tandem
from scripted_engine import STEP_SECONDS
from storm import HERE

pytestmark = pytest.mark.timeout(300)

GROUPS = 61
SETTINGS = (
    f"data.miniature_fresh={GROUPS}",
    "rollout.workers=1",
    "reward.graders=1",
    "learner.checkpoint_every=3",
)
Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts or resumes the run of a folder; ends it in any case."""
    runs: list[Run] = []
    patch = pytest.MonkeyPatch()
    # The engine is found by its import path, in the workers.
    patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    patch.setenv(STEP_SECONDS, "0.003")

    def started(folder: Path, *settings: str) -> Run:
        words = ("start", str(HERE / "storm.yaml"), f"run.dir={folder}", *settings)
        runs.append(Run(folder.parent, *words))
        return runs[-1]

    yield started
    for run in runs:
        run.end()
    patch.undo()


@pytest.fixture(scope="module")
def stopped(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped on its way."""
    folder = tmp_path_factory.mktemp("backup") / "original"
    run = start(folder, *SETTINGS)
    run.wait_for(lambda: rows(folder) >= 5, "row 5")
    code, _, err = tandem(folder.parent, "stop", str(folder))
    assert code == 0, err
    assert run.wait() == 128 + 15
    assert 5 <= rows(folder) < GROUPS // 4, "it was stopped too late for a test"
    return folder


def rows(folder: Path) -> int:
    """Rows in the journal."""
    return sum(record["kind"] == "row" for record in journal_of(folder))


def join(folder: Path) -> dict[str, Any]:
    """``join.json``."""
    found: dict[str, Any] = json.loads((folder / "join.json").read_text())
    return found


def used(run: Run) -> str:
    """Command lines, working folders, open files and Unix sockets of a run's processes."""
    told = []
    for process in run.tree.children(recursive=True):
        try:
            told += [*process.cmdline(), process.cwd()]
            told += [file.path for file in process.open_files()]
            told += [str(one.laddr) for one in process.net_connections(kind="unix")]
        except psutil.Error:
            continue
    return "\n".join(told)


def trained_once(folder: Path, before: Path) -> None:
    """Audits a finished run that was resumed from the journal that ``before`` has."""
    found = examine(gather(folder))
    assert found.breaches == []
    assert found.figures["groups trained"] == found.figures["groups of the run"] == GROUPS
    kept = journal_of(before)
    assert journal_of(folder)[: len(kept)] == kept


@pytest.mark.byhand  # What CI runs of it: tests/launch/notebook/test_handle.py.
def test_a_stopped_run_is_told_from_its_folder(stopped: Path) -> None:
    code, out, err = tandem(stopped.parent, "status", str(stopped), "--json")
    assert code == 0, err
    status = json.loads(out)
    assert (status["state"], status["memory"], status["oldest_lease"]) == ("stopped", None, None)
    done = rows(stopped)
    assert status["journal"] == {"rows": done, "applied": done, "quarantined": []}
    for part in ("redis", "checkpoints", "journal", "metrics", "samples", "logs", "data"):
        assert status["disk"]["parts"][part] > 0, part
    code, _, err = tandem(stopped.parent, "retry", str(stopped), "--all")
    assert code == 1
    assert "`tandem start` resumes it, then put the groups back" in err


@pytest.mark.byhand
def test_a_copy_goes_on_without_its_original(stopped: Path, start: Start) -> None:
    copy, away = (stopped.with_name(name) for name in ("copy", "away"))
    shutil.copytree(stopped, copy)
    stopped.rename(away)
    try:
        run = start(copy)
        run.wait_for(lambda: rows(copy) > rows(away), "another row")
        assert str(stopped) not in used(run)
        assert str(copy) in used(run)
        for name in ("config.yaml", "run.json", "join.json", "redis/redis.conf"):
            assert str(stopped) not in (copy / name).read_text(), name
        assert run.wait() == 0, run.said()
        assert not stopped.exists()
    finally:
        away.rename(stopped)
    assert "members on other hosts need a new file" in run.said()
    assert join(copy)["run_id"] == join(stopped)["run_id"]
    assert join(copy)["port"] != join(stopped)["port"]
    assert join(copy)["password"] != join(stopped)["password"]
    trained_once(copy, stopped)


@pytest.mark.byhand  # Half a minute.
def test_copy_and_original_go_on_at_once(stopped: Path, start: Start) -> None:
    kept, copy = stopped.with_name("kept"), stopped.with_name("another")
    for place in (kept, copy):
        shutil.copytree(stopped, place)
    known = join(stopped)
    runs = [start(copy), start(stopped)]
    for run in runs:
        assert run.wait() == 0, run.said()
    assert join(stopped) == known
    assert join(copy)["port"] != known["port"]
    for folder in (copy, stopped):
        trained_once(folder, kept)
