"""A disk that fills up under a whole run: it waits, says so, and loses nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit import examine, gather
from processes import TANDEM, Run
from storm import HERE, journalled, plan

MEGABYTES = 240
"""What `tandem start` wants to be free for this run, and a little more."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine is found by its import path, in the workers.
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def words(small: Any, groups: int) -> list[str]:
    settings = plan(5, 0, staleness=1, groups=groups, ranks=1).settings()
    return ["start", str(HERE / "storm.yaml"), f"run.dir={small.folder / 'run'}", *settings]


def test_a_disk_that_fills_and_empties_twice_costs_a_run_nothing(
    small_disk: Callable[[int], Any], tmp_path: Path
) -> None:
    small = small_disk(MEGABYTES)
    folder = small.folder / "run"
    run = Run(tmp_path, *words(small, 100))
    try:
        for fill, step in ((1, 4), (2, 12)):
            run.wait_for(lambda step=step: journalled(folder) >= step, f"step {step}")
            small.fill()
            run.wait_for(
                lambda fill=fill: run.said().count("the disk is full") == fill, "a word about it"
            )
            if fill == 2:
                # Whoever dies now is started again when there is space; whether the learner had
                # finished the run can't be told before Redis is back.
                for name in ("learner-0", "rollout-1", "redis"):
                    run.kill(name)
                run.wait_for(lambda: run.said().count("once there is space") == 2, "the deaths")
            small.empty()
            run.wait_for(
                lambda fill=fill: run.said().count("there is space again") == fill, "space"
            )
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    said = run.said()
    assert "journal.jsonl, redis/, checkpoints/ and logs/ in" in said
    assert "Traceback" not in said
    for log in (folder / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()
    found = examine(gather(folder))
    assert found.breaches == []
    assert found.figures["groups trained"] == found.figures["groups of the run"] > 90


@pytest.mark.byhand
def test_a_run_that_finds_no_space_drains_at_its_bound_and_goes_on_when_it_is_started_again(
    small_disk: Callable[[int], Any], tmp_path: Path
) -> None:
    small = small_disk(MEGABYTES)
    folder = small.folder / "run"
    run = Run(tmp_path, *words(small, 40), "launch.full_disk_seconds=3")
    try:
        run.wait_for(lambda: journalled(folder) >= 4, "step 4")
        small.fill()
        assert run.wait() == 75
    finally:
        run.end()
    assert "the same command goes on from the last checkpoint" in run.said()
    assert "Traceback" not in run.said()
    small.empty()
    # Its output finds no space either, and ends nothing: the log in the folder has every word.
    with open("/dev/full", "w") as nowhere:
        done = subprocess.run(
            [*TANDEM, *words(small, 40)],
            cwd=tmp_path,
            stdout=nowhere,
            stderr=subprocess.STDOUT,
            timeout=150,
            check=False,
        )
    assert done.returncode == 0
    told = (folder / "logs" / "start.log").read_text()
    assert "resumes in" in told
    assert "next: tandem evaluate" in told
    assert examine(gather(folder)).breaches == []
