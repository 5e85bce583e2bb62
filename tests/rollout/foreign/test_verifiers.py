"""The relay to a server of verifiers, against one that speaks its frames as they were recorded."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.common.config.environments import VerifiersEnvironment
from tandem.common.errors import ConfigError, TandemError
from tandem.common.records import Verdict
from tandem.rollout.environments import verifiers
from tandem.rollout.environments.bounded_log import BoundedLog
from tandem.rollout.environments.descendants import Family
from tandem.rollout.environments.requests import (
    EnvironmentTask,
    Limits,
    ModelClient,
    RunRequest,
)
from tandem.rollout.environments.verifiers import CallReading, VerifiersWorld
from tandem.rollout.environments.wire import (
    Played,
    result_of,
)
from tandem.rollout.environments.worlds import Lost

HERE = Path(__file__).resolve().parent
RECORDED = json.loads((HERE / "verifiers_frames.json").read_text())
URL = "http://127.0.0.1:9/sessions/KEY/v1"


def frames(name: str) -> list[bytes]:
    return [base64.b64decode(data) for _, data in RECORDED[name]]


def read(name: str) -> Played:
    *deltas, reply = frames(name)
    reading = CallReading()
    for delta in deltas:
        reading.add(delta)
    return reading.finish(reply)


def request(name: str | None) -> RunRequest:
    row = {} if name is None else {"task": {"name": name}}
    return RunRequest(
        task_data=EnvironmentTask(environment="game", row=row),
        client=ModelClient(type="train", base_url=URL, api_key="KEY"),
        model="tiny",
        sampling={"max_tokens": 9},
        limits=Limits(turns=3, calls=3, observation_tokens=100),
    )


@pytest.fixture
def python(tmp_path: Path) -> str:
    """This Python, where a virtual environment of verifiers would have its own."""
    link = tmp_path / "venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    # A link would be this interpreter without its packages.
    link.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    link.chmod(0o755)
    return str(link)


@pytest.fixture
def serving(tmp_path: Path, python: str) -> Any:
    """``async with serving() as world``: a world with the server that stands in."""

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[VerifiersWorld]:
        given = {"python": python, "config": {}, "path": (str(HERE / "standin"),), **settings}
        spec = VerifiersEnvironment(**given)
        world = VerifiersWorld("game", spec, Family(), tmp_path / "server.log")
        try:
            yield world
        finally:
            await world.close()

    return make


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(100):
            return await body()

    return asyncio.run(bounded())


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; an orphan that has ended may wait for whoever reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(holds: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (found := holds()):
            await asyncio.sleep(0.02)
        return found


# What the real server answered.


def test_a_played_episode_has_the_reward_of_its_trace() -> None:
    played = read("played")
    assert (played.reward, played.failure, played.detail) == (0.0, None, "user_closed")
    assert played.seconds > 0


def test_a_failed_harness_is_a_failure_although_its_reply_says_success_and_pays_zero() -> None:
    played = read("failed")
    assert (played.reward, played.failure) == (None, Verdict.ENV_FAILED)
    assert "HarnessError" in played.detail
    assert "planted" in played.detail


def test_a_session_without_room_is_an_end_by_length() -> None:
    *deltas, reply = frames("full")
    assert result_of(deltas, reply).detail == "user_closed", "verifiers doesn't say so"
    played = read("full")
    assert (played.reward, played.failure, played.detail) == (0.0, None, "context_length")


def test_cancelled_and_refused_runs_are_failures() -> None:
    assert "Cancelled" in read("cancelled").detail
    assert "info" in read("refused").detail
    assert {read(name).failure for name in ("cancelled", "refused")} == {Verdict.ENV_FAILED}


# The relay.


def test_episodes_are_played_at_the_same_time(serving: Any) -> None:
    async def body() -> None:
        async with serving() as world:
            await world.start()
            waiting = asyncio.create_task(world.play(request("hangs"), 60))
            done = await asyncio.gather(*(world.play(request("played"), 60) for _ in range(16)))
            assert [one.reward for one in done] == [0.0] * 16
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait({waiting})
            assert world.starts == 1

    run(body)


def test_the_run_names_everything_that_would_else_be_the_vendors(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "for the judge")
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "secret")

    async def body() -> None:
        client = {"type": "train", "renderer": {"name": "qwen3"}}
        config = {"taskset": {"id": "game"}}
        async with serving(client=client, config=config, variables=("JUDGE_KEY",)) as world:
            assert (await world.play(request("tells"), 60)).failure is None

    run(body)
    told = json.loads((tmp_path / "venv" / "home" / "told.json").read_text())
    assert told["config"] == {"taskset": {"id": "game"}}
    assert told["body"] == {
        "task_data": {"name": "tells"},
        "client": {
            "type": "train",
            "renderer": {"name": "qwen3"},
            "base_url": URL,
            "api_key_var": verifiers.KEY_VARIABLE,
        },
        "model": "tiny",
        "sampling": {"max_tokens": 9},
    }
    variables = told["environment"]
    assert variables["JUDGE_KEY"] == "for the judge"
    assert variables["HOME"] == str(tmp_path / "venv" / "home")
    assert verifiers.KEY_VARIABLE not in variables
    assert "secret" not in variables.values()


def test_the_socket_is_in_a_folder_of_our_user_alone(serving: Any) -> None:
    async def body() -> None:
        async with serving() as world:
            await world.start()
            folder = Path(world._child.folder)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert any(stat.S_ISSOCK(file.stat().st_mode) for file in folder.iterdir())
            listening = [
                one.laddr
                for one in psutil.Process(world.pid).net_connections("inet")
                if one.status == psutil.CONN_LISTEN
            ]
            assert listening == []
        assert not folder.exists()

    run(body)


def test_a_late_episode_is_cancelled_and_the_server_stays(serving: Any) -> None:
    async def body() -> None:
        async with serving() as world:
            await world.start()
            late = await world.play(request("hangs"), 0.3)
            assert (late.failure, late.reward) == (Verdict.ENV_TIMEOUT, None)
            assert "episode_seconds=0.3" in late.detail
            await until(lambda: not world._child.running)
            assert (await world.play(request("played"), 60)).failure is None
            assert world.starts == 1

    run(body)


def test_a_server_that_doesnt_listen_any_more_is_ended_with_all_below_it(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers, "CANCEL_SECONDS", 0.5)

    async def body() -> None:
        async with serving() as world:
            await world.start()
            first = psutil.Process(world.pid)
            other = asyncio.create_task(world.play(request("hangs"), 60))
            await until(lambda: world._child.running)
            deaf = asyncio.create_task(world.play(request("is deaf"), 60))
            below = await until(lambda: first.children())
            deaf.cancel()
            with pytest.raises(Lost, match="another episode"):
                await other
            assert (await world.play(request("played"), 60)).failure is None
            assert world.starts == 2
            await until(lambda: not any(lives(one) for one in (first, *below)))
        assert "deaf now" in (tmp_path / "server.log").read_text()

    run(body)


def test_a_server_that_dies_hands_back_what_it_was_playing(serving: Any) -> None:
    async def body() -> None:
        async with serving() as world:
            other = asyncio.create_task(world.play(request("hangs"), 60))
            await until(lambda: world._child is not None and world._child.running)
            with pytest.raises(Lost, match="by itself"):
                await world.play(request("dies"), 60)
            with pytest.raises(Lost, match="by itself"):
                await other
            assert (await world.play(request("played"), 60)).failure is None

    run(body)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loses a delta", "incomplete"),
        ("garbage", "delta of an episode"),
        ("not a number", "finite"),
        ("unlucky", "a call of the model failed"),
        ("failed", "planted"),
    ],
)
def test_a_wrong_answer_is_a_failure_and_never_a_zero(serving: Any, name: str, words: str) -> None:
    async def body() -> None:
        async with serving() as world:
            played = await world.play(request(name), 60)
            assert (played.failure, played.reward) == (Verdict.ENV_FAILED, None)
            assert words in played.detail
            assert (await world.play(request("played"), 60)).failure is None

    run(body)


def test_a_row_without_a_task_is_refused(serving: Any) -> None:
    async def body() -> None:
        async with serving() as world:
            played = await world.play(request(None), 60)
            assert played.failure is Verdict.ENV_RESET
            assert "`task`" in played.detail

    run(body)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"python": "/nowhere/python"}, ConfigError, "/nowhere/python can't be run"),
        ({"config": {"is_broken": True}}, ConfigError, "exited with 1"),
        ({"config": {"is_silent": True}, "start_seconds": 0.5}, TandemError, "start_seconds=0.5"),
        ({"config": {"is_old": True}}, ConfigError, "verifiers before 0.4"),
    ],
)
def test_a_server_that_doesnt_start_is_told(
    serving: Any, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    async def body() -> None:
        async with serving(**settings) as world:
            with pytest.raises(error, match=words) as raised:
                await world.start()
            assert "environments.use.game" in str(raised.value)

    run(body)


def test_no_server_outlives_ours(tmp_path: Path, python: str) -> None:
    """The launcher ends when its input does, as it does if whoever holds the other end is killed."""
    address = f"ipc://{tmp_path}/s"
    process = subprocess.Popen(
        [python, "-P", str(verifiers.LAUNCHER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(HERE / "standin")},
    )
    assert process.stdin is not None
    order = {"do": "serve", "address": address, "config": {}}
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    run(lambda: until((tmp_path / "s").exists))
    process.stdin.close()
    assert process.wait(30) != 0


def test_the_log_is_bounded_and_only_ours_to_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = BoundedLog(file, most=100)
    for number in range(30):
        log.data_received(f"line {number:4}\n".encode())
    log.connection_lost(None)
    kept = (tmp_path / "log.1").read_text() + file.read_text()
    assert kept.endswith("line   29\n")
    assert file.stat().st_size <= 100
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 2


def test_a_log_whose_folder_is_gone_closes_no_file_of_others_and_goes_on_with_a_new_one(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = BoundedLog(folder / "log", most=10)
    log.data_received(b"12345678\n")
    shutil.rmtree(folder)
    log.data_received(b"lost\n")
    with (tmp_path / "other").open("w+b") as other:
        log.data_received(b"lost as well\n")
        assert os.fstat(other.fileno()).st_size == 0
        folder.mkdir()
        log.data_received(b"kept\n")
        log.connection_lost(None)
        assert os.fstat(other.fileno()).st_size == 0
    assert (folder / "log").read_bytes() == b"kept\n"
