"""Supervision, with small real processes in place of the roles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.disk import DiskFull
from tandem.common.errors import ConfigError
from tandem.launch.run.processes.disk_watch import DiskWatch
from tandem.launch.run.processes.parts import Part, ProcessSpec, Stage, exit_of
from tandem.launch.run.processes.supervision import Outcome, PartFailed, Supervisor


def spec(tmp_path: Path, name: str, code: str, **more: object) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        arguments=("exec", sys.executable, "-S", "-c", code),
        log=tmp_path / f"{name}.log",
        **more,  # type: ignore[arg-type]
    )


def part(
    tmp_path: Path, name: str, code: str, *, stage: int = 1, ranks: int = 1, **more: object
) -> Part:
    names = [name] if ranks == 1 else [f"{name}-{i}" for i in range(ranks)]
    return Part(
        name=name,
        stage=stage,
        specs=lambda: [spec(tmp_path, n, code) for n in names],
        **more,  # type: ignore[arg-type]
    )


def supervisor(**more: object) -> Supervisor:
    settings: dict[str, object] = {
        "max_failures": 3,
        "backoff_seconds": 0.01,
        "drain_seconds": 20.0,
        "say": lambda line: None,
    }
    return Supervisor(**(settings | more))  # type: ignore[arg-type]


FOREVER = "import time; time.sleep(600)"


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_run_is_over_when_the_learner_has_finished_it(tmp_path: Path) -> None:
    with supervisor() as running:
        worker = part(tmp_path, "rollout-0", FOREVER, stage=1)
        running.start(worker)
        pid = worker.processes[0][1].pid
        running.start(part(tmp_path, "learner", "pass", stage=0, may_finish=True))
        assert running.run() is Outcome.FINISHED
    assert gone(pid)
    assert running.restarts == []


@pytest.mark.parametrize(("before", "drains"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_hangup_drains_unless_it_is_ignored_as_under_nohup(
    before: signal.Handlers, drains: bool
) -> None:
    old = signal.signal(signal.SIGHUP, before)
    try:
        with supervisor() as running:
            os.kill(os.getpid(), signal.SIGHUP)
            assert running.stop_requested is drains
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, old)


def test_the_run_goes_on_without_a_dispensable_part_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    end = tmp_path / "end"

    def tick() -> None:
        if said:
            end.touch()

    with supervisor(say=said.append, max_failures=1, tick=tick) as running:
        code = "print('no such server'); raise SystemExit(2)"
        running.start(part(tmp_path, "wandb", code, stage=3, dispensable=True))
        waits = (
            f"import pathlib, time\nwhile not pathlib.Path({str(end)!r}).exists(): time.sleep(0.01)"
        )
        running.start(part(tmp_path, "learner", waits, stage=0, may_finish=True))
        assert running.run() is Outcome.FINISHED
    assert said == [
        "warning: wandb ended with exit code 2, the run goes on without it: no such server"
    ]
    assert running.restarts == []


def test_a_killed_process_is_started_again_and_recorded(tmp_path: Path) -> None:
    marker = tmp_path / "second"
    code = (
        f"import os, pathlib, signal, time\n"
        f"marker = pathlib.Path({str(marker)!r})\n"
        f"if marker.exists(): raise SystemExit(0)\n"
        f"marker.touch()\n"
        f"os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    file = tmp_path / "restarts.jsonl"
    ends = iter([False])
    with supervisor(restarts_file=file, finished=lambda: next(ends, True)) as running:
        running.start(part(tmp_path, "learner", code, may_finish=True))
        assert running.run() is Outcome.FINISHED
    (restart,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (restart["process"], restart["exit"]) == ("learner", "SIGKILL")
    log = (tmp_path / "learner.log").read_text()
    assert log.count("=== ") == 2


def test_a_part_that_keeps_dying_ends_the_run_and_shows_its_log(tmp_path: Path) -> None:
    with supervisor() as running:
        steady = part(tmp_path, "reward-0", FOREVER, stage=2)
        running.start(steady)
        pid = steady.processes[0][1].pid
        running.start(part(tmp_path, "rollout-0", "raise SystemExit('out of luck')"))
        with pytest.raises(PartFailed, match=r"rollout-0 died 3 times") as told:
            running.run()
    assert "out of luck" in str(told.value)
    assert "rollout-0.log" in str(told.value)
    assert gone(pid)
    assert len(running.restarts) == 2


def test_deaths_while_redis_is_away_are_not_counted_but_those_of_redis_are(tmp_path: Path) -> None:
    said: list[str] = []
    looks = iter([True] * 5)
    with supervisor(say=said.append, redis_away=lambda: next(looks, False)) as running:
        running.start(part(tmp_path, "reward-0", "raise SystemExit(1)"))
        with pytest.raises(PartFailed, match="reward-0 died 3 times"):
            running.run()
    assert len(running.restarts) == 5 + 2
    assert sum("while Redis is away" in line for line in said) == 5
    with supervisor(redis_away=lambda: True) as running:
        server = part(tmp_path, "redis", "raise SystemExit(1)", stage=Stage.REDIS)
        running.start(server)
        with pytest.raises(PartFailed, match="redis died 3 times"):
            running.run()


def test_deaths_with_progress_in_between_are_not_counted(tmp_path: Path) -> None:
    steps = iter(range(100))
    deaths = tmp_path / "deaths"
    code = (
        f"import pathlib\n"
        f"file = pathlib.Path({str(deaths)!r})\n"
        f"count = len(file.read_text()) if file.exists() else 0\n"
        f"file.write_text('x' * (count + 1))\n"
        f"raise SystemExit(1 if count < 6 else 0)\n"
    )
    over = lambda: len(deaths.read_text()) > 6  # noqa: E731
    with supervisor(progress=lambda: next(steps), finished=over) as running:
        running.start(part(tmp_path, "learner", code, may_finish=True))
        assert running.run() is Outcome.FINISHED
    assert len(running.restarts) == 6


@pytest.mark.parametrize(
    ("code", "why"), [(2, "learner ended with a configuration or data error"), (3, "ended the run")]
)
def test_an_error_that_starting_again_cant_mend_is_not_tried_again(
    code: int, why: str, tmp_path: Path
) -> None:
    with supervisor(max_failures=100) as running:
        running.start(part(tmp_path, "learner", f"print('for a reason'); raise SystemExit({code})"))
        with pytest.raises(PartFailed, match=rf"(?s){why}; .*for a reason"):
            running.run()
    assert running.restarts == []


def test_a_rank_that_ends_the_run_counts_before_those_that_it_took_along(tmp_path: Path) -> None:
    codes = {"learner-0": 0, "learner-1": 1, "learner-2": 3}
    learner = Part(
        name="learner",
        stage=1,
        specs=lambda: [
            spec(tmp_path, name, f"print('I am {name}'); raise SystemExit({code})")
            for name, code in codes.items()
        ],
    )
    with supervisor() as running:
        running.start(learner)
        wait_for(lambda: not learner.alive())
        with pytest.raises(PartFailed, match=r"(?s)learner-2 ended the run; .*I am learner-2"):
            running.run()
    assert running.restarts == []


def test_an_exit_with_0_is_a_death_while_the_run_goes_on(tmp_path: Path) -> None:
    with supervisor(finished=lambda: False) as running:
        running.start(part(tmp_path, "learner", "pass", may_finish=True))
        with pytest.raises(PartFailed, match="died 3 times"):
            running.run()


def test_a_worker_that_leaves_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    with supervisor(finished=lambda: True) as running:
        running.start(part(tmp_path, "rollout-0", "pass"))
        running.start(
            part(tmp_path, "learner", "import time; time.sleep(0.5)", stage=0, may_finish=True)
        )
        assert running.run() is Outcome.FINISHED
    assert running.restarts == []


def test_a_learner_that_dies_after_the_end_is_not_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    with supervisor(say=said.append, finished=lambda: True) as running:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
        running.start(part(tmp_path, "learner", code, stage=0, may_finish=True))
        assert running.run() is Outcome.FINISHED
    assert running.restarts == []
    assert said == ["learner was killed by SIGABRT after it had finished the run"]


def test_ranks_live_and_die_as_one(tmp_path: Path) -> None:
    pids: list[list[int]] = []
    with supervisor(finished=lambda: False) as running:
        ranks = part(tmp_path, "learner", FOREVER, ranks=3, on_start=pids.append)
        running.start(ranks)
        first = pids[0]
        os.kill(first[1], signal.SIGKILL)
        threading.Thread(
            target=lambda: (wait_for(lambda: len(pids) == 2), running.request_stop("test"))
        ).start()
        assert running.run() is Outcome.STOPPED
    assert len(set(first) | set(pids[1])) == 6
    assert all(gone(pid) for pid in first + pids[1])
    assert [r.process for r in running.restarts] == ["learner-1"]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
def test_a_death_by_a_signal_counts_as_any_other(tmp_path: Path, number: str) -> None:
    code = f"import os, signal; os.kill(os.getpid(), signal.{number})"
    with supervisor(max_failures=2) as running:
        running.start(part(tmp_path, "reward-0", code))
        with pytest.raises(PartFailed, match="died 2 times without a step"):
            running.run()


def test_what_a_dead_process_started_dies_with_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import os, pathlib, signal, subprocess\n"
        "process = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(process.pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with supervisor(max_failures=1) as running:
        running.start(part(tmp_path, "reward-0", code))
        with pytest.raises(PartFailed):
            running.run()
    wait_for(lambda: gone(int(child.read_text())))


DRAINS = """
import pathlib, signal, sys, time
def drain(*_):
    with open({order!r}, "a") as file: file.write({name!r} + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
pathlib.Path({ready!r}).touch()
time.sleep(600)
"""


def draining(tmp_path: Path, name: str, stage: int) -> Part:
    code = DRAINS.format(
        order=str(tmp_path / "order"), name=name, ready=str(tmp_path / f"{name}.ready")
    )
    return part(tmp_path, name, code, stage=stage)


def test_a_signal_drains_the_learner_first_and_redis_last(tmp_path: Path) -> None:
    names = ["redis", "reward-0", "rollout-0", "learner"]
    said: list[str] = []
    with supervisor(say=said.append) as running:
        for stage, name in zip((3, 2, 1, 0), names, strict=True):
            running.start(draining(tmp_path, name, stage))
        wait_for(lambda: all((tmp_path / f"{name}.ready").exists() for name in names))
        os.kill(os.getpid(), signal.SIGINT)
        assert running.run() is Outcome.STOPPED
        assert running.signal_seen == signal.SIGINT
    assert (tmp_path / "order").read_text().split() == ["learner", "rollout-0", "reward-0", "redis"]
    assert said[0].startswith("SIGINT: draining")


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    said: list[str] = []

    def again(line: str) -> None:
        said.append(line)
        if "draining" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    with supervisor(say=again, drain_seconds=600) as running:
        running.start(part(tmp_path, "learner", code))
        wait_for(ready.exists)
        os.kill(os.getpid(), signal.SIGTERM)
        assert running.run() is Outcome.KILLED


def test_what_does_not_drain_in_time_is_killed_and_named(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    said: list[str] = []
    with supervisor(say=said.append, drain_seconds=0.1) as running:
        running.start(part(tmp_path, "rollout-0", code))
        wait_for(ready.exists)
        running.request_stop("test")
        assert running.run() is Outcome.KILLED
    assert "rollout-0 didn't end in time and is killed" in said


OWNER = """
import sys
from pathlib import Path
from tandem.launch.run.processes.parts import Part, ProcessSpec
from tandem.launch.run.processes.supervision import Supervisor
folder = Path(sys.argv[1])
stubborn = (
    "import os, signal, time; from tandem.launch import lifeline; "
    "lifeline.tie_to(os.getppid(), signal.SIGKILL); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
plain = "import time; print('ready', flush=True); time.sleep(600)"
with Supervisor(
    max_failures=3, backoff_seconds=1, drain_seconds=5, say=print, finished=lambda: False
) as supervisor:
    for name, code in (("redis", plain), ("learner", stubborn)):
        supervisor.start(Part(name=name, stage=0, specs=lambda name=name, code=code: [ProcessSpec(
            name=name, arguments=("exec", sys.executable, "-c", code), log=folder / f"{name}.log")],
            on_start=lambda pids: print(*pids, flush=True)))
    supervisor.run()
"""


def test_children_are_gone_soon_after_the_supervisor_was_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(owner.stdout.readline()) for _ in range(2)]
    logs = [tmp_path / "redis.log", tmp_path / "learner.log"]
    wait_for(lambda: all("ready" in log.read_text() for log in logs))
    owner.kill()
    owner.communicate()
    wait_for(lambda: all(gone(pid) for pid in pids), seconds=10)


def test_a_process_gets_its_threads_and_not_the_password(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "secret")
    code = "import os; print(os.environ['OMP_NUM_THREADS'], 'TANDEM_REDIS_PASSWORD' in os.environ)"
    with supervisor() as running:
        running.start(
            Part(
                name="learner",
                stage=0,
                specs=lambda: [spec(tmp_path, "learner", code, threads=3)],
                may_finish=True,
            )
        )
        running.run()
    assert (tmp_path / "learner.log").read_text().splitlines()[-1] == "3 False"


def test_an_exit_is_seen_without_reaping() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])
    wait_for(lambda: exit_of(process) == 7)
    assert process.returncode is None
    assert process.wait() == 7


def test_parts_are_looked_after_during_other_work(tmp_path: Path) -> None:
    with supervisor() as running:
        redis = part(tmp_path, "redis", FOREVER)
        running.start(redis)
        pid = redis.processes[0][1].pid

        def work() -> None:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: redis.alive() and redis.processes[0][1].pid != pid)

        assert running.watch_during(work)
    assert [restart.exit for restart in running.restarts] == ["SIGKILL"]


def test_a_signal_ends_the_wait_for_other_work(tmp_path: Path) -> None:
    over = threading.Event()
    with supervisor() as running:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert not running.watch_during(lambda: over.wait(60))
        assert running.stop_requested
    over.set()


def test_what_the_work_raises_is_raised(tmp_path: Path) -> None:
    def work() -> None:
        raise KeyError("gold")

    with supervisor() as running, pytest.raises(KeyError, match="gold"):
        running.watch_during(work)


@pytest.mark.parametrize("code", ["pass", "import os; os.kill(os.getpid(), 9)"])
def test_nothing_is_started_again_while_the_runs_end_cannot_be_told(
    tmp_path: Path, code: str
) -> None:
    # Redis and the learner have died together: what Redis holds, the next looks will tell.
    answers = iter([None, None])
    with supervisor(finished=lambda: next(answers, True)) as running:
        running.start(part(tmp_path, "learner", code, may_finish=True))
        assert running.run() is Outcome.FINISHED
    assert running.restarts == []


def test_a_part_with_last_words_is_brought_back_for_them(tmp_path: Path) -> None:
    alive: list[bool] = []
    redis = part(
        tmp_path, "redis", FOREVER, stage=9, before_end=lambda: alive.append(redis.alive())
    )
    # Its restart is due long after the run has finished.
    with supervisor(backoff_seconds=60.0) as running:
        running.start(redis)
        end = tmp_path / "end"
        code = f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"
        running.start(part(tmp_path, "learner", code, stage=0, may_finish=True))
        os.kill(redis.processes[0][1].pid, signal.SIGKILL)
        threading.Thread(
            target=lambda: (wait_for(lambda: redis.due is not None), end.touch()), daemon=True
        ).start()
        assert running.run() is Outcome.FINISHED
    assert alive == [True]


@pytest.mark.parametrize("error", [OSError(11, "no process"), ConfigError("no port is free")])
def test_a_part_that_cannot_be_started_again_is_tried_again_after_a_pause(
    tmp_path: Path, error: Exception
) -> None:
    said: list[str] = []
    failing = iter([None, error, error])

    def specs() -> list[ProcessSpec]:
        if failure := next(failing, None):
            raise failure
        return [spec(tmp_path, "reward-0", "raise SystemExit(1)")]

    with supervisor(say=said.append, max_failures=4) as running:
        running.start(Part(name="reward-0", stage=1, specs=specs))
        # Two deaths, and the two starts between them that failed.
        with pytest.raises(PartFailed, match="reward-0 died 4 times without a step"):
            running.run()
    assert sum(f"reward-0 can't be started: {error}; trying again in" in line for line in said) == 2


def test_a_part_that_can_never_be_started_again_ends_the_run_after_a_drain(tmp_path: Path) -> None:
    ready, drained = tmp_path / "learner.ready", tmp_path / "order"
    failing = iter([None])

    def specs() -> list[ProcessSpec]:
        if next(failing, "no port") is not None:
            raise ConfigError("no port is free")
        wait = f"import os, time\nwhile not os.path.exists({str(ready)!r}): time.sleep(0.01)"
        return [spec(tmp_path, "reward-0", f"{wait}\nraise SystemExit(1)")]

    with supervisor() as running:
        running.start(draining(tmp_path, "learner", 0))
        running.start(Part(name="reward-0", stage=1, specs=specs))
        with pytest.raises(
            PartFailed, match=r"reward-0 can't be started: no port is free, after 3"
        ):
            running.run()
    assert drained.read_text().split() == ["learner"]


def test_a_second_signal_ends_the_last_words_to_a_part_that_hangs(tmp_path: Path) -> None:
    over = threading.Event()

    def last_words() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        running.unless_killed(lambda: over.wait(60))
        assert not over.is_set()

    with supervisor() as running:
        running.start(part(tmp_path, "redis", FOREVER, stage=9, before_end=last_words))
        os.kill(os.getpid(), signal.SIGINT)
        assert running.run() is Outcome.KILLED
        # A work that is asked for after it isn't begun.
        running.unless_killed(over.set)
        assert not over.is_set()
    over.set()


def test_a_tracker_that_fails_when_it_is_asked_to_end_is_told(tmp_path: Path) -> None:
    ready = tmp_path / "wandb.ready"
    code = (
        "import pathlib, signal, sys, time\n"
        "def fail(*_):\n    print('not all is there'); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, fail)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    said: list[str] = []
    with supervisor(say=said.append) as running:
        running.start(part(tmp_path, "wandb", code, stage=4, dispensable=True))
        wait_for(ready.exists)
        running.request_stop("test")
        assert running.run() is Outcome.STOPPED
    assert "warning: wandb ended with exit code 1: not all is there" in said


def test_a_part_that_cannot_be_kept_alive_has_no_last_words(tmp_path: Path) -> None:
    said: list[str] = []
    redis = part(tmp_path, "redis", "raise SystemExit(1)", before_end=lambda: said.append("?"))
    with supervisor() as running:
        running.start(redis)
        with pytest.raises(PartFailed):
            running.run()
    assert said == []


def watched(small: Any, said: list[str], patience: float = 60.0) -> DiskWatch:
    return DiskWatch(small.folder, patience, said.append, "runs/small")


def test_deaths_on_a_full_disk_count_nothing_and_are_followed_by_a_start_when_there_is_space(
    small_disk: Any,
) -> None:
    small = small_disk(4)
    said: list[str] = []
    restarts = small.folder / "restarts.jsonl"
    out = small.folder / "out"
    out.touch()
    code = f"open({str(out)!r}, 'ab', buffering=0).write(bytes(65536))"
    small.fill()
    with supervisor(
        max_failures=2,
        say=said.append,
        restarts_file=restarts,
        disk_watch=watched(small, said),
        finished=lambda: out.stat().st_size > 0,
    ) as running:
        learner = part(small.folder, "learner", code, may_finish=True)
        running.start(learner)
        wait_for(lambda: not learner.alive())
        threading.Timer(2.5, small.empty).start()
        assert running.run() is Outcome.FINISHED
    told = "\n".join(said)
    assert "the disk is full: " in told
    assert "in runs/small can't be written (0.0 MB free)" in told
    assert "learner ended with exit code 1; it is started again once there is space" in told
    assert "there is space again in runs/small" in told
    # One start waited for space, and the file tells of the death now.
    assert [json.loads(line)["exit"] for line in restarts.read_text().splitlines()] == [1]


def test_a_disk_that_stays_full_drains_the_run_at_its_bound(small_disk: Any) -> None:
    small = small_disk(4)
    said: list[str] = []
    small.fill()
    with supervisor(say=said.append, disk_watch=watched(small, said, 1.5)) as running:
        running.start(part(small.folder, "learner", FOREVER, may_finish=True))
        with pytest.raises(DiskFull, match=r"launch.full_disk_seconds=1.5.*the same command"):
            running.run()
    assert any("draining, since there is no space" in line for line in said)


@pytest.mark.parametrize("risen", [True, False])
def test_a_kill_is_told_as_the_kernels_if_its_counter_rose(risen: bool, tmp_path: Path) -> None:
    counts = iter([5, 6 if risen else 5, 6, 6])
    said: list[str] = []
    with supervisor(max_failures=2, say=said.append, oom_kills=lambda: next(counts)) as running:
        running.start(part(tmp_path, "learner", "import os; os.kill(os.getpid(), 9)", stage=0))
        with pytest.raises(PartFailed) as failed:
            running.run()
    first = next(line for line in said if "starting it again" in line)
    assert ("for want of memory" in first) is risen
    assert "was killed by SIGKILL" in first
    # The counter that rose once explains one death.
    assert ("for want of memory" in str(failed.value)) is not risen


def test_a_part_that_was_told_to_end_too_early_is_brought_back_for_those_before_it(
    tmp_path: Path,
) -> None:
    """As Redis, where a scheduler sends SIGTERM to every process of a job at once."""
    ledger = tmp_path / "ledger"
    redis = part(
        tmp_path,
        "redis",
        f"import time\nopen({str(ledger)!r}, 'a').write('up ')\ntime.sleep(600)",
        stage=9,
        before_end=lambda: None,
    )
    # It ends once its ledger is up for the second time.
    saving = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        f"    open({str(tmp_path / 'asked')!r}, 'w')\n"
        f"    while open({str(ledger)!r}).read() != 'up up ': time.sleep(0.01)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w')\n"
        "while True: time.sleep(1)"
    )
    with supervisor() as running:
        running.start(redis)
        running.start(part(tmp_path, "learner", saving, stage=0))
        wait_for(lambda: (tmp_path / "ready").exists() and ledger.exists())
        wait_for(lambda: ledger.read_text() == "up ")
        learner = running._parts[1].processes[0][1].pid

        def told() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for((tmp_path / "asked").exists)
            os.kill(redis.processes[0][1].pid, signal.SIGTERM)

        threading.Thread(target=told, daemon=True).start()
        assert running.run() is Outcome.STOPPED
        assert gone(learner)
    assert ledger.read_text() == "up up "
