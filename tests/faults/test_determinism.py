"""``run.deterministic=true``: whoever is killed, the parameters are the same in every bit."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from audit import journal_of
from processes import Run, step
from safetensors.numpy import load_file

pytestmark = pytest.mark.timeout(300)

STEPS = 10
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


def parameters(here: Path, name: str, kills: dict[int, str]) -> dict[str, np.ndarray]:
    """Those of a finished run in which processes were killed, by step."""
    folder = here / name
    run = Run(here, "start", f"run.dir={folder}", *SETTINGS)
    try:
        for at, part in sorted(kills.items()):
            run.wait_for(lambda at=at: step(folder) >= at, f"step {at}")
            run.kill_and_await(part)
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    kinds = [record["kind"] for record in journal_of(folder)]
    assert ("resumed" in kinds) == bool(kills)
    return load_file(folder / "model" / "model.safetensors")


def test_a_killed_run_ends_with_the_parameters_of_one_that_was_left_alone(tmp_path: Path) -> None:
    undisturbed = parameters(tmp_path, "undisturbed", {})
    at = random.randint(2, STEPS - 3)
    killed = parameters(tmp_path, "killed", {at - 1: "rollout-0", at: "learner-0"})
    differ = [
        name for name, value in undisturbed.items() if not np.array_equal(value, killed[name])
    ]
    assert differ == [], f"the learner was killed at step {at}"


PPO = (
    *("miniature-easy", "learner.objective.name=ppo", "learner.update_epochs=2"),
    *("learner.minibatches=2", "learner.stop_kl=0.05", "learner.critic.optimizer.lr=3.0e-4"),
    "learner.critic.warmup_steps=2",
)


def trained_on(here: Path, name: str, kill_at: int | None) -> dict[str, np.ndarray]:
    """Parameters of policy and critic after PPO on the archive, with the learner killed at a step."""
    folder = here / name
    words = ("learner.source=offline", f"data.archive={here / 'first' / 'archive'}")
    run = Run(here, "offline", *PPO, *words, f"run.dir={folder}", *SETTINGS)
    try:
        if kill_at is not None:
            run.wait_for(lambda: step(folder) >= kill_at, f"step {kill_at}")
            run.kill_and_await("learner-0")
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    kinds = [record["kind"] for record in journal_of(folder)]
    assert ("resumed" in kinds) == (kill_at is not None)
    found: dict[str, np.ndarray] = load_file(folder / "model" / "model.safetensors")
    (path,) = (folder / "checkpoints" / f"step-{STEPS:08d}" / "critic").glob("*model_states.pt")
    module = torch.load(path, weights_only=False)["module"]
    assert float(module["head.weight"].abs().max()) > 0
    return found | {f"critic.{key}": tensor.numpy() for key, tensor in module.items()}


def test_policy_and_critic_of_a_killed_run_are_those_of_one_that_was_left_alone(
    tmp_path: Path,
) -> None:
    """The same groups for both: those of an archive."""
    first = Run(
        tmp_path, "start", *PPO, f"run.dir={tmp_path / 'first'}", *SETTINGS, "log.archive=true"
    )
    try:
        assert first.wait() == 0, first.said()
    finally:
        first.end()
    undisturbed = trained_on(tmp_path, "undisturbed", None)
    killed = trained_on(tmp_path, "killed", random.randint(2, STEPS - 3))
    differ = [
        name for name, value in undisturbed.items() if not np.array_equal(value, killed[name])
    ]
    assert differ == []
