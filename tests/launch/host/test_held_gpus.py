"""Processes that are added to a run get GPUs that no other process of Tandem's on the host has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError
from tandem.launch.board.terminal import Terminal
from tandem.launch.commands.roles import _seeing
from tandem.launch.host.held_gpus import HeldGpus
from tandem.launch.plan import hardware
from tandem.launch.plan.hardware import machine
from tandem.launch.plan.placement import place
from tandem.launch.run import job
from tandem.launch.run.joining import gpus_of
from tandem.launch.run.opened.opening import open_folder
from tandem.launch.run.opened.presets import load
from tandem.launch.run.processes.parts import PLACED, ProcessSpec, environment_of


@pytest.fixture(autouse=True)
def uuids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with four GPUs that no other test has."""
    uuids = [f"GPU-{os.getpid()}-{i}" for i in range(4)]
    rows = "\n".join(f"{i}, NVIDIA H100, 81559, {uuid}" for i, uuid in enumerate(uuids))
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{rows}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return uuids


@pytest.fixture
def hold() -> Iterator[Callable[[int], HeldGpus]]:
    """Has somebody else hold the first GPUs that are free."""
    made: list[HeldGpus] = []

    def another(count: int) -> HeldGpus:
        made.append(HeldGpus())
        assert len(made[-1].take(hardware.gpus(), count)) == count
        return made[-1]

    yield another
    for held in made:
        held.release()


def test_hosts_that_join_on_one_machine_take_gpus_of_their_own(
    hold: Callable[[int], HeldGpus],
) -> None:
    config = load("miniature").resolve(["launch.gpus=auto"])
    run, first, second = hold(1), HeldGpus(), HeldGpus()
    # Looking at them takes none.
    assert gpus_of(config, "rollout", None) == [(1,), (2,), (3,)]
    assert gpus_of(config, "rollout", 1, held=first) == [(1,)]
    assert gpus_of(config, "rollout", None, held=second) == [(2,), (3,)]
    for held in (run, first):
        held.release()
    assert gpus_of(config, "rollout", None) == [(0,), (1,)]
    second.release()


def test_a_host_leaves_gpus_that_make_no_whole_worker_to_others(
    hold: Callable[[int], HeldGpus],
) -> None:
    hold(1)
    words = ["launch.gpus=required", "rollout.engine=vllm", "rollout.gpus_per_worker=2"]
    held = HeldGpus()
    assert gpus_of(load("miniature").resolve(words), "rollout", None, held=held) == [(1, 2)]
    assert gpus_of(load("miniature").resolve(words[:1]), "rollout", None) == [(3,)]
    held.release()


def test_gpus_are_free_once_their_holder_has_been_killed(uuids: list[str]) -> None:
    program = (
        "import sys, time; from tandem.launch.host.held_gpus import HeldGpus; from tandem.launch.plan import hardware;"
        "held = HeldGpus(); held.take(hardware.gpus()); print('there', flush=True); time.sleep(100)"
    )
    config = load("miniature").resolve(["launch.gpus=auto"])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert gpus_of(config, "rollout", None) == [()]
        holder.kill()
    assert len(gpus_of(config, "rollout", None)) == len(uuids)


