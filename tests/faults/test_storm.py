"""A short storm of SIGKILLs over a run of real processes, and what the audit says of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit import Evidence, examine, gather, tampered
from storm import HERE, TARGETS, Storm, plan, report, restarts

KILLS = 10
SEED = 31

pytestmark = pytest.mark.timeout(300)


class Survived:
    """A run that was killed at, and its audit."""

    storm: Storm
    trouble: str | None
    evidence: Evidence


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survived]:
    patch = pytest.MonkeyPatch()
    # The engine is found by its import path, in the workers.
    patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    here: Path = tmp_path_factory.mktemp("storm")
    seen = Survived()
    seen.storm = Storm(plan(SEED, KILLS, groups=61), here)
    seen.trouble = seen.storm.through()
    assert seen.trouble is None, f"{seen.trouble}\n{seen.storm.run.said()}"
    seen.evidence = gather(seen.storm.folder)
    yield seen
    patch.undo()


def test_every_group_is_trained_once_whoever_is_killed(survived: Survived) -> None:
    found = examine(survived.evidence)
    print("\n".join(report(survived.storm, None, found)))
    assert found.breaches == []
    assert found.figures["groups trained"] == found.figures["groups of the run"] > 50


def test_all_kills_of_the_plan_were_made(survived: Survived) -> None:
    hit = survived.storm.hit
    assert sum(hit.values()) - KILLS in (0, 1)  # The one into the run's end may come too late.
    again = restarts(survived.storm.folder)
    for role in TARGETS.keys() - {"grader"}:
        assert again[role] >= hit[role] - 1, role


@pytest.mark.parametrize(
    "breach", ["doubled row", "lost id", "short row", "stale group", "lost evaluation"]
)
def test_a_breach_planted_in_the_real_folder_is_told(survived: Survived, breach: str) -> None:
    evidence = tampered(survived.evidence)
    records = [record for record in evidence.journal if record["kind"] == "row"]
    if breach == "doubled row":
        evidence.journal.append(records[3])
    elif breach == "lost id":
        del evidence.final[17]
    elif breach == "short row":
        records[4]["row"]["groups"].pop()
    elif breach == "lost evaluation":
        evidence.told.pop()
    else:
        rows = next(iter(evidence.samples[9].values()))
        rows[0]["versions"] = ["1.2"]
    assert examine(evidence).breaches


def test_a_seed_settles_the_plan() -> None:
    assert plan(3, 30) == plan(3, 30)
    assert plan(3, 30) != plan(4, 30)
    assert [kill.step for kill in plan(3, 30).kills] == sorted(k.step for k in plan(3, 30).kills)


def test_seeds_cover_every_target_and_both_kinds_of_staleness() -> None:
    plans = [plan(seed, 30) for seed in range(10)]
    assert {kill.target for one in plans for kill in one.kills} == set(TARGETS)
    assert 0 in {one.staleness for one in plans}
    assert max(one.staleness for one in plans) >= 1
