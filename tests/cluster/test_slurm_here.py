"""A run on a real Slurm of two nodes, by the scripts that `tandem cluster slurm` writes; audited at its end.

The packages are fetched by apt-get and unpacked, not installed; ``TANDEM_SLURM_TREE`` names a folder in which they
stay from one time to the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit import examine, gather
from slurm_here import Slurm, unpacked
from storm import journalled

from tandem.launch.cli import dispatch

STORM = Path(__file__).resolve().parent.parent / "faults" / "storm.yaml"
WAITING = 150.0
"""Deadline of what takes seconds on a quiet machine."""

pytestmark = [pytest.mark.slurm, pytest.mark.byhand, pytest.mark.timeout(1200)]

MANY = 9601
"""Groups of a run that lasts for some minutes on a fast machine too."""


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("TANDEM_SLURM_TREE")
    if os.geteuid():
        pytest.skip("Slurm's daemons want root here")
    try:
        return unpacked(Path(named) if named else tmp_path_factory.mktemp("slurm-packages"))
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no Slurm: {error}")


class OnSlurm:
    """A run's scripts, submitted."""

    def __init__(self, slurm: Slurm, here: Path, groups: int, *words: str) -> None:
        self.slurm, self.folder, self.out = slurm, here / "run", here / "scripts"
        settings = [
            "rollout.engine=torch",
            f"data.miniature_fresh={groups}",
            f"run.dir={self.folder}",
            "launch.bind=127.0.0.1",
            "launch.backoff_seconds=0.5",
            "evaluate.every=0",
        ]
        command = ["cluster", "slurm", str(STORM), *settings, "--name", "here", *words]
        assert dispatch([*command, "--out", str(self.out)]) == 0
        self.head = slurm.submit(str(self.out / "head.sbatch"))
        self.array = slurm.submit(
            f"--dependency=after:{self.head}", str(self.out / "rollout.sbatch")
        )

    def rows(self) -> int:
        return journalled(self.folder) if self.folder.exists() else 0

    def more_rows(self, count: int = 3) -> float:
        """Waits for so many more rows in the journal; returns the seconds."""
        before = self.rows()
        return self.slurm.wait_for(lambda: self.rows() >= before + count, "new rows", WAITING)

    def state(self, job: str) -> str:
        return self.slurm.jobs().get(job, "gone")

    def again(self, job: str) -> None:
        """Has a job run that asked to be requeued, or that somebody else has."""
        self.slurm.wait_for(lambda: self.state(job) == "PENDING", f"{job} pending", WAITING)
        self.slurm.start_now(job)
        self.slurm.wait_for(lambda: self.state(job) == "RUNNING", f"{job} running", WAITING)

    def audited(self) -> dict[str, int]:
        """Waits for the end of all jobs; the figures of the audit."""
        self.slurm.wait_for(lambda: not self.slurm.jobs(), "end of all jobs", 4 * WAITING)
        found = examine(gather(self.folder))
        assert found.breaches == [], self.said()
        assert found.figures["groups trained"] == found.figures["groups of the run"]
        return found.figures

    def said(self) -> str:
        """What the jobs have printed."""
        logs = sorted(self.out.glob("*.log"))
        return "\n".join(f"=== {log.name}\n{log.read_text()[-3000:]}" for log in logs)


@pytest.fixture
def slurm(tree: Path, tmp_path: Path) -> Iterator[Slurm]:
    made = Slurm(tree, tmp_path / "slurm")
    yield made
    made.close()


def test_head_and_workers_are_cancelled_and_requeued_and_nothing_is_lost(
    slurm: Slurm, tmp_path: Path
):
    run = OnSlurm(slurm, tmp_path, 241)
    slurm.wait_for(lambda: run.rows() > 2, "first rows", WAITING)
    assert (run.folder / "join.json").stat().st_mode & 0o777 == 0o600
    slurm.run("scancel", f"{run.array}_1")
    slurm.wait_for(lambda: run.state(f"{run.array}_1") == "gone", "end of a worker")
    slurm.run("scontrol", "requeue", run.head)
    run.again(run.head)
    # Its worker has left with the head, and asks to be started again by itself.
    run.again(f"{run.array}_2")
    run.more_rows()
    figures = run.audited()
    assert figures["learner's resumptions"] == 1
    assert run.state(f"{run.array}_1") == "gone"


