"""Has episodes played by verifiers' own server, which is a child of ours in a virtual environment of its own.

A server of verifiers asks nobody who they are, so it listens on a Unix socket in a folder that only our user
can open, and is reached through the environment server alone. It plays many episodes at a time in one process
(each harness is a process of its own below it), and knows no deadline. So the deadline is kept here: an
episode that is late is cancelled, and if it isn't given up at once, the whole server is ended and started
anew. The other episodes that it was playing are handed back then, to be played again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ...common.config.environments import VerifiersEnvironment
from ...common.errors import ConfigError, TandemError, WireError
from ...common.plain import read_message
from ...common.records import Verdict
from .bounded_log import BoundedLog
from .descendants import Family
from .forms.asking import CONTEXT_CODE
from .process import (
    EpisodeFailed,
    NotStarted,
)
from .requests import RunRequest
from .wire import (
    MAX_ANSWER_BYTES,
    Played,
    Reading,
    failed,
    read_answer,
    read_reply,
)
from .worlds import Lost

log = logging.getLogger("tandem.environments")

LAUNCHER = Path(__file__).with_name("verifiers_launcher.py")
KEPT_ENVIRONMENT = ("PATH", "LANG", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "TZ")
"""Variables of our environment that the server gets besides those in ``variables``: none could be a secret."""
KEY_VARIABLE = "TANDEM_SESSION_KEY"
"""Names a variable that isn't set: the session's URL is its key, and verifiers' default is its vendor's."""
FULL = (CONTEXT_CODE, "exceeds maximum context length")
"""What the endpoint says when a session has no more room, and what verifiers' renderers say before they ask."""
HEALTH_SECONDS = 0.5
"""Time between two questions whether a server has started."""
CANCEL_SECONDS = 5.0
"""How long a cancelled episode may take to be given up before its server is ended."""
REAP_SECONDS = 5.0


class _Fault(msgspec.Struct, frozen=True):
    """Why a call of the model failed."""

    type: str
    message: str = ""


class _Call(msgspec.Struct, frozen=True):
    """One call of the model, as verifiers saw it."""

    error: _Fault | None = None


class _Calls(msgspec.Struct, frozen=True):
    """The calls of a delta."""

    calls: list[_Call] = []


class CallReading(Reading):
    """Reads one episode, and how its last call of the model ended.

    To verifiers an episode whose model doesn't answer any more may just be over: the taskset then gives it a
    reward, and it is ``ok``. But if the session had no more room, the policy has ended it by its length,
    and if anything else went wrong, the reward says nothing about the policy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fault: _Fault | None = None

    def add(self, data: bytes) -> None:
        """Reads one delta.

        Raises:
            WireError: it isn't a valid one.
        """
        super().add(data)
        calls = read_message(_Calls, data, "delta of an episode").calls
        if calls:
            self._fault = calls[-1].error

    def finish(self, data: bytes) -> Played:
        """Reads the reply.

        Raises:
            WireError: it isn't a valid one, or deltas are missing.
        """
        played = super().finish(data)
        fault = self._fault
        if fault is None or played.failure is Verdict.ENV_TIMEOUT:
            return played
        if any(words in fault.message for words in FULL):
            return replace(played, failure=None, detail="context_length")
        if played.failure is not None:
            return played
        why = f"a call of the model failed: {fault.type}: {fault.message}"
        return failed(Verdict.ENV_FAILED, why, played.seconds)


@dataclass(slots=True)
class _Running:
    """An episode that the server plays."""

    reading: Reading
    ended: asyncio.Future[bytes]
    """The map of its reply."""


@dataclass(slots=True)
class _Child:
    """One life of the server."""

    process: subprocess.Popen[bytes]
    socket: zmq.asyncio.Socket
    folder: str
    listening: asyncio.Task[None] | None = None
    pid_file: int = -1
    running: dict[str, _Running] = field(default_factory=dict)
    answers: dict[str, asyncio.Future[bytes]] = field(default_factory=dict)
    """Requests that aren't episodes."""


def run_map(run: RunRequest, client: Mapping[str, Any]) -> bytes:
    """The map of a ``run``. What verifiers would take from its vendor's cloud is always given.

    Raises:
        EpisodeFailed: the row has no task, or one that can't be sent.
    """
    task = run.task_data.row.get("task")
    if not isinstance(task, Mapping):
        raise EpisodeFailed(
            Verdict.ENV_RESET,
            "the row has no object `task` with the data of a task of verifiers: `tandem tasks` writes such rows",
        )
    ours = {"base_url": run.client.base_url, "api_key_var": KEY_VARIABLE}
    request = {
        "task_data": task,
        "client": {"type": "eval", **client, **ours},
        "model": run.model,
        "sampling": run.sampling,
    }
    try:
        return msgspec.msgpack.encode(request)
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise EpisodeFailed(Verdict.ENV_RESET, f"the task can't be sent: {error}") from None


