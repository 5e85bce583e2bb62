"""Steps of which no token can move the gradient: how many in a row are told, and why."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tandem.learner.metrics.idle import Idle

ACTIVE = {"train/rows": 8.0, "train/rows_active": 8.0, "train/grad_norm": 0.3}
EQUAL = {"train/rows": 8.0, "train/rows_active": 0.0}
FLAT = {"train/rows": 8.0, "train/rows_active": 8.0, "train/grad_norm": 0.0}
UNGRADED = {"train/rows": 0.0, "train/rows_active": 0.0}


def idle_of(made_up: ModuleType, total: int = 100, **learner: Any) -> Idle:
    return Idle(made_up.config_of(learner={"max_idle": 3, **learner}), total)


def test_a_stretch_is_told_once_and_ends_with_the_first_step_that_moves(made_up: ModuleType):
    idle = idle_of(made_up)
    assert [idle.saw(step, EQUAL) for step in range(1, 6)] == [False, False, True, False, False]
    assert idle.steps == 5
    assert "no token of the last 5 steps" in idle.alarm
    assert not idle.saw(6, ACTIVE)
    assert (idle.steps, idle.alarm) == (0, "")
    assert [idle.saw(step, EQUAL) for step in range(7, 10)] == [False, False, True]


def test_a_run_that_is_shorter_is_idle_as_a_whole(made_up: ModuleType):
    idle = idle_of(made_up, total=2)
    assert [idle.saw(step, FLAT) for step in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("metrics", "learner", "why"),
    [
        (EQUAL, {}, "advantage=group_mean is 0 for every row"),
        (FLAT, {}, "the loss of learner.objective.name=grpo has no gradient on their samples"),
        (UNGRADED, {}, "none of their samples has a verdict"),
        (
            EQUAL,
            {"source": "offline", "objective": {"name": "luffy"}},
            "gives each of their traces the advantage 0: choose sft",
        ),
    ],
)
def test_why_is_told_with_the_way_out(
    made_up: ModuleType, metrics: dict[str, float], learner: dict[str, Any], why: str
):
    idle = idle_of(made_up, **learner)
    for step in range(1, 4):
        idle.saw(step, metrics)
    assert why in idle.alarm


def test_a_gradient_that_is_no_number_is_another_matter(made_up: ModuleType):
    idle = idle_of(made_up)
    nan = {**ACTIVE, "train/grad_norm": float("nan")}
    assert not any(idle.saw(step, nan) for step in range(1, 10))
    assert idle.steps == 0


@pytest.mark.parametrize(("total", "told_at"), [(100, 8), (7, 7)])
def test_the_policy_may_stand_still_in_the_critics_warm_up_alone(
    made_up: ModuleType, total: int, told_at: int
):
    idle = idle_of(made_up, total, objective={"name": "ppo"}, critic={"warmup_steps": 5})
    assert [step for step in range(1, told_at + 1) if idle.saw(step, FLAT)] == [told_at]
    assert idle.steps == told_at - 5
