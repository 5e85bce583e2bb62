"""Export in mid-run, and a run that goes on with other ranks and another ZeRO stage."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from processes import Run, step, summary, tandem

SETTINGS = (
    *("run.deterministic=true", "evaluate.every=0"),
    *("evaluate.at_start=false", "evaluate.at_end=false"),
)


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["train/loss"] for record in records if "train/loss" in record]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def finished(cwd: Path, *words: str) -> Run:
    run = Run(cwd, *words, *SETTINGS)
    try:
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    return run


def exported_in_mid_run(cwd: Path, words: tuple[str, ...], at: int, steps: int) -> None:
    """A step's model exported while its run goes on is that of a run that ended there."""
    words = (*words, f"run.steps={steps}", f"learner.checkpoint_every={at}")
    # Which steps are kept is the run's matter: this one keeps all that it can make meanwhile.
    words = (*words, "learner.checkpoints_kept=1000")
    long = Run(cwd, *words, "run.dir=long", *SETTINGS)
    try:
        place = cwd / "long" / "checkpoints" / f"step-{at:08d}"
        long.wait_for(place.is_dir, f"the checkpoint of step {at}")
        code, said, error = tandem(cwd, "export", "long", "--step", str(at), "--out", "exported")
        assert code == 0, error
        assert said == f"the model of step {at} is in exported\n"
        # It was in mid-run, and the learner went on.
        assert long.process.poll() is None
        began = step(cwd / "long")
        long.wait_for(lambda: step(cwd / "long") > began, "a step after the export")
    finally:
        long.end()
    finished(cwd, *words, "run.dir=short", f"run.last_step={at}")
    assert step(cwd / "short") == at
    assert content(cwd / "exported") == content(cwd / "short" / "model")


@pytest.mark.timeout(300)
def test_a_step_exported_in_mid_run_is_the_model_of_a_run_that_ended_there(tmp_path: Path) -> None:
    exported_in_mid_run(tmp_path, ("offline", "miniature-sft"), at=4, steps=4_000)


@pytest.mark.timeout(300)
def test_an_offline_run_goes_on_with_the_evaluation_in_which_it_was_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    evaluated = ("evaluate.at_start=false", "data.evaluate.0.limit=40")
    words = ("offline", "miniature-sft", "run.dir=run", "run.steps=2", *evaluated)
    run = Run(tmp_path, *words)
    try:
        run.wait_for((folder / "logs" / "evaluate-after.log").exists, "the last evaluation")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
    finally:
        run.end()
    assert "stopped while evaluating; `" in run.said()
    assert json.loads((folder / "run.json").read_text())["state"] == "stopped"
    again = Run(tmp_path, *words)
    try:
        assert again.wait() == 0, again.said()
    finally:
        again.end()
    assert [one["step"] for one in summary(folder)["evaluations"]] == [2]


@pytest.mark.byhand
@pytest.mark.timeout(900)
def test_step_50_of_a_run_with_rollouts_exported_in_mid_run(tmp_path: Path) -> None:
    exported_in_mid_run(tmp_path, ("start", "miniature"), at=50, steps=500)


@pytest.mark.byhand
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("learner.ranks=2", "learner.zero_stage=2"), ("learner.ranks=1", "learner.zero_stage=1")),
        (("learner.ranks=1", "learner.zero_stage=0"), ("learner.ranks=2", "learner.zero_stage=3")),
    ],
)
def test_a_run_goes_on_with_other_ranks_and_another_stage(
    before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("offline", "miniature-sft", "run.steps=8", "learner.checkpoint_every=4")
    finished(tmp_path, *words, "run.dir=whole")
    finished(tmp_path, *words, "run.dir=moved", *before, "run.last_step=4")
    run = finished(tmp_path, *words[:2], "run.dir=moved", *after, "run.last_step=null")
    assert f"changed: learner.ranks: {before[0][-1]} -> {after[0][-1]}" in run.said()
    logged = (tmp_path / "moved" / "logs" / "learner-0.log").read_text()
    assert logged.count("step-00000004 was written by") == 1
    expected = losses(tmp_path / "whole")
    assert len(expected) == 8
    assert losses(tmp_path / "moved") == pytest.approx(expected, abs=1e-4)
