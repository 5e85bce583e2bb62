"""The simulated run against cases that can be worked out by hand, and against the ledger's promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.launch.plan.lengths import Lengths
from tandem.launch.plan.simulation import (
    EngineSpeed,
    LearnerSpeed,
    Scenario,
    Simulated,
    simulate,
)
from tandem.replay.rules.leases import Limits

FIFTY = Lengths(mean=50, limit=100, spread=0.0)
"""All samples are 50 tokens long."""


def scenario(staleness: int = 0, **changed: object) -> Scenario:
    """One worker, rows of 4 groups of 2 samples of 50 tokens at a second each, 8 slots: 50 s."""
    made = Scenario(
        limits=Limits(groups_per_step=4, max_staleness=staleness),
        workers=1,
        samples=2,
        batch=1,
        ahead=7,
        slots=8,
        lengths=FIFTY,
        engine=EngineSpeed(host=1.0),
        learner=LearnerSpeed(step=20.0),
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def seconds(made: Scenario) -> float:
    return simulate(made).step


def test_with_fresh_samples_generating_and_training_take_turns() -> None:
    found = simulate(scenario(staleness=0))
    assert found.step == pytest.approx(50 + 20)
    assert found.learner_waits == pytest.approx(50 / 70)
    assert found.engines_wait == pytest.approx(20 / 70)
    assert (found.running, found.staleness) == (pytest.approx(8), 0)
    assert found.tokens_per_second == pytest.approx(8 * 50 / 70)


@pytest.mark.parametrize(("training", "step"), [(20.0, 50.0), (150.0, 150.0)])
def test_with_samples_a_step_old_the_slower_of_both_decides(training: float, step: float) -> None:
    found = simulate(scenario(staleness=1, learner=LearnerSpeed(step=training)))
    assert found.step == pytest.approx(step)
    assert found.staleness <= 1


def test_an_iteration_is_the_longer_of_reading_and_arithmetic() -> None:
    # 8 rows from 10 to 60 tokens: 35 on average; reading takes 0.01 s a token.
    read = EngineSpeed(host=0.0, weights=1.0, cached_token=0.01)
    assert seconds(scenario(engine=read, prompt=10.0)) == pytest.approx(
        50 * (1.0 + 0.01 * 8 * 35) + 20
    )
    busy = EngineSpeed(host=0.0, weights=1.0, row=0.5)
    assert seconds(scenario(engine=busy)) == pytest.approx(50 * 0.5 * 8 + 20)


def test_rows_that_have_no_slot_wait_for_one() -> None:
    assert seconds(scenario(slots=4)) == pytest.approx(2 * 50 + 20)
    # Three of eight at a time: 3 + 3 + 2. With whole groups of two it is one group at a time.
    assert seconds(scenario(slots=3)) == pytest.approx(3 * 50 + 20)
    assert seconds(scenario(slots=3, whole_groups=True)) == pytest.approx(4 * 50 + 20)


def test_workers_share_a_row_and_one_that_takes_it_all_leaves_the_other_idle() -> None:
    shared = scenario(workers=2, batch=1, ahead=1, slots=4)
    assert seconds(shared) == pytest.approx(50 + 20)
    assert seconds(replace(shared, ahead=3, slots=4)) == pytest.approx(2 * 50 + 20)


def test_without_groups_ahead_a_worker_leases_only_when_its_engine_is_empty() -> None:
    # Two rows may be on their way, but the worker takes four groups at a time.
    made = scenario(staleness=2, learner=LearnerSpeed(step=1.0), slots=4)
    assert seconds(replace(made, batch=1, ahead=3)) == pytest.approx(100.0)
    spread = Lengths(mean=50, limit=100, spread=0.75)
    alone = replace(made, lengths=spread, batch=4, ahead=0, slots=8)
    ahead = replace(alone, batch=1, ahead=7)
    assert seconds(ahead) < 0.8 * seconds(alone)


def test_new_weights_pause_the_engines_and_cost_what_is_under_way() -> None:
    engine = EngineSpeed(host=1.0, load=5.0)
    fresh = scenario(engine=engine)
    # At staleness 0 nothing runs when they arrive.
    assert seconds(fresh) == pytest.approx(50 + 20 + 5)
    stale = scenario(staleness=2, engine=EngineSpeed(host=1.0, prompt_token=0.02))
    again = simulate(stale)
    assert again.engines_pause > 0.05
    assert again.step > 1.05 * seconds(replace(stale, recompute=False))
    assert simulate(replace(stale, recompute=False)).engines_pause == 0


def test_a_version_that_takes_long_to_arrive_holds_fresh_samples_up() -> None:
    learner = LearnerSpeed(step=20.0, publish=2.0, transfer=7.0)
    assert seconds(scenario(learner=learner)) == pytest.approx(50 + 20 + 2 + 7)
    assert seconds(scenario(staleness=1, learner=learner)) == pytest.approx(50.0)


def test_a_slow_pool_is_counted() -> None:
    # Eight samples at one in two seconds; the last row's grading is what the learner waits for.
    assert seconds(scenario(graded_a_second=0.5)) == pytest.approx(50 + 16 + 20)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_more_groups_are_leased_than_the_limit_and_a_graded_one_makes_room(workers: int) -> None:
    made = scenario(workers=workers)
    limits = replace(made.limits, max_inflight=2)
    assert seconds(replace(made, limits=limits)) == pytest.approx(2 * 50 + 20)


def test_roles_that_share_gpus_take_turns_however_stale_samples_may_be() -> None:
    assert seconds(scenario(staleness=1, shared=True)) == pytest.approx(50 + 20)


def test_published_every_second_step() -> None:
    # Of each version two rows are sampled: the first is waited for, the second is there in time.
    made = scenario(staleness=1, every=2, learner=LearnerSpeed(step=500.0))
    assert seconds(made) == pytest.approx((50 + 500 + 500) / 2)
    assert simulate(made).staleness <= 1


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_no_sample_is_older_than_the_bound_and_a_greater_bound_makes_no_step_longer(
    staleness: int, workers: int
) -> None:
    found = simulate(long_tailed(staleness, workers))
    assert found.staleness <= staleness
    assert simulate(long_tailed(staleness + 1, workers)).step <= 1.02 * found.step


def long_tailed(staleness: int, workers: int = 2) -> Scenario:
    """128 groups of 7 samples up to 8,192 tokens; generating takes as long as training on average."""
    lengths = Lengths(mean=8192 / 3, limit=8192, spread=1.0)
    training = 128 * 7 * lengths.mean / (256 * workers)
    return Scenario(
        limits=Limits(groups_per_step=128, max_staleness=staleness),
        workers=workers,
        samples=7,
        batch=16,
        ahead=94,
        slots=256,
        lengths=lengths,
        engine=EngineSpeed(host=1.0),
        learner=LearnerSpeed(step=training),
    )


def test_where_both_are_balanced_the_bound_has_to_cover_the_longest_sample() -> None:
    reached = {
        bound: made.learner.step / seconds(made)
        for bound in (0, 1, 2, 4)
        for made in [long_tailed(bound)]
    }
    assert reached[0] < 0.4
    assert 0.5 < reached[1] < 0.71 < reached[2] < 0.98 < reached[4]


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = (simulate(long_tailed(2), seed=3) for _ in range(2))
    assert first == again
    other = simulate(long_tailed(2), seed=4)
    assert other != first
    assert other.step == pytest.approx(first.step, rel=0.1)


def test_rows_may_pass_over_late_groups_within_the_window() -> None:
    strict = long_tailed(3, 3)
    loose = replace(strict, limits=replace(strict.limits, window=2))
    assert seconds(loose) < seconds(strict)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_lengths_have_the_mean_that_is_asked_for_and_none_is_over_the_limit(spread: float) -> None:
    drawn = Lengths(mean=2000, limit=8192, spread=spread).draw(4000, 7, seed=1)
    assert drawn.mean() == pytest.approx(2000, rel=0.02)
    assert 1 <= drawn.min() <= drawn.max() <= 8192


def test_offline_a_step_is_what_the_learner_takes() -> None:
    found = simulate(scenario(workers=0))
    assert found == Simulated(
        step=20.0,
        trained=20.0,
        learner_waits=0.0,
        engines_wait=0.0,
        engines_pause=0.0,
        running=0.0,
        tokens_per_second=0.0,
        staleness=0.0,
    )
