"""Processes that are begun before their run is there: what they load, how they go on, how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tandem.common.config import Config
from tandem.launch.run.opened import presets
from tandem.launch.run.processes.parts import Part, ProcessSpec


@pytest.fixture(scope="module")
def config() -> Config:
    return presets.load("miniature").resolve([])


def part(tmp_path: Path) -> Part:
    def specs() -> list[ProcessSpec]:
        # As for the learner's port, another one at each look.
        arguments = (
            "reward",
            "--run",
            str(tmp_path / f"nowhere{len(looked)}"),
            "--name",
            "reward-0",
        )
        looked.append(arguments)
        return [ProcessSpec(name="reward-0", arguments=arguments, log=tmp_path / "reward-0.log")]

    looked: list[tuple[str, ...]] = []
    return Part(name="reward-0", stage=0, specs=specs)


def until(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def test_it_waits_and_then_runs_the_newest_command_with_a_log(tmp_path: Path, config: Config):
    one = part(tmp_path)
    one.begin_early(config.model_dump_json())
    (early,) = one.early.values()
    until(lambda: "early reward --run" in " ".join(psutil.Process(early.pid).cmdline()))
    # It has loaded its libraries, and waits.
    until(lambda: any("numpy" in one.path for one in psutil.Process(early.pid).memory_maps()))
    until(lambda: psutil.Process(early.pid).status() == psutil.STATUS_SLEEPING)
    assert early.poll() is None
    assert not (tmp_path / "reward-0.log").exists()
    one.start()
    ((spec, process),) = one.processes
    assert process is early
    assert process.wait(60) != 0
    said = spec.log.read_text()
    assert said.startswith("=== ")
    assert "nowhere1" in said
    assert "nowhere0" not in said
    assert not one.early


def test_one_that_died_meanwhile_is_a_death_of_the_part(tmp_path: Path, config: Config):
    one = part(tmp_path)
    one.begin_early(config.model_dump_json())
    (early,) = one.early.values()
    early.send_signal(signal.SIGKILL)
    early.wait(10)
    one.start()
    assert [process.poll() for _, process in one.processes] == [-signal.SIGKILL]
    one.processes.clear()
    one.start()
    ((_, process),) = one.processes
    assert process.pid != early.pid
    assert process.wait(60) != 0


def test_one_whose_log_cannot_be_made_goes_on_with_the_next_attempt(tmp_path: Path, config: Config):
    logs = tmp_path / "logs"
    one = part(logs)
    one.begin_early(config.model_dump_json())
    (early,) = one.early.values()
    with pytest.raises(OSError, match=r"reward-0\.log"):
        one.start()
    assert one.processes == []
    logs.mkdir()
    one.start()
    ((_, process),) = one.processes
    assert process is early
    assert process.wait(60) != 0


def test_those_that_are_never_started_end(tmp_path: Path, config: Config):
    one = part(tmp_path)
    one.begin_early(config.model_dump_json())
    (early,) = one.early.values()
    one.end_early()
    assert early.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_it_ends_with_its_supervisor(tmp_path: Path, config: Config):
    """Closed input is enough, for a system without parent-death signals."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem.launch.lifeline", str(os.getpid()), "early", "reward"],
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    told = {"config": config.model_dump_json(), "forks": None}
    process.stdin.write(json.dumps(told).encode() + b"\n")
    process.stdin.close()
    assert process.wait(60) == 0


def test_a_config_that_cannot_be_loaded_is_told_by_the_role_itself(tmp_path: Path):
    one = part(tmp_path)
    one.begin_early('{"model": 5}')
    (early,) = one.early.values()
    one.start()
    ((spec, process),) = one.processes
    assert process is early
    assert process.wait(60) != 0
    assert "nowhere1" in spec.log.read_text()
