"""Runs over several hosts, each a network namespace of its own: whole, with cables cut, and in a storm of kills."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit import examine, gather
from cluster import REQUEUE, Cluster, storm
from netns import Network
from processes import TANDEM
from safetensors.numpy import load_file
from storm import HERE as FAULTS
from storm import journalled

pytestmark = pytest.mark.timeout(400)

LOST = 10.0
AWAY = 30.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    network = Network(3)
    made = Cluster(network, tmp_path)
    try:
        yield made
    finally:
        made.end()
        network.close()


def begin(cluster: Cluster, *settings: str, groups: int) -> None:
    """A run with its head, Redis, pool, a worker and a rank on the first host; ranks on one of the others."""
    first, second = cluster.network.hosts[:2]
    cluster.start(
        first,
        *("start", str(FAULTS / "storm.yaml"), f"run.dir={cluster.folder}"),
        *(f"launch.bind={first.address}", "learner.ranks=2", "learner.hosts=2"),
        *("rollout.workers=1", f"data.miniature_fresh={groups}", "evaluate.limit=8"),
        *(f"launch.lost_seconds={LOST}", f"launch.hosts_seconds={AWAY}", "launch.drain_seconds=20"),
        *settings,
    )
    cluster.join(second, "learner", "--folder", str(cluster.here / "second-learner"))
    cluster.join(second, "rollout", "--folder", str(cluster.here / "second-rollout"))


def examined(cluster: Cluster, groups: int) -> None:
    """Every group is trained once, and nothing has listened but on private addresses and loopback."""
    found = examine(gather(cluster.folder))
    assert found.breaches == []
    assert found.figures["groups trained"] == found.figures["groups of the run"] == groups
    for host in cluster.network.hosts:
        if host.address in cluster.seen:
            assert cluster.seen[host.address] <= {host.address, "127.0.0.1"}, cluster.seen
    assert len(cluster.seen) >= 2


@pytest.mark.byhand
def test_cables_that_are_cut_cost_a_run_no_group(cluster: Cluster) -> None:
    second, third = cluster.network.hosts[1:]
    begin(cluster, "learner.checkpoints=gathered", groups=96)
    learner, rollout = cluster.jobs[1:3]
    cluster.rows(3)
    attempts = cluster.attempts()
    # For a while: all wait, and nobody is given up.
    cluster.network.cut(second)
    end = time.monotonic() + LOST / 3
    cluster.until(lambda: time.monotonic() > end, "the end of the cut")
    cluster.network.mend(second)
    cluster.rows(max(8, journalled(cluster.folder) + 2))
    assert cluster.attempts() == attempts
    assert "lost" not in cluster.head.said()
    # A rank that is killed ends the attempt on both hosts.
    cluster.kill("learner", 0.99)
    cluster.until(lambda: cluster.attempts() > attempts, "another attempt")
    assert "learner-1 on" in cluster.head.said()
    cluster.rows(journalled(cluster.folder) + 1)
    assert "resumes from the checkpoint" in (cluster.folder / "logs" / "learner-0.log").read_text()
    # For ever: another host takes the place.
    spare = cluster.join(third, "learner", "--folder", str(cluster.here / "third-learner"))
    cluster.network.cut(second)
    cluster.until(lambda: "is lost" in cluster.head.said(), "word of the loss")
    assert f"host {second.name} ({second.address}, last seen" in cluster.head.said()
    assert cluster.wait() == 0, cluster.told()
    assert spare.process.wait(30) == 0, cluster.told()
    for job in (learner, rollout):
        assert job.process.wait(60) == REQUEUE, cluster.told()
        assert "hasn't answered for" in job.said()
    examined(cluster, 96)


@pytest.mark.byhand  # CI cuts it for three seconds, in the test above.
def test_a_cable_that_is_cut_for_twenty_seconds_loses_nobody(cluster: Cluster) -> None:
    second = cluster.network.hosts[1]
    begin(cluster, "launch.lost_seconds=60", groups=64)
    cluster.rows(3)
    attempts = cluster.attempts()
    cluster.network.cut(second)
    end = time.monotonic() + 20.0
    cluster.until(lambda: time.monotonic() > end, "the end of the cut")
    cluster.network.mend(second)
    assert cluster.wait() == 0, cluster.told()
    assert "is lost" not in cluster.head.said()
    assert cluster.attempts() == attempts
    examined(cluster, 64)


@pytest.mark.byhand  # What CI runs of it: tests/launch/run/test_meeting.py.
def test_a_host_that_stays_away_is_named_and_the_run_goes_on_when_it_is_started_again(
    cluster: Cluster,
) -> None:
    begin(cluster, "launch.lost_seconds=3", "launch.hosts_seconds=6", groups=24)
    second = cluster.network.hosts[1]
    cluster.rows(2)
    cluster.network.cut(second)
    assert cluster.wait() == REQUEUE, cluster.told()
    said = cluster.head.said()
    assert f"waiting for host {second.name} ({second.address}, last seen" in said
    assert "didn't come to the learner's meeting within 6.0 s" in said
    cluster.network.mend(second)
    words = cluster.head.words
    for job in cluster.jobs[1:]:
        assert job.process.wait(60) == REQUEUE, cluster.told()
    joined = [job.words for job in cluster.jobs[1:]]
    cluster.jobs.clear()
    cluster.start(cluster.network.hosts[0], *words, "launch.hosts_seconds=60")
    for job_words in joined:
        cluster.start(second, *job_words)
    assert cluster.wait() == 0, cluster.told()
    assert [job.process.wait(60) for job in cluster.jobs[1:]] == [0, 0]
    examined(cluster, 24)


@pytest.mark.parametrize(
    ("seed", "events", "groups"),
    [(33, 5, 80), pytest.param(8, 40, 400, marks=pytest.mark.byhand)],
)
def test_every_group_is_trained_once_in_a_storm_over_all_hosts(
    seed: int, events: int, groups: int, cluster: Cluster
) -> None:
    begin(cluster, groups=groups)
    third = cluster.network.hosts[2]
    cluster.join(third, "rollout", "--folder", str(cluster.here / "third-rollout"))
    hit = storm(cluster, seed, events, last=groups // 4 - 4)
    assert sum(hit.values()) == events
    while cluster.head.process.poll() is None:
        cluster.look()
        cluster.requeue()
        time.sleep(0.2)
    assert cluster.wait() == 0, cluster.told()
    print(dict(hit), cluster.ended)
    examined(cluster, groups)


def test_two_hosts_train_as_two_ranks_of_one_host(cluster: Cluster) -> None:
    first, second = cluster.network.hosts[:2]
    found = []
    for hosts in (1, 2):
        cluster.here = cluster.here / f"on-{hosts}"
        cluster.here.mkdir()
        cluster.jobs.clear()
        cluster.start(
            first,
            *("offline", "miniature-sft", f"run.dir={cluster.folder}", "run.steps=6"),
            *("learner.ranks=2", f"learner.hosts={hosts}", "learner.zero_stage=2"),
            *(f"launch.bind={first.address}", "evaluate.every=0", "evaluate.at_end=false"),
            "evaluate.at_start=false",
        )
        if hosts == 2:
            cluster.join(second, "learner")
        assert cluster.wait() == 0, cluster.told()
        found.append(load_file(cluster.folder / "model" / "model.safetensors"))
        record = json.loads((cluster.folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert record["step"] == 6
    alone, apart = found
    base = load_file(
        Path(__file__).parents[2] / "launch" / "miniature" / "base" / "model.safetensors"
    )
    assert max(abs(alone[name] - base[name]).max() for name in alone) > 1e-4
    assert max(abs(alone[name] - apart[name]).max() for name in alone) < 1e-5


@pytest.mark.byhand
def test_torchrun_places_the_ranks_of_a_run_that_leaves_them_to_it(cluster: Cluster) -> None:
    first = cluster.network.hosts[0]
    cluster.start(
        first,
        *("start", str(FAULTS / "storm.yaml"), f"run.dir={cluster.folder}", "evaluate.limit=8"),
        *("launch.learner=outside", "learner.ranks=2", "rollout.workers=1"),
        *("data.miniature_fresh=24", "launch.drain_seconds=20"),
    )
    cluster.until(cluster.running, "the run's start")
    with open(cluster.here / "torchrun.txt", "w+") as said:
        ranks = subprocess.Popen(
            [
                *(*first.inside, sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", "--no-python", "--"),
                str(Path(TANDEM[0]).parent / "tandem"),
                *("learner", "--run", str(cluster.folder)),
            ],
            cwd=cluster.here,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            assert cluster.wait() == 0, cluster.told()
            assert ranks.wait(60) == 0
        finally:
            ranks.terminate()  # Its ranks end with it.
            ranks.wait(60)
        said.seek(0)
        assert "on 2 rank(s)" in said.read()
    found = examine(gather(cluster.folder))
    assert found.breaches == []
    assert found.figures["groups trained"] == 24