def test_too_few_free_gpus_are_refused_or_told_of(
    hold: Callable[[int], HeldGpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(3)
    held, told = HeldGpus(), list[str]()
    required = load("miniature").resolve(["launch.gpus=required"])
    with pytest.raises(
        ConfigError,
        match=r"2 rollout processes need 2 GPUs, and this host has 4, of which 3 are held by other processes of "
        r"Tandem \(launch.gpus=required\): lower --workers",
    ):
        gpus_of(required, "rollout", 2, held=held)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    auto = load("miniature").resolve(["launch.gpus=auto"])
    assert gpus_of(auto, "rollout", None, held=held, say=told.append) == [()]
    assert told.pop() == (
        "1 rollout process needs 1 GPU, and this host has 2, of which 2 are held by other processes of Tandem, so it "
        "runs on CPUs (launch.gpus=auto): run it where there are as many, or have CUDA_VISIBLE_DEVICES=1,2 name more "
        "of them"
    )
    # What didn't suffice is left to others.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus_of(required, "rollout", 1) == [(3,)]


def test_a_host_with_fewer_gpus_than_it_needs_says_that_it_runs_on_cpus() -> None:
    told: list[str] = []
    config = load("miniature").resolve(["launch.gpus=auto"])
    assert gpus_of(config, "rollout", 5, say=told.append) == [()] * 5
    assert told == [
        "5 rollout processes need 5 GPUs, and this host has 4, so they run on CPUs (launch.gpus=auto): lower --workers"
    ]
    # One without any is what launch.gpus=auto is for.
    Path(os.environ["PATH"].split(":")[0], "nvidia-smi").unlink()
    assert gpus_of(config, "rollout", 1, say=told.append) == [()]
    assert len(told) == 1


def test_ranks_may_share_gpus_with_engines_where_the_run_lets_them(
    hold: Callable[[int], HeldGpus],
) -> None:
    hold(4)
    words = ["launch.share_gpu=true", "learner.ranks=4", "learner.hosts=2", "launch.gpus=required"]
    config = load("miniature").resolve([*words, "launch.bind=10.0.0.1"])
    assert gpus_of(config, "learner", None) == [(0,), (1,)]
    with pytest.raises(ConfigError, match="of which 4 are held"):
        gpus_of(config, "rollout", None)


def test_a_worker_that_is_started_by_hand_sees_a_gpu_that_is_free(
    hold: Callable[[int], HeldGpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(2)
    config = load("miniature").resolve(["launch.gpus=auto"])
    first, second = HeldGpus(), HeldGpus()
    assert _seeing(config, first)["CUDA_VISIBLE_DEVICES"] == "2"
    assert _seeing(config, second)["CUDA_VISIBLE_DEVICES"] == "3"
    first.release()
    second.release()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert _seeing(config, first)["CUDA_VISIBLE_DEVICES"] == "3"
    first.release()
    none = load("miniature").resolve(["launch.gpus=none"])
    assert _seeing(none, first)["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=7 name more of them"):
        _seeing(load("miniature").resolve(["launch.gpus=required"]), first)
    # Without nvidia-smi nobody knows what CUDA finds.
    Path(os.environ["PATH"].split(":")[0], "nvidia-smi").unlink()
    assert _seeing(config, first) == {}
    assert _seeing(none, first)["CUDA_VISIBLE_DEVICES"] == ""


ROLE = """
import argparse, os, sys, types
from tandem.launch.commands import roles
from tandem.launch.run.opened.presets import load
sys.modules["entry"] = entry = types.ModuleType("entry")
entry.main = lambda *_, **__: print("sees", os.environ["CUDA_VISIBLE_DEVICES"]) or 0
roles.ENTRY = {"rollout": "entry"}
roles.locate = lambda _: (None, None)
store = types.SimpleNamespace(close=lambda: None)
roles.joined = lambda *_: (store, load("miniature").resolve(["launch.gpus=auto"]))
roles.run_role("rollout", argparse.Namespace(name=None))
"""


@pytest.mark.parametrize(
    ("told", "seen"), [({}, "1"), ({PLACED: "1", "CUDA_VISIBLE_DEVICES": "0"}, "0")]
)
def test_a_worker_chooses_a_gpu_unless_its_supervisor_has(
    hold: Callable[[int], HeldGpus], told: dict[str, str], seen: str
) -> None:
    hold(1)
    environment = {**os.environ, **told}
    done = subprocess.run(
        [sys.executable, "-c", ROLE], capture_output=True, text=True, timeout=60, env=environment
    )
    assert f"sees {seen}\n" in done.stdout, done.stderr
    spec = ProcessSpec(name="rollout-0", arguments=(), log=Path("log"))
    assert PLACED in environment_of(spec)


@pytest.mark.parametrize(
    ("words", "free"), [([], [(2,), (3,)]), (["launch.share_gpu=true"], [(1,), (2,), (3,)])]
)
def test_a_run_holds_the_gpus_of_its_processes_until_it_ends(
    words: list[str],
    free: list[tuple[int, ...]],
    hold: Callable[[int], HeldGpus],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = load("miniature")
    opening = open_folder(preset, ["launch.gpus=required", *words], fresh=False)
    config, left = opening.config, []
    monkeypatch.setattr(job, "check_host", lambda *_, **__: (place(config, machine()), None))

    def look(*_: object) -> None:
        left.append(gpus_of(config, "rollout", None))
        raise ConfigError("seen")

    monkeypatch.setattr(job, "gpus_left_idle", look)
    with pytest.raises(ConfigError, match="seen"):
        job.Job(preset, opening, Terminal(plain=True), began=0.0).run()
    assert left == [free]
    assert "warning" not in capsys.readouterr().out
    assert len(gpus_of(config, "rollout", None)) == 4
    hold(1)
    with pytest.raises(ConfigError, match="seen"):
        job.Job(preset, opening, Terminal(plain=True), began=0.0).run()
    assert "warning: other processes of Tandem hold GPU 0 of this host" in capsys.readouterr().out
