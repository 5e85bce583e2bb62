"""``tandem start`` itself is killed with SIGKILL, and the same words go on with its run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from audit import examine, gather
from processes import Run, gone
from storm import HERE, journalled

GROUPS, STEPS = 41, 11


@pytest.mark.timeout(300)
def test_the_same_words_go_on_with_a_run_whose_supervisor_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine is found by its import path, in the workers.
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    folder = tmp_path / "run"
    words = ["start", str(HERE / "storm.yaml"), f"run.dir={folder}"]
    words += [f"data.miniature_fresh={GROUPS}", "learner.checkpoint_every=2"]
    first = Run(tmp_path, *words)
    try:
        first.wait_for(lambda: journalled(folder) >= 4, "row 4")
        children = [process.pid for process in first.tree.children(recursive=True)]
    finally:
        first.end()
    reached = journalled(folder)
    second = Run(tmp_path, *words)
    try:
        assert second.wait() == 0, second.said()
    finally:
        second.end()
    assert gone(children, seconds=1)
    assert reached < STEPS
    found = examine(gather(folder))
    assert found.breaches == []
    assert found.figures["learner's resumptions"] == 1
    assert found.figures["groups trained"] == found.figures["groups of the run"] == GROUPS
