"""KL penalties, entropies, coefficients and the critic's loss, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.learner.losses.penalties import (
    controlled_coefficient,
    entropy_of,
    kl_in_loss,
    learned_coefficient,
    scaled_coefficient,
    stepped_coefficient,
    value_loss,
)
from tandem.learner.recipes.as_published import temperature_loss

F64 = torch.float64
NOW = torch.tensor([0.5, 0.2, 0.1], dtype=F64).log()
REF = torch.tensor([0.4, 0.2, 0.3], dtype=F64).log()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("kl", [0.223144, 0.0, -1.098612]),
        ("abs", [0.223144, 0.0, 1.098612]),
        ("mse", [0.024897, 0.0, 0.603474]),
        ("low_var", [0.023144, 0.0, 0.901388]),
        ("k2", [0.024897, 0.0, 0.603474]),
        ("k3", [0.023144, 0.0, 0.901388]),
    ],
)
def test_each_form_is_the_published_one(form: str, expected: list[float]) -> None:
    found = kl_in_loss(NOW, REF, form)  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_with_its_ratio_a_penalty_has_the_gradient_of_the_divergence(form: str) -> None:
    """Over a vocabulary of 3, samples of μ: E_μ[∂ penalty] = ∂ KL(π‖π_ref)."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=F64, requires_grad=True)
    mu = torch.tensor([0.2, 0.5, 0.3], dtype=F64)
    ref = torch.tensor([0.5, 0.3, 0.2], dtype=F64).log()
    now = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((now.exp() * (now - ref)).sum(), logits, retain_graph=True)
    penalty = kl_in_loss(now, ref, form, log_ratios=now - mu.log())  # type: ignore[arg-type]
    (found,) = torch.autograd.grad((mu * penalty).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, exact)
    # And what its first estimator would do in the loss: nothing.
    samples = now.exp().detach()
    (nothing,) = torch.autograd.grad((samples * kl_in_loss(now, ref, "kl")).sum(), logits)
    torch.testing.assert_close(nothing, torch.zeros(3, dtype=F64))


@pytest.mark.parametrize("form", ["k2", "k3", "low_var", "mse"])
@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
def test_penalties_are_finite_far_away(form: str, gap: float) -> None:
    leaf = torch.tensor([gap], requires_grad=True)
    found = kl_in_loss(leaf, torch.zeros(1), form, log_ratios=leaf - 0.0)  # type: ignore[arg-type]
    found.sum().backward()
    assert found.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_entropy_is_over_the_whole_vocabulary() -> None:
    found = entropy_of(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([0.832396, 1.098612]), atol=1e-6, rtol=0)
    forbidden = entropy_of(torch.tensor([0.0, 0.0, -math.inf]))
    torch.testing.assert_close(forbidden, torch.tensor(math.log(2)))


def test_a_scaled_coefficient_grows_as_the_entropy_falls() -> None:
    assert scaled_coefficient(0.001, 0.3, 0.6) == pytest.approx(0.0005)
    assert scaled_coefficient(0.001, 0.3, 0.1) == pytest.approx(0.003)
    assert math.isfinite(scaled_coefficient(0.001, 0.3, 0.0))


def test_a_stepped_coefficient_moves_towards_the_target() -> None:
    assert stepped_coefficient(0.01, 0.3, 0.2, step=0.005) == pytest.approx(0.015)
    assert stepped_coefficient(0.01, 0.3, 0.4, step=0.005) == pytest.approx(0.005)
    assert stepped_coefficient(0.0, 0.3, 0.4) == 0.0


def test_the_temperature_grows_while_the_entropy_is_under_its_target() -> None:
    log_alpha = torch.tensor(0.5, requires_grad=True)
    entropy = torch.tensor([0.1, 0.3], requires_grad=True)
    loss = temperature_loss(log_alpha, entropy, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(-0.3 * math.exp(0.5))
    assert log_alpha.grad is not None
    assert log_alpha.grad < 0
    assert entropy.grad is None


def test_a_learned_coefficient_is_a_step_down_that_loss() -> None:
    log_alpha = torch.tensor(math.log(0.4), dtype=torch.float64, requires_grad=True)
    loss = temperature_loss(log_alpha, torch.tensor([0.1], dtype=torch.float64), 0.5)
    loss.backward()
    assert log_alpha.grad is not None
    stepped = math.exp(log_alpha.item() - 0.05 * log_alpha.grad.item())
    assert learned_coefficient(0.4, 0.5, 0.1, step=0.05) == pytest.approx(stepped)
    assert learned_coefficient(0.4, 0.5, 1e9, step=0.05) == pytest.approx(0.4 / math.e)


def test_a_kl_coefficient_is_steered_to_its_target() -> None:
    assert controlled_coefficient(0.5, 0.1, 0.11) == pytest.approx(0.5 * 1.01)
    assert controlled_coefficient(0.5, 0.1, 7.0) == pytest.approx(0.5 * 1.02)
    assert controlled_coefficient(0.5, 0.1, -1.0) == pytest.approx(0.5 * 0.98)
    assert controlled_coefficient(0.5, 0.1, 0.09, gain=1.0) == pytest.approx(0.5 * 0.9)


def test_the_critics_loss_is_the_greater_of_the_near_and_the_plain_one() -> None:
    values = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    old, goal = torch.tensor([0.5, 0.1, 0.0]), torch.tensor([0.0, 1.0, 3.0])
    found = value_loss(values, old, goal, clip=0.2)
    # 1 against 0.7; 0 against 0; 2 against 0.2 of a goal of 3.
    torch.testing.assert_close(found, 0.5 * torch.tensor([1.0, 1.0, 2.8**2]))
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, -1.0, 0.0]
    torch.testing.assert_close(value_loss(values, old, goal, None), 0.5 * (values - goal) ** 2)
