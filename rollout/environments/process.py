"""One process in which episodes are played: messages to and from it, its deadlines and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.errors import WireError
from ...common.plain import read_message
from ...common.records import Verdict
from .descendants import Family
from .pipes import (
    LENGTH,
    MAX_FROM_PROCESS,
    MAX_TO_PROCESS,
    Doing,
    Done,
    FromProcess,
    Order,
    Phase,
    Play,
    Raised,
    Ready,
    ToProcess,
)
from .wire import (
    Played,
    brief,
)

log = logging.getLogger("tandem.environments")

START_SECONDS = 60.0
"""Deadline of a process to import the environment; the reset's deadline if that is longer."""
OUTPUT_BYTES = 64 << 20
"""What an episode may print before its process is ended."""
KEPT_OUTPUT = 2_000
"""Bytes of the output of an episode that are kept, for its error."""
MOST_MESSAGES = 100_000
"""Messages of an episode, beyond which its process is ended."""
REAP_SECONDS = 5.0
"""Time in which a killed process has to be gone."""
OUT_OF_MEMORY = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals that end a process which is refused memory."""
KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""The only variables of our environment that a process gets: none of them could be a secret."""


class EpisodeFailed(Exception):
    """An episode that failed, by no fault of the policy."""

    def __init__(self, verdict: Verdict, detail: str) -> None:
        super().__init__(detail)
        self.verdict, self.detail = verdict, detail


class NotStarted(Exception):
    """A process couldn't be started, or its environment couldn't be loaded in it.

    ``refused`` says that another attempt would end as this one.
    """

    def __init__(self, detail: str, *, refused: bool) -> None:
        super().__init__(detail)
        self.refused = refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What bounds the episodes of a server."""

    reset_seconds: float
    step_seconds: float
    episode_seconds: float
    memory_mb: int

    def of(self, phase: Phase) -> float:
        """Deadline of a phase, counted from its beginning."""
        match phase:
            case "reset":
                return self.reset_seconds
            case "step" | "reward":
                return self.step_seconds
            case "model" | "agent":
                return self.episode_seconds


@dataclass(slots=True)
class Figures:
    """What has happened since the server started."""

    started: int = 0
    """Processes."""
    killed: dict[str, int] = field(default_factory=dict)
    """Processes that were ended before their time, by verdict."""


class _Output(asyncio.Protocol):
    """Reads what a process prints, keeps the beginning, and ends the process if it is too much."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.kept = bytearray()
        self.total = 0
        self.flooded = False

    def data_received(self, data: bytes) -> None:
        self.total += len(data)
        if len(self.kept) < KEPT_OUTPUT:
            self.kept += data[: KEPT_OUTPUT - len(self.kept)]
        if self.total > OUTPUT_BYTES and not self.flooded:
            self.flooded = True
            # Its socket closes with it, and whoever waits for it hears of that.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, 9)

    def begin(self) -> None:
        """Forgets the last episode's output."""
        self.kept.clear()
        self.total = 0


def read_said(data: bytes) -> FromProcess:
    """Reads a message of a process.

    Raises:
        WireError: it isn't a valid one.
    """
    said: FromProcess = read_message(FromProcess, data, "message of an episode's process")
    if isinstance(said, Done):
        for number in (said.reward, *said.turn_rewards, *said.metrics.values()):
            if number is not None and not math.isfinite(number):
                raise WireError(f"refused message of an episode's process: {number} isn't finite")
    return said


