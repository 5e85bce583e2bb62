"""A run over several hosts: its head, and supervisors that join from the others as a scheduler would place them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from netns import Host, Network, listening
from processes import TANDEM
from scripted_engine import STEP_SECONDS
from storm import HERE as FAULTS
from storm import journalled

from tandem.common.run_folder import RunFolder

DEADLINE = 150.0
REQUEUE = 75


@dataclass
class Job:
    """One command on one host."""

    host: Host
    words: tuple[str, ...]
    output: Path
    process: subprocess.Popen[bytes]

    def said(self) -> str:
        """All that it has printed."""
        return self.output.read_text()


@dataclass
class Cluster:
    """The head's job comes first."""

    network: Network
    here: Path
    jobs: list[Job] = field(default_factory=list)
    seen: dict[str, set[str]] = field(default_factory=dict)
    """Address of a host -> addresses on which anything has listened there."""
    ended: list[int] = field(default_factory=list)
    """Exit codes of jobs that :meth:`requeue` has placed again."""

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.here / "run"

    def start(self, host: Host, *words: str) -> Job:
        """Starts a ``tandem`` command on a host."""
        path = f"{FAULTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        output = self.here / f"job-{len(self.jobs)}-{time.monotonic_ns()}.txt"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [*host.inside, *TANDEM, *words],
                cwd=self.here,
                env={**os.environ, "PYTHONPATH": path, STEP_SECONDS: "0.02"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        job = Job(host, words, output, process)
        self.jobs.append(job)
        return job

    def join(self, host: Host, role: str, *words: str) -> Job:
        """Has a host join with processes of a role, once the run can be joined."""
        file = self.folder / "join.json"
        self.until(file.exists, "the join file")
        return self.start(host, "join", str(file), "--role", role, "--name", host.name, *words)

    @property
    def head(self) -> Job:
        """The head's job."""
        return self.jobs[0]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits while the head goes on, and looks who listens meanwhile."""
        end = time.monotonic() + DEADLINE
        while not condition():
            self.look()
            assert self.head.process.poll() is None, f"it ended before {what}:\n{self.told()}"
            assert time.monotonic() < end, f"no {what} in {DEADLINE:.0f} s:\n{self.told()}"
            time.sleep(0.05)

    def rows(self, count: int) -> None:
        """Waits for so many rows of the journal."""
        self.until(lambda: journalled(self.folder) >= count, f"row {count}")

    def look(self) -> None:
        """Notes on which addresses anything listens on each host."""
        for job in self.jobs:
            if job.process.poll() is None:
                try:
                    # Before it has entered its namespace it is in the machine's own.
                    found = listening(job.process.pid) if self._inside(job) else set()
                except OSError:
                    continue  # It has just ended.
                self.seen.setdefault(job.host.address, set()).update(found)

    def _inside(self, job: Job) -> bool:
        own = os.stat("/proc/self/ns/net").st_ino
        return os.stat(f"/proc/{job.process.pid}/ns/net").st_ino != own

    def wait(self, deadline: float = DEADLINE) -> int:
        """The head's exit code."""
        end = time.monotonic() + deadline
        while self.head.process.poll() is None:
            self.look()
            assert time.monotonic() < end, f"still running:\n{self.told()}"
            time.sleep(0.1)
        return int(self.head.process.returncode)

    def told(self) -> str:
        """The last that every job has printed."""
        return "\n".join(f"== {job.words[:4]}\n{job.said()[-1500:]}" for job in self.jobs)

    def alive(self, role: str) -> list[psutil.Process]:
        """Living processes of a role on all hosts, in the order of the jobs; ``redis`` and ``grader`` too."""
        found = []
        for job in self.jobs:
            try:
                children = psutil.Process(job.process.pid).children()
            except psutil.NoSuchProcess:
                continue
            for child in children:
                try:
                    words = child.cmdline()
                    if not words or child.status() == psutil.STATUS_ZOMBIE:
                        continue
                    name = words[words.index("--name") + 1] if "--name" in words else words[0]
                    if role == "grader" and name.startswith("reward"):
                        found += child.children(recursive=True)
                except psutil.NoSuchProcess:
                    continue
                if name.startswith(role) or (role == "redis" and "redis-server" in words[0]):
                    found.append(child)
        return found

    def kill(self, role: str, pick: float = 0.0) -> None:
        """``kill -9`` of one process of a role, as soon as there is one."""
        self.until(lambda: bool(self.alive(role)), f"a living {role}")
        found = self.alive(role)
        if found:
            found[int(pick * len(found))].send_signal(signal.SIGKILL)

    def running(self) -> bool:
        """Whether the head has started its processes."""
        return RunFolder(self.folder).read_run().get("state") == "running"

    def attempts(self) -> int:
        """How often the head has started its rank."""
        log = self.folder / "logs" / "learner-0.log"
        return sum(line.startswith("=== ") for line in log.read_text().splitlines())

    def requeue(self) -> None:
        """Places jobs again that a scheduler would: killed, or ended with exit code 75."""
        for job in list(self.jobs[1:]):
            code = job.process.poll()
            if code is not None and (code < 0 or code == REQUEUE):
                self.ended.append(code)
                self.jobs.remove(job)
                self.start(job.host, *job.words)

    def end(self) -> None:
        """Ends everything; children end with their supervisor."""
        for job in self.jobs:
            if job.process.poll() is None:
                job.process.kill()
        for job in self.jobs:
            job.process.wait()


def storm(cluster: Cluster, seed: int, events: int, last: int) -> Counter[str]:
    """Kills and cuts at instants that a seed settles, before row ``last``; returns what was hit how often."""
    draw = random.Random(f"hosts {seed}")
    hit: Counter[str] = Counter()
    weights = {
        "learner": 3,
        "rollout": 5,
        "reward": 3,
        "grader": 2,
        "redis": 2,
        "supervisor": 2,
        "drain": 2,
        "cable": 3,
    }
    steps = sorted(draw.randint(1, last) for _ in range(events))
    for step in steps:
        cluster.until(lambda step=step: _rows(cluster) >= step, f"row {step}")
        what = draw.choices(list(weights), list(weights.values()))[0]
        pick, seconds = draw.random(), draw.choice((1.0, 3.0, 9.0))
        hit[what] += 1
        if what == "cable":
            host = draw.choice(cluster.network.hosts[1:])
            cluster.network.cut(host)
            end = time.monotonic() + seconds
            cluster.until(lambda end=end: time.monotonic() > end, "the end of a cut")
            cluster.network.mend(host)
        elif what in ("supervisor", "drain"):
            # A host that fails, and one whose scheduler wants it back.
            job = draw.choice(cluster.jobs[1:])
            job.process.send_signal(signal.SIGKILL if what == "supervisor" else signal.SIGTERM)
            job.process.wait(60)
        else:
            cluster.kill(what, pick)
    return hit


def _rows(cluster: Cluster) -> int:
    cluster.requeue()
    return journalled(cluster.folder)
