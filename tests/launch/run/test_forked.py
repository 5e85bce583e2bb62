"""Workers that the learner's process forks while the run is prepared: which, how they go on, how they end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.common.config import Config
from tandem.common.run_folder import RunFolder
from tandem.launch.plan.placement import Placement
from tandem.launch.run.opened import presets
from tandem.launch.run.processes import forked, roles
from tandem.launch.run.processes.forked import Forked
from tandem.launch.run.processes.parts import SPINS, Part, ProcessSpec, environment_of, exit_of
from tandem.launch.run.processes.supervision import Supervisor

PR_GET_CHILD_SUBREAPER = 37

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands over orphans")


def until(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def others(tmp_path: Path, forking: int) -> list[psutil.Process]:
    """Running processes with this test's command lines except the one that forks: wherever an orphan has gone to."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if process.pid != forking and str(tmp_path / "nowhere") in words:
            found.append(process)
    return found


def has_forked(pid: int) -> bool:
    """Whether the forking process has closed the pipes of what it has forked."""
    return all(int(number) <= 2 for number in os.listdir(f"/proc/{pid}/fd"))


def part(tmp_path: Path, role: str, *names: str) -> Part:
    specs = [
        ProcessSpec(
            name=name,
            arguments=(role, "--run", str(tmp_path / "nowhere"), "--name", name),
            log=tmp_path / f"{name}.log",
        )
        for name in names
    ]
    return Part(name=names[0], stage=0, specs=lambda: specs)


@pytest.fixture
def told() -> str:
    """A config whose worker has an engine of the user's own: it loads no torch."""
    config = presets.load("miniature").resolve(["rollout.engine=json:loads"])
    return config.model_dump_json()


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[Part, Part]]:
    """What forks, and two processes that it forks. A pool, which loads little, stands for the learner."""
    pair = (
        part(tmp_path, "reward", "reward-that-forks"),
        part(tmp_path, "rollout", "rollout-0", "rollout-1"),
    )
    # Other tests' servers.
    before = set(psutil.Process().children(recursive=True))
    yield pair
    for one in pair:
        one.end_early()
        one.reap(print)
    assert not set(psutil.Process().children(recursive=True)) - before


def is_subreaper() -> bool:
    answer = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0
    return bool(answer.value)


def test_they_go_on_as_the_supervisors_own_children(
    tmp_path: Path, parts: tuple[Part, Part], told: str
):
    forking, workers = parts
    forking.begin_early(told, [workers])
    assert is_subreaper()
    assert list(workers.early) == ["rollout-0", "rollout-1"]
    until(lambda: not workers.awaits_fork())
    # Others' orphans are none of the supervisor's business.
    until(lambda: not is_subreaper())
    (pool,) = forking.early.values()
    for name, process in workers.early.items():
        seen = psutil.Process(process.pid)
        assert isinstance(process, Forked)
        assert seen.ppid() == os.getpid() != pool.pid
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        words = [word for word in seen.cmdline() if word]
        assert words[1:6] == ["-P", "-m", "tandem.launch.lifeline", str(os.getpid()), "early"]
        assert words[6:] == ["rollout", "--run", str(tmp_path / "nowhere"), "--name", name]
        links = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in (1, 2)}
        assert links == {os.devnull}
        # Nothing of the forking process's pipes is held.
        until(
            lambda pid=process.pid: (
                len([f for f in os.listdir(f"/proc/{pid}/fd") if int(f) > 2]) == 0
            )
        )
    workers.start()
    assert not workers.early
    for spec, process in workers.processes:
        assert process.wait(60) != 0
        assert exit_of(process) == process.returncode != 0
        assert "nowhere" in spec.log.read_text()
    assert pool.poll() is None


def test_a_supervisor_waits_for_them_before_it_starts_the_part(parts: tuple[Part, Part], told: str):
    forking, workers = parts
    with Supervisor(max_failures=1, backoff_seconds=0.1, drain_seconds=1, say=print) as supervisor:
        forking.begin_early(told, [workers])
        (pool,) = forking.early.values()
        pool.send_signal(signal.SIGSTOP)
        supervisor.start(workers)
        assert workers.due is not None
        assert workers.processes == []
        pool.send_signal(signal.SIGCONT)
        until(lambda: not workers.awaits_fork())
        supervisor.start(workers)
        assert workers.due is None
        assert all(isinstance(process, Forked) for _, process in workers.processes)
        assert [spec.name for spec in workers.running()] == ["rollout-0", "rollout-1"]
        assert exit_of(workers.processes[0][1]) is None


def test_what_dies_before_it_forks_leaves_them_to_be_started_anew(
    parts: tuple[Part, Part], told: str
):
    forking, workers = parts
    forking.begin_early(told, [workers])
    (pool,) = forking.early.values()
    pool.send_signal(signal.SIGKILL)
    until(lambda: not workers.awaits_fork())
    assert not workers.early
    assert not is_subreaper()
    workers.start()
    assert [type(process) for _, process in workers.processes] == [subprocess.Popen] * 2
    assert all(process.wait(60) != 0 for _, process in workers.processes)


