"""A run that leaves out groups without a signal, looked at from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from processes import Run, tandem

STEPS, LIMIT = 5, 12


def test_groups_without_a_signal_are_left_out_and_counted(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        *("start", "miniature-easy", "run.dir=run", f"run.steps={STEPS}"),
        f"replay.dynamic_sampling={LIMIT}",
        *("evaluate.at_start=false", "evaluate.every=0", "evaluate.at_end=false"),
    )
    assert run.wait() == 0, run.said()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "train/rows" in record]
    assert [record["train/rows"] for record in steps] == [64.0] * STEPS
    gone = [record["replay/left_out"] for record in steps]
    assert 0 < max(gone) <= LIMIT
    for record, count in zip(steps, gone, strict=True):
        # Those that teach nothing are trained on only where the limit is reached.
        assert record["reward/zero_variance"] == 0 or count == LIMIT
    code, said, error = tandem(tmp_path, "status", "run", "--json")
    assert code == 0, error
    assert json.loads(said)["ledger"]["rejected:no_signal"] == sum(gone)
