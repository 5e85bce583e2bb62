"""Prefix schedules, CHORD's weight and ExGRPO's buckets."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.learner.losses.mixing import (
    bucket_weights,
    chord_mu,
    chord_phi,
    cosine_prefix_low,
    prefix_length,
    prefix_ratios,
)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_fixed_ratios_are_evenly_spaced_and_one_row_gets_the_greatest() -> None:
    assert prefix_ratios("fixed", 5, low=0.2, high=1.0).tolist() == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0]
    )
    assert prefix_ratios("fixed", 1, low=0.2, high=0.9).tolist() == [0.9]


def test_random_ratios_lie_in_their_bounds() -> None:
    found = prefix_ratios("random", 1000, low=0.3, high=0.6, generator=seeded())
    assert 0.3 <= found.min() < 0.31
    assert 0.59 < found.max() <= 0.6


@pytest.mark.parametrize(("step", "share"), [(0, 0.8), (25, 0.6), (50, 0.4), (100, 0), (300, 0)])
def test_the_linear_ratio_falls_to_0(step: int, share: float) -> None:
    found = prefix_ratios("linear", 3, step=step, steps=100, high=0.8)
    assert found.tolist() == pytest.approx([share] * 3)


@pytest.mark.parametrize(
    ("step", "falling", "growing"), [(0, 10, 1), (39, 7, 4), (99, 1, 10), (500, 1, 10)]
)
def test_the_staircases_bound_what_is_drawn(step: int, falling: int, growing: int) -> None:
    for how, tenths in (("linear_max", falling), ("reverse_linear", growing)):
        found = prefix_ratios(
            how, 2000, step=step, steps=100, high=0.9, generator=seeded()  # type: ignore[arg-type]
        )  # fmt: skip
        most = 0.9 * tenths / 10
        assert 0.98 * most < found.max() <= most


@pytest.mark.parametrize(("step", "least"), [(0, 0.95), (50, 0.5), (100, 0.05), (300, 0.05)])
def test_the_cosines_least_share_falls(step: int, least: float) -> None:
    found = prefix_ratios(
        "cosine", 2000, step=step, steps=100, low=0.05, high=0.95, generator=seeded()
    )
    assert least <= found.min() + 1e-12
    assert found.min() < least + 0.01
    assert 0.94 < found.max() <= 0.95 + 1e-12


def test_a_prefix_is_rounded_down() -> None:
    assert [prefix_length(7, ratio) for ratio in (0.0, 0.5, 0.99, 1.0)] == [0, 3, 6, 7]


def test_prefix_rfts_lower_end_falls_on_a_half_cosine() -> None:
    found = [cosine_prefix_low(step, 100) for step in (0, 50, 100, 200)]
    assert found == pytest.approx([0.95, 0.475, 0.0, 0.0])


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


def test_buckets_follow_the_normal_density() -> None:
    found = bucket_weights(8)
    density = [math.exp(-((k - 4) ** 2) / 2) for k in range(1, 8)]
    assert found.tolist() == pytest.approx([d / sum(density) for d in density])
    assert found[3].item() == pytest.approx(0.3991, abs=1e-4)
