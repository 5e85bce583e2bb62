"""Requests to grader processes, their outcomes, and restarts of graders."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...common.errors import WireError
from ...common.records import Verdict
from .deadlines import SLOW, InLine
from .pipes import MAX_MESSAGE, MAX_REPLY, PACKET_BYTES, Crash, Done, Idle, Part, Raised, read_reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A grader (or zygote) that died and was replaced."""

    kind: str
    """``grader`` or ``zygote``; those of the code reward are ``runner`` and ``runner zygote``."""
    pid: int
    """Process id of the one that died."""
    time: float
    """Seconds since the epoch."""
    reason: str
    """``deadline``, ``killed by signal 9``, ``memory``, ``recycled``, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one request."""

    failure: Verdict | None
    """``timeout``, ``memory`` or ``crashed``; None if there is a result."""
    result: Any
    """The grader's reply; for a comparison, the verdict's name."""
    seconds: float
    """Seconds from dispatch to reply."""
    waited: float
    """Seconds from arrival to dispatch."""
    reason: str = ""
    """The last line of the error, if one was raised."""

    @property
    def verdict(self) -> Verdict:
        """The verdict of a comparison."""
        return self.failure or Verdict(self.result)


@dataclass(slots=True)
class Request:
    """A request that has no outcome yet."""

    kind: str
    """``compare``, ``function`` or ``code``."""
    payload: list[Any]
    """Plain data for the zygote's handler of that kind."""
    deadline: float
    """Seconds from dispatch."""
    done: Callable[[Outcome], None]
    arrived: float
    attempts: int = 0
    dispatched: float = 0.0
    due: float = 0.0
    """The ``time.monotonic`` at which it is to be ended, or checked again."""
    reason: str = ""

    def finish(self, failure: Verdict | None, result: Any = None) -> None:
        """Passes the outcome on to whoever asked."""
        now = time.monotonic()
        started = self.dispatched or now
        self.done(
            Outcome(
                failure=failure,
                result=result,
                seconds=now - started,
                waited=started - self.arrived,
                reason=self.reason,
            )
        )

    def send(self, channel: socket.socket) -> None:
        """Sends it to a grader.

        Raises:
            OSError: the grader is gone.
        """
        data = _packed(self.payload)
        if len(data) <= PACKET_BYTES:
            channel.send(msgspec.msgpack.encode((self.kind, self.deadline, data)))
            return
        descriptor = os.memfd_create("tandem-request")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            message = msgspec.msgpack.encode((self.kind, self.deadline, None))
            socket.send_fds(channel, [message], [descriptor])
        finally:
            os.close(descriptor)


def _packed(payload: list[Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(payload)
    except (UnicodeEncodeError, OverflowError):
        # A text with half a surrogate pair can't be right, and a longer integer travels as text, as a date does.
        return msgspec.msgpack.encode(_clean(payload))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value


@dataclass(slots=True, eq=False)
class Slot:
    """One grader process."""

    number: int
    channel: socket.socket
    pid: int = 0
    state: str = "starting"
    request: Request | None = None
    served: int = 0
    since: float = field(default_factory=time.monotonic)
    was_ready: bool = False
    resident_kib: int = 0
    last_words: str = ""
    parts: bytearray = field(default_factory=bytearray)
    """What has come of a reply in parts."""
    in_line: InLine | None = None
    """Measures how long the grader has waited for a core; None until its pid is known."""
    stood: float = 0.0
    """Seconds that it had waited before its request."""

    def is_slow(self, now: float) -> bool:
        """Whether a slow request holds the grader."""
        request = self.request
        return (
            self.state == "busy"
            and request is not None
            and now - request.dispatched >= SLOW * request.deadline
        )

    def hear(self) -> Idle | Done | Raised | Crash | None:
        """The next reply; None if it isn't there yet, or not all of it.

        Raises:
            EOFError: the grader has ended.
            WireError: it isn't a reply, or one that is too long.
        """
        while True:
            try:
                data = self.channel.recv(MAX_MESSAGE)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            reply = read_reply(data)
            if not isinstance(reply, Part):
                return reply
            self.parts += reply.data
            if len(self.parts) > MAX_REPLY:
                raise WireError(
                    f"refused reply of a grader: it is longer than {MAX_REPLY:,} bytes; "
                    f"pay single tokens of fewer or shorter completions at a time"
                )
            if reply.last:
                whole = read_reply(bytes(self.parts))
                self.parts.clear()
                if isinstance(whole, Part):
                    raise WireError("refused reply of a grader: its parts are a part")
                return whole
