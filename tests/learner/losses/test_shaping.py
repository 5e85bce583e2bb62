"""Shaped weights against LUFFY's table: every reshape of expert and of own tokens."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.learner.losses.ratios import clip_surrogate
from tandem.learner.losses.shaping import (
    chord_mu,
    chord_phi,
    expert_weights,
    own_ratios,
    shape,
)
from tandem.learner.objectives import make

F64 = torch.float64
PROBS = torch.tensor([0.01, 0.1, 0.5, 1.0], dtype=F64)
OLD = 0.2
NEW = torch.tensor([0.1, 0.2, 0.25, 0.4], dtype=F64)

EXPERT: list[tuple[dict[str, Any], list[float]]] = [
    ({"how": "none"}, [0.010000, 0.100000, 0.500000, 1.000000]),
    ({"how": "log", "coefficient": 0.1}, [-0.460517, -0.230259, -0.069315, 0.0]),
    ({"how": "log", "coefficient": 1.0}, [-4.605170, -2.302585, -0.693147, 0.0]),
    ({"how": "plus_log", "coefficient": 0.1}, [-0.450517, -0.130259, 0.430685, 1.0]),
    ({"how": "plus_log", "coefficient": 1.0}, [-4.595170, -2.202585, -0.193147, 1.0]),
    ({"how": "square_root"}, [0.100000, 0.316228, 0.707107, 1.0]),
    ({"how": "power", "exponent": 0.5}, [0.100000, 0.316228, 0.707107, 1.0]),
    ({"how": "power", "exponent": 0.3}, [0.251189, 0.501187, 0.812252, 1.0]),
    ({"how": "ratio", "gamma": 0.1}, [0.090909, 0.500000, 0.833333, 0.909091]),
    ({"how": "ratio", "gamma": 0.3}, [0.032258, 0.250000, 0.625000, 0.769231]),
    ({"how": "ratio", "gamma": 0.5}, [0.019608, 0.166667, 0.500000, 0.666667]),
]


def weights(logprobs: torch.Tensor, known: bool = False, **options: Any) -> torch.Tensor:
    recorded = torch.full_like(logprobs, math.log(0.5))
    return expert_weights(logprobs, recorded, torch.full_like(logprobs, known).bool(), **options)


@pytest.mark.parametrize(("options", "expected"), EXPERT)
def test_each_expert_reshape_is_the_published_one(
    options: dict[str, Any], expected: list[float]
) -> None:
    found = weights(PROBS.log(), **options)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), atol=1e-6, rtol=0)


def test_a_teachers_probability_divides_unshaped_and_then_the_clip_bounds_it() -> None:
    found = weights(PROBS.log(), known=True, behaviour="published")
    expected = torch.tensor([0.020000, 0.200000, 0.999998, 1.999996], dtype=F64)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    found = weights(PROBS.log(), known=True, behaviour="published", clip_high=1.0)
    torch.testing.assert_close(found, expected.clamp(max=1.0), atol=1e-6, rtol=0)
    found = weights(PROBS.log(), known=True, behaviour="published", clip_low=0.3)
    torch.testing.assert_close(found, expected.clamp(min=0.3), atol=1e-6, rtol=0)


def test_the_slope_of_the_shaping_is_greatest_at_gamma() -> None:
    leaf = PROBS.log().requires_grad_()
    weights(leaf, how="ratio", gamma=0.1).sum().backward()
    expected = torch.tensor([0.082645, 0.250000, 0.138889, 0.082645], dtype=F64)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, atol=1e-6, rtol=0)
    # The bound of the gradient by a logit, f'(p) p (1 − p).
    bound = leaf.grad * (1 - PROBS)
    expected = torch.tensor([0.081818, 0.225000, 0.069444, 0.0], dtype=F64)
    torch.testing.assert_close(bound, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("none", [0.5, 1.0, 1.25, 2.0]),
        ("log", [-0.0693147, 0.0, 0.0223144, 0.0693147]),
        ("plus_log", [0.430685, 1.0, 1.272314, 2.069315]),
        ("square_root", [0.707107, 1.0, 1.118034, 1.414214]),
        ("power", [0.707107, 1.0, 1.118034, 1.414214]),
        ("ratio", [0.75, 1.0, 1.071429, 1.2]),
    ],
)
def test_each_own_reshape_is_the_published_one(how: Any, expected: list[float]) -> None:
    """``log`` is there times c = 0.1, which upstream leaves out."""
    found = own_ratios(NEW.log(), torch.full_like(NEW, OLD).log(), how)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("advantage", "expected"), [(1.0, [-0.5, -1.0, -1.2, -1.2]), (-1.0, [0.8, 1.0, 1.25, 2.0])]
)
def test_the_clip_is_the_published_one(advantage: float, expected: list[float]) -> None:
    ratio = own_ratios(NEW.log(), torch.full_like(NEW, OLD).log())
    found = clip_surrogate(
        ratio, torch.tensor(advantage, dtype=F64), clip_low=0.2, clip_high=0.2, dual_clip=None
    )
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("how", ["none", "ratio", "log", "power", "square_root", "plus_log"])
def test_a_weight_is_finite_whatever_its_log(how: Any) -> None:
    leaf = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]).requires_grad_()
    found = expert_weights(leaf, torch.zeros(5), torch.ones(5).bool(), how)
    found.sum().backward()
    assert found.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_shape_is_a_function_of_the_weight_alone() -> None:
    log_w = torch.tensor([0.3, -0.7], dtype=F64)
    torch.testing.assert_close(shape(log_w, "ratio", gamma=0.2), 1 / (1 + 0.2 / log_w.exp()))


# The published worked example with other options; p, p_μ, masks and A as in hand_made.py.
VARIANTS: list[tuple[dict[str, Any], float]] = [
    ({}, 0.002315),
    ({"aggregation": "token_mean"}, 0.000926),
    ({"clip_low": 0.2, "clip_high": 0.2}, 0.049537),
    ({"shaping": "none"}, 0.059444),
    ({"shaping": "log"}, 0.197271),
]


@pytest.mark.parametrize(("options", "expected"), VARIANTS)
def test_luffy_code_gives_the_published_losses(
    options: dict[str, Any], expected: float, hand: ModuleType
) -> None:
    objective = make("luffy_code", entropy_coefficient=0.0, **options)
    these, _ = hand.reference_case()
    scalars = hand.scalars_of(objective, these) | {"width": 4.0}
    assert objective.loss(these, scalars)[0].item() == pytest.approx(expected, abs=1e-6)


def test_likely_tokens_leave_the_published_loss_and_its_denominator(hand: ModuleType) -> None:
    objective = make(
        "luffy_code", entropy_coefficient=0.0, max_probability=0.5, aggregation="token_mean"
    )
    assert "current" in objective.columns
    these, _ = hand.reference_case()
    scalars = hand.scalars_of(objective, these)
    found, _ = objective.loss(these, scalars)
    # Left: .5 .4 .3 | .1 .5 | .02 .3, seven tokens; A = −2/3, 1/3, 1/3.
    own = 2 / 3 * (0.5 / 0.4 + 1 + 0.3 / 0.45) - 1 / 3 * (0.5 + 1)
    expert = -1 / 3 * (0.02 / 0.12 + 0.3 / 0.4)
    assert found.item() == pytest.approx((own + expert) / 7, abs=1e-12)


def test_likely_tokens_stay_in_the_entropy_and_the_kl_and_in_their_denominators(
    hand: ModuleType,
) -> None:
    """As in the published code, whose bound on the probability is inside the function of the policy's loss."""
    these, leaf = hand.reference_case()
    these = these.with_columns(
        entropy=torch.full_like(leaf, 2.0).detach(), reference=leaf.detach() - 0.3
    )
    settings: dict[str, Any] = {"max_probability": 0.5, "aggregation": "token_mean"}

    def loss(**changes: float) -> float:
        objective = make("luffy_code", **settings | {"entropy_coefficient": 0.0} | changes)
        found: float = objective.loss(these, hand.scalars_of(objective, these))[0].item()
        return found

    alone = loss()
    assert loss(entropy_coefficient=1.0) - alone == pytest.approx(-2.0, abs=1e-12)
    # Seven of the ten tokens are the policy's own; the mean is over all.
    settings["kl_form"] = "kl"
    assert loss(kl_coefficient=1.0) - alone == pytest.approx(0.3 * 7 / 10, abs=1e-12)


def test_chords_weight_warms_up_and_then_decays() -> None:
    given = {"peak": 0.9, "valley": 0.1, "warmup_steps": 10, "decay_steps": 20}
    found = [chord_mu(step, **given) for step in (0, 5, 10, 20, 30, 99)]  # type: ignore[arg-type]
    assert found == pytest.approx([0.0, 0.45, 0.9, 0.5, 0.1, 0.1])
    assert chord_mu(0, peak=0.9, valley=0.1) == 0.1


def test_chords_token_weight_is_least_where_the_model_is_certain() -> None:
    leaf = torch.tensor([0.5, 0.999, 0.001]).log().requires_grad_()
    found = chord_phi(leaf)
    torch.testing.assert_close(found, torch.tensor([0.25, 0.000999, 0.000999]))
    assert not found.requires_grad
