"""The ratio check by its parts: which tokens it looks at, its figures, its bounds, what an alarm does."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem.common.ratio_check import FIGURES, alarm_of
from tandem.common.records import VersionSpan
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.metrics.ratio_check import BOUNDS, HISTORY, RatioCheck, measure
from tandem.learner.objectives import make
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.rows.rows import Rows
from tandem.learner.updates.updates import Updates

CPU = torch.device("cpu")
Learner = Callable[..., Updates]


@pytest.fixture
def learner(made_up: ModuleType, group: None) -> Learner:
    """Makes a rank on a tiny model."""

    def started(dtype: str = "float32", **sections: Any) -> Updates:
        config = made_up.config_of(model={"dtype": dtype}, **sections)
        model = made_up.tiny_model(dtype=getattr(torch, dtype))
        return Updates(DeepSpeedEngine(model, config, CPU), config)

    return started


def rows_with(hand: ModuleType, lags: list[list[int]], gaps: list[list[float]]) -> Rows:
    """Rows of own tokens (−1: an expert's) with these lags and log π_θ/μ."""
    row = torch.tensor([n for n, own in enumerate(lags) for _ in own])
    lag = torch.tensor([value for own in lags for value in own])
    gap = torch.tensor([value for own in gaps for value in own], dtype=torch.float64)
    made: Rows = hand.rows(
        row,
        lag == -1,
        -1.0 - gap,
        torch.tensor([1.0, -1.0] * len(lags), dtype=torch.float64)[: len(lags)],
        lag=lag,
        logprobs=torch.full_like(gap, -1.0),
    )
    return made


def figures(rows: list[Rows], **options: Any) -> dict[str, float]:
    return measure(rows, [r.logprobs for r in rows], make("grpo"), **options)  # type: ignore[misc]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("seed", range(3))
def test_the_figures_are_those_of_the_formula_whatever_the_micro_batches(
    seed: int, hand: ModuleType, formula: ModuleType
) -> None:
    rows = hand.random_rows(seed, count=60)
    mine = ~rows.expert & (rows.lag == 0)
    expected = formula.ratio_figures((rows.logprobs - rows.behaviour)[mine].tolist())
    for parts in (1, 4, 60):
        pieces = [rows.select(part) for part in torch.arange(60).chunk(parts)]
        found = figures(pieces)
        assert found["lag"] == 0
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.usefixtures("group")
def test_the_figures_of_tiny_log_ratios_are_not_lost_in_rounding(hand: ModuleType) -> None:
    found = figures([rows_with(hand, [[0, 0]], [[2.0**-20, -(2.0**-20)]])])
    assert found["k3"] == pytest.approx(2.0**-41, rel=1e-3)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("lags", "lag", "mean"),
    [
        ([[0, 0, -1], [1, 1]], 0, 0.1),
        ([[2, 2, -1], [1, 1]], 1, 0.3),
        # Of an earlier run: younger than the learner's own weights, so of other ones.
        ([[-2, -2, -1], [3, 3]], 3, 0.3),
        ([[-1, -1, -1], [-2, -2]], None, None),
    ],
)
def test_the_tokens_of_the_least_lag_are_looked_at(
    lags: list[list[int]], lag: int | None, mean: float | None, hand: ModuleType
) -> None:
    found = figures([rows_with(hand, lags, [[0.1, 0.1, 5.0], [0.3, 0.3]])])
    assert found.get("lag") == lag
    assert found.get("log_ratio") == pytest.approx(mean)


@pytest.mark.usefixtures("group")
def test_with_stale_keys_only_rows_of_one_version_count(hand: ModuleType) -> None:
    rows = rows_with(
        hand, [[1, 1, 0, 0], [0, 0], [1, 1]], [[0.0, 0.0, 7.0, 7.0], [0.2, 0.2], [1, 1]]
    )
    assert figures([rows])["tokens"] == 4
    found = figures([rows], whole_rows=True)
    assert (found["tokens"], found["log_ratio"]) == (2, pytest.approx(0.2))


@pytest.mark.usefixtures("group")
def test_the_share_that_the_clip_decides_is_told(hand: ModuleType) -> None:
    """Over 1.2 where A > 0, under 0.8 where A < 0; an objective without a clip tells none."""
    rows = rows_with(hand, [[0, 0, 0], [0, 0, 0]], [[0.3, 0.1, -0.3], [0.3, 0.1, -0.3]])
    assert figures([rows])["clipped"] == pytest.approx(2 / 6)
    assert "clipped" not in measure([rows], [rows.logprobs], make("dpo"))  # type: ignore[list-item]


def found_at(lag: int, log_ratio: float, tokens: int = 1000) -> dict[str, float]:
    k3 = log_ratio**2 / 2
    return {
        "lag": lag,
        "tokens": tokens,
        "log_ratio": log_ratio,
        "log_ratio_p99": 3 * log_ratio,
        "k3": k3,
        "k3_p99": 9 * k3,
    }


@pytest.fixture
def held(made_up: ModuleType) -> Callable[..., RatioCheck]:
    def made(**sections: Any) -> RatioCheck:
        return RatioCheck(made_up.config_of(**sections), make("grpo"))

    return made


