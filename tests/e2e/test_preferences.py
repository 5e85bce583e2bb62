"""Preferences from a run's own samples: the archive is made first, pairs are trained on, others are held out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import Run, step

FEW = ("samples.run.steps=40", "pairs.run.steps=12")
QUICK = ("evaluate.at_start=false", "evaluate.at_end=false")


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)
@pytest.mark.byhand
def test_an_archive_is_made_and_its_pairs_are_learned(tmp_path: Path) -> None:
    """Killed while the archive is made and again while it is trained on, the run goes on each time."""
    words = ("offline", "miniature-dpo", "run.dir=run", *FEW, *QUICK)
    folder, samples = tmp_path / "run" / "pairs", tmp_path / "run" / "samples"
    first = Run(tmp_path, *words)
    first.wait_for(lambda: step(samples) >= 5, "steps of the first stage")
    first.end()
    assert not folder.exists()

    second = Run(tmp_path, *words, "pairs.learner.checkpoint_every=4")
    second.wait_for((samples / "summary.json").exists, "end of the first stage")
    second.wait_for(lambda: step(folder) >= 6, "steps of the second stage")
    second.end()
    assert "resumes in" in second.said()
    made = (samples / "run.json").read_bytes()
    (kept,) = (folder / "reference").iterdir()
    before = kept.read_bytes()

    third = Run(tmp_path, *words, "pairs.learner.checkpoint_every=4")
    assert third.wait() == 0, third.said()
    assert (samples / "run.json").read_bytes() == made
    assert kept.read_bytes().startswith(before)
    assert "(chosen longer in 0, shorter in 0)" in second.said()
    found = records(folder)
    trained = [record for record in found if "train/loss" in record]
    assert [record["step"] for record in trained] == list(range(1, 13))
    computed = sum(record["train/reference_computed"] for record in trained)
    # The last step's rows were all computed in an earlier pass.
    assert trained[-1]["train/reference_found"] == trained[-1]["train/rows"]
    assert trained[-1]["train/preference_margin"] > trained[0]["train/preference_margin"] + 0.02
    (held,) = [record for record in found if "heldout/preference_accuracy" in record]
    assert held["step"] == 12
    assert held["heldout/preference_pairs"] >= 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["preference_accuracy"] == held["heldout/preference_accuracy"]
    assert "held-out pairs" in third.said()

    # From the same archive in one go it is the same run, bit for bit.
    shutil.copytree(samples, tmp_path / "again" / "samples")
    shutil.copy(tmp_path / "run" / "stages.json", tmp_path / "again")
    again = Run(tmp_path, "offline", "miniature-dpo", "run.dir=again", *FEW, *QUICK)
    assert again.wait() == 0, again.said()
    other = tmp_path / "again" / "pairs"
    fresh = [record for record in records(other) if "train/loss" in record]
    assert [record["train/loss"] for record in fresh] == [r["train/loss"] for r in trained]
    assert sum(record["train/reference_computed"] for record in fresh) >= computed
    model = Path("model") / "model.safetensors"
    assert (folder / model).read_bytes() == (other / model).read_bytes()


@pytest.mark.byhand
@pytest.mark.timeout(900)
@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo", "cpo"])
def test_held_out_pairs_are_told_apart_and_answers_get_better(
    tmp_path: Path, objective: str
) -> None:
    run = Run(tmp_path, "offline", "miniature-dpo", f"learner.objective.name={objective}")
    assert run.process.wait(600) == 0, run.said()
    summary = json.loads(
        (tmp_path / "runs" / "miniature-dpo" / "pairs" / "summary.json").read_text()
    )
    assert summary["preference_accuracy"] >= 0.9
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.1
