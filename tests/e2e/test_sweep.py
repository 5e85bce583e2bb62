"""Sweeps of real runs: a run that fails, Ctrl-C, and the same command again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import Run, step, summary

QUIET = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")


def states(folder: Path) -> dict[str, str]:
    content: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return {run["folder"]: run["state"] for run in content["runs"]}


@pytest.mark.timeout(400)
def test_a_run_that_fails_does_not_end_the_others_and_is_named(tmp_path: Path) -> None:
    """Only the data show that no trace is so short."""
    words = ("data.train.0.max_target_tokens=1,60", "run.steps=3", "--seeds", "5,", "--jobs", "2")
    command = ("sweep", "miniature-sft", *QUIET, *words, "--out", "all")
    run = Run(tmp_path, *command)
    assert run.wait() == 1, run.said()
    good, bad = "max_target_tokens-60-seed-5", "max_target_tokens-1-seed-5"
    assert states(tmp_path / "all") == {bad: "failed", good: "finished"}
    assert "1 of 2 runs failed" in run.said()
    assert f"  all/{bad}: ended with exit code 2: " in run.said()
    made = summary(tmp_path / "all" / good)
    assert (made["seed"], made["steps"], made["epochs"]) == (5, 3, 3.0)
    assert "| 60 " in (tmp_path / "all" / "sweep.md").read_text()

    again = Run(tmp_path, *command)
    assert again.wait() == 1, again.said()
    assert "2 runs in all, of which 1 are finished" in again.said()
    assert f"{bad} starts" in again.said()
    assert f"{good} starts" not in again.said()


@pytest.mark.byhand
@pytest.mark.timeout(400)
def test_ctrl_c_stops_the_runs_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = ("sweep", "miniature-sft", *QUIET, "run.steps=400,3", "--seeds", "1")
    folder = tmp_path / "runs" / "sweep-miniature-sft"
    run = Run(tmp_path, *command)
    long, short = folder / "steps-400-seed-0", folder / "steps-3-seed-0"
    run.wait_for(lambda: step(long) >= 10, "ten steps")
    other = Run(tmp_path, *command)
    assert other.wait() == 75
    assert "is in use by process" in other.said()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.said()
    assert "stopped; the same command goes on" in run.said()
    assert states(folder) == {long.name: "stopped", short.name: "waiting"}
    assert json.loads((long / "run.json").read_text())["state"] == "stopped"

    again = Run(tmp_path, *command)
    assert again.wait() == 0, again.said()
    assert f"{long.name} resumes" in again.said()
    assert set(states(folder).values()) == {"finished"}
    assert [summary(one)["steps"] for one in (long, short)] == [400, 3]
