"""``run.deterministic=true``: whoever is killed, the parameters are the same in every bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from audit import journal_of
from processes import Run, step
from safetensors.numpy import load_file

from tandem.learner.resume.state_files import CRITIC, StateFiles

pytestmark = pytest.mark.timeout(300)

STEPS = 10
PPO = (
    *("miniature-easy", "learner.objective.name=ppo"),
    *("learner.lora.rank=2", "learner.lora.alpha=4"),
    *("learner.update_epochs=2", "learner.minibatches=2", "learner.stop_kl=0.05"),
    *("learner.critic.optimizer.lr=3.0e-4", "learner.critic.warmup_steps=2"),
)
"""A critic, adapters and two passes over each batch."""
SETTINGS = (
    f"run.steps={STEPS}",
    "run.seed=5",
    "run.deterministic=true",
    "data.miniature_fresh=200",
    "learner.checkpoint_every=4",
    "evaluate.at_start=false",
    "evaluate.at_end=false",
    "evaluate.every=0",
    "launch.backoff_seconds=0.05",
)


def parameters(
    here: Path, name: str, method: tuple[str, ...], kills: dict[int, str]
) -> dict[str, np.ndarray]:
    """Those of a finished run in which processes were killed, by step; the critic's too."""
    folder = here / name
    run = Run(here, "start", *method, f"run.dir={folder}", *SETTINGS)
    try:
        for at, part in sorted(kills.items()):
            run.wait_for(lambda at=at: step(folder) >= at, f"step {at}")
            run.kill_and_await(part)
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    kinds = [record["kind"] for record in journal_of(folder)]
    assert ("resumed" in kinds) == bool(kills)
    found: dict[str, np.ndarray] = load_file(folder / "model" / "model.safetensors")
    critic = folder / "checkpoints" / f"step-{STEPS:08d}" / CRITIC
    if critic.is_dir():
        files = StateFiles(critic)
        assert float(files.whole("head.weight").abs().max()) > 0
        found |= {f"critic.{name}": files.whole(name).numpy() for name in files.names}
    return found


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(("miniature",), id="luffy"),
        pytest.param(PPO, id="ppo", marks=pytest.mark.byhand),
    ],
)
def test_a_killed_run_ends_with_the_parameters_of_one_that_was_left_alone(
    method: tuple[str, ...], tmp_path: Path
) -> None:
    undisturbed = parameters(tmp_path, "undisturbed", method, {})
    assert any(name.startswith("critic.") for name in undisturbed) == (method is PPO)
    at = random.randint(2, STEPS - 5)
    kills = {at - 1: "rollout-0", at: "learner-0", at + 1: "reward-0", at + 2: "redis"}
    killed = parameters(tmp_path, "killed", method, kills)
    differ = [
        name for name, value in undisturbed.items() if not np.array_equal(value, killed[name])
    ]
    assert differ == [], f"the learner was killed at step {at}"
