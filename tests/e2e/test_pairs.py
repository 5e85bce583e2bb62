"""Preference losses on files of pairs, without a rollout worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import Run
from twins import write_pairs


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("objective", "count"),
    [
        ("dpo", 15),
        pytest.param("kto", 40, marks=pytest.mark.byhand),
        pytest.param("orpo", 40, marks=pytest.mark.byhand),
        pytest.param("cpo", 40, marks=pytest.mark.byhand),
    ],
)
def test_pairs_without_gold_answers_are_learned(
    tmp_path: Path, finished_run: Path, objective: str, count: int
) -> None:
    write_pairs(finished_run / "data" / "expert.parquet", tmp_path / "pairs.jsonl")
    # A labelled row would be alone in its group.
    own = ["learner.objective.advantage=none"] if objective == "kto" else []
    run = Run(
        tmp_path,
        *("offline", "miniature-sft", f"learner.objective.name={objective}", f"run.steps={count}"),
        *("data.train=[{path: pairs.jsonl}]", "run.dir=run", *own),
        *("evaluate.at_start=false", "evaluate.at_end=false"),
    )
    assert run.wait() == 0, run.said()
    assert "data pairs: 4 problems, 8 expert traces (8 not graded)" in run.said()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "train/loss" in record]
    assert steps[0]["train/preference_pairs"] == (8 if objective == "kto" else 4)
    assert steps[-1]["train/preference_accuracy"] == 1.0
    assert steps[-1]["train/preference_margin"] > steps[0]["train/preference_margin"] + 0.02
