"""A made-up run to look at: records as the learner writes them, and a look into Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.launch.board.assembly import assemble
from tandem.launch.board.facts import Facts
from tandem.launch.board.history import History
from tandem.launch.board.snapshot import Known, Snapshot
from tandem.replay.evaluating.evaluations import EvaluationResult
from tandem.replay.members import Member

NOW = 2000.0
KNOWN = Known(
    run="runs/miniature",
    preset="miniature",
    state="running",
    supervisor=77,
    elapsed_seconds=62.0,
    total_steps=250,
    limit=1,
)


def record(step: int, **more: Any) -> dict[str, Any]:
    """One step: half a second of which the learner waited a tenth."""
    return {
        "step": step,
        "term": 1,
        "time": NOW - 50 + step / 2,
        "reward/mean": step / 250,
        "reward/zero_variance": 0.25,
        "rollout/length_mean": 52.5,
        "train/loss": 0.5,
        "train/entropy": 0.125,
        "train/rows": 64.0,
        "train/tokens_own": 1000.0,
        "train/tokens_expert": 200.0,
        "replay/staleness_mean": 0.75,
        "replay/staleness_max": 1.0,
        "replay/staleness_share_0": 0.25,
        "replay/staleness_share_1": 0.75,
        "time/wait/batch": 0.2,
        "time/compute": 0.3,
        "time/total": 0.5,
        **more,
    }


def alarmed(step: int, **more: Any) -> dict[str, Any]:
    """A step whose samples the learner doesn't score as they were sampled."""
    figures = {"lag": 0.0, "tokens": 812.0, "log_ratio": 0.25, "log_ratio_bound": 2e-05}
    return record(
        step, **{f"ratio/{k}": v for k, v in figures.items()}, **{"ratio/alarm": 1.0}, **more
    )


ALARM = (
    "log-probs as sampled and as learned differ (lag 0, 812 tokens): "
    "mean |log π/μ| 0.25 (bound 2e-05)"
)


def evaluated(step: int, accuracy: float, **more: Any) -> dict[str, Any]:
    """An evaluation, as the learner writes it."""
    return {
        "step": step,
        "term": 1,
        "eval/id": f"heldout@{step}",
        "eval/heldout/accuracy": accuracy,
        "eval/heldout/problems": 100,
        **more,
    }


def history(steps: int = 100) -> History:
    """So many steps, and an evaluation every fifty."""
    made = History()
    for step in range(1, steps + 1):
        made.add(record(step))
        if step % 50 == 0:
            made.add(evaluated(step, step / 200))
    return made


def member(name: str, *, age: float = 0.5, **info: Any) -> Member:
    """One process."""
    role = name.partition("-")[0]
    return Member(member=name, role=role, info={"pid": 11, "host": "here", **info}, age=age)


REPORTS: Mapping[str, Mapping[str, Any]] = {
    "learner-0": {
        "role": "learner",
        "time": NOW - 1,
        "version": [1, 100],
        "total_steps": 250,
        "waiting": "",
        "seconds": {"wait/batch": 0.2, "total": 0.5},
        "reward": 0.4,
        "loss": 0.5,
    },
    "rollout-0": {
        "role": "rollout",
        "time": NOW - 1,
        "version": [1, 99],
        "tokens_per_second": 1500.0,
        "clock": {"generate": 1.0, "wait/admission": 1.0, "total": 2.0},
        "waiting_for": "admission: staleness",
        "submission": {"outstanding": 3},
    },
    "reward-0": {
        "role": "reward",
        "time": NOW - 1,
        "clock": {"grade": 0.1, "wait/groups": 0.9, "total": 1.0},
        "pool/in_hand": 2,
        "grader/recent": 1,
        "grader/correct": 3,
    },
}


def facts(**changes: Any) -> Facts:
    """A look into Redis."""
    values: dict[str, Any] = {
        "time": NOW,
        "state": "running",
        "counts": {
            "admitted": 1,
            "leased": 8,
            "graded": 4,
            "taken": 5,
            "trained": 792,
            "rejected:stale": 6,
        },
        "journalled": 100,
        "term": 1,
        "limit": 1,
        "steps": 250,
        "waiting_for": "row 101 is waiting for group 0-801, leased (rollout-0)",
        "members": (
            member("learner-0", version=None),
            member("reward-0"),
            member("rollout-0", version=[1, 99]),
        ),
        "reports": REPORTS,
        "evaluations": (
            EvaluationResult(
                id="heldout@0",
                set_name="heldout",
                step=0,
                accuracy=0.0,
                problems=500,
                format_share=1.0,
                mean_length=50.0,
                seconds=1.0,
                member="rollout-0",
            ),
        ),
        "evaluations_open": 1,
        "grader_restarts": 2,
    }
    return Facts(**{**values, **changes})


def snapshot(**changes: Any) -> Snapshot:
    """The run of all of this."""
    restarts = [{"process": "rollout-0", "time": "2026-01-02T03:04:05+00:00", "exit": "SIGKILL"}]
    return assemble(KNOWN, history(), facts(**changes), restarts=restarts, now=NOW)
