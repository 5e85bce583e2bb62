"""Rates of the reward pools' grading from one record of the metrics to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.records import Verdict

COUNTERS = (
    *(verdict.value for verdict in Verdict),
    *("cache_hits", "coalesced", "to_process", "requests", "restarts"),
    *("grade_seconds", "queue_wait_seconds"),
    *("judge_asked", "judge_cached", "judge_failures", "judge_retries", "judge_seconds"),
)
"""Counters in a pool's report, counted since the pool's start."""


class GradingRates:
    """Turns the pools' counters into rates; a restarted pool counts from 0."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, dict[str, float]]] = {}

    def take(self, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """``grading/…`` rates since the last call with new figures; empty if there are no new ones.

        Args:
            reports: reports of all members.
        """
        grown = dict.fromkeys(COUNTERS, 0.0)
        seen = dict(self._seen)
        worst = {"hang_share": 0.0, "crash_share": 0.0, "longest_queue_wait": 0.0}
        for member, report in reports.items():
            if report.get("role") != "reward":
                continue
            pid = int(report.get("pid") or 0)
            counters = {name: float(report.get(f"grader/{name}") or 0) for name in COUNTERS}
            known = seen.get(member)
            before = known[1] if known is not None and known[0] == pid else {}
            seen[member] = (pid, counters)
            fresh = False
            for name, value in counters.items():
                growth = value - before.get(name, 0.0)
                grown[name] += growth
                fresh = fresh or growth > 0
            for name in worst if fresh else ():
                worst[name] = max(worst[name], float(report.get(f"grader/{name}") or 0))
        if not any(grown[verdict.value] for verdict in Verdict):
            # Rates are of samples with a verdict: what grew meanwhile counts with the next of them.
            return {}
        self._seen = seen
        return _rates(grown, worst)


def _rates(grown: Mapping[str, float], worst: Mapping[str, float]) -> dict[str, float]:
    samples = sum(grown[verdict.value] for verdict in Verdict)
    rates = {
        f"grading/verdict_{verdict.value}": grown[verdict.value] / samples for verdict in Verdict
    }
    rates["grading/samples"] = samples
    rates["grading/to_process"] = grown["to_process"] / samples
    shared = grown["cache_hits"] + grown["coalesced"]
    compared = shared + grown["to_process"]
    if compared:
        rates["grading/cache_hits"] = shared / compared
    if grown["requests"]:
        rates["grading/seconds"] = grown["grade_seconds"] / grown["requests"]
        rates["grading/queue_wait"] = grown["queue_wait_seconds"] / grown["requests"]
        rates["grading/queue_wait_max"] = worst["longest_queue_wait"]
    if asked := grown["judge_asked"]:
        rates["grading/judge_asked"] = asked
        rates["grading/judge_cached"] = grown["judge_cached"] / (asked + grown["judge_cached"])
        rates["grading/judge_failed"] = grown["judge_failures"] / asked
        rates["grading/judge_retries"] = grown["judge_retries"]
        rates["grading/judge_seconds"] = grown["judge_seconds"] / asked
    rates["grading/hang_share"] = worst["hang_share"]
    rates["grading/crash_share"] = worst["crash_share"]
    rates["grading/restarts"] = grown["restarts"]
    return rates
