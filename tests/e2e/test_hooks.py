"""Whole runs with a user's own callbacks and learning-rate schedule."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from processes import Run, gone, step, summary, tandem
from safetensors.numpy import load_file

from tandem.common.errors import ConfigError
from tandem.launch.cli import dispatch

pytestmark = pytest.mark.timeout(400)

MODULE = """
import os, time

def noted(name, *words):
    with open(name, "a") as file:
        print(*words, file=file)

def good_enough(step, metrics, handle):
    if metrics.get("eval/heldout/accuracy", -1) >= 0 and step >= 3:
        handle.stop("heldout was measured at step 3")

def rewarded(step, metrics, handle):
    if step >= 3 and metrics["reward/mean"] >= 0:
        handle.stop("the reward is what it should be")

def note(step, metrics, handle):
    # Newer weights may have been measured than those of the step for which an evaluation was due.
    noted("calls.txt", int(metrics.get("eval/due", step)), "eval/due" in metrics)

def asks(step, metrics, handle):
    if "train/lr" in metrics:  # An evaluation's record may come after those of later steps.
        handle.log("steps/called", step)
    if step == 2:
        handle.checkpoint()
        handle.evaluate()

def raises(step, metrics, handle):
    raise ValueError("no good")

def hangs(step, metrics, handle):
    time.sleep(1000)

def eats(step, metrics, handle):
    held = []
    while True:
        held.append(bytearray(1 << 26))

def ends(step, metrics, handle):
    os._exit(7)

def floods(step, metrics, handle):
    for _ in range(100):
        print("x" * 100_000)

def decay(step, total_steps):
    return 0.9 ** step

def sour(step, total_steps):
    return 1 / abs(step - 3)
