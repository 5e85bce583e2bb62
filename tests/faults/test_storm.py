"""A short storm of SIGKILLs over a run of real processes, and what the audit says of it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit import Evidence, examine, gather, tampered
from storm import HERE, TARGETS, Storm, plan, report, restarts

PLANS = {
    "samples": plan(31, 10, groups=61),
    "episodes": plan(76, 6, groups=41, ranks=2, environments=True),
}

pytestmark = pytest.mark.timeout(300)


class Survived:
    """A run that was killed at, and its audit."""

    storm: Storm
    trouble: str | None
    evidence: Evidence


@pytest.fixture(scope="module", params=PLANS)
def survived(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Survived]:
    patch = pytest.MonkeyPatch()
    # The engine is found by its import path, in the workers.
    patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    here: Path = tmp_path_factory.mktemp("storm")
    seen = Survived()
    seen.storm = Storm(PLANS[request.param], here)
    seen.trouble = seen.storm.through()
    assert seen.trouble is None, f"{seen.trouble}\n{seen.storm.run.said()}"
    seen.evidence = gather(seen.storm.folder)
    yield seen
    patch.undo()


def test_every_group_is_trained_once_whoever_is_killed(survived: Survived) -> None:
    found = examine(survived.evidence)
    print("\n".join(report(survived.storm, None, found)))
    assert found.breaches == []
    assert found.figures["groups trained"] == found.figures["groups of the run"] > 40
    assert found.figures["learner's resumptions"] >= 1


def test_all_kills_of_the_plan_were_made(survived: Survived) -> None:
    storm = survived.storm
    planned = Counter(kill.target for kill in storm.plan.kills)
    late = storm.hit - planned  # The one into the run's end may come too late,
    assert storm.hit >= planned
    assert late <= Counter([storm.plan.last.target])
    again = restarts(storm.folder)
    for role in storm.hit.keys() - {"grader", "episode"}:
        assert again[role] >= storm.hit[role] - late[role], role  # or nobody is started for it.
    killed = {json.loads(line)["process"] for line in storm.log.read_text().splitlines()}
    assert storm.plan.ranks == 1 or "learner-1" in killed


def test_the_plans_hit_everything_there_is() -> None:
    hit = {name: {kill.target for kill in one.kills} for name, one in PLANS.items()}
    assert hit["samples"] == TARGETS.keys()
    assert hit["episodes"] >= {"environments", "episode", "learner"}


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
