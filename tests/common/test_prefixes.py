"""Which share of a trace a response begins with, over the steps of a run."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.common.prefixes import PrefixSchedule, prefix_length, prefix_shares


def drawn(count: int) -> list[float]:
    found: list[float] = np.random.default_rng(0).random(count).tolist()
    return found


def test_fixed_ratios_are_evenly_spaced_and_one_row_gets_the_greatest() -> None:
    assert prefix_shares("fixed", 5, drawn, low=0.2, high=1.0) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0]
    )
    assert prefix_shares("fixed", 1, drawn, low=0.2, high=0.9) == [0.9]


def test_random_ratios_lie_in_their_bounds() -> None:
    found = prefix_shares("random", 1000, drawn, low=0.3, high=0.6)
    assert 0.3 <= min(found) < 0.31
    assert 0.59 < max(found) <= 0.6


@pytest.mark.parametrize(("step", "share"), [(0, 0.8), (25, 0.6), (50, 0.4), (100, 0), (300, 0)])
def test_the_linear_ratio_falls_to_0(step: int, share: float) -> None:
    found = prefix_shares("linear", 3, drawn, step=step, steps=100, high=0.8)
    assert found == pytest.approx([share] * 3)


@pytest.mark.parametrize(
    ("step", "falling", "growing"), [(0, 10, 1), (39, 7, 4), (99, 1, 10), (500, 1, 10)]
)
def test_the_staircases_bound_what_is_drawn(step: int, falling: int, growing: int) -> None:
    schedules: list[tuple[PrefixSchedule, int]] = [
        ("linear_max", falling),
        ("reverse_linear", growing),
    ]
    for how, tenths in schedules:
        found = prefix_shares(how, 2000, drawn, step=step, steps=100, high=0.9)
        most = 0.9 * tenths / 10
        assert 0.98 * most < max(found) <= most


@pytest.mark.parametrize(("step", "least"), [(0, 0.95), (50, 0.5), (100, 0.05), (300, 0.05)])
def test_the_cosines_least_share_falls(step: int, least: float) -> None:
    found = prefix_shares("cosine", 2000, drawn, step=step, steps=100, low=0.05, high=0.95)
    assert least <= min(found) + 1e-12
    assert min(found) < least + 0.01
    assert 0.94 < max(found) <= 0.95 + 1e-12


def test_a_prefix_is_rounded_down() -> None:
    assert [prefix_length(7, ratio) for ratio in (0.0, 0.5, 0.99, 1.0)] == [0, 3, 6, 7]
