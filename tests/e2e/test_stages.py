"""Several runs by one command, killed where it hurts; one step run again; the best model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Run, gone, step, steps, summary, tandem
from safetensors.numpy import load_file

from tandem.common.errors import ConfigError
from tandem.launch.cli import dispatch

pytestmark = pytest.mark.timeout(500)

BASE = Path(__file__).parents[2] / "launch" / "miniature" / "base"
QUIET = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")
BRIEF = (
    "sft.run.steps=6",
    "rl.run.steps=8",
    "learner.checkpoint_every=2",
    "data.evaluate.0.limit=20",
    "log.every=2",
)


def killed(run: Run, condition: Callable[[], bool], what: str) -> None:
    """Waits, then kills the command; its parts end with it."""
    try:
        run.wait_for(condition, what)
        parts = [child.pid for child in run.tree.children(recursive=True)]
    finally:
        run.end()
    assert gone(parts, 30)


def state(folder: Path) -> str:
    try:
        return str(json.loads((folder / "run.json").read_text())["state"])
    except FileNotFoundError:
        return ""


@pytest.mark.byhand
def test_sft_and_then_rl_survive_kills_in_each_stage_and_between_them(tmp_path: Path) -> None:
    top = tmp_path / "runs" / "miniature-sft-rl"
    sft, rl = top / "sft", top / "rl"
    command = ("start", "miniature-sft-rl")
    killed(Run(tmp_path, *command, *BRIEF), lambda: step(sft) >= 2, "step 2 of sft")
    # From here on the settings are known.
    killed(Run(tmp_path, *command), lambda: state(sft) == "finished", "end of sft")
    assert steps(sft) == list(range(1, 7))
    killed(Run(tmp_path, *command), lambda: step(rl) >= 3, "step 3 of rl")
    assert not (top / "summary.json").exists()
    # Whoever looks at the whole sees the stage that is under way.
    code, said, _ = tandem(tmp_path, "status", "runs/miniature-sft-rl")
    assert (code, "miniature-sft-rl/rl" in said) == (0, True), said
    last = Run(tmp_path, *command)
    try:
        assert last.wait() == 0, last.said()
    finally:
        last.end()
    assert steps(rl) == list(range(1, 9))
    assert "stage 2 of 2: rl" in last.said()
    assert "stage 1" not in last.said()

    made = summary(top)
    assert set(made) == {*summary(sft), "stages"}
    assert [stage["name"] for stage in made["stages"]] == ["sft", "rl"]
    assert made["steps"] == 14
    assert made["tokens_trained"] == sum(summary(one)["tokens_trained"] for one in (sft, rl))
    assert made["accuracy_before"] == summary(sft)["accuracy_before"]
    assert made["accuracy_after"] == summary(rl)["accuracy_after"]
    assert (top / "report.png").stat().st_size > 10_000
    # The second run began from what the first one made.
    config = (rl / "config.yaml").read_text()
    assert "path: runs/miniature-sft-rl/sft/model" in config

    again = Run(tmp_path, *command)
    assert again.wait() == 0
    assert "is finished" in again.said()
    # More steps for a stage whose model another one has begun from.
    more = Run(tmp_path, *command, "sft.run.steps=9")
    assert more.wait() == 2
    assert "stage sft can't go on, since stage rl has begun from what it made" in more.said()


def figures(folder: Path, number: int) -> dict[str, Any]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(one for one in records if one["step"] == number and "train/lr" in one)


@pytest.mark.byhand
def test_one_step_of_a_recorded_run_is_run_again(tmp_path: Path) -> None:
    first = Run(
        tmp_path, "start", "miniature", "log.archive=true", "run.dir=first", "run.steps=6", *QUIET
    )
    assert first.wait() == 0, first.said()
    words = ("offline", "miniature", "learner.source=offline", "run.steps=6")
    code, said, error = tandem(tmp_path, *words, "data.archive=first/archive", "--step", "4")
    assert code == 0, error
    printed = dict(
        line.split(maxsplit=1) for line in said.splitlines() if "/" in line.split(" ")[0]
    )
    expected = figures(tmp_path / "first", 4)
    for name in ("train/grad_norm", "train/loss", "train/lr", "reward/mean"):
        assert float(printed[name]) == expected[name]
    assert steps(tmp_path / "runs" / "miniature-step-4") == [1, 2, 3, 4]
    # Another reward for the same samples: other advantages, and so another gradient.
    code, said, error = tandem(
        tmp_path,
        *("archive", "first", "--out", "paid", "--regrade", "miniature"),
        "reward.components=[{name: repetition}]",
    )
    assert code == 0, error
    assert "48 groups of 6 steps" in said
    code, said, error = tandem(
        tmp_path, *words, "data.archive=paid", "run.dir=paid-4", "--step", "4"
    )
    assert code == 0, error
    other = figures(tmp_path / "paid-4", 4)
    assert other["reward/mean"] < 0 <= expected["reward/mean"]
    assert other["train/grad_norm"] != expected["train/grad_norm"]


def test_a_run_may_only_sample(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        *("start", "miniature-easy", "learner.train=false", "log.archive=true", "run.dir=run"),
        *("run.steps=5", "learner.checkpoint_every=2", *QUIET),
    )
    assert run.wait() == 0, run.said()
    folder = tmp_path / "run"
    base = load_file(BASE / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    assert all((after[name] == base[name]).all() for name in base)
    assert steps(folder) == [1, 2, 3, 4, 5]
    assert len(list((folder / "archive").iterdir())) == 5
    assert summary(folder)["samples_trained"] == 0
    with pytest.raises(ConfigError, match=r"nothing keeps the samples: set log\.archive=true"):
        dispatch(["start", "miniature-easy", "learner.train=false"])


@pytest.mark.byhand
def test_the_best_model_by_a_named_figure_is_kept(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        *("offline", "run.steps=8", "data.evaluate.0.limit=30", "run.dir=run"),
        *("evaluate.every=2", "evaluate.exact=true", "evaluate.best=-heldout/length"),
    )
    folder = tmp_path / "run"
    assert run.wait() == 0, run.said()
    made = summary(folder)
    lengths = {one["step"]: one["mean_length"] for one in made["evaluations"]}
    best = made["best"]
    assert best["value"] == min(lengths.values()) == lengths[best["step"]]
    assert best["metric"] == "heldout/length"
    kept = load_file(folder / "best" / "model.safetensors")
    last = load_file(folder / "model" / "model.safetensors")
    same = all((kept[name] == last[name]).all() for name in kept)
    assert same == (best["step"] == 8)
    assert (folder / "best" / "tokenizer.json").exists()
    for word, said in (
        ("evaluate.best=other/accuracy", "should be a set of data.evaluate"),
        ("evaluate.best=heldout/loss", "should be a set of data.evaluate"),
        ("evaluate.best=heldout/accuracy", "set evaluate.exact=true"),
    ):
        refused = Run(tmp_path, "offline", "evaluate.every=2", word)
        assert refused.wait() == 2
        assert said in refused.said()
