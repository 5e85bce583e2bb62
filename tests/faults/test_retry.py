"""Groups that were given up in a real run are put back, and each is trained once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from audit import examine, gather
from processes import Run, tandem
from scripted_engine import STEP_SECONDS
from storm import HERE

pytestmark = [pytest.mark.timeout(300), pytest.mark.byhand]

GROUPS = 81


def test_groups_of_killed_workers_are_put_back_and_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(STEP_SECONDS, "0.02")
    folder = tmp_path / "run"

    def status() -> dict:
        code, out, err = tandem(tmp_path, "status", str(folder), "--json")
        assert code == 0, err
        return json.loads(out)

    run = Run(
        tmp_path,
        *("start", str(HERE / "storm.yaml"), f"run.dir={folder}", f"data.miniature_fresh={GROUPS}"),
        *("replay.max_attempts=1", "rollout.workers=2", "log.every=1"),
    )
    try:
        run.wait_for(lambda: "step 2/" in run.said() or "step 2 " in run.said(), "step 2")
        run.kill_and_await("rollout-0")
        run.wait_for(lambda: len(status()["dead_letters"]) > 0, "a dead letter")
        dead = [letter["group_id"] for letter in status()["dead_letters"]]
        code, out, err = tandem(tmp_path, "retry", str(folder), *dead)
        assert code == 0, err
        assert f"{len(dead)} group(s) put back, 0 not" in out
        # Whoever takes them next may die as well; the learner, while they are on their way.
        run.kill_and_await("learner-0")
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    evidence = gather(folder)
    found = examine(evidence)
    assert found.breaches == []
    assert found.figures["groups trained"] == GROUPS
    rows = [r["row"]["groups"] for r in evidence.journal if r["kind"] == "row"]
    attempts = {entry["id"]: entry["attempt"] for row in rows for entry in row}
    assert {attempts[name] for name in dead} == {3}
