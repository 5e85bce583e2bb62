"""What sending weights took, and cost the engines, from one record of the metrics to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTS = ("committed", "failed", "superseded")


class TransferRates:
    """Turns the weight sender's counters and the workers' reports into figures per step."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._versions: dict[str, Any] = {}
        self._engines: dict[str, tuple[int, float, float]] = {}
        self._checks: dict[str, tuple[int, int, int]] = {}

    def sent(self, stats: Mapping[str, Any]) -> dict[str, float]:
        """``weights/…`` figures of the transfers that have ended since the last call.

        Args:
            stats: counters of the :class:`~tandem.common.weights.sender.WeightSender`.
        """
        figures: dict[str, float] = {}
        for name in COUNTS:
            count = float(stats.get(name, 0))
            figures[f"weights/{name}"] = count - self._counts.get(name, 0.0)
            self._counts[name] = count
        for member, last in stats.get("transfers", {}).items():
            if self._versions.get(member) == last["version"]:
                continue
            self._versions[member] = last["version"]
            if last["transport"] == "none":
                continue
            for name in ("seconds", "gb_per_second", "pause_seconds", "latency_seconds"):
                figures[f"weights/{member}/{name}"] = float(last[name])
        return figures

    def lost(self, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """``weights/engine_time_lost``: the share of the engines' busy time since the last call.

        Args:
            reports: reports of all members.
        """
        lost = busy = 0.0
        for member, report in reports.items():
            engine = report.get("engine")
            if report.get("role") != "rollout" or not isinstance(engine, Mapping):
                continue
            pid = int(report.get("pid") or 0)
            now = (pid, float(engine.get("load_seconds", 0)), float(engine.get("busy_seconds", 0)))
            before = self._engines.get(member, (pid, 0.0, 0.0))
            if before[0] != pid:
                before = (pid, 0.0, 0.0)
            self._engines[member] = now
            lost += max(0.0, now[1] - before[1])
            busy += max(0.0, now[2] - before[2])
        return {"weights/engine_time_lost": min(1.0, lost / busy)} if busy > 0 else {}

    def checked(self, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """``weights/check…`` figures of the checks that workers have made since the last call.

        Args:
            reports: reports of all members.
        """
        made = failed = 0
        nearest, seconds = 0.0, 0.0
        for member, report in reports.items():
            weights = report.get("weights")
            check = weights.get("check") if isinstance(weights, Mapping) else None
            if report.get("role") != "rollout" or not isinstance(check, Mapping):
                continue
            pid = int(report.get("pid") or 0)
            now = (pid, int(check.get("checks", 0)), int(check.get("failures", 0)))
            before = self._checks.get(member, (pid, 0, 0))
            if before[0] != pid:
                before = (pid, 0, 0)
            self._checks[member] = now
            if now[1] <= before[1]:
                continue
            made += now[1] - before[1]
            failed += max(0, now[2] - before[2])
            seconds = max(seconds, float(check.get("seconds") or 0))
            nearest = max(nearest, float(check.get("nearness") or 0))
        if not made:
            return {}
        return {
            "weights/checks": float(made),
            "weights/checks_failed": float(failed),
            "weights/check_nearness": nearest,
            "weights/check_seconds": seconds,
        }
