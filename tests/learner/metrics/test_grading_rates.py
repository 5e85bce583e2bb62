"""The pools' counters as rates between two records."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.learner.metrics.grading_rates import GradingRates


def pool(pid: int = 7, **counts: float) -> dict[str, Any]:
    return {"role": "reward", "pid": pid, **{f"grader/{k}": v for k, v in counts.items()}}


FIRST = pool(
    correct=6, wrong=3, timeout=1, to_process=2, cache_hits=3, coalesced=1, requests=2,
    grade_seconds=1.0, queue_wait_seconds=0.5, longest_queue_wait=0.4, hang_share=0.5, restarts=1,
)  # fmt: skip


def test_counters_become_rates() -> None:
    found = GradingRates().take({"reward-0": FIRST, "rollout-0": {"role": "rollout"}})
    assert found["grading/samples"] == 10
    assert found["grading/verdict_correct"] == 0.6
    assert found["grading/verdict_timeout"] == 0.1
    assert found["grading/verdict_memory"] == 0.0
    assert found["grading/to_process"] == 0.2
    assert found["grading/cache_hits"] == pytest.approx(2 / 3)
    assert (found["grading/seconds"], found["grading/queue_wait"]) == (0.5, 0.25)
    assert (found["grading/hang_share"], found["grading/queue_wait_max"]) == (0.5, 0.4)
    assert found["grading/restarts"] == 1


def test_only_what_is_new_counts_and_pools_are_added_up() -> None:
    rates = GradingRates()
    rates.take({"reward-0": FIRST})
    assert rates.take({"reward-0": FIRST}) == {}
    later = {**FIRST, "grader/wrong": 7}
    found = rates.take({"reward-0": later, "reward-1": pool(pid=8, correct=4)})
    assert found["grading/samples"] == 8
    assert found["grading/verdict_correct"] == 0.5
    assert "grading/seconds" not in found


def test_a_pool_that_was_started_anew_counts_from_nothing() -> None:
    rates = GradingRates()
    rates.take({"reward-0": FIRST})
    assert rates.take({"reward-0": pool(pid=9, correct=2)})["grading/samples"] == 2


def test_questions_to_judges_are_shares_of_what_was_asked() -> None:
    judged = pool(
        correct=6, judge_failed=2, judge_asked=4, judge_cached=4, judge_failures=1,
        judge_retries=3, judge_seconds=2.0,
    )  # fmt: skip
    found = GradingRates().take({"reward-0": judged})
    assert found["grading/verdict_judge_failed"] == 0.25
    names = ("asked", "cached", "failed", "retries", "seconds")
    assert [found[f"grading/judge_{name}"] for name in names] == [4, 0.5, 0.25, 3, 0.5]
    assert "grading/judge_asked" not in GradingRates().take({"reward-0": FIRST})


def test_questions_that_end_before_their_samples_count_with_these() -> None:
    rates = GradingRates()
    assert rates.take({"reward-0": pool(judge_asked=3, judge_seconds=0.3)}) == {}
    found = rates.take({"reward-0": pool(correct=8, judge_asked=4, judge_seconds=0.4)})
    assert found["grading/judge_asked"] == 4
