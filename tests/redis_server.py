"""A real redis-server for tests, on an ephemeral loopback port with a password.

The fixtures ``servers``, ``server`` and ``own_server`` of ``tests/conftest.py`` are made of it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from tandem.common.errors import TandemError
from tandem.common.memory import KEPT
from tandem.common.run_folder import JoinInfo
from tandem.launch.host.redis_server import find


def executable() -> str | None:
    """The redis-server that a run would start."""
    try:
        return str(find().path)
    except TandemError:
        return None


class RedisServer:
    """One server and its folder; it can be killed and started again on the same port."""

    def __init__(
        self,
        folder: Path,
        *,
        program: str | None = None,
        environment: Mapping[str, str] | None = None,
        tls: Mapping[str, str] | None = None,
        **options: str,
    ) -> None:
        """``tls`` is what its clients are told of TLS, by redis-py's names; then it has no other port."""
        self.folder = folder
        self.program = program
        self.environment = environment
        self.tls = tls
        self.password = secrets.token_hex(16)
        self.options = options
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        for _ in range(5):
            if not self.port:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    self.port = probe.getsockname()[1]
            if self._launch():
                return
            self.port = 0
        raise RuntimeError(f"redis-server does not start in {self.folder}: {self._log()}")

    def _launch(self) -> bool:
        settings = {
            "bind": "127.0.0.1",
            "port": "0" if self.tls else str(self.port),
            **({"tls-port": str(self.port)} if self.tls else {}),
            "requirepass": self.password,
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "no",
            "save": '""',
            "daemonize": "no",
            "logfile": str(self.folder / "redis.log"),
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        path = self.program or executable()
        assert path is not None
        # The settings go in by standard input: a password has no place on a command line.
        self.process = subprocess.Popen(
            [path, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **KEPT, **(self.environment or {})},
        )
        assert self.process.stdin is not None
        text = "".join(f"{name} {value}\n" for name, value in settings.items())
        self.process.stdin.write(text.encode())
        self.process.stdin.close()
        end = time.monotonic() + 10
        client = self.client()
        try:
            while time.monotonic() < end:
                if self.process.poll() is not None:
                    return False
                try:
                    client.ping()
                    return True
                except (redis.ConnectionError, redis.TimeoutError):
                    time.sleep(0.01)
        finally:
            client.close()
        return False

    def client(self, db: int = 0) -> redis.Redis:
        """A client of the user that may do everything."""
        tls = {"ssl": True, **self.tls} if self.tls else {}
        return redis.Redis(port=self.port, db=db, password=self.password, host="127.0.0.1", **tls)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after 5 s."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def join(self, run_id: str | None = None) -> JoinInfo:
        """A join file's content for a new (or the named) run on this server."""
        return JoinInfo(
            run_id=run_id or secrets.token_hex(6),
            host="127.0.0.1",
            port=self.port,
            password=self.password,
        )

    def _log(self) -> str:
        path = self.folder / "redis.log"
        return path.read_text()[-500:] if path.exists() else "no log"


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[RedisServer]:
    """A started server that is gone at the end, whatever happens."""
    server = RedisServer(folder, **options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
