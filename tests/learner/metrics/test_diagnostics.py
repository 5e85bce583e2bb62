"""Metrics of the ratios, from tokens laid out by hand."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from tandem.learner.metrics.diagnostics import diagnose, evaluate, percentile
from tandem.learner.objectives import make


def test_the_figures_of_a_batch_do_not_depend_on_its_split(made_up: ModuleType) -> None:
    rows = made_up.random_rows(lag=1)
    logprobs = -torch.rand(len(rows.row), generator=torch.Generator().manual_seed(0))
    entropy = torch.rand(len(rows.row))
    whole = diagnose([rows], [logprobs], [entropy])
    parts = torch.arange(rows.count).split(3)
    tokens = [(rows.row[:, None] == part[None]).any(1) for part in parts]
    split = diagnose(
        [rows.select(part) for part in parts],
        [logprobs[t] for t in tokens],
        [entropy[t] for t in tokens],
    )
    assert split == pytest.approx(whole, rel=1e-6)
    own = ~rows.expert
    weight = (logprobs - rows.behaviour)[own].exp()
    assert whole["ess"] == pytest.approx(float(weight.sum() ** 2 / (weight**2).sum() / own.sum()))
    assert whole["ratio_max"] == pytest.approx(float(weight.max()))
    assert whole["lag"] == 1.0
    assert "log_ratio_max_lag0" not in whole


def test_at_lag_0_the_greatest_log_ratio_is_told(made_up: ModuleType) -> None:
    rows = made_up.random_rows()
    logprobs = rows.behaviour.clone()
    first_own = int(torch.nonzero(~rows.expert)[0])
    logprobs[first_own] += math.log(1.5)
    found = diagnose([rows], [logprobs], [torch.zeros_like(logprobs)])
    assert found["log_ratio_max_lag0"] == pytest.approx(math.log(1.5), rel=1e-5)


def test_a_rank_without_rows_tells_nothing_of_ratios() -> None:
    assert diagnose([], [], []) == {"tokens_own": 0.0, "tokens_expert": 0.0}


def test_the_99th_percentile_is_a_value_that_is_there() -> None:
    assert percentile(torch.arange(100.0), 0.99) == 98.0
    assert percentile(torch.tensor([3.0]), 0.99) == 3.0


@pytest.mark.parametrize("count", [3, 100, 1000])
def test_a_percentile_over_ranks_is_that_of_all_their_values(count: int) -> None:
    """Whatever rank they lie on: here the greatest are all on the first, and the last has none."""
    values = torch.arange(float(count)).flip(0)
    shares = [values[: count // 2], values[count // 2 :], values[:0]]
    given: list[torch.Tensor] = []

    def gather(mine: torch.Tensor) -> torch.Tensor:
        given.append(mine)
        return mine

    for mine in shares:
        percentile(mine, 0.99, count, gather)
    for mine in shares:
        found = percentile(mine, 0.99, count, lambda _: torch.cat(given))
        assert found == percentile(values, 0.99)


def test_a_whole_update_tells_all_its_metrics(hand: ModuleType) -> None:
    """The numbers of LUFFY's worked example."""
    these, _ = hand.reference_case()
    these = these.with_columns(
        entropy=torch.full_like(these.behaviour, 0.5),
        reference=these.logprobs.detach() - 0.1,
        lag=torch.where(these.row == 0, 2, these.lag),
    )
    loss, found = evaluate(make("luffy_code", entropy_coefficient=0.0), these, width=4.0)
    assert loss.item() == found["loss"] == pytest.approx(0.002315, abs=1e-6)
    # On and off parts are sums over 4 here; upstream tells means over 7 and 3 tokens.
    assert found["loss_own"] * 4 / 7 == pytest.approx(0.087302, abs=1e-6)
    assert found["loss_expert"] * 4 / 3 == pytest.approx(-0.200617, abs=1e-6)
    assert found["expert_weight"] == pytest.approx(0.601852, abs=1e-6)
    assert found["loss_stale"] * 4 == pytest.approx(2 / 3 * (1.25 + 1 + 2 / 3))
    assert found["prob_stale"] == pytest.approx((0.5 + 0.4 + 0.3) / 3)
    assert found["prob_expert"] == pytest.approx((0.02 + 0.3 + 0.8) / 3)
    assert found["entropy_stale"] == found["entropy_expert"] == 0.5
    assert found["k3_reference"] == pytest.approx(math.expm1(-0.1) + 0.1)
    ratios = [1.25, 1, 2 / 3, 1, 0.5, 1.5, 1]
    assert found["ratio_mean"] == pytest.approx(sum(ratios) / 7)
    assert found["ratio_max"] == pytest.approx(1.5)
    squares = sum(ratio * ratio for ratio in ratios)
    assert found["ess"] == pytest.approx(sum(ratios) ** 2 / 7 / squares)
    assert found["k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 7)
