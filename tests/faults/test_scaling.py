"""Workers come and go while a run goes on, and its Redis stands still for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from audit import journal_of
from processes import DEADLINE, TANDEM, Run, tandem
from scripted_engine import STEP_SECONDS
from storm import HERE

pytestmark = [pytest.mark.timeout(400), pytest.mark.byhand]

PACE_SECONDS = 8.0
STOPPED_SECONDS = 20.0
"""Twice the preset's lease: every lease would run out."""


class Job:
    """A run with two workers of its own, which is joined by others."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.folder = here / "run"
        self.joined: dict[str, subprocess.Popen[bytes]] = {}
        self.run = Run(
            here,
            *("start", str(HERE / "storm.yaml"), f"run.dir={self.folder}"),
            *("run.passes=", "run.steps=100000", "rollout.workers=2", "replay.max_staleness=3"),
        )

    def join(self, name: str, role: str = "rollout") -> None:
        """Starts a worker, or a pool, by hand."""
        with open(self.here / f"{name}.log", "wb") as log:
            self.joined[name] = subprocess.Popen(
                [*TANDEM, role, "--run", str(self.folder), "--name", name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def status(self) -> dict[str, Any]:
        """``tandem status --json``."""
        code, out, err = tandem(self.here, "status", str(self.folder), "--json")
        assert code == 0, err
        told: dict[str, Any] = json.loads(out)
        return told

    def workers(self, role: str = "rollout") -> set[str]:
        """Rollout workers that the status names, each of which must be there or just have died."""
        return {m["member"] for m in self.status()["members"] if m["role"] == role}

    def committed(self, pool: str) -> int:
        """Groups that a pool says it has committed."""
        client, prefix = self.redis()
        told = client.hget(f"{prefix}reports", pool)
        client.close()
        return int(json.loads(told).get("pool/committed", 0)) if told else 0

    def rows(self) -> list[float]:
        """When each row was journalled."""
        records = journal_of(self.folder)
        return [record["time"] for record in records if record["kind"] == "row"]

    def pace(self) -> float:
        """Rows a second, lately."""
        now = time.time()
        return sum(now - moment < PACE_SECONDS for moment in self.rows()) / PACE_SECONDS

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        self.run.wait_for(condition, what)

    def makers(self, since: int) -> set[str]:
        """Workers whose groups were trained on after a step."""
        lines = (self.folder / "samples.jsonl").read_text().splitlines()
        return {r["worker"] for r in map(json.loads, lines) if r["step"] > since}

    def redis(self) -> Any:
        """A plain client."""
        join = json.loads((self.folder / "join.json").read_text())
        return redis.Redis(
            port=join["port"], password=join["password"]
        ), f"tandem:{join['run_id']}:"

    def end(self) -> None:
        for process in self.joined.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self.run.end()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    # A batch takes more than a second: the pace is that of the workers.
    patch.setenv(STEP_SECONDS, "0.02")
    made = Job(tmp_path_factory.mktemp("scaling"))
    try:
        made.wait_for(lambda: len(made.rows()) > 3, "step 3")
        yield made
    finally:
        made.end()
        patch.undo()


def test_pace_follows_the_workers_that_come_and_go(job: Job) -> None:
    began = time.time()
    job.wait_for(lambda: time.time() - began > PACE_SECONDS, "a look at the pace")
    alone = job.pace()
    assert job.workers() == {"rollout-0", "rollout-1"}

    job.join("guest-a")
    job.join("guest-b")
    everybody = {"rollout-0", "rollout-1", "guest-a", "guest-b"}
    job.wait_for(lambda: job.workers() == everybody, "four workers in the status")
    job.wait_for(lambda: job.pace() > 1.3 * alone, f"more than 1.3 x {alone:.2f} rows a second")
    together = job.pace()
    job.wait_for(lambda: job.makers(0) == everybody, "groups of all four in training")

    job.joined["guest-a"].send_signal(signal.SIGKILL)
    job.joined["guest-b"].send_signal(signal.SIGTERM)
    assert job.joined["guest-b"].wait(DEADLINE) == 0
    assert "guest-b" not in job.workers()
    job.wait_for(lambda: job.workers() == {"rollout-0", "rollout-1"}, "two workers in the status")
    job.wait_for(
        lambda: job.pace() < 0.8 * together, f"less than 0.8 x {together:.2f} rows a second"
    )
    # What the killed one had leased is made by others, else no further row could be cut.
    here = len(job.rows())
    job.wait_for(lambda: len(job.rows()) > here + 4, "further rows")
    job.wait_for(
        lambda: job.makers(len(job.rows()) - 4) == {"rollout-0", "rollout-1"}, "rows of the two"
    )
    print(f"rows a second: two workers {alone:.2f}, four {together:.2f}, two {job.pace():.2f}")


def test_pools_come_and_go_likewise(job: Job) -> None:
    assert job.workers("reward") == {"reward-0"}
    job.join("guest-pool", "reward")
    job.wait_for(lambda: job.committed("guest-pool") > 8, "groups that the guest has graded")
    # With the run's own pool stopped, the guest grades alone; nobody starts another in its place.
    own = job.run.role("reward-0")
    own.send_signal(signal.SIGSTOP)
    try:
        here, alone = len(job.rows()), job.committed("guest-pool")
        job.wait_for(lambda: job.committed("guest-pool") > alone + 8, "groups of the guest alone")
        job.wait_for(lambda: len(job.rows()) > here + 2, "rows of what it graded")
    finally:
        own.send_signal(signal.SIGCONT)
    job.joined["guest-pool"].send_signal(signal.SIGTERM)
    assert job.joined["guest-pool"].wait(DEADLINE) == 0
    job.wait_for(lambda: job.workers("reward") == {"reward-0"}, "one pool in the status")
    here = len(job.rows())
    job.wait_for(lambda: len(job.rows()) > here + 4, "further rows")
    assert job.status()["dead_letters"] == []


def test_a_redis_that_stands_still_costs_no_attempt(job: Job) -> None:
    client, prefix = job.redis()
    leased = client.zrange(f"{prefix}leased", 0, -1)
    assert leased
    attempts = {int(s): int(client.hget(f"{prefix}group:{int(s)}", "attempt")) for s in leased}
    server = job.run.role("redis")
    pids = {p.pid for p in job.run.tree.children()}
    server.send_signal(signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        job.wait_for(lambda: time.monotonic() - stopped > STOPPED_SECONDS, "the end of the stop")
    finally:
        server.send_signal(signal.SIGCONT)
    before = len(job.rows())
    job.wait_for(lambda: len(job.rows()) > before + 5, "further rows")

    def finals() -> dict[int, int]:
        raw = {s: client.hget(f"{prefix}final:{s // 256}", s % 256) for s in attempts}
        return {s: int(text.split(b":")[2]) for s, text in raw.items() if text is not None}

    job.wait_for(lambda: len(finals()) == len(attempts), "the end of what was leased then")
    assert finals() == attempts
    # Nobody died of it either.
    assert {p.pid for p in job.run.tree.children() if p.status() != psutil.STATUS_ZOMBIE} == pids
    assert job.status()["dead_letters"] == []
    client.close()


def test_it_drains_at_the_end(job: Job) -> None:
    job.run.process.send_signal(signal.SIGINT)
    assert job.run.wait() == 130, job.run.said()
