"""What sending weights took and cost, between two records."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.learner.metrics.transfer_rates import TransferRates


def stats(step: int, **changes: Any) -> dict[str, Any]:
    last = {
        "version": [1, step],
        "transport": "gloo",
        "seconds": 0.5,
        "gb_per_second": 2.0,
        "pause_seconds": 0.25,
        "latency_seconds": 0.75,
    }
    counts = {"committed": step, "failed": 0, "superseded": 1}
    return {**counts, "transfers": {"rollout-0": {**last, **changes}}}


def worker(pid: int, lost: float, busy: float) -> dict[str, Any]:
    engine = {"load_seconds": lost, "busy_seconds": busy}
    return {"role": "rollout", "pid": pid, "engine": engine}


def test_each_transfer_is_told_once_with_its_member() -> None:
    rates = TransferRates()
    found = rates.sent(stats(3))
    assert found == {
        "weights/committed": 3,
        "weights/failed": 0,
        "weights/superseded": 1,
        "weights/rollout-0/seconds": 0.5,
        "weights/rollout-0/gb_per_second": 2.0,
        "weights/rollout-0/pause_seconds": 0.25,
        "weights/rollout-0/latency_seconds": 0.75,
    }
    assert rates.sent(stats(3)) == dict.fromkeys(
        ("weights/committed", "weights/failed", "weights/superseded"), 0.0
    )
    assert rates.sent(stats(4))["weights/committed"] == 1


def test_a_version_that_was_only_renamed_took_no_transfer() -> None:
    found = TransferRates().sent(stats(3, transport="none"))
    assert not any("rollout-0" in name for name in found)


def test_time_lost_is_a_share_of_what_the_engines_were_busy() -> None:
    rates = TransferRates()
    assert rates.lost({"rollout-0": worker(1, 1.0, 4.0), "learner-0": {"role": "learner"}}) == {
        "weights/engine_time_lost": 0.25
    }
    assert rates.lost({"rollout-0": worker(1, 1.0, 4.0)}) == {}
    # A worker that was started anew counts from nothing.
    later = {"rollout-0": worker(2, 0.5, 1.0), "rollout-1": worker(3, 0.0, 4.0)}
    assert rates.lost(later)["weights/engine_time_lost"] == pytest.approx(0.1)


def checks(pid: int, made: int, failed: int, nearness: float | None) -> Any:
    check = {
        "checks": made,
        "failures": failed,
        "seconds": 0.01 * made,
        "nearness": nearness,
    }
    return {"role": "rollout", "pid": pid, "weights": {"check": check}}


def test_checks_are_counted_once_and_the_nearest_to_its_bound_is_told() -> None:
    rates = TransferRates()
    first = {"rollout-0": checks(1, 3, 0, 0.1), "rollout-1": checks(2, 2, 1, 0.5)}
    found = rates.checked(first)
    assert found == {
        "weights/checks": 5.0,
        "weights/checks_failed": 1.0,
        "weights/check_nearness": pytest.approx(0.5),
        "weights/check_seconds": pytest.approx(0.03),
    }
    assert rates.checked(first) == {}
    # A worker that was started anew counts from nothing; a figure that is no number has none.
    assert rates.checked({"rollout-1": checks(3, 1, 1, None)}) == {
        "weights/checks": 1.0,
        "weights/checks_failed": 1.0,
        "weights/check_nearness": 0.0,
        "weights/check_seconds": pytest.approx(0.01),
    }
    assert rates.checked({"learner-0": {"role": "learner", "weights": {}}}) == {}
