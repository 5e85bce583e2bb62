"""What the running system is measured against still runs: benchmarks are else started by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_loop_in_one_process_trains() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "benchmarks" / "single_process.py"),
            *("--preset", "miniature", "--steps", "2", "run.steps=2", "data.miniature_fresh=64"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout.splitlines()[-1])
    assert len(parts["update"]) == 2, parts
    assert all(seconds > 0 for seconds in parts["learn"])


def test_the_learner_is_timed_beside_a_bare_model() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "benchmarks" / "learner.py"),
            *("--models", "3M", "--pairs", "1", "--rows", "8"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| 3M, ")]
    compared = [line.split(" | ")[0] for line in lines]
    assert compared[:2] == ["| 3M, alike: bare, learner", "| 3M, varied: bare, learner"]
    # The layout that was chosen, whatever it is on this machine, beside padded rows.
    assert len(compared) == 3, compared
    assert compared[2].startswith("| 3M, varied: learner padded, ")