def test_a_joiner_samples_within_half_a_minute(slurm: Slurm, tmp_path: Path):
    run = OnSlurm(slurm, tmp_path, 1201)
    slurm.wait_for(lambda: run.rows() > 2, "first rows", WAITING)
    slurm.run("scancel", run.array)
    slurm.wait_for(lambda: list(slurm.jobs()) == [run.head], "end of all workers")
    began = time.monotonic()
    more = slurm.submit("--array=101", str(run.out / "rollout.sbatch"))
    slurm.wait_for(lambda: run.state(f"{more}_101") == "RUNNING", "start of the joiner")
    log = run.out / "hosts" / f"rollout-{more}_101"
    run.more_rows(1)
    seconds = time.monotonic() - began
    print(f"the joiner's first row is trained {seconds:.1f} s after it was submitted ({log})")
    assert seconds < 30
    run.audited()


def test_time_limits_of_head_and_workers_pass_by_themselves(slurm: Slurm, tmp_path: Path):
    # Slurm counts in minutes: the warning comes 70 s before the end of three, or up to a minute earlier.
    run = OnSlurm(slurm, tmp_path, MANY, "--time", "3:00", "--grace", "10")
    slurm.wait_for(lambda: run.rows() > 2, "first rows", WAITING)
    run.again(run.head)
    assert slurm.field(run.head, "Restarts") == "1"
    slurm.run("scontrol", "update", f"JobId={run.head}", "TimeLimit=1:00:00")
    for task in (1, 2):
        run.again(f"{run.array}_{task}")
        slurm.run("scontrol", "update", f"JobId={run.array}_{task}", "TimeLimit=1:00:00")
    run.more_rows()
    assert run.audited()["learner's resumptions"] >= 1


def test_a_storm_of_requeues_and_cancels_loses_nothing(slurm: Slurm, tmp_path: Path):
    run = OnSlurm(slurm, tmp_path, 2401)
    slurm.wait_for(lambda: run.rows() > 2, "first rows", WAITING)
    for number in range(4):
        slurm.run("scontrol", "requeue", f"{run.array}_{1 + number % 2}")
        run.again(f"{run.array}_{1 + number % 2}")
        run.more_rows()
    more = slurm.submit("--array=101-102", str(run.out / "rollout.sbatch"))
    run.more_rows()
    slurm.run("scancel", f"{more}_101")
    for _ in range(2):
        slurm.run("scontrol", "requeue", run.head)
        run.again(run.head)
        for job in (f"{run.array}_1", f"{run.array}_2", f"{more}_102"):
            run.again(job)
        run.more_rows()
    assert run.audited()["learner's resumptions"] == 2


def test_of_two_heads_after_the_death_of_a_nodes_daemon_one_has_the_run(
    slurm: Slurm, tmp_path: Path
):
    run = OnSlurm(slurm, tmp_path, MANY)
    slurm.wait_for(lambda: run.rows() > 2, "first rows", WAITING)
    node = slurm.field(run.head, "NodeList")
    slurm.kill_node(node)
    # Slurm starts the head again elsewhere, while the first one runs on.
    slurm.wait_for(lambda: run.state(run.head) == "PENDING", "the head requeued", WAITING)
    run.more_rows()
    slurm.start_now(run.head)
    log = run.out / f"head-{run.head}.log"
    slurm.wait_for(lambda: "is in use by process" in log.read_text(), "the refusal", WAITING)
    run.more_rows()
    # The node comes back, and what it finds there is ended.
    slurm.start_node(node)
    run.again(run.head)
    for task in (1, 2):
        if run.state(f"{run.array}_{task}") != "RUNNING":
            run.again(f"{run.array}_{task}")
    run.more_rows()
    run.audited()
