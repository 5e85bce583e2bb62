"""Runs of the miniature whose reward asks a judge that dies in the middle: it costs rows, not the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import TANDEM, Run

sys.path.insert(0, str(Path(__file__).parents[1]))
from judges import JudgeProcess

STEPS = 60
"""So many that a fast machine still has some left when the judge is gone."""
QUICK = (
    *("evaluate.at_start=false", "evaluate.every=0", "evaluate.at_end=false"),
    *("expert.per_group=0", "learner.objective.name=grpo", "log.samples_per_step=8"),
)


def words(url: str, *more: str) -> list[str]:
    params = {"url": url, "model": "tiny", "retries": 0, "prompt": "{problem} {response}"}
    # The samples of a poor model are cut, and must be asked about all the same.
    judge = {"name": "judge", "params": {**params, "truncated": "ask"}}
    parts = [{"name": "accuracy", "weight": 0.5}, judge]
    return ["start", "miniature", f"reward.components={json.dumps(parts)}", *QUICK, *more]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def status(folder: Path) -> dict[str, Any]:
    import subprocess

    found = subprocess.run(
        [*TANDEM, "status", str(folder), "--json"], capture_output=True, text=True, check=True
    )
    parsed: dict[str, Any] = json.loads(found.stdout)
    return parsed


def counted(folder: Path, name: str) -> float:
    return sum(record.get(name, 0.0) for record in lines(folder / "metrics.jsonl"))


@pytest.mark.byhand
@pytest.mark.timeout(400)
def test_a_judge_that_dies_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "miniature"
    judge = JudgeProcess(tmp_path / "requests.jsonl")
    run = Run(tmp_path, *words(judge.url, f"run.steps={STEPS}"))
    try:
        run.wait_for(lambda: len(lines(folder / "samples.jsonl")) >= 16, "two steps")
        judge.stop()
        run.wait_for(
            lambda: ((status(folder)["grading"] or {}).get("judge") or {}).get("failed", 0) >= 40,
            "questions that failed",
        )
        judge = JudgeProcess(tmp_path / "requests.jsonl", port=judge.port)
        assert run.wait(300) == 0, run.said()
    finally:
        judge.stop()
    steps = [record for record in lines(folder / "metrics.jsonl") if "train/rows" in record]
    assert len(steps) == STEPS
    trained = [
        row
        for record in lines(folder / "samples.jsonl")
        for row in record["rows"]
        if row["source"] == "own"
    ]
    failed = [row for row in trained if row["verdict"] == "judge_failed"]
    # No failure was paid 0: its row has no reward.
    assert all(row["reward"] is None for row in failed)
    paid = [row["reward"] for row in trained if row["verdict"] != "judge_failed"]
    assert min(paid) >= 0.8
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"]["rejected:ungraded"] > 0
    assert "ConnectionRefusedError" in (folder / "logs" / "reward-0.log").read_text()
    assert counted(folder, "grading/judge_asked") > 0


@pytest.mark.byhand
@pytest.mark.timeout(400)
def test_a_judge_that_dies_for_good_ends_a_run_of_passes_with_what_it_had(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "miniature"
    judge = JudgeProcess(tmp_path / "requests.jsonl")
    run = Run(
        tmp_path, *words(judge.url, "run.steps=null", "run.passes=1", "data.miniature_fresh=200")
    )
    try:
        run.wait_for(lambda: len(lines(folder / "samples.jsonl")) >= 16, "two steps")
        judge.stop()
        assert run.wait(300) == 0, run.said()
    finally:
        judge.stop()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"]["rejected:ungraded"] > 50


def test_a_judge_that_is_not_there_is_told_of_before_anything_starts(tmp_path: Path) -> None:
    run = Run(tmp_path, *words("http://127.0.0.1:1", "run.steps=2"))
    assert run.wait() == 2
    assert "start the server and wait until it is ready" in run.said()
    assert not (tmp_path / "runs").exists()
