"""A whole run whose learner gets too little memory for its steps."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest


def limited() -> None:
    # Enough for the libraries and the model, and much less than a step takes.
    resource.setrlimit(resource.RLIMIT_DATA, (1500 << 20, 1500 << 20))


@pytest.mark.byhand
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts all memory on Linux alone")
def test_the_run_ends_with_what_would_free_most_and_is_not_tried_for_ever(tmp_path: Path) -> None:
    """The smaller sibling is in ``tests/launch/plan/test_measure.py``."""
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "tandem.launch.cli", "start", "miniature"),
            *(f"run.dir={tmp_path}/run", "run.steps=3", "data.miniature_fresh=1024"),
            *("replay.groups_per_step=512", "rollout.groups_per_batch=128"),
            *("learner.micro_batch_tokens=350000", "evaluate.every=1000"),
            *("launch.max_failures=2", "launch.backoff_seconds=0.1"),
        ],
        capture_output=True,
        text=True,
        timeout=350,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=limited,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert said.count("learner-0 ended with exit code 1; starting it again") == 1, said
    assert "learner-0 died 2 times without a step in between" in said
    (line,) = [one for one in done.stderr.splitlines() if "| tandem: no memory is left" in one][-1:]
    assert "is left for learner-0: it asked for" in line
    assert "it holds libraries 0." in line
    assert ", weights 0.000" in line
    assert "learner.gradient_checkpointing=true (" in line
