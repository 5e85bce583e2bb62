"""Sweeps of real runs: a run that fails, a password, Ctrl-C, and the same command again."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from passwords import MARKER, QUOTED, holding, server_with_password, words_until_the_end
from processes import Run, step, summary

QUIET = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")


def states(folder: Path) -> dict[str, str]:
    content: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return {run["folder"]: run["state"] for run in content["runs"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep has left, in which one of two runs fails, and the same command again."""

    here: Path
    first: Run
    again: Run
    words: set[str]
    """Of the processes that the first one has started."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    here = tmp_path_factory.mktemp("swept")
    with server_with_password(tmp_path_factory.mktemp("redis")) as url:
        # Only the data show that no trace is so short.
        words = ("data.train.0.max_target_tokens=1,60", "run.steps=3", *QUIET)
        words += (f"replay={{redis_url: '{url}', window: 1, groups_per_step: 4}}",)
        words += ("--seeds", "5,", "--jobs", "2")
        command = ("sweep", "miniature-sft", *words, "--out", "all")
        first = Run(here, *command)
        seen = words_until_the_end(first)
        again = Run(here, *command)
        again.wait()
    return Swept(here=here, first=first, again=again, words=seen)


GOOD, BAD = "max_target_tokens-60-seed-5", "max_target_tokens-1-seed-5"


@pytest.mark.timeout(400)
def test_a_run_that_fails_does_not_end_the_others_and_is_named(swept: Swept) -> None:
    said = swept.first.said()
    assert swept.first.process.returncode == 1, said
    assert states(swept.here / "all") == {BAD: "failed", GOOD: "finished"}
    assert "1 of 2 runs failed" in said
    assert f"  all/{BAD}: ended with exit code 2: " in said
    made = summary(swept.here / "all" / GOOD)
    assert (made["seed"], made["steps"], made["epochs"]) == (5, 3, 3.0)
    assert "| 60 " in (swept.here / "all" / "sweep.md").read_text()


@pytest.mark.timeout(400)
def test_the_same_command_tries_again_what_has_failed(swept: Swept) -> None:
    said = swept.again.said()
    assert swept.again.process.returncode == 1, said
    assert "2 runs in all, of which 1 are finished" in said
    assert f"{BAD} starts" in said
    assert f"{GOOD} starts" not in said


@pytest.mark.timeout(400)
def test_a_redis_password_is_handed_to_the_runs_in_their_environment(swept: Swept) -> None:
    assert [word for word in swept.words if MARKER in word or QUOTED in word] == []
    assert any("redis_url" in word for word in swept.words)
    assert holding(swept.here) == {"join.json"}
    assert "put it into TANDEM_REDIS_PASSWORD" in swept.first.said()
    assert "redis_url" in (swept.here / "all" / "sweep.md").read_text()


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
