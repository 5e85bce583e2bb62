"""Coefficients move by what an update measured, and only by that."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.objectives import OBJECTIVES
from tandem.learner.updates.coefficients import Coefficients

MEASURED = {
    "entropy": 0.4,
    "entropy_expert": 1.0,
    "tokens_own": 30.0,
    "tokens_expert": 10.0,
    "k3_reference": 0.3,
    "k1_reference": 0.05,
}


def followed(measured: dict[str, float] = MEASURED, **settings: Any) -> Coefficients:
    found = Coefficients.of(OBJECTIVES["grpo"](**settings))
    found.follow(measured)
    found.follow_step(measured)
    return found


def stepped(**settings: Any) -> float:
    common = {"entropy_adapt": "stepped", "entropy_step": 0.01, "entropy_coefficient": 0.1}
    return followed(**{**common, **settings}).entropy


def test_the_entropy_is_of_the_tokens_that_the_bonus_is_over() -> None:
    """0.4 over own tokens, 0.55 over all."""
    assert stepped(entropy_target=0.5) == pytest.approx(0.11)
    assert stepped(entropy_target=0.5, entropy_over="all") == pytest.approx(0.09)


def test_a_learned_coefficient_goes_down_while_the_entropy_is_over_its_target() -> None:
    found = stepped(entropy_target=0.3, entropy_adapt="learned")
    assert 0.0999 < found < 0.1
    assert stepped(entropy_target=0.5, entropy_adapt="learned") > 0.1


def test_each_kl_is_steered_by_its_own_measure() -> None:
    found = followed(kl_target=0.1, kl_coefficient=1.0, kl_reward_coefficient=1.0)
    assert (found.kl, found.kl_reward) == (pytest.approx(1.02), pytest.approx(0.98))
    assert found.metrics == {
        "kl_coefficient": found.kl,
        "kl_reward_coefficient": found.kl_reward,
    }


def test_what_was_not_measured_or_has_no_target_stays() -> None:
    moving = {"entropy_target": 0.5, "entropy_adapt": "stepped", "entropy_coefficient": 0.1}
    assert followed({}, **moving, kl_target=0.1, kl_coefficient=1.0).state() == {
        "entropy": 0.1,
        "kl": 1.0,
        "kl_reward": 0.0,
    }
    still = followed(entropy_coefficient=0.1, entropy_target=0.5, kl_coefficient=1.0)
    assert still.state() == {"entropy": 0.1, "kl": 1.0, "kl_reward": 0.0}
    assert still.metrics == {}


def test_a_checkpoint_without_them_leaves_the_start() -> None:
    found = Coefficients.of(OBJECTIVES["grpo"](kl_coefficient=0.2))
    found.restore({})
    assert found.kl == 0.2
