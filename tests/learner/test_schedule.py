"""The learning rate of every step."""

from __future__ import annotations

import pytest

from tandem.common.config import OptimizerConfig
from tandem.learner.schedule import learning_rate


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


def test_the_first_step_has_a_learning_rate_without_warm_up() -> None:
    assert learning_rate(OptimizerConfig(lr=2e-4, schedule="linear"), 1, 1) > 0
