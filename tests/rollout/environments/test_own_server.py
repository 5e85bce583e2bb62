"""Episodes that are evaluated without a run: by the command, and by a server of one process's own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.config import Config, build
from tandem.common.errors import ConfigError, TandemError
from tandem.replay.evaluating.evaluated import EvaluationFolder
from tandem.rollout.environments import own_server
from tandem.rollout.environments.own_server import OwnServer
from tandem.rollout.evaluate.episodes import playing, unless_it_dies

WORLD = """
class Twice:
    def reset(self, row):
        self.asked = 0
        return f"{row['task']['number']}*2=?"

    def step(self, text):
        self.asked += 1
        return "once more", 0.25 * self.asked, self.asked == 2
"""


def settings(target: str, *more: str) -> Config:
    use = f"environments.use={{twice: {{form: text, target: '{target}'}}}}"
    return build({"run": {"steps": 1}, "data": {"train": [{"path": "a.parquet"}]}}, [use, *more])


@pytest.mark.byhand
def test_the_command_plays_the_episodes_of_a_held_out_set(
    tmp_path: Path, tandem_command: str
) -> None:
    (tmp_path / "twice_world.py").write_text(WORLD)
    rows = [json.dumps({"task": {"number": number}}) for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ["evaluate", "miniature-tools", "--model", "miniature-tools", "--data", "rows.jsonl"]
    words += ["environments.use={twice: {form: text, target: 'twice_world:Twice'}}"]
    words += ["environments.default=twice", "reward.components=[{name: environment}]"]

    def evaluated(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tandem_command, *words, *more],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
            cwd=tmp_path,
        )

    done = evaluated("--out", "figures.json")
    assert done.returncode == 0, done.stderr
    assert "reward 0.750, 2.0 turns an episode, 0 of 3 episodes failed" in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())["reward"] == 0.75
    # Where the samples are kept, each is an episode too.
    kept = evaluated("--to", "kept")
    assert kept.returncode == 0, kept.stderr
    folder = EvaluationFolder(tmp_path / "kept")
    (cell,) = folder.plan().cells
    samples = list(folder.samples(cell.name))
    assert [(one.reward, one.turns) for one in samples] == [(0.75, 2)] * 3
    refused = evaluated("--endpoint", "http://127.0.0.1:9")
    assert refused.returncode == 2
    assert "leave --endpoint out" in refused.stderr


def test_an_environment_that_cant_be_loaded_is_named() -> None:
    async def body() -> None:
        server = OwnServer(settings("no_such_module:World"))
        try:
            with pytest.raises(
                ConfigError, match=r"environments\.use\.twice can't be loaded.*no_such"
            ):
                await server.start()
        finally:
            await server.close()

    asyncio.run(body())


def test_a_slow_environment_has_until_the_resets_deadline_to_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        server = OwnServer(settings("slow_world:Twice", "environments.reset_seconds=60"))
        try:
            await server.start()
        finally:
            await server.close()

    (tmp_path / "slow_world.py").write_text(f"import time\ntime.sleep(1)\n{WORLD}")
    monkeypatch.setattr(own_server, "START_SECONDS", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    asyncio.run(body())


def test_whoever_waits_for_a_server_that_dies_is_told(tmp_path: Path) -> None:
    async def body() -> None:
        server = OwnServer(settings("twice_world:Twice"))
        try:
            await server.start()
            work = asyncio.create_task(asyncio.sleep(3600))
            waiting = asyncio.create_task(unless_it_dies(work, server))
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(TandemError, match="ended with -9"):
                await waiting
            assert work.cancelled()
        finally:
            await server.close()

    (tmp_path / "twice_world.py").write_text(WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        asyncio.run(body())


def test_a_server_of_ones_own_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    async def body() -> list[psutil.Process]:
        server = OwnServer(settings("twice_world:Twice"))
        await server.start()
        started = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
        await server.close()
        return started

    (tmp_path / "twice_world.py").write_text(WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        started = asyncio.run(body())
    assert len(started) == 2
    assert not any(one.is_running() for one in started)


def test_an_evaluation_leaves_the_port_to_the_run_whose_settings_it_has(tmp_path: Path) -> None:
    async def body(port: int) -> None:
        more = "model.path=miniature-tools", f"environments.port={port}"
        engine: Any = None
        async with playing(engine, settings("twice_world:Twice", *more)):
            pass

    (tmp_path / "twice_world.py").write_text(WORLD)
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as taken:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        asyncio.run(body(taken.getsockname()[1]))
