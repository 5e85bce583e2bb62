"""What the running system is measured against still runs: benchmarks are else started by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.launch.run.opened import presets
from tandem.reward.grades import GradeItem
from tandem.reward.grading import Grader

ROOT = Path(__file__).resolve().parents[2]


def run(benchmark: str, *words: str, seconds: float = 100) -> str:
    """What a benchmark prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "benchmarks" / f"{benchmark}.py"), *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_in_one_process_trains() -> None:
    words = ("--preset", "miniature", "--steps", "2", "run.steps=2", "data.miniature_fresh=64")
    parts = json.loads(run("single_process", *words).splitlines()[-1])
    assert len(parts["update"]) == 2, parts
    assert all(seconds > 0 for seconds in parts["learn"])


@pytest.mark.byhand
def test_the_learner_is_timed_beside_a_bare_model() -> None:
    said = run("learner", "--models", "3M", "--pairs", "1", "--rows", "8")
    lines = [line for line in said.splitlines() if line.startswith("| 3M, ")]
    compared = [line.split(" | ")[0] for line in lines]
    assert compared[:2] == ["| 3M, alike: bare, learner", "| 3M, varied: bare, learner"]
    # The layout that was chosen, whatever it is on this machine, beside padded rows.
    assert len(compared) == 3, compared
    assert compared[2].startswith("| 3M, varied: learner padded, ")


@pytest.mark.byhand
def test_the_race_runs_and_counts_what_it_says(tmp_path: Path) -> None:
    run(
        "race",
        *("--rounds", "1", "--steps", "5", "--races", "sums"),
        *("--no-trl", "--arms", "Tandem, on-policy"),
        *("--dir", str(tmp_path), "--page", str(tmp_path / "race.md")),
        seconds=200,
    )
    found = json.loads((tmp_path / "race.json").read_text())["sums"]
    (one,) = found["Tandem, on-policy"]
    assert one["samples"] > 0
    # All cores' worth at most; nearly all samples run to the limit.
    assert 0 < one["cpu"] * one["samples"] <= (os.cpu_count() or 1) + 0.5
    assert 50 < one["length"] <= 64
    assert one["memory"] > 300
    assert "| Tandem, on-policy | **" in (tmp_path / "race.md").read_text()


@pytest.mark.byhand
def test_the_pool_is_timed_beside_a_bare_process() -> None:
    lines = run("pool", "--quick", "--rounds", "1", seconds=200).splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| 8 x ")]
    assert rows == ["8 x 74 tokens", "8 x 2,048 tokens", "8 x 8,192 tokens"]


def test_both_sides_of_the_race_are_paid_alike() -> None:
    """The chains' reward for TRL is the preset's own, graded by Tandem's pool."""
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    try:
        import race_work
    finally:
        sys.path.pop(0)
    texts = [
        r"5+3=8-2=6</think> <answer> \boxed{6} </answer>",
        r"5+3=8-2=6</think> <answer> \boxed{7} </answer>",
        r"5+3=8</think> <answer> \boxed{6} </answer>",
        r"5+3=8-2=6</think> <answer> \boxed{6} </answer>6",
        r"5+3=8-2=6</think> <answer> \boxed{6}",
        r"\boxed{6}",
        "",
    ]
    with Grader(presets.load("miniature-easy").resolve([]).reward) as grader:
        grades = grader.grade_texts([GradeItem(text=text, gold="6") for text in texts])
    paid = race_work.chain(texts, ["6"] * len(texts))
    assert paid == [grade.reward for grade in grades]
    assert paid == [1, 0, 1, 0, 0, 0, 0]


def test_figures_of_two_versions_meet_by_their_names() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    try:
        import versions
    finally:
        sys.path.pop(0)
    old = """2 cores
| groups of | | ledger | ratio |
|---|---|---|---|
| 8 x 74 tokens | put | 1,000 | **0.50** (0.4 0.6) |
| 8 x 74 tokens | taken | 2,000 | **0.60** |
open the journal  0.20 s  18.9 times
{"memory": 0.1, "seconds": 93.1}
"""
    assert versions.figures(old) == {
        "cores": 2,
        "8 x 74 tokens put, ledger": 1000,
        "8 x 74 tokens put, ratio": 0.5,
        "8 x 74 tokens taken, ledger": 2000,
        "8 x 74 tokens taken, ratio": 0.6,
        "open the journal s": 0.2,
        "open the journal s times": 18.9,
        "memory": 0.1,
        "memory seconds": 93.1,
    }
    new = old.replace("1,000", "1,100").replace("0.20 s", "0.21 s").replace("93.1", "one")
    runs = versions.Runs(old=[old, old, old], new=[new, old, new])
    assert versions.compared(runs, 0.05) == [
        "| 8 x 74 tokens put, ledger | 1,000 | 1,100 | **1.10** | 1.10 1.00 1.10 |",
        "| open the journal s | 0.2 | 0.21 | 1.05 | 1.05 1.00 1.05 |",
    ]
