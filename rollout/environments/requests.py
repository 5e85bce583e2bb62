"""What a worker asks of an environment server: an episode, the end of one, or a sign of life (see :mod:`.wire`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from ...common.errors import WireError
from ...common.plain import read_message

MAX_REQUEST_BYTES = 32 << 20
"""Longest request that a server reads: a row of a data set, and little else."""

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class EnvironmentTask(Struct, frozen=True, kw_only=True):
    """``task_data`` of our servers."""

    environment: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    """Name in ``environments.use``."""
    row: dict[str, Any]
    """The data set's row."""


class ModelClient(Struct, frozen=True, kw_only=True):
    """Where the episode's model answers."""

    type: Text
    """``train``, as verifiers calls a client that records tokens."""
    base_url: Text
    """The session's own URL."""
    api_key: Text
    """The session's own key."""

    def __repr__(self) -> str:
        return f"ModelClient(type={self.type!r}, base_url=…, api_key=…)"


class Limits(Struct, frozen=True, kw_only=True):
    """What bounds the episode besides time."""

    turns: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    """Greatest number of the policy's turns."""
    calls: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
    """Greatest number of tool calls."""
    observation_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    """Tokens to which the endpoint cuts an observation."""


class RunRequest(Struct, frozen=True, kw_only=True):
    """Asks for one episode."""

    task_data: EnvironmentTask
    client: ModelClient
    model: Text
    """Name of the model that the endpoint serves."""
    limits: Limits
    sampling: dict[str, float | int | str | bool | None] = {}
    """Further keys of each request to the model."""


class CancelRequest(Struct, frozen=True, kw_only=True):
    """Asks for an episode to be ended."""

    request_id: RequestId


class HealthRequest(Struct, frozen=True, kw_only=True):
    """Asks whether the server answers."""


Request = RunRequest | CancelRequest | HealthRequest
_METHODS: dict[bytes, Any] = {
    b"run": RunRequest,
    b"cancel": CancelRequest,
    b"health": HealthRequest,
}


def request_frames(request_id: str, request: Request) -> list[bytes]:
    """The frames of a request.

    Raises:
        WireError: it holds something that MessagePack can't carry, or is too long.
    """
    method = next(name for name, kind in _METHODS.items() if isinstance(request, kind))
    try:
        data = msgspec.msgpack.encode(request)
    except (TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise WireError(f"a {method.decode()} can't travel: {error}") from None
    if len(data) > MAX_REQUEST_BYTES:
        raise WireError(
            f"a {method.decode()} of {len(data):,} bytes is over the limit of {MAX_REQUEST_BYTES:,}: "
            f"leave columns that the environment doesn't need out of its rows"
        )
    return [request_id.encode(), method, data]


def read_request(frames: Sequence[bytes]) -> tuple[str, Request]:
    """Reads a request, without the identity frame before it.

    Raises:
        WireError: it isn't a valid one.
    """
    if len(frames) != 3:
        raise WireError(f"refused a request of {len(frames)} frames: there should be 3")
    name, method, data = frames
    if method not in _METHODS:
        raise WireError(f"unknown method {bytes(method[:40])!r}")
    if len(data) > MAX_REQUEST_BYTES:
        raise WireError(f"refused a request of {len(data):,} bytes: over {MAX_REQUEST_BYTES:,}")
    request: Request = read_message(_METHODS[bytes(method)], data, f"{method.decode()} request")
    return read_id(name), request


def read_id(frame: bytes) -> str:
    """Reads the frame with a request's id.

    Raises:
        WireError: it isn't 1 to 64 characters of ASCII.
    """
    if not 1 <= len(frame) <= 64 or not frame.isascii() or not frame.decode().isprintable():
        raise WireError(f"refused the request id {frame[:80]!r}: it should be 1 to 64 characters")
    return frame.decode()