@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ({}, "float32"),
        ({"rollout": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"model": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"model": {"dtype": "bfloat16"}, "rollout": {"dtype": "float32"}}, "bfloat16"),
    ],
)
def test_the_coarser_dtype_bounds_what_is_fresh(
    sections: dict[str, Any], dtype: str, held: Callable[..., RatioCheck]
) -> None:
    check, bound = held(**sections), BOUNDS[dtype]["log_ratio"]
    assert not check.hold(found_at(0, 0.5 * bound))[1]
    assert check.hold(found_at(0, 2 * bound))[1]
    told, alarm = held(learner={"ratio_check": {"slack": 10}}, **sections).hold(
        found_at(0, 2 * bound)
    )
    assert not alarm
    assert told["log_ratio_bound"] == pytest.approx(
        10 * check.hold(found_at(0, 0))[0]["log_ratio_bound"]
    )


@pytest.mark.parametrize(("dtype", "unbounded"), [("float32", set[str]()), ("bfloat16", {"k3"})])
def test_each_figure_alone_is_an_alarm(
    dtype: str, unbounded: set[str], held: Callable[..., RatioCheck]
) -> None:
    calm = found_at(0, 0.0)
    for name in FIGURES.keys() - unbounded:
        bound = BOUNDS[dtype][name]
        told, alarm = held(rollout={"dtype": dtype}).hold({**calm, name: 3 * bound})
        assert alarm
        assert f"{3 * bound:.3g} (bound" in alarm_of({f"ratio/{k}": v for k, v in told.items()})


def test_one_token_that_half_precision_moves_far_is_no_alarm(
    held: Callable[..., RatioCheck],
) -> None:
    """In the mean of k3 it would outweigh a thousand others."""
    outlier = {**found_at(0, 1e-6), "k3": (math.exp(8) - 9) / 1000}
    assert held().hold(outlier)[1]
    for lag in (0, 2):
        assert not held(rollout={"dtype": "bfloat16"}).hold({**outlier, "lag": lag})[1]


def test_a_mean_of_few_tokens_may_be_larger_and_their_percentile_is_not_held(
    held: Callable[..., RatioCheck],
) -> None:
    bound = BOUNDS["float32"]["log_ratio"]
    assert held().hold(found_at(0, 3 * bound, tokens=1000))[1]
    told, alarm = held().hold({**found_at(0, 3 * bound, tokens=4), "log_ratio_p99": 1.0})
    assert not alarm
    assert "log_ratio_p99_bound" not in told


def test_stale_tokens_are_held_against_the_runs_own_history(
    held: Callable[..., RatioCheck],
) -> None:
    check = held()
    # A policy that begins to learn moves further from step to step, up to some limit.
    for step in range(30):
        assert not check.hold(found_at(1, min(1e-4 * 2**step, 0.05)))[1], step
    # Later it moves less. What is sampled at another temperature then is found.
    for _ in range(HISTORY):
        assert not check.hold(found_at(1, 0.002))[1]
    for _ in range(2 * HISTORY):
        assert check.hold(found_at(1, 0.4))[1], "an alarm doesn't get used to itself"
    assert not check.hold(found_at(1, 0.002))[1]
    # Another lag has a history of its own.
    assert not check.hold(found_at(4, 0.3))[1]


def test_a_history_goes_through_a_checkpoint(held: Callable[..., RatioCheck]) -> None:
    check, other = held(), held()
    for step in range(40):
        check.hold(found_at(1 + step % 2, 0.001 * step))
    other.hold(found_at(1, 0.09))
    other.restore(check.state())
    assert other.state() == check.state()
    for lag in (1, 2):
        assert other.hold(found_at(lag, 0.3)) == check.hold(found_at(lag, 0.3))
    # A checkpoint of before there was a history.
    other.restore({"entropy": 0.0})
    assert other.state() == {}


def test_the_history_is_in_what_a_checkpoint_keeps_of_the_updates(learner: Learner) -> None:
    updates, other = learner(), learner()
    updates.ratio_check.hold(found_at(1, 0.002))
    other.restore(updates.state())
    assert other.ratio_check.state() == updates.ratio_check.state() != {}


def sampled(
    made_up: ModuleType, updates: Updates, *, count: int = 4, step: int = 4, off: float = 0.0
) -> list[MixedGroup]:
    """Groups whose log-probs are the learner's own, but for ``off`` nats."""
    found: list[MixedGroup] = []
    for mixed in made_up.groups_of(count, step=step):
        group, samples = mixed.group, []
        for sample in group.samples:
            ids = np.concatenate([group.prompt_tokens, sample.tokens]).astype(np.int64)
            with torch.no_grad():
                logits = updates.engine.model(input_ids=torch.from_numpy(ids)[None]).logits[0]
            every = torch.log_softmax(logits.float(), -1)
            places = torch.arange(len(group.prompt_tokens), len(ids))
            picked = every[places - 1, torch.from_numpy(ids)[places]]
            samples.append(replace(sample, logprobs=(picked + off).numpy()))
        found.append(MixedGroup(group=replace(group, samples=tuple(samples))))
    return found