class Host:
    """One process.

    Args:
        name: the environment's name.
        spec: what it loads: ``form``, ``target`` and ``params``; ``reads`` is as in :class:`~.pipes.Order`, and in the
            folder ``outputs`` it gets one of its own, which its parameter ``outputs`` names.
        bounds: the deadlines.
        folder: where its own folder goes.
        user: see :class:`~.pipes.Order`.
        path: see :class:`~.pipes.Order`.
        family: the server's children.
    """

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Any],
        bounds: Bounds,
        folder: Path,
        user: int | None,
        path: Sequence[str],
        family: Family,
    ) -> None:
        self.name = name
        self._family = family
        self._bounds = bounds
        self._folder = tempfile.mkdtemp(prefix=f"{name[:20]}-".replace("/", "-"), dir=folder)
        params, self._outputs = dict(spec["params"]), None
        if "outputs" in spec:
            self._outputs = f"{spec['outputs']}/tandem-{os.path.basename(self._folder)}"
            params["outputs"] = self._outputs
        self._order = Order(
            form=spec["form"],
            target=spec["target"],
            params=params,
            path=list(path),
            memory_bytes=bounds.memory_mb << 20,
            user=user,
            folder=self._folder,
            reads=list(spec.get("reads", ())),
            outputs=self._outputs,
        )
        self.why_root = ""
        """See :class:`~.pipes.Ready`."""
        self.process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._output: _Output | None = None
        self._transport: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 before the process has started."""
        return self.process.pid if self.process is not None else 0

    async def start(self) -> None:
        """Starts the process and waits until it has loaded its environment.

        Raises:
            NotStarted: it doesn't.
        """
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        # -P: a file of the working directory must not shadow a library's module.
        command = [sys.executable, "-P", "-m", f"{__package__}.host"]
        command += [str(theirs.fileno()), str(os.getpid())]
        try:
            # In this thread, which lasts as long as the server: the kernel ends a child with the
            # thread that started it.
            self.process = self._family.start(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=write,
                    stderr=write,
                    env=self._environment(),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            )
        except OSError as error:
            ours.close()
            os.close(read)
            raise NotStarted(f"no process can be started: {error}", refused=False) from None
        finally:
            theirs.close()
            os.close(write)
        loop = asyncio.get_running_loop()
        output = self._output = _Output(self.process.pid)
        pipe = os.fdopen(read, "rb", buffering=0)
        self._transport, _ = await loop.connect_read_pipe(lambda: output, pipe)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        seconds = max(START_SECONDS, self._bounds.reset_seconds)
        try:
            async with asyncio.timeout(seconds):
                self._say(self._order)
                said = await self._hear()
        except TimeoutError:
            raise NotStarted(f"it wasn't loaded within {seconds:.0f} s", refused=False) from None
        except (EpisodeFailed, WireError) as error:
            way_out = ""
            if -(self.process.poll() or 0) in OUT_OF_MEMORY and not output.flooded:
                way_out = f". If it needs more memory, raise environments.memory_mb={self._bounds.memory_mb}"
            raise NotStarted(f"{error}{way_out}", refused=False) from None
        if isinstance(said, Raised):
            way_out = f". {brief(said.way_out)}" if said.way_out else ""
            raise NotStarted(f"{brief(said.error)}{way_out}", refused=True)
        if not isinstance(said, Ready):
            raise NotStarted("it said something other than that it is ready", refused=False)
        self.why_root = said.why_root

    def _environment(self) -> dict[str, str]:
        kept = {k: os.environ[k] for k in KEPT_ENVIRONMENT if k in os.environ}
        return kept | {
            "HOME": self._folder,
            "TMPDIR": self._folder,
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    async def play(self, play: Play) -> Played:
        """Has one episode played.

        Raises:
            EpisodeFailed: it failed; the process must be ended.
        """
        assert self._output is not None
        self._output.begin()
        bounds = self._bounds
        phase: Phase = "reset"
        began = since = time.monotonic()
        modelled = 0.0
        end = began + bounds.episode_seconds
        self._say(play)
        for _ in range(MOST_MESSAGES):
            try:
                async with asyncio.timeout(min(end, since + bounds.of(phase)) - time.monotonic()):
                    said = await self._hear()
            except TimeoutError:
                raise self._late(phase, since + bounds.of(phase) <= end) from None
            except WireError as error:
                raise EpisodeFailed(Verdict.ENV_FAILED, self._words(str(error))) from None
            except EpisodeFailed as error:
                raise EpisodeFailed(_verdict(phase), error.detail) from None
            now = time.monotonic()
            match said:
                case Doing():
                    modelled += now - since if phase == "model" else 0.0
                    phase, since = said.phase, now
                case Done():
                    return Played(
                        reward=said.reward,
                        turn_rewards=tuple(said.turn_rewards),
                        failure=None,
                        detail=brief(said.ended),
                        metrics=said.metrics,
                        seconds=max(0.0, now - began - modelled),
                    )
                case Raised():
                    raise EpisodeFailed(_verdict(phase), self._words(said.error))
                case _:
                    break
        raise EpisodeFailed(Verdict.ENV_FAILED, "its process said what it shouldn't say")

    def _late(self, phase: Phase, by_phase: bool) -> EpisodeFailed:
        verdict, what, key = Verdict.ENV_TIMEOUT, "the episode", "episode_seconds"
        if by_phase:
            what, key = f"a {phase}", "step_seconds"
            if phase == "reset":
                verdict, what, key = Verdict.ENV_RESET, "reset", "reset_seconds"
        seconds = getattr(self._bounds, key)
        why = f"{what} took longer than environments.{key}={seconds:g}"
        return EpisodeFailed(verdict, self._words(why))

    def _words(self, why: str) -> str:
        """A reason, with the beginning of what was printed."""
        printed = bytes(self._output.kept).decode("utf-8", "replace") if self._output else ""
        return brief(f"{why}; it printed: {printed[:300]}" if printed.strip() else why)

    def _say(self, message: ToProcess) -> None:
        assert self._writer is not None
        data = message.pack()
        if len(data) > MAX_TO_PROCESS:
            raise EpisodeFailed(Verdict.ENV_RESET, f"the row has {len(data):,} bytes")
        self._writer.write(data)

    async def _hear(self) -> FromProcess:
        """The next message.

        Raises:
            EpisodeFailed: the process has ended.
            WireError: it isn't a valid one.
        """
        assert self._reader is not None
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MAX_FROM_PROCESS:
                raise WireError(f"refused message of an episode's process: {length:,} bytes")
            return read_said(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._exited()
            raise EpisodeFailed(Verdict.ENV_FAILED, self._words(self._how_it_ended())) from None

    async def _exited(self) -> None:
        """Gives the process a moment to be a zombie, and its last words to arrive."""
        end = time.monotonic() + 1.0
        while self.process is not None and self.process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def _how_it_ended(self) -> str:
        code = self.process.poll() if self.process is not None else None
        if self._output is not None and self._output.flooded:
            return f"its process was ended: it printed more than {OUTPUT_BYTES >> 20} MiB"
        if code is None:
            return "its process closed its socket"
        return (
            f"its process {f'was killed by signal {-code}' if code < 0 else f'exited with {code}'}"
        )

    async def end(self) -> None:
        """Ends the process with all that it has started, reaps it, and removes its folders."""
        if self._writer is not None:
            self._writer.close()
        if self.process is not None and not await asyncio.to_thread(
            self._family.end, self.process, REAP_SECONDS
        ):
            log.warning(f"process {self.pid} of {self.name} was killed but is still there")
        if self._transport is not None:
            self._transport.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, True)
        if self._outputs is not None:
            await asyncio.to_thread(shutil.rmtree, self._outputs, True)


def _verdict(phase: Phase) -> Verdict:
    return Verdict.ENV_RESET if phase == "reset" else Verdict.ENV_FAILED
