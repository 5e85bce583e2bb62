"""Every preset for GPUs trains some steps on the miniature: its objective, optimizer, schedule, staleness, rewards and
use of traces, with the miniature's model, data and sizes laid over it (``PRESET+miniature-twin``)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from processes import Run
from twins import (
    AGAIN,
    OTHER_REWARDS,
    SAMPLED,
    STAGED,
    STEPS,
    command,
    different,
    overrides,
    prepare,
    twin,
)

from tandem.common.config import read_config
from tandem.launch.run.opened.presets import load
from tandem.learner.loop.schedule import learning_rate
from tandem.replay.archive import steps as steps_of

IN_CI = (
    "olmo2-1b-cs336-off-policy-gspo-2gpu",
    "pythia-14m-ppo-only-1gpu",
    "qwen2.5-1.5b-lora-1gpu",
    "qwen2.5-math-7b-rl-sft-loss-8gpu",
)
"""The others are run by hand: each takes a quarter of a minute. Pairs are trained on by test_pairs.py."""


def with_most_by_hand(presets: list[str]) -> list[Any]:
    assert set(IN_CI) <= set(presets)
    return [
        pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.byhand]) for name in presets
    ]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all twins run, with pairs of right and wrong chains."""
    folder = tmp_path_factory.mktemp("twins")
    prepare(folder)
    return folder


def ran(here: Path, name: str) -> Path:
    """The folder of a twin's finished run."""
    config = twin(name)
    assert config.run.dir is not None
    folder = here / config.run.dir
    if not folder.exists():
        run = Run(here, command(name), f"{name}+miniature-twin", *overrides(name))
        try:
            assert run.wait() == 0, run.said()
        finally:
            run.end()
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", with_most_by_hand(different()))
def test_a_preset_trains_the_miniature(name: str, here: Path) -> None:
    if name == AGAIN:
        ran(here, SAMPLED)
    folder = ran(here, name)
    used = read_config((folder / "config.yaml").read_text())
    preset = load(name).resolve([])
    for key in ("objective", "optimizer", "minibatches", "source", "train"):
        assert getattr(used.learner, key) == getattr(preset.learner, key)
    assert used.expert.per_group == preset.expert.per_group
    assert used.replay.max_staleness == preset.replay.max_staleness
    if name not in OTHER_REWARDS:
        assert used.reward.components == preset.reward.components
    if not used.learner.train:
        assert next(iter(steps_of(folder / "archive")), None) is not None
        return
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [record for record in records if "train/lr" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    for record in steps:
        expected = learning_rate(preset.learner.optimizer, record["step"], STEPS)
        assert record["train/lr"] == pytest.approx(expected)
    # Of a step in which no group has a signal there is no loss.
    losses = [record["train/loss"] for record in steps if "train/loss" in record]
    assert losses
    assert all(map(math.isfinite, losses))
    assert (folder / "model" / "model.safetensors").exists()


@pytest.mark.timeout(600)
@pytest.mark.byhand  # CI runs stages of the miniature's own (test_stages.py).
@pytest.mark.parametrize("name", STAGED)
def test_a_presets_stages_train_the_miniature_one_after_another(name: str, here: Path) -> None:
    preset = load(f"{name}+miniature-twin")
    run = Run(here, "start", f"{name}+miniature-twin", *overrides(name))
    try:
        assert run.wait(400) == 0, run.said()
    finally:
        run.end()
    summary = json.loads((here / "runs" / f"{name}+miniature-twin" / "summary.json").read_text())
    assert len(summary["stages"]) == len(preset.stages) * min(preset.rounds, 2)
