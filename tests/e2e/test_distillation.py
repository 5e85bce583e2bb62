"""Runs that learn from a teacher: on stored traces, and on the policy's own samples without a reward."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import Run

from tandem.common.errors import ConfigError
from tandem.common.models import resolve
from tandem.launch.cli import dispatch

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the miniature's tokenizer, that is wider and has a padded output."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    base, folder = Path(resolve("miniature")), tmp_path_factory.mktemp("teacher")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    sizes = AutoConfig.from_pretrained(base)
    sizes.hidden_size, sizes.vocab_size = 2 * sizes.hidden_size, sizes.vocab_size + 16
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(sizes).save_pretrained(folder)
    return folder


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "train/loss" in record]


def test_a_teacher_is_followed_on_stored_traces(tmp_path: Path, teacher: Path) -> None:
    run = Run(
        tmp_path,
        *("offline", "miniature-sft", "learner.objective.name=distill", "run.steps=10"),
        *(f"learner.teacher={teacher}", "run.dir=run", "learner.optimizer.lr=3e-3"),
        *("evaluate.at_start=false", "evaluate.at_end=false"),
    )
    assert run.wait() == 0, run.said()
    steps = steps_of(tmp_path / "run")
    assert steps[-1]["train/divergence"] < 0.5 * steps[0]["train/divergence"]
    assert "train/nll" not in steps[0]


def test_a_teacher_is_followed_on_own_samples_that_are_not_paid(
    tmp_path: Path, teacher: Path
) -> None:
    run = Run(
        tmp_path,
        *("start", "miniature-easy", "learner.objective.name=distill", "run.steps=6"),
        *(f"learner.teacher={teacher}", "run.dir=run", "learner.optimizer.lr=3e-3"),
        *("learner.objective.divergence_mix=0.5", "reward.components=[]"),
        *("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false"),
    )
    assert run.wait() == 0, run.said()
    steps = steps_of(tmp_path / "run")
    assert all(one["train/rows_active"] == one["train/rows"] == 64 for one in steps)
    divergences = [one["train/divergence"] for one in steps]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.99 * divergences[0]


def test_a_teacher_with_another_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("start", "miniature", "learner.objective.name=distill", "run.dir=run")
    said = r"learner\.teacher=miniature-tools has another tokenizer than model\.path"
    with pytest.raises(ConfigError, match=said):
        dispatch([*words, "learner.teacher=miniature-tools"])
    assert list(tmp_path.iterdir()) == []
