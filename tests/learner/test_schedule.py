"""The learning rate of every step."""

from __future__ import annotations

from types import ModuleType

import pytest

from tandem.common.config import OptimizerConfig
from tandem.common.errors import ConfigError
from tandem.learner.loop.schedule import check_warmup, learning_rate


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ("constant", {1: 0.2, 4: 0.8, 5: 1.0, 6: 1.0, 105: 1.0, 200: 1.0}),
        ("linear", {1: 0.2, 5: 1.0, 55: 0.55, 105: 0.1, 200: 0.1}),
        ("cosine", {5: 1.0, 30: 1 - 0.9 * 0.1464466, 55: 0.55, 105: 0.1}),
    ],
)
def test_warm_up_then_the_schedule(schedule: str, at: dict[int, float]) -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=5, schedule=schedule, final_lr_share=0.1)
    for step, expected in at.items():
        assert learning_rate(optimizer, step, 105) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "total", "steps"), [(0.1, 50, 5), (0.03, 100, 3), (0.03, 40, 2), (0.07, 100, 7)]
)
def test_a_share_of_the_run_warms_up(share: float, total: int, steps: int) -> None:
    """A share is rounded up, so that a short run warms up too."""
    by_share = OptimizerConfig(lr=1.0, warmup_share=share, schedule="cosine")
    by_steps = OptimizerConfig(lr=1.0, warmup_steps=steps, schedule="cosine")
    for step in range(1, total + 1):
        assert learning_rate(by_share, step, total) == learning_rate(by_steps, step, total)
    assert learning_rate(by_share, 1, total) == pytest.approx(1 / steps)


def test_the_first_step_has_a_learning_rate_without_warm_up() -> None:
    assert learning_rate(OptimizerConfig(lr=2e-4, schedule="linear"), 1, 1) > 0


def test_a_critics_warm_up_must_leave_the_policy_a_step(made_up: ModuleType) -> None:
    config = made_up.config_of(
        run={"steps": None, "passes": 2},
        learner={"objective": {"name": "ppo"}, "critic": {"warmup_steps": 12}},
    )
    check_warmup(config, 13)
    with pytest.raises(ConfigError, match=r"=12 leaves .* in all 12 steps of run\.passes=2: lower"):
        check_warmup(config, 12)
