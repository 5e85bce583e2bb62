"""A fresh run for each test, and processes that are gone at its end."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Processes are forked from a server that has torch imported; they find their entry by name.
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))
import weight_processes as processes  # noqa: E402

from tandem.common.config import Config  # noqa: E402
from tandem.common.run_folder import JoinInfo  # noqa: E402
from tandem.common.weights.sender import WeightSender  # noqa: E402
from tandem.common.weights.shared_memory import remove_left_behind  # noqa: E402
from tandem.replay.connection import Store, connect  # noqa: E402
from tandem.replay.ledger import Ledger  # noqa: E402
from tandem.replay.ledger_records import LedgerSettings  # noqa: E402
from tandem.replay.members import membership  # noqa: E402

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["weight_processes"])


@pytest.fixture(scope="session", autouse=True)
def forkserver() -> None:
    """Starts the server with this folder on its path, which Python 3.11 doesn't hand over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
        multiprocessing.forkserver.ensure_running()


class Child:
    """A process with a pipe to it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = CONTEXT.Pipe()
        self.process: ForkServerProcess = CONTEXT.Process(
            target=target, args=(theirs, *args), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def next(self, seconds: float = 30.0) -> Any:
        """What it says next."""
        assert self.pipe.poll(seconds), f"{self.process.name} said nothing for {seconds} s"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(10)


class Lines(logging.Handler):
    """Log lines that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.more:
            self.seen.append(record.getMessage())
            self.more.notify_all()

    def wait_for(self, *parts: str, seconds: float = 20.0) -> str:
        """The first line that has all the parts."""

        def find() -> str | None:
            return next((line for line in self.seen if all(p in line for p in parts)), None)

        with self.more:
            assert self.more.wait_for(lambda: find() is not None, seconds), (parts, self.seen)
            found = find()
        assert found is not None
        return found


class Run:
    """One run: starts workers and learners of it."""

    def __init__(self, join: JoinInfo, lines: Lines) -> None:
        self.join = join
        self.store: Store = connect(join, name="test")
        Ledger(self.store, "test").create(
            LedgerSettings(
                sources=(("a", 100, 1),),
                seed=0,
                data_digest="d",
                group_size=2,
                groups_per_step=2,
                max_staleness=1,
                steps=100,
            )
        )
        self.lines = lines
        self.config: Config = processes.config()
        self._children: list[Child] = []
        self._publishers: list[WeightSender] = []

    def new_term(self) -> int:
        """Begins a term, as a starting learner does."""
        return Ledger(self.store, "learner-0").new_term()

    def publisher(self, term: int | None = None, **changes: Any) -> WeightSender:
        """A started publisher in this process."""
        values: dict[str, Any] = {"config": self.config, **changes}
        publisher = WeightSender(
            membership(self.store, "learner-0"),
            values.pop("config"),
            term if term is not None else self.new_term(),
            **values,
        )
        self._publishers.append(publisher)
        publisher.start()
        return publisher

    def worker(self, member: str = "rollout-0", **options: Any) -> Child:
        """A worker process."""
        values = {"config": self.config, "specs": processes.specs_of(processes.model(0)), **options}
        return self._child(processes.worker, member, values)

    def learner(self, **options: Any) -> Child:
        """A learner process of a new term."""
        values = {"config": self.config, **options}
        return self._child(processes.learner, self.new_term(), values)

    def _child(self, target: Callable[..., None], *args: Any) -> Child:
        child = Child(target, self.join, *args)
        self._children.append(child)
        return child

    def close(self) -> None:
        """Ends everything that was started."""
        for child in self._children:
            child.kill()
        for publisher in self._publishers:
            publisher.close()
        self.store.close()
        # Who is killed leaves its segment to whoever starts next.
        remove_left_behind()


@pytest.fixture
def run(server: Any) -> Iterator[Run]:
    """A run that nobody has used."""
    lines = Lines()
    log = logging.getLogger("tandem")
    log.addHandler(lines)
    level = log.level
    log.setLevel(logging.INFO)
    started = Run(server.join(), lines)
    try:
        yield started
    finally:
        started.close()
        log.removeHandler(lines)
        log.setLevel(level)
