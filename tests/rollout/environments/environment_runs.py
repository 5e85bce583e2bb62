"""A run in a real Redis with real environment servers, and episodes against an endpoint that stands in."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from standin_endpoint import Script, StandInEndpoint

from tandem.common import config as configs
from tandem.common.run_folder import JoinInfo, RunFolder
from tandem.replay.connection import Store, connect
from tandem.replay.members import Member, Members
from tandem.replay.store import RunStore
from tandem.rollout.engine import Task
from tandem.rollout.environments.client import (
    EnvironmentClient,
    servers_in,
)
from tandem.rollout.environments.wire import (
    Played,
)

HERE = Path(__file__).resolve().parent
PROGRAM = """
import sys
from pathlib import Path
from tandem.common import config
from tandem.common.run_folder import read_join
from tandem.common.telemetry import start_log
from tandem.replay.connection import connect
from tandem.replay.store import RunStore
from tandem.rollout.environments import server
import yaml

join = read_join(Path(sys.argv[1]))
store = connect(join)
tree = yaml.safe_load(RunStore(store).config_yaml())
store.close()
start_log("environments")
sys.exit(server.main(join, config.build(tree), name=sys.argv[2], folder=None))
"""

NUMBERS = itertools.count(1)
"""Numbers of the sessions."""

USE = {
    "guess": {"form": "text", "target": "played_worlds:Guess", "params": {"bonus": 0.5}},
    "talks": {"form": "text", "target": "played_worlds:Talks"},
    "calculator": {"form": "tools", "target": "played_worlds:Calculator"},
    "unpaid": {"form": "tools", "target": "played_worlds:Unpaid"},
    "agent": {"form": "agent", "target": "played_worlds:agent", "params": {"bonus": 0.5}},
    "plain": {"form": "agent", "target": "played_worlds:plain_agent"},
    "bad": {"form": "text", "target": "played_worlds:Misbehaves"},
}
LIMITS = {"turns": 6, "calls": 5, "observation_tokens": 100}


@dataclass
class Run:
    """A run in Redis, and the servers that have joined it."""

    join: JoinInfo
    store: Store
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def members(self) -> list[Member]:
        return Members(self.store).live("environments")

    def log(self, name: str = "environments-0") -> str:
        return (self.folder / f"{name}.log").read_text()

    @contextmanager
    def server(self, name: str = "environments-0") -> Iterator[subprocess.Popen[bytes]]:
        folder = RunFolder(self.folder)
        folder.write_join(self.join)
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder.join), name],
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, "TANDEM_SECRET": "s3cret"},
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def client(self, **more: Any) -> EnvironmentClient:
        members = Members(self.store)
        settings = {"deadline": 20.0, "retries": 1, **more}
        keys = settings.pop("keys", RunStore(self.store).curve_client())
        return EnvironmentClient("rollout-0", lambda: servers_in(members), keys, **settings)


def make_run(server: Any, folder: Path, **settings: Any) -> Run:
    tree = {
        "run": {"steps": 100},
        "data": {"train": [{"path": "a.parquet"}]},
        "environments": {
            "use": USE,
            "episodes": 4,
            "memory_mb": 1024,
            "reset_seconds": 3.0,
            "step_seconds": 3.0,
            "episode_seconds": 10.0,
            **settings,
        },
    }
    join = server.join()
    store = connect(join, name="test")
    run = RunStore(store)
    run.put_config(configs.to_yaml(configs.build(tree, [])))
    # Where a process that is another user may write.
    folder.chmod(0o755)
    return Run(join, store, folder)


def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Looks until something holds."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


async def connected(client: EnvironmentClient, count: int = 1) -> None:
    """Waits until that many servers are connected."""
    async with asyncio.timeout(30):
        while sum(link.connected for link in client._links.values()) < count:
            await asyncio.sleep(0.02)


@dataclass
class Playing:
    """Has episodes played against an endpoint that stands in."""

    endpoint: StandInEndpoint
    client: EnvironmentClient
    sessions: int = 0
    last_key: str = ""
    """Key of the session that was opened last."""
    limits: dict[str, int] = field(default_factory=lambda: dict(LIMITS))

    def session(self, script: Script) -> tuple[str, str]:
        self.sessions += 1
        # The endpoint is that of several tests, and remembers every request.
        self.last_key = f"key-{next(NUMBERS)}"
        return self.endpoint.open(self.last_key, script)

    async def play(
        self, environment: str, row: dict[str, Any], script: Script = lambda _: "ok", **more: int
    ) -> Played:
        url, key = self.session(script)
        return await self.client.play(
            Task(environment=environment, row=row),
            base_url=url,
            api_key=key,
            model="tandem",
            limits={**self.limits, **more},
            on_retry=lambda: self.session(script),
        )