def ratios(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("ratio/")}


@pytest.mark.parametrize("budget", [4096, 18])
def test_a_step_is_looked_at_before_its_first_update_alone(
    budget: int, learner: Learner, made_up: ModuleType
) -> None:
    """The second mini-batch is scored by weights that the first has moved, far with this rate."""
    updates = learner(
        learner={"minibatches": 2, "micro_batch_tokens": budget}, replay={"groups_per_step": 4}
    )
    groups = sampled(made_up, updates)
    metrics = updates.train(5, groups, lr=0.1).metrics
    assert metrics["train/ratio_max"] > 1.1
    tokens = sum(len(sample.tokens) for mixed in groups[:2] for sample in mixed.group.samples)
    assert metrics["ratio/tokens"] == tokens
    assert metrics["ratio/alarm"] == 0
    assert metrics["ratio/log_ratio"] < 1e-5


def test_where_the_first_mini_batch_teaches_nothing_the_next_is_looked_at(
    learner: Learner, made_up: ModuleType
) -> None:
    updates = learner(learner={"minibatches": 2}, replay={"groups_per_step": 4})
    groups = sampled(made_up, updates)
    silent = []
    for mixed in groups[:2]:
        samples = tuple(replace(s, reward=0.0) for s in mixed.group.samples)
        silent.append(MixedGroup(group=replace(mixed.group, samples=samples)))
    metrics = updates.train(5, [*silent, *groups[2:]], lr=0.1).metrics
    tokens = sum(len(sample.tokens) for mixed in groups[2:] for sample in mixed.group.samples)
    assert metrics["ratio/tokens"] == tokens
    assert metrics["ratio/alarm"] == 0


def test_tokens_that_are_scored_at_another_temperature_than_sampled_tell_nothing(
    learner: Learner, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: made_up.tiny_model()
    )
    for temperature, told in ((1.0, True), (0.7, False)):
        updates = learner(
            learner={"objective": {"name": "dpo"}}, rollout={"temperature": temperature}
        )
        metrics = updates.train(5, sampled(made_up, updates, count=2), lr=1e-3).metrics
        assert bool(ratios(metrics)) is told


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "bfloat16"), (3, "float32")]
)
def test_a_step_with_an_alarm_leaves_nothing_behind_where_it_is_quarantined(
    stage: int, dtype: str, learner: Learner, made_up: ModuleType
) -> None:
    """The next step is to the bit what it would have been without it."""
    settings = {"zero_stage": stage, "minibatches": 2, "micro_batch_tokens": 45}
    quarantine = {"ratio_check": {"on_alarm": "quarantine"}}
    found = []
    for faults in (0, 1):
        updates = learner(dtype, learner=settings | quarantine, replay={"groups_per_step": 4})
        good, bad = sampled(made_up, updates), sampled(made_up, updates, off=2.0)
        for _ in range(faults):
            outcome = updates.train(5, bad, lr=1e-2)
            assert (outcome.applied, outcome.undone, outcome.refused) == (False, False, True)
            assert outcome.metrics["ratio/alarm"] == 1
        outcome = updates.train(6, good, lr=1e-2)
        assert (outcome.applied, outcome.refused) == (True, False)
        assert outcome.metrics["train/micro_batches"] >= 4
        found.append({name: tensor.clone() for name, tensor in updates.engine.parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("on_alarm", "settled"), [("tell", False), ("quarantine", True), ("stop", True)]
)
def test_an_alarm_is_told_and_changes_nothing_else(
    on_alarm: str, settled: bool, learner: Learner, made_up: ModuleType
) -> None:
    """Also where the journal has the step as applied."""
    updates = learner(learner={"ratio_check": {"on_alarm": on_alarm}})
    outcome = updates.train(
        5, sampled(made_up, updates, count=2, off=2.0), lr=1e-3, settled=settled
    )
    assert (outcome.applied, outcome.refused) == (True, False)
    assert outcome.metrics["ratio/alarm"] == 1
    assert "differ (lag 0, " in alarm_of(outcome.metrics)


def test_a_sample_of_two_versions_is_looked_at_where_it_is_fresh(
    learner: Learner, made_up: ModuleType
) -> None:
    """Half of each sample is of the version before, with log-probs of its own."""
    updates = learner()
    groups = []
    fresh = 0
    for mixed in sampled(made_up, updates, count=2):
        group, samples = mixed.group, []
        for sample in group.samples:
            half, length = len(sample.tokens) // 2, len(sample.tokens)
            logprobs = sample.logprobs.copy()
            logprobs[:half] -= 0.3
            spans = (
                VersionSpan(term=1, step=3, start=0, end=half),
                VersionSpan(term=2, step=4, start=half, end=length),
            )
            fresh += length - half
            samples.append(replace(sample, logprobs=logprobs, spans=spans))
        groups.append(MixedGroup(group=replace(group, samples=tuple(samples))))
    metrics = updates.train(5, groups, lr=1e-3).metrics
    assert (metrics["ratio/lag"], metrics["ratio/tokens"]) == (0, fresh)
    assert metrics["ratio/alarm"] == 0
