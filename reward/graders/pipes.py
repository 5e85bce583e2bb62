"""Messages between the pool, the zygote and the graders: MessagePack lists, declared here.

A grader reads what a policy wrote, so its messages are treated as if anybody might have sent them.
Every reader raises a :class:`~tandem.common.errors.WireError` for anything that isn't one of its
messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from ...common.errors import WireError
from ...common.plain import Count, Record, read_message

MAX_MESSAGE = 1 << 18
"""Longest packet that is read."""
PACKET_BYTES = 1 << 16
"""Bytes for which a packet surely has room; what is longer travels in a memory file, or in parts."""
MAX_REPLY = 1 << 26
"""Longest reply in parts: nine bytes for each token of a group that is as long as a group may be."""

Kind = Literal["compare", "function", "code"]
CallForm = Literal["auto", "text", "conversation"]
"""What a user's function gets as prompts and completions: ``reward.components.form``."""


class Message(Record, frozen=True, array_like=True, tag=str.lower):
    """A list of the class's name, in lower case, and its fields."""

    def pack(self) -> bytes:
        """The message as it is sent."""
        return msgspec.msgpack.encode(self)


# Pool to zygote.


class Spawn(Message, frozen=True):
    """Fork the grader with that number; a descriptor of its socket comes with the message."""

    slot: int


class Kill(Message, frozen=True):
    slot: int


# Zygote to pool.


class Ready(Message, frozen=True):
    """Graders may be spawned; ``limits`` describe what confines them."""

    pid: int
    limits: tuple[str, ...]


class Spawned(Message, frozen=True):
    slot: int
    pid: int


class Exited(Message, frozen=True):
    slot: int
    pid: int
    status: int


class Failed(Message, frozen=True):
    """A package is missing, or broken."""

    why: str


class Refused(Message, frozen=True):
    """Something that another attempt wouldn't fix: a missing function, no sandbox."""

    why: str


# Pool to grader.


class Request(Record, frozen=True, array_like=True):
    """``payload`` is packed by itself; None if it is in a memory file whose descriptor comes along."""

    kind: Kind
    seconds: Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
    payload: bytes | None


PAYLOADS: dict[str, Any] = {
    "compare": tuple[str, str],
    "function": tuple[int, dict[str, Any], CallForm, list[list[dict[str, str]]]],
    "code": tuple[str, list[list[str]], float, float, int, bool],
}
"""Argument types of each kind of request."""

# Grader to pool; each says how much memory the grader has held at most.


class Idle(Message, frozen=True, tag="ready"):
    """The grader waits for its first request."""

    nothing: None
    resident_kib: Count


class Done(Message, frozen=True):
    result: Any
    resident_kib: Count


class Raised(Message, frozen=True):
    """A user's function raised; the grader goes on."""

    traceback: str
    resident_kib: Count


class Crash(Message, frozen=True):
    """The grader's last words."""

    traceback: str
    resident_kib: Count


class Part(Message, frozen=True):
    """Some bytes of a reply that is too long for one packet."""

    data: bytes
    last: bool


RESULTS: dict[str, Any] = {
    "compare": Literal[
        "correct", "wrong", "unparsable", "gold_unparsable", "timeout", "crashed", "memory"
    ],
    "function": list[float | list[float] | None],
    "code": tuple[Count, int, Count],
}
"""Verdicts are written out here since graders don't import NumPy; for code: passed, tests, timed out."""


def read_control(data: bytes) -> Spawn | Kill | Ready | Spawned | Exited | Failed | Refused:
    """Reads a message between pool and zygote."""
    kinds = Spawn | Kill | Ready | Spawned | Exited | Failed | Refused
    return read_message(kinds, data, "message of the zygote's socket")


def read_request(data: bytes) -> Request:
    """Reads a request from the pool to a grader."""
    return read_message(Request, data, "request to a grader")


def read_payload(kind: str, data: bytes) -> Sequence[Any]:
    """Reads the payload of a request of that kind."""
    return read_message(PAYLOADS[kind], data, f"payload of a request to {kind}")


def read_reply(data: bytes) -> Idle | Done | Raised | Crash | Part:
    """Reads a reply from a grader to the pool."""
    return read_message(Idle | Done | Raised | Crash | Part, data, "reply of a grader")


def checked_result(kind: str, payload: Sequence[Any], result: Any) -> Any:
    """Checks a grader's result for a request of that kind with that payload."""
    try:
        checked = msgspec.convert(result, RESULTS[kind])
    except msgspec.ValidationError as error:
        raise _refused(kind, str(error)) from None
    if kind == "function":
        _check_values(checked, payload[1])
    if kind == "code" and not checked[0] <= checked[1] == len(payload[1]):
        raise _refused(
            kind, f"{checked[0]} of {checked[1]} tests passed, and there are {len(payload[1])}"
        )
    return checked


def _check_values(values: Sequence[float | list[float] | None], columns: dict[str, Any]) -> None:
    if len(values) != len(columns["completions"]):
        raise _refused(
            "function", f"{len(values)} values for {len(columns['completions'])} completions"
        )
    for place, value in enumerate(values):
        numbers = value if isinstance(value, list) else [value or 0.0]
        if not all(map(math.isfinite, (*numbers, sum(numbers)))):
            raise _refused("function", "a value isn't finite")
        ids = columns.get("completion_ids")
        if isinstance(value, list) and (ids is None or len(value) != len(ids[place])):
            raise _refused("function", f"{len(value)} rewards for the tokens of completion {place}")


def _refused(kind: str, why: str) -> WireError:
    return WireError(f"refused result of a request to {kind}: {why}")