class VerifiersWorld:
    """An environment whose episodes are played by a server of verifiers; for use in one loop.

    Args:
        name: the environment's name.
        spec: its settings.
        family: the children of this process.
        log_file: what the server prints goes there.
    """

    def __init__(
        self, name: str, spec: VerifiersEnvironment, family: Family, log_file: Path
    ) -> None:
        self._name, self._spec = name, spec
        self._family = family
        self._log_file = log_file
        self._context = zmq.asyncio.Context()
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self.starts = 0
        """How often a server was started."""

    @property
    def pid(self) -> int:
        """Process id of the server; 0 while there is none."""
        return self._child.process.pid if self._child is not None else 0

    async def start(self) -> None:
        """Starts the server if there is none, and waits until it answers.

        Raises:
            TandemError: it doesn't; a ``ConfigError`` where another attempt would end alike.
        """
        try:
            await self._started()
        except NotStarted as error:
            kind = ConfigError if error.refused else TandemError
            raise kind(f"environments.use.{self._name} can't be started: {error}") from None

    async def play(self, run: RunRequest, seconds: float) -> Played:
        """Plays one episode within ``seconds``. A failure is a result; being cancelled ends the episode.

        Raises:
            Lost: the server was ended; the episode may be played again.
        """
        try:
            return await self._play(run_map(run, self._spec.client), seconds)
        except EpisodeFailed as error:
            return failed(error.verdict, error.detail)
        except NotStarted as error:
            return failed(Verdict.ENV_RESET, str(error))
        except WireError as error:
            return failed(Verdict.ENV_FAILED, str(error))

    async def close(self) -> None:
        """Ends the server with everything that it has started."""
        async with self._starting:
            if self._child is not None:
                await self._end(self._child, "it was ended")
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._context.destroy(linger=0)

    # Episodes.

    async def _play(self, request: bytes, seconds: float) -> Played:
        end = time.monotonic() + seconds
        child = await self._started()
        name = uuid.uuid4().hex
        running = _Running(CallReading(), asyncio.get_running_loop().create_future())
        child.running[name] = running
        try:
            await child.socket.send_multipart([name.encode(), b"run", request])
            # Unlike `wait_for` it leaves the future alone, to which the reply comes in any case.
            await asyncio.wait({running.ended}, timeout=max(0.0, end - time.monotonic()))
        finally:
            if running.ended.done():
                child.running.pop(name, None)
            else:
                self._later(self._cancel(child, name, running))
        if not running.ended.done():
            raise EpisodeFailed(
                Verdict.ENV_TIMEOUT,
                f"the episode took longer than environments.episode_seconds={seconds:g}",
            )
        return running.reading.finish(running.ended.result())

    async def _cancel(self, child: _Child, name: str, running: _Running) -> None:
        """Has an episode given up that nobody waits for any more; ends the server if it isn't."""
        try:
            with contextlib.suppress(TimeoutError, WireError):
                await self._ask(child, b"cancel", {"request_id": name}, CANCEL_SECONDS)
            await asyncio.wait({running.ended}, timeout=CANCEL_SECONDS)
            if not running.ended.done():
                log.warning(f"{self._name}: an episode wasn't given up; its server is restarted")
                await self._end(child, "verifiers' server was ended because of another episode")
            elif not running.ended.cancelled():
                running.ended.exception()  # Nobody waits for it, and nothing is to be said about it.
        finally:
            child.running.pop(name, None)

    # The child.

    async def _started(self) -> _Child:
        """The server, which is started if there is none.

        Raises:
            NotStarted: it doesn't answer.
        """
        async with self._starting:
            if self._child is not None:
                return self._child
            child = await self._spawn()
            try:
                await self._healthy(child)
            except BaseException:
                await self._end(child, "it wasn't started")
                raise
            self._child = child
            self.starts += 1
            return child

    async def _spawn(self) -> _Child:
        """Starts the process.

        Raises:
            NotStarted: it can't be.
        """
        # The system's own folder for them, since the name of a Unix socket has at most 107 bytes.
        folder = tempfile.mkdtemp(prefix="tandem-verifiers-")
        address = f"ipc://{folder}/{secrets.token_hex(4)}"
        order = {"do": "serve", "address": address, "config": dict(self._spec.config)}
        read, write = os.pipe()
        try:
            process = self._family.start(
                lambda: subprocess.Popen(
                    [self._spec.python, "-P", str(LAUNCHER)],
                    stdin=subprocess.PIPE,
                    stdout=write,
                    stderr=write,
                    env=variables_of(self._spec),
                    cwd=folder,
                    start_new_session=True,
                )
            )
        except OSError as error:
            os.close(read)
            shutil.rmtree(folder, ignore_errors=True)
            raise NotStarted(
                f"{self._spec.python} can't be run ({error.strerror}): set the environment's `python` to the Python of a "
                f"virtual environment that has verifiers",
                refused=True,
            ) from None
        finally:
            os.close(write)
        output = BoundedLog(self._log_file)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: output, os.fdopen(read, "rb", buffering=0)
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # If it has ended already, it is seen below.
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        connected = self._context.socket(zmq.DEALER)
        connected.setsockopt(zmq.LINGER, 0)
        connected.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        connected.connect(address)
        child = _Child(process, connected, folder)
        child.pid_file = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(child.pid_file, self._died, child)
        child.listening = asyncio.create_task(self._listen(child))
        return child

    async def _healthy(self, child: _Child) -> None:
        """Waits until the server answers.

        Raises:
            NotStarted: it ended, or doesn't answer by its deadline.
        """
        end = time.monotonic() + self._spec.start_seconds
        while True:
            if child.process.poll() is not None:
                raise NotStarted(
                    f"verifiers' server exited with {child.process.returncode}: see {self._log_file}",
                    refused=True,
                )
            try:
                reply = read_reply(await self._ask(child, b"health", {}, HEALTH_SECONDS))
            except TimeoutError:
                if time.monotonic() < end:
                    continue
                raise NotStarted(
                    f"verifiers' server didn't answer within start_seconds={self._spec.start_seconds:g}: "
                    f"see {self._log_file}",
                    refused=False,
                ) from None
            except WireError as error:
                raise NotStarted(str(error), refused=True) from None
            if reply.success:
                return
            raise NotStarted(f"verifiers' server isn't well: {reply.error}", refused=False)

    async def _ask(
        self, child: _Child, method: bytes, request: Mapping[str, Any], seconds: float
    ) -> bytes:
        """The map of the reply to a request that isn't an episode.

        Raises:
            TimeoutError: there is none in time.
            WireError: it can't be read.
        """
        name = uuid.uuid4().hex
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        child.answers[name] = answer
        try:
            async with asyncio.timeout(seconds):
                await child.socket.send_multipart(
                    [name.encode(), method, msgspec.msgpack.encode(request)]
                )
                return await answer
        finally:
            child.answers.pop(name, None)

    async def _listen(self, child: _Child) -> None:
        """Gives each answer to whoever waits for it."""
        while True:
            frames = await child.socket.recv_multipart()
            try:
                name, kind, data = read_answer(frames)
            except WireError as error:
                log.warning(f"{self._name}: {error}")
                for answer in child.answers.values():
                    if not answer.done():
                        answer.set_exception(error)
                continue
            running = child.running.get(name)
            waits = child.answers.get(name) if running is None else running.ended
            if waits is None or waits.done():
                continue
            if kind == "reply":
                waits.set_result(data)
            elif running is not None:
                try:
                    running.reading.add(data)
                except WireError as error:
                    waits.set_exception(error)

    def _died(self, child: _Child) -> None:
        """Called by the loop as soon as the process has ended."""
        asyncio.get_running_loop().remove_reader(child.pid_file)
        os.close(child.pid_file)
        child.pid_file = -1
        if self._child is child:
            log.warning(f"verifiers' server of {self._name} has ended by itself")
            self._later(self._end(child, "verifiers' server ended by itself"))

    async def _end(self, child: _Child, why: str) -> None:
        """Ends the process and all below it, and gives back what it was playing."""
        if self._child is child:
            self._child = None
        for running in child.running.values():
            if not running.ended.done():
                running.ended.set_exception(Lost(why))
                running.ended.exception()  # If nobody waits, nothing is to be said about it.
        process = child.process
        if not await asyncio.to_thread(self._family.end, process, REAP_SECONDS):
            log.warning(f"verifiers' server {process.pid} was killed but is still there")
        # Not before: it would end by itself, and what is below it couldn't be found from it any more.
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        if child.listening is not None:
            child.listening.cancel()
        child.socket.close()
        if child.pid_file >= 0:
            asyncio.get_running_loop().remove_reader(child.pid_file)
            os.close(child.pid_file)
            child.pid_file = -1
        await asyncio.to_thread(shutil.rmtree, child.folder, True)

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def variables_of(spec: VerifiersEnvironment) -> dict[str, str]:
    """The variables of verifiers' process.

    Its home is a folder of the virtual environment's, where the caches of its harnesses are found again.
    """
    home = Path(spec.python).absolute().parent.parent / "home"
    with contextlib.suppress(OSError):
        home.mkdir(mode=0o700, exist_ok=True)
    if not os.access(home, os.W_OK):
        home = Path(os.path.expanduser("~"))
    found = {k: os.environ[k] for k in (*KEPT_ENVIRONMENT, *spec.variables) if k in os.environ}
    found |= {"HOME": str(home), "PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if spec.path:
        found["PYTHONPATH"] = os.pathsep.join(spec.path)
    return found
