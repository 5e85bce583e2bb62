"""An environment server of one process's own, which needs neither a run nor Redis: for an evaluation by itself.

It is a child (``python -m tandem.rollout.environments.own_server``) that plays episodes as the servers of a run do. The
first line of its input says what to serve, as JSON; its input then stays open, and its end is the end of the server.
Its first line of output says where it listens, or why it can't.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from ...common import config as configs
from ...common.config import Config, VerifiersEnvironment
from ...common.confinement import adopt_orphans, hide_memory
from ...common.errors import ConfigError, TandemError
from ...common.plain import Record, read_record
from ...common.sockets import new_keys
from .client import EnvironmentClient, ServerAddress
from .process import START_SECONDS

END_SECONDS = 20.0
"""Time in which it has to be gone once its input has ended; then it is killed."""


class _Said(Record, frozen=True):
    """Its first line of output."""

    endpoint: str = ""
    public_key: str = ""
    error: str = ""
    """Why it can't serve."""


class OwnServer:
    """The server, and a client of it; for use in one loop.

    Args:
        config: its environments are served.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._keys = new_keys()
        self._address: ServerAddress | None = None
        self._process: Process | None = None
        self._logs: Path | None = None
        settings = config.environments
        self.client = EnvironmentClient(
            "evaluation",
            lambda: [] if self._address is None else [self._address],
            self._keys,
            deadline=settings.episode_seconds,
            retries=settings.retries,
        )

    @property
    def pid(self) -> int:
        """Its process id; 0 before its start."""
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts it, and waits until it may be asked.

        Raises:
            ConfigError: an environment can't be loaded.
            TandemError: it doesn't start.
        """
        settings = self._config.environments
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", __name__),
            stdin=PIPE,
            stdout=PIPE,
            # A Ctrl-C in the terminal is for whoever has started it.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._logs = Path(tempfile.mkdtemp(prefix="tandem-logs-"))
        order = {
            "config": configs.to_yaml(self._config),
            "client": self._keys.public,
            "logs": str(self._logs),
        }
        process.stdin.write(json.dumps(order).encode() + b"\n")
        seconds = START_SECONDS + sum(
            one.start_seconds
            if isinstance(one, VerifiersEnvironment)
            else max(START_SECONDS, settings.reset_seconds)
            for one in settings.use.values()
        )
        try:
            async with asyncio.timeout(seconds):
                line = await process.stdout.readline()
        except TimeoutError:
            raise TandemError(
                f"the environments {', '.join(settings.use)} weren't loaded within {seconds:.0f} s"
            ) from None
        if not line:
            raise TandemError(
                f"the environment server ended with {await process.wait()} before it could be asked"
            )
        said = read_record(_Said, line, "what the environment server said", TandemError)
        if said.error:
            if any(self._logs.iterdir()):
                self._logs = None  # The error may name a log.
            raise ConfigError(said.error)
        self._address = ServerAddress(
            member="environments",
            endpoint=said.endpoint,
            public_key=said.public_key,
            environments=tuple(settings.use),
            slots=settings.episodes,
            busy=0,
        )
        await self.client.start()

    async def died(self) -> None:
        """Waits until the server has ended, which it shouldn't.

        Raises:
            TandemError: it has.
        """
        assert self._process is not None
        status = await self._process.wait()
        raise TandemError(
            f"the environment server ended with {status} while episodes were being played"
        )

    async def close(self) -> None:
        """Ends it with everything that it has started."""
        await self.client.close()
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):  # It may have ended already.
            process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)


async def _serve(config: Config, client: str, logs: Path, out: int) -> None:
    from .server import ready

    async with ready(config, client, "127.0.0.1", logs, drain_seconds=0.0) as found:
        _say(out, endpoint=found.endpoint, public_key=found.public_key)
        serving = asyncio.create_task(found.server.run())
        ended = asyncio.create_task(_end_of_input())
        await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        found.server.stop()
        await serving
        ended.cancel()


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass


def _say(out: int, **said: str) -> None:
    os.write(out, json.dumps(said).encode() + b"\n")


def main() -> int:
    """Reads the order and serves until the end of its input."""
    # What is printed by chance goes where errors go.
    out = os.dup(1)
    os.dup2(2, 1)
    order: dict[str, str] = json.loads(sys.stdin.readline())
    config = configs.read_config(order["config"])
    adopt_orphans()
    if os.geteuid() != 0:
        hide_memory()
    try:
        asyncio.run(_serve(config, order["client"], Path(order["logs"]), out))
    except TandemError as error:
        _say(out, error=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
