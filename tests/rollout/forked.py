"""Processes that are forked from a server which has loaded torch and what the torch engine needs.

Loading that takes one core for seconds, and a run forks its workers for the same reason. The fixture ``forkserver``
starts the server.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENGINES = [str(HERE), str(HERE.parent / "faults")]
"""Where engines of the tests' own are found."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["forked_libraries"])


class Forked:
    """One process: what :class:`subprocess.Popen` is for one that is spawned.

    Args:
        log: a file to which it appends what it says.
        target: what it does, found by its module's name; it exits with 0, or as ``sys.exit`` says.
        arguments: of ``target``.
        environment: what it has in its environment besides the server's.
    """

    def __init__(
        self, log: Path, target: Callable[..., None], *arguments: Any, **environment: str
    ) -> None:
        log.touch()
        whole = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(ENGINES), **environment}
        self._process = CONTEXT.Process(
            target=_become, args=(log, whole, target, arguments), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code (negative: signal); None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it still runs after so long."""
        self._process.join(seconds)
        return self.poll()

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait(10)


def _become(
    log: Path, environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    sys.path[:0] = ENGINES
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(*arguments)
