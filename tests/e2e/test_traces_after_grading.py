"""A run whose expert traces enter only groups that all failed, looked at from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Run

STEPS = 8


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.byhand
def test_a_trace_enters_where_all_failed_and_the_run_trains(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        *("start", "miniature", "expert.when=all_failed", f"run.steps={STEPS}"),
        *("evaluate.at_start=false", "evaluate.every=0", "evaluate.at_end=false"),
        "log.samples_per_step=8",
    )
    assert run.wait() == 0, run.said()
    folder = tmp_path / "runs" / "miniature"
    entered = groups = 0
    for record in lines(folder / "samples.jsonl"):
        groups += 1
        own = [row for row in record["rows"] if row["source"] == "own"]
        traces = [row for row in record["rows"] if row["source"] == "expert"]
        failed = not any(row["verdict"] == "correct" for row in own)
        # Problems of this source have a trace each, the others none.
        assert len(traces) == (failed and record["problem_id"].startswith("expert/"))
        assert len(own) == 8
        assert sum(row.get("replaced", False) for row in own) == len(traces)
        entered += len(traces)
    assert groups == 8 * STEPS
    assert entered
    steps = [record for record in lines(folder / "metrics.jsonl") if "train/rows" in record]
    assert [record["train/rows"] for record in steps] == [64.0] * STEPS
    assert sum(8 * record["replay/replaced_groups"] for record in steps) == entered
    assert sum(record["replay/expert_rows"] for record in steps) == entered
    assert all(record["train/rows_active"] for record in steps)
