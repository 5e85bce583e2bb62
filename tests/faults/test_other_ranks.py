"""A run that is stopped in the middle of its steps goes on with other ranks, and still trains each group once."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit import examine, gather, journal_of
from processes import Run, step, steps

PRESET = """
base: miniature-easy
run:
  steps: null
  passes: 1
data:
  train:
    # 12 steps of 8 groups, and a short one.
    - {path: "{run}/data/train.parquet", name: train, limit: 99}
learner:
  checkpoint_every: 4
log:
  # The auditor reads the versions of all samples.
  samples_per_step: 8
evaluate:
  at_start: false
  at_end: false
  every: 0
"""
STEPS = 13


@pytest.mark.byhand
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_journalled_steps_are_trained_again_by_the_other_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (tmp_path / "once.yaml").write_text(PRESET)
    words = ("start", "once.yaml", f"run.dir={folder}")
    first = Run(tmp_path, *words, f"learner.ranks={before}", "learner.zero_stage=2")
    try:
        first.wait_for(lambda: step(folder) >= 6, "step 6")
        first.process.kill()  # The children end with it, and the learner saves nothing.
        first.process.wait()
    finally:
        first.end()
    reached = step(folder)
    second = Run(tmp_path, *words, f"learner.ranks={after}", "learner.zero_stage=3")
    try:
        assert second.wait() == 0, second.said()
    finally:
        second.end()
    (resumed,) = (record for record in journal_of(folder) if record["kind"] == "resumed")
    assert resumed["step"] < reached  # Or no step would have been trained again.
    assert steps(folder) == list(range(1, STEPS + 1))
    found = examine(gather(folder))
    assert found.breaches == [], found
