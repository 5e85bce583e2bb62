"""Runs from Python: started, looked at while they go on, stopped, resumed, and read as tables."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import zipfile
from itertools import count
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from held_folder import held

import tandem.launch
from tandem.common.config import to_yaml, valid_keys
from tandem.common.errors import DataError, DeadlineError, TandemError
from tandem.common.run_folder import RunFolder
from tandem.launch import cli
from tandem.launch.notebook import handle
from tandem.launch.notebook.handle import Run, _flat, _word
from tandem.launch.run.opened.presets import load
from tandem.learner.resume.journal import read

QUICK = {
    "evaluate.every": 4,
    "evaluate.limit": 20,
    "log.archive": True,
    "log.inspect": True,
    "log.samples_per_step": 2,
    "data.miniature_fresh": 200,
}


@pytest.mark.timeout(300)
def test_a_run_is_started_looked_at_stopped_resumed_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tandem.launch.start("miniature", run={"steps": 2000}, **QUICK)
    try:
        assert run.path == tmp_path / "runs" / "miniature"
        assert run.is_running
        end = time.monotonic() + 150
        while run.metrics().num_rows < 3:
            assert run.is_running, run.output
            assert time.monotonic() < end, run.output
            time.sleep(0.1)
        assert run.status()["step"] >= 3
        with pytest.raises(DeadlineError, match="goes on"):
            run.wait(0.1)
        # Another Python finds it by its folder, and stops it.
        tandem.launch.open_run("runs/miniature").stop()
        run.stop()
        assert not run.is_running
        assert run.wait(10) is None
        done = run.metrics().column("step").to_pylist()[-1]
    finally:
        run.stop()
    told_from_its_folder(run)
    assert cli.main(["retry", str(run.path), "--all"]) == 1
    assert "`tandem start` resumes it, then put the groups back" in capsys.readouterr().err
    again = tandem.launch.start(
        "miniature", **{"run.steps": 2000, "run.last_step": done + 4, **QUICK}
    )
    try:
        summary = again.wait(150)
    finally:
        again.stop()
    assert summary is not None
    found = tandem.launch.open_run(tmp_path / "runs" / "miniature")
    steps = found.metrics().column("step").to_pylist()
    assert steps == list(range(1, done + 5))
    assert found.config.run.steps == 2000
    evaluations = found.evaluations()
    assert set(evaluations.column("set").to_pylist()) == {"heldout"}
    assert evaluations.column("step").to_pylist()[0] == 0
    assert all(0 <= share <= 1 for share in evaluations.column("accuracy").to_pylist())
    samples = found.samples().to_pandas() if _has_pandas() else None
    table = found.samples()
    assert set(table.column("source").to_pylist()) == {"own", "expert"}
    assert samples is None or len(samples) == table.num_rows
    # The run itself has written them, the steps before its stop and those after it.
    logged = []
    for path in sorted((found.path / "inspect").iterdir()):
        with zipfile.ZipFile(path) as log:
            logged += [
                json.loads(log.read(name))["metadata"]["step"]
                for name in log.namelist()
                if name.startswith("samples/")
            ]
    assert sorted(logged) == sorted(table.column("step").to_pylist())
    groups = found.groups(range(2, 4))
    assert sorted(set(groups.column("step").to_pylist())) == [2, 3]
    assert found.groups().num_rows == 8 * len(steps)


def told_from_its_folder(run: Run) -> None:
    """The state of a run that is stopped, whose Redis is down."""
    status = run.status()
    assert (status["state"], status["memory"], status["oldest_lease"]) == ("stopped", None, None)
    rows = sum(record["kind"] == "row" for record in read(run.path / "journal.jsonl"))
    assert status["journal"] == {"rows": rows, "applied": rows, "quarantined": ()}
    assert rows >= 3
    for part in ("redis", "checkpoints", "journal", "metrics", "samples", "logs", "data"):
        assert status["disk"]["parts"][part] > 0, part


COUNTS = """
import signal, sys, time
from pathlib import Path
from tandem.common.run_folder import RunFolder
from tandem.launch.host.folder_lock import FolderLock

