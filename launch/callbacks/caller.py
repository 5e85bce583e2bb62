"""The other end of the callbacks' process: starts it, calls through it, and kills it at a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ...common.errors import ConfigError, WireError
from ...common.plain import Record, read_object, read_record

LOAD_SECONDS = 120.0
"""Longest time for the process to start and to import the callbacks' modules."""
MESSAGE_BYTES = 1 << 20
"""Size of an answer; a longer one isn't of this program's own making."""
OUTPUT_BYTES = 4 << 20
"""Bytes of what callbacks print that go to the log, of one process; the rest is left out."""
REAP_SECONDS = 10.0
LOOK_SECONDS = 0.1
"""Time between two checks whether the wait has been cut short."""


class Asked(Record, frozen=True, kw_only=True):
    """What one call asked for."""

    stop: str | None
    checkpoint: bool
    evaluate: bool
    values: dict[str, float] = msgspec.field(default_factory=dict)


class Answer(Record, frozen=True, kw_only=True):
    """The end of one call."""

    error: str
    """Traceback, if the callback raised; else empty."""
    asked: Asked


class Ended(Exception):
    """The process has ended or was killed; the message is a predicate that says why."""


def read_answer(line: bytes) -> Answer:
    """Reads an answer; raises ``WireError`` if it isn't one."""
    return read_record(Answer, line, "the callbacks' answer", WireError)


class Caller:
    """The callbacks' process, which is started by :meth:`start` and again after it has ended.

    Args:
        callbacks: import paths.
        seconds: deadline of a call.
        memory_mb: limit of the process's address space, MiB.
        output: gets what the callbacks print, up to :data:`OUTPUT_BYTES`; None = it is discarded.
    """

    def __init__(
        self,
        callbacks: Sequence[str],
        *,
        seconds: float,
        memory_mb: int,
        output: Callable[[bytes], None] | None = None,
    ) -> None:
        self._callbacks = list(callbacks)
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._alive = -1
        self._unread = b""
        self.cut_at = math.inf
        """Monotonic time at which every wait ends; may be set from a signal handler."""

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Starts the process and waits until it has imported the callbacks.

        Raises:
            ConfigError: a callback can't be imported; says why.
            Ended: the process ended, or took too long.
        """
        ours, theirs = socket.socketpair()
        watched, alive = os.pipe()
        settings = {
            "callbacks": self._callbacks,
            "memory_mb": self._memory_mb,
            "parent": os.getpid(),
            # Its other end is held by this process alone.
            "alive": watched,
        }
        secret = "TANDEM_REDIS_PASSWORD"
        command = [sys.executable, "-P", "-m", f"{__package__}.calling", str(theirs.fileno())]
        self._channel, self._alive, self._unread = ours, alive, b""
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if self._output is None else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # A group of its own, so that what it starts ends with it.
                start_new_session=True,
                pass_fds=(theirs.fileno(), watched),
                env={name: value for name, value in os.environ.items() if name != secret},
            )
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(watched)
        if self._output is not None:
            threading.Thread(
                target=_pass_on, args=(self._process, self._output), name="output", daemon=True
            ).start()
        line = self._receive(LOAD_SECONDS, "its modules weren't imported")
        try:
            greeting = read_object(line, "the greeting", WireError)
        except WireError as error:
            raise self._end(f"said something other than it should: {error}") from None
        if "refused" in greeting:
            self.close()
            raise ConfigError(str(greeting["refused"]))

    def call(self, index: int, step: int, metrics: Mapping[str, float]) -> Answer:
        """Calls a callback.

        Raises:
            Ended: the process ended during the call, or was killed at the deadline.
        """
        assert self._channel is not None, "start comes before call"
        request = {"callback": index, "step": step, "metrics": dict(metrics)}
        try:
            self._channel.settimeout(self._seconds)
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._end(f"can't be reached: {error}") from None
        line = self._receive(self._seconds, "the call didn't end")
        try:
            return read_answer(line)
        except WireError as error:
            raise self._end(f"said something other than it should: {error}") from None

    def close(self) -> None:
        """Kills the process with all that is in its group."""
        process, self._process = self._process, None
        if self._channel is not None:
            self._channel.close()
            os.close(self._alive)
            self._channel = None
        if process is None:
            return
        # Not reaped yet, so the id can't be another group's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_SECONDS)

    def _receive(self, seconds: float, what: str) -> bytes:
        """The next line."""
        assert self._channel is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = min(end, self.cut_at) - time.monotonic()
            if left <= 0:
                raise self._end(f"was killed: {what} in {seconds:g} s")
            if len(self._unread) > MESSAGE_BYTES:
                raise self._end(f"was killed: its answer is over {MESSAGE_BYTES:,} bytes")
            self._channel.settimeout(min(left, LOOK_SECONDS))
            try:
                data = self._channel.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                raise self._end("")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self, why: str) -> Ended:
        """Ends the process; the error says why, or how it ended by itself."""
        process = self._process
        if not why and process is not None:
            # The socket closes a moment before the process can be waited for.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            code = process.returncode
            if code is None:
                why = "closed its connection"
            elif code < 0:
                why = f"was killed by {signal.Signals(-code).name}"
            else:
                why = f"ended with exit code {code}"
        self.close()
        return Ended(why)


def _pass_on(process: subprocess.Popen[bytes], output: Callable[[bytes], None]) -> None:
    """Passes on what a process prints, up to a limit, and reads the rest so that it doesn't block."""
    assert process.stdout is not None
    left = OUTPUT_BYTES
    with process.stdout as pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            if left > 0:
                output(data[:left])
                left -= len(data)
                if left <= 0:
                    output(
                        f"\n(over {OUTPUT_BYTES:,} bytes: what else callbacks print is left out)\n".encode()
                    )
