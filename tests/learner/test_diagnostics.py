"""Metrics of the ratios, from tokens laid out by hand."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from tandem.learner.diagnostics import diagnose, percentile
from tandem.learner.microbatch import rows_of
from tandem.learner.objectives import ObjectiveSettings, make


def test_the_figures_of_a_batch_do_not_depend_on_its_split(made_up: ModuleType) -> None:
    objective = make("luffy", ObjectiveSettings())
    rows = rows_of(
        made_up.random_rows(lag=1),
        step=6,
        baseline="group_mean",
        truncation="wrong",
        objective=objective,
    )
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
    objective = make("luffy", ObjectiveSettings())
    rows = rows_of(
        made_up.random_rows(),
        step=6,
        baseline="group_mean",
        truncation="wrong",
        objective=objective,
    )
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