seen = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: seen.append(1))
FolderLock(RunFolder(Path(sys.argv[1]))).take()
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
print(len(seen), flush=True)
"""


def test_a_stop_is_one_signal_since_a_second_one_ends_everything_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        Run(tmp_path, process=process).stop(30)
        assert process.stdout.read() == b"1\n"


SLOW = COUNTS.replace("time.sleep(0.3)", "sys.stdin.readline()")


def test_a_second_stop_goes_on_waiting_and_ends_at_once_what_it_is_told_to(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for now in (False, False, True):
            # Whoever opens the run anew goes on waiting as well.
            with pytest.raises(DeadlineError, match="still draining"):
                Run(tmp_path).stop(0.2, now=now)
        process.stdin.close()
        assert process.stdout.read() == b"2\n"


def test_a_first_stop_ends_at_once_what_it_is_told_to(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        Run(tmp_path).stop(30, now=True)
        assert process.stdout.read() == b"2\n"


def test_a_run_has_a_summary_while_it_is_finished_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.summary.write_text('{"steps": 50}')
    run = Run(folder.path)
    # It is finished, goes on with more steps, and is stopped.
    for state, summary in (("finished", {"steps": 50}), ("running", None), ("stopped", None)):
        folder.write_run({"state": state})
        assert run.summary == summary
        assert run.wait(10) == summary


@pytest.mark.parametrize("ended", ["exit 143", "exit 130", "kill -TERM $$"])
def test_a_run_that_was_stopped_has_no_summary_and_has_not_failed(
    ended: str, tmp_path: Path
) -> None:
    with subprocess.Popen(["sh", "-c", ended]) as process:
        assert Run(tmp_path, process=process).wait(30) is None


@pytest.mark.parametrize("ended", ["exit 1", "kill -KILL $$"])
def test_a_command_that_failed_or_was_killed_is_told(ended: str, tmp_path: Path) -> None:
    with (
        subprocess.Popen(["sh", "-c", ended]) as process,
        pytest.raises(TandemError, match="the run has failed"),
    ):
        Run(tmp_path, process=process).wait(30)


def test_whoever_opens_a_run_that_has_failed_is_told(tmp_path: Path) -> None:
    top, first, second = (RunFolder(tmp_path / name) for name in ("", "sft", "rl"))
    top.stages.write_text('{"stages": ["sft", "rl"]}')
    for folder, state in ((first, "finished"), (second, "failed")):
        folder.make()
        folder.write_run({"state": state})
    for path in (second.path, top.path):
        with pytest.raises(TandemError, match=r"rl: the run has failed: .*start\.log"):
            tandem.launch.open_run(path).wait(10)
    second.write_run({"state": "stopped"})
    assert tandem.launch.open_run(top.path).wait(10) is None


def test_stages_have_a_summary_while_all_of_them_are_finished(tmp_path: Path) -> None:
    top = RunFolder(tmp_path)
    top.stages.write_text('{"stages": ["sft", "rl"]}')
    top.summary.write_text('{"steps": 50}')
    stages = [RunFolder(top.path / name) for name in ("sft", "rl")]
    for state, summary in (("finished", {"steps": 50}), ("running", None)):
        for stage in stages:
            stage.make()
            stage.write_run({"state": "finished"})
        stages[-1].write_run({"state": state})
        assert Run(top.path).summary == summary
    stages[-1].run_json.unlink()
    assert Run(top.path).summary is None


@pytest.mark.parametrize("way", ["python", "named", "newest"])
def test_stages_are_under_way_between_the_end_of_one_and_the_begin_of_the_next(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    top = RunFolder("runs/mine")
    first = RunFolder(top.path / "sft")
    first.make()
    first.write_run({"state": "finished"})
    top.stages.write_text('{"stages": ["sft", "rl"]}')
    with held(top.path) as process:
        run = tandem.launch.open_run(top.path)
        assert run.is_running
        with pytest.raises(DeadlineError, match="goes on"):
            run.wait(0.1)
        # The first stage alone is over.
        assert not tandem.launch.open_run(first.path).is_running
        if way == "python":
            run.stop(30)
        else:
            assert cli.main(["stop", *(["runs/mine"] if way == "named" else [])]) == 0
            assert "stopped in" in capsys.readouterr().out
        assert process.wait(30) == -signal.SIGTERM
        assert not run.is_running


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("miniature-dpo", {"samples.run.steps": 1, "pairs.run.steps": 1}),
        ("miniature", {"run.steps": 1, "evaluate.every": 0, "data.miniature_fresh": 200}),
    ],
)
def test_the_folder_that_python_names_is_the_runs(
    preset: str, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tandem.launch.start(preset, run={"dir": Path("läufe") / "a: b 😀"}, **settings)
    try:
        assert run.path == tmp_path / "läufe" / "a: b 😀"
        assert run.is_running
        assert [path.name for path in tmp_path.iterdir()] == ["läufe"]
        assert [path.name for path in run.path.parent.iterdir()] == ["a: b 😀"]
    finally:
        run.stop()


def test_a_refused_run_raises_what_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TandemError, match=r"rollout\.group_size"):
        tandem.launch.start("miniature", **{"rollout.groupsize": 4})
    with pytest.raises(TandemError, match="launch"):
        tandem.launch.start("miniature", **{"learner.ranks": 3, "launch.gpus": [0, 1, 2]})
    assert not (tmp_path / "runs").exists()


def test_a_start_is_waited_for_as_long_as_it_takes_unless_a_time_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hours = count(0.0, 3600.0)
    clock = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: next(hours))
    monkeypatch.setattr(handle, "time", clock)
    # A refusal is waited for in the place of its begin.
    foreign = tmp_path / "runs" / "miniature" / "thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    with pytest.raises(TandemError, match="holds something other than a run"):
        tandem.launch.start("miniature")
    with pytest.raises(DeadlineError, match=r"hasn't begun after 60 s \(wait_seconds\)"):
        tandem.launch.start("miniature", wait_seconds=60)


def test_an_interrupted_start_leaves_no_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, **more)
            begun.append(self)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    clock = SimpleNamespace(time=time.time, sleep=interrupted, monotonic=time.monotonic)
    monkeypatch.setattr(handle, "time", clock)
    with pytest.raises(KeyboardInterrupt):
        tandem.launch.start("miniature")
    assert begun[0].wait(60) != 0


def test_settings_are_given_as_the_command_line_takes_them() -> None:
    keys = set(valid_keys())
    given = {
        "run": {"steps": np.int64(5), "dir": Path("here")},
        "rollout": {"vllm": {"args": {"a.b": 1}}},
        "environments": {"use": {}},
        "sft": {"learner": {"objective": {"name": "own:Loss", "params": {"k": np.float32(0.5)}}}},
        "rl.learner.deepspeed": MappingProxyType({}),
    }
    assert [f"{name}={_word(value)}" for name, value in _flat("", given, keys)] == [
        "run.steps=5",
        'run.dir="here"',
        'rollout.vllm.args={"a.b": 1}',
        "environments.use={}",
        'sft.learner.objective.name="own:Loss"',
        'sft.learner.objective.params={"k": 0.5}',
        "rl.learner.deepspeed={}",
    ]


LIVE = """
import sys, time
from tandem.common.run_folder import RunFolder
from tandem.launch.host.folder_lock import FolderLock
folder = RunFolder(sys.argv[1])
FolderLock(folder).take()
record = folder.read_run()
print("ready", flush=True)
while True:
    folder.write_run({**record, "alive": time.time()})
    time.sleep(0.01)
"""


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_goes_on_is_not_taken_for_the_one_that_is_refused(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("runs/miniature")
    folder.make()
    folder.write_config(to_yaml(load("miniature").resolve([])))
    record = {"run_id": "abc", "preset": "miniature", "state": "running", "began": time.time()}
    folder.write_run(record)
    with subprocess.Popen(
        [sys.executable, "-c", LIVE, str(folder.path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(TandemError, match=f"in use by process {process.pid}"):
                tandem.launch.start("miniature", fresh=fresh)
        finally:
            process.kill()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="isn't a run's folder"):
        tandem.launch.open_run(tmp_path)


def test_other_names_are_not_there() -> None:
    assert not hasattr(tandem.launch, "strat")


def _has_pandas() -> bool:
    import importlib.util

    return importlib.util.find_spec("pandas") is not None
