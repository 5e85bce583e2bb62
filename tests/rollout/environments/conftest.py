"""Fixtures of the environment servers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from environment_runs import Playing, Run, connected, make_run, until
from standin_endpoint import Script, StandInEndpoint

from tandem.rollout.environments.wire import (
    Played,
)


@pytest.fixture(scope="module")
def run(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made = make_run(server, tmp_path_factory.mktemp("run"), episode_seconds=7.0)
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def running(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """One server for the tests that don't end it."""
    with run.server() as process:
        until(lambda: run.members() or process.poll() is not None, 90)
        assert process.poll() is None, run.log()
        yield process


@pytest.fixture(scope="module")
def endpoint() -> Iterator[StandInEndpoint]:
    made = StandInEndpoint()
    yield made
    made.close()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which a process of any user may write."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@pytest.fixture
def play(
    run: Run, running: subprocess.Popen[bytes], endpoint: StandInEndpoint
) -> Callable[[Callable[[Playing], Coroutine[Any, Any, Any]]], Any]:
    """Runs a coroutine that has episodes played by the one server."""

    def go(body: Callable[[Playing], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
        async def inside() -> Any:
            client = run.client(**settings)
            await client.start()
            try:
                await connected(client)
                return await body(Playing(endpoint, client))
            finally:
                await client.close()

        return asyncio.run(inside())

    return go


@pytest.fixture
def play_one(play: Any, endpoint: StandInEndpoint) -> Callable[..., tuple[Played, list[Any]]]:
    """Has one episode played; returns what became of it, and the bodies of its requests."""

    def go(
        environment: str, row: dict[str, Any], script: Script = lambda _: "ok", **more: Any
    ) -> Any:
        keys: list[str] = []

        async def body(playing: Playing) -> Played:
            try:
                return await playing.play(environment, row, script, **more)
            finally:
                keys.append(playing.last_key)

        played = play(body)
        return played, endpoint.asked(keys[0])

    return go