def test_those_that_come_too_late_are_started_anew_and_end_by_themselves(
    tmp_path: Path, parts: tuple[Part, Part], told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(forked, "FORK_SECONDS", 0.5)
    forking, workers = parts
    forking.begin_early(told, [workers])
    (pool,) = forking.early.values()
    pool.send_signal(signal.SIGSTOP)
    until(lambda: not workers.awaits_fork(), 5)
    assert not workers.early
    pool.send_signal(signal.SIGCONT)
    until(lambda: has_forked(pool.pid))
    until(lambda: not others(tmp_path, pool.pid))


@pytest.mark.parametrize("forks", [True, False], ids=["there", "still-to-come"])
def test_those_that_are_never_started_end(
    tmp_path: Path, parts: tuple[Part, Part], told: str, forks: bool
):
    forking, workers = parts
    forking.begin_early(told, [workers])
    (pool,) = forking.early.values()
    if forks:
        until(lambda: not workers.awaits_fork())
    else:
        pool.send_signal(signal.SIGSTOP)
    workers.end_early()
    pool.send_signal(signal.SIGCONT)
    until(lambda: has_forked(pool.pid))
    until(lambda: not others(tmp_path, pool.pid))
    assert not is_subreaper()
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_killed_is_a_death_of_its_part(parts: tuple[Part, Part], told: str):
    forking, workers = parts
    forking.begin_early(told, [workers])
    until(lambda: not workers.awaits_fork())
    workers.start()
    (_, first), (_, second) = workers.processes
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: exit_of(first) is not None)
    assert exit_of(first) == -signal.SIGKILL
    assert psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.05)
    workers.reap(print)
    assert not psutil.pid_exists(first.pid)
    assert not psutil.pid_exists(second.pid)


SUPERVISOR = """
import os, sys, time
from pathlib import Path
from tandem.launch.run.processes.parts import Part, ProcessSpec

def part(role):
    name = f"{role}-0"
    spec = ProcessSpec(name=name, arguments=(role, "--run", "nowhere", "--name", name), log=Path(name))
    return Part(name=name, stage=0, specs=lambda: [spec])

forking, worker = part("reward"), part("rollout")
forking.begin_early(sys.stdin.read(), [worker])
while worker.awaits_fork():
    time.sleep(0.02)
print(worker.early["rollout-0"].pid, flush=True)
time.sleep(600)
"""


def test_they_end_with_their_supervisor(tmp_path: Path, told: str):
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(told)
    process.stdin.close()
    worker = psutil.Process(int(process.stdout.readline()))
    assert worker.ppid() == process.pid
    process.kill()
    process.wait(10)
    process.stdout.close()
    gone, alive = psutil.wait_procs([worker], timeout=10)
    # Whose child it is by then may not reap it.
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], gone


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ([], ["rollout-0"]),
        (["rollout.workers=2"], ["rollout-0", "rollout-1"]),
        (["learner.threads=2"], ["rollout-0"]),
        (["learner.threads=2", "replay.max_staleness=0"], ["rollout-0"]),
        (["learner.threads=2", "rollout.threads=2"], ["rollout-0"]),
        # Its threads would spin: how they wait is settled when the library is loaded.
        (["rollout.threads=2"], []),
        (["rollout.engine=vllm"], []),
        (["rollout.engine=my.package:engine"], []),
        (["learner.ranks=2"], []),
        (["rollout.workers=0"], []),
        (["launch.learner=outside"], []),
    ],
)
def test_which_are_forked(tmp_path: Path, words: list[str], workers: list[str]):
    config = presets.load("miniature").resolve(words)
    placement = Placement(
        learner=((),) * config.learner.ranks, rollout=((),) * config.rollout.workers
    )
    made = roles.parts(config, RunFolder(tmp_path), placement)
    assert [one.name for one in roles.forked_by_learner(config, made)] == workers


@pytest.mark.parametrize(
    ("learner", "worker"), [((0,), (1,)), ((0,), (0,)), ((0,), ()), ((), (0,))]
)
def test_none_is_forked_where_there_are_gpus(
    tmp_path: Path, learner: tuple[int, ...], worker: tuple[int, ...]
):
    config: Config = presets.load("miniature").resolve([])
    made = roles.parts(
        config, RunFolder(tmp_path), Placement(learner=(learner,), rollout=(worker,))
    )
    assert roles.forked_by_learner(config, made) == []


@pytest.mark.parametrize(
    ("words", "spins"),
    [
        (["learner.threads=2", "replay.max_staleness=0"], True),
        (["learner.threads=2"], False),
        # By default it takes the cores that the worker leaves.
        (["replay.max_staleness=0"], True),
        ([], False),
        (["replay.max_staleness=0", "learner.threads=1"], False),
    ],
)
def test_threads_spin_only_where_no_worker_samples_meanwhile(
    words: list[str], spins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Config = presets.load("miniature").resolve(words)

    def variables() -> dict[str, str]:
        (spec,) = roles.learner(
            config, RunFolder(tmp_path), Placement(learner=((),), rollout=((),)), "1"
        )
        return environment_of(spec)

    monkeypatch.setattr(roles, "usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert variables().get("GOMP_SPINCOUNT") == (SPINS if spins else None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in variables()
