"""What the learner's records say of pools and workers, whose reports stand in a real Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.common.records import Version
from tandem.common.telemetry import Clock
from tandem.learner.loop.reporter import Reporter
from tandem.replay.members import Members

POOL = {
    "role": "reward", "pid": 7, "grader/correct": 6, "grader/wrong": 2, "grader/judge_asked": 4,
    "grader/restarts": 1,
}  # fmt: skip


def worker(lost: float, busy: float, checks: int) -> dict[str, Any]:
    check = {"checks": checks, "failures": 0, "seconds": 0.01, "nearness": 0.5}
    engine = {"load_seconds": lost, "busy_seconds": busy}
    return {"role": "rollout", "pid": 8, "engine": engine, "weights": {"check": check}}


@pytest.fixture
def run(
    server: Any, made_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setattr("tandem.learner.loop.reporter.REPORT_SECONDS", 0.0)
    made = made_up.Run(server.join(), made_up.config_of(), tmp_path / "run")
    yield made
    made.close()


def started(run: Any, step: int = 0) -> Reporter:
    """The reporter of a learner that begins after this step."""
    made = Reporter(run.runs, run.config, run.folder, "learner-0", Clock(), 6)
    made.cut_back(step)
    return made


def told(run: Any, reporter: Reporter, step: int) -> dict[str, float]:
    """The record of a step."""
    reporter.step(Version(term=1, step=step), {}, {})
    record: dict[str, float] = json.loads(run.folder.metrics.read_text().splitlines()[-1])
    return record


def test_a_learner_that_takes_over_counts_nothing_again(run: Any) -> None:
    first = started(run)
    run.runs.report("reward-0", POOL)
    run.runs.report("rollout-0", worker(1.0, 4.0, 3))
    before = told(run, first, 1)
    assert (before["grading/samples"], before["weights/checks"]) == (8, 3)
    again = started(run, 1)
    counted = [name for name in told(run, again, 2) if name.startswith(("grading/", "weights/"))]
    assert counted == []
    run.runs.report("reward-0", {**POOL, "grader/wrong": 5})
    run.runs.report("rollout-0", worker(1.5, 6.0, 4))
    after = told(run, again, 3)
    assert (after["grading/samples"], after["grading/restarts"]) == (3, 0)
    assert (after["weights/checks"], after["weights/engine_time_lost"]) == (1, 0.25)


def test_a_learner_that_goes_back_to_a_checkpoint_counts_on(run: Any) -> None:
    reporter = started(run)
    run.runs.report("reward-0", POOL)
    told(run, reporter, 1)
    run.runs.report("reward-0", {**POOL, "grader/wrong": 5})
    reporter.cut_back(0)
    assert told(run, reporter, 1)["grading/samples"] == 3


def test_the_memory_of_workers_is_that_of_those_that_are_there(run: Any) -> None:
    reporter, members = started(run), Members(run.store)
    for name, peak in (("rollout-0", 5e9), ("rollout-1", 2e9)):
        members.register("rollout", name, {"pid": 8})
        run.runs.report(name, {"role": "rollout", "memory": {"peak": peak}})
    assert told(run, reporter, 1)["memory/rollout_peak_bytes"] == 5e9
    members.leave("rollout-0")
    assert told(run, reporter, 2)["memory/rollout_peak_bytes"] == 2e9
