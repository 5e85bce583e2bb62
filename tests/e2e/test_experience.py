"""A run whose own past successes come back as rows of its groups, looked at from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Run

SETTINGS = (
    *("start", "miniature-easy", "run.dir=run", "learner.objective.name=exgrpo"),
    *("expert.per_group=1", "learner.objective.replay_from=0.05", "data.miniature_fresh=16"),
    *("learner.micro_batch_tokens=4096", "replay.max_staleness=0", "learner.checkpoint_every=4"),
    "run.deterministic=true",
    *("evaluate.at_start=false", "evaluate.every=0", "evaluate.at_end=false"),
)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Every life of a run has a journal of its own."""
    files = sorted((folder / "run").glob("journal*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [record["row"] for record in map(json.loads, lines) if "row" in record]


def traces_of(folder: Path) -> dict[int, list[list[str]]]:
    """The traces of each group of each step."""
    return {row["step"]: [one["traces"] for one in row["groups"]] for row in rows_of(folder)}


def trained(folder: Path, *steps: int) -> Path:
    """The folder in which a run has trained up to each of some steps, resumed after every one."""
    for last in steps:
        run = Run(folder, *SETTINGS, f"run.steps={last}")
        assert run.wait() == 0, run.said()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("whole"), 8)


def test_own_successes_come_back_as_rows_of_groups(whole: Path) -> None:
    lines = (whole / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "train/rows" in record]
    assert sum(record["replay/expert_rows"] for record in steps) > 0
    for record in steps:
        assert record["train/rows"] == 64  # one sample less where a success comes back
        if record["train/tokens_expert"]:
            # w = π_θ/π_past is about 1, and f(w) = w / (w + 0.1).
            assert abs(record["train/expert_weight"] - 1 / 1.1) < 0.05
    named = [name for traces in traces_of(whole).values() for some in traces for name in some]
    assert named
    assert all(name.endswith("#own") for name in named)


@pytest.mark.byhand
def test_a_resumed_run_has_the_same(whole: Path, tmp_path: Path) -> None:
    """Strictly on-policy, what comes back in a step depends on the steps before it alone."""
    assert traces_of(trained(tmp_path, 4, 8)) == traces_of(whole)