"""
QUIET = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")
BRIEF = ("data.evaluate.0.limit=20", "data.miniature_fresh=200", "learner.checkpoint_every=100")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "hooks.py").write_text(MODULE)
    return tmp_path


def callbacks(*names: str) -> str:
    return f"run.callbacks=[{', '.join(f'hooks:{name}' for name in names)}]"


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if "train/lr" in record]


def evaluated(folder: Path) -> list[str]:
    return [record["eval/id"] for record in records(folder) if "eval/id" in record]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def finished(cwd: Path, *words: str) -> Run:
    run = Run(cwd, *words)
    try:
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    return run


def same(one: Path, other: Path) -> bool:
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (one, other))
    return all(np.array_equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.byhand
def test_a_callback_stops_a_run_by_an_evaluation_and_the_run_can_go_on(here: Path) -> None:
    """It ends as a run ends: checkpoint, model, last evaluation, summary."""
    folder = here / "run"
    words = ("start", "miniature-easy", f"run.dir={folder}", *BRIEF)
    run = finished(here, *words, "evaluate.every=3", callbacks("good_enough"))
    made = summary(folder)
    last = made["steps"]
    assert 3 <= last < 60
    assert made["stopped"] == {
        "callback": "hooks:good_enough",
        "reason": "heldout was measured at step 3",
        "step": made["stopped"]["step"],
    }
    assert 3 <= made["stopped"]["step"] <= last
    assert "stopped by a callback  heldout was measured at step 3" in run.said()
    assert saved(folder)[-1] == last
    assert [record["step"] for record in trained(folder)] == list(range(1, last + 1))
    assert any(one.startswith(f"heldout@{last}") for one in evaluated(folder))
    assert made["accuracy_after"] is not None
    assert (folder / "model" / "model.safetensors").exists()
    code, out, _ = tandem(here, *words, callbacks("good_enough"))
    assert code == 0
    assert "is finished" in out
    assert "without the callback that stopped it: run.callbacks=[]" in out
    # Without the callback it goes on from there.
    finished(here, *words, "run.callbacks=[]", f"run.last_step={last + 2}")
    assert summary(folder)["stopped"] is None
    assert [record["step"] for record in trained(folder)] == list(range(1, last + 3))
    # Callbacks that it has again are called for what follows, and not for the steps without any.
    finished(here, *words, callbacks("note"), f"run.last_step={last + 4}")
    called = [int(line.split()[0]) for line in (here / "calls.txt").read_text().splitlines()]
    assert min(called) == last + 3


@pytest.mark.byhand
def test_whatever_callbacks_do_the_model_is_the_same_in_every_bit(here: Path) -> None:
    common = ("offline", *BRIEF, *QUIET, "run.steps=150")
    finished(here, *common, "run.dir=without")
    bad = ("raises", "hangs", "eats", "ends", "floods", "note", "asks")
    limits = ("run.callback_seconds=2", "run.callback_memory_mb=512")
    folder = here / "with"
    run = Run(here, *common, "run.dir=with", callbacks(*bad), *limits)
    try:
        run.wait_for(lambda: step(folder) >= 1, "step 1")
        run.kill_and_await("callbacks")
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    assert same(here / "without", folder)
    assert len(trained(folder)) == 150
    made = summary(folder)
    assert [one["process"] for one in made["restarts"]] == ["callbacks"]
    assert made["stopped"] is None
    tallies = made["callbacks"]
    assert tallies["hooks:raises"]["errors"] == tallies["hooks:raises"]["calls"] > 0
    assert tallies["hooks:hangs"]["ended"] > 0
    assert tallies["hooks:eats"]["errors"] + tallies["hooks:eats"]["ended"] > 0
    assert "callback failed" in run.said()
    log = (folder / "logs" / "callbacks.log").read_text()
    assert log.count("ValueError: no good") <= 2  # once by each host: one was killed
    # Each of the processes may have written 4 MB, and with three lives of each bad one there are few.
    assert len(log) < 50 << 20


def test_what_a_callback_asks_for_is_done(here: Path) -> None:
    folder = here / "run"
    words = ("start", "miniature-easy", f"run.dir={folder}", *BRIEF, *QUIET, "run.steps=24")
    # New weights every fourth step only, except for the evaluation that was asked for.
    finished(here, *words, "weights.every=4", "replay.max_staleness=4", callbacks("asks", "note"))
    kept = [step for step in saved(folder) if step != 24]
    assert len(kept) == 1
    (evaluation,) = evaluated(folder)
    assert evaluation == f"heldout@{kept[0]}"
    logged = [
        one["callback/steps/called"] for one in records(folder) if "callback/steps/called" in one
    ]
    assert logged
    assert logged == sorted(set(logged))
    assert set(logged) <= set(range(1, 25))
    calls = (here / "calls.txt").read_text().splitlines()
    assert sorted(calls, key=lambda line: int(line.split()[0])).count(f"{kept[0]} True") == 1


@pytest.mark.byhand
def test_a_resumed_run_calls_for_no_step_twice(here: Path) -> None:
    folder = here / "run"
    words = ("start", "miniature-easy", f"run.dir={folder}", *BRIEF, *QUIET, "run.steps=14")
    words += ("learner.checkpoint_every=4", callbacks("note"))
    calls = here / "calls.txt"
    run = Run(here, *words)
    try:
        run.wait_for(lambda: calls.exists() and len(calls.read_text().split()) >= 12, "step 6")
        children = [child.pid for child in psutil.Process(run.process.pid).children(recursive=True)]
    finally:
        run.end()
    assert gone(children, 30)
    finished(here, *words)
    assert calls.read_text().splitlines() == [f"{n} False" for n in range(1, 15)]
    assert len(trained(folder)) == 14


@pytest.mark.byhand
def test_stages_and_offline_runs_have_callbacks_too(here: Path) -> None:
    words = ("miniature-sft-rl", *BRIEF, *QUIET, "sft.run.callbacks=hooks:note")
    stop = "rl.run.callbacks=[hooks:rewarded]"
    finished(here, "start", *words, "sft.run.steps=4", "rl.run.steps=60", stop)
    top = here / "runs" / "miniature-sft-rl"
    assert (here / "calls.txt").read_text().splitlines() == [f"{n} False" for n in range(1, 5)]
    assert summary(top / "sft")["stopped"] is None
    assert summary(top / "rl")["stopped"]["reason"] == "the reward is what it should be"
    assert 3 <= summary(top / "rl")["steps"] < 60


@pytest.mark.byhand
def test_a_schedule_of_ones_own_survives_a_kill_in_every_bit(here: Path) -> None:
    common = ("offline", *BRIEF, *QUIET, "run.steps=40", "learner.optimizer.warmup_steps=2")
    common += ("learner.checkpoint_every=5", "learner.optimizer.schedule=hooks:decay")
    common += ("learner.optimizer.lr=1e-3",)
    finished(here, *common, "run.dir=left")
    folder = here / "killed"
    run = Run(here, *common, "run.dir=killed")
    try:
        run.wait_for(lambda: step(folder) >= 8, "step 8")
        run.kill_and_await("learner-0")
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    rates = [1e-3 * n / 2 for n in (1, 2)] + [1e-3 * 0.9**n for n in range(3, 41)]
    for name in ("left", "killed"):
        assert [record["train/lr"] for record in trained(here / name)] == rates
        kept = json.loads((here / name / "schedule.json").read_text())
        assert kept["factors"] == [0.9**n for n in range(3, 41)]
    assert same(here / "left", folder)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("run.callbacks=[nowhere:at_all]", "run.callbacks=nowhere:at_all can't be imported"),
        ("run.callbacks=hooks:none", "has no attribute 'none'"),
        ("run.callbacks=hooks", "isn't an import path"),
        ("learner.optimizer.schedule=hooks:none", "has no attribute 'none'"),
        ("learner.optimizer.schedule=hooks:sour", "at step 3 of 60, raised ZeroDivisionError"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_is_started(
    here: Path, setting: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError, match=re.escape(said)):
        dispatch(["start", "miniature-easy", setting, "learner.optimizer.warmup_steps=0"])
    assert not (here / "runs").exists()
