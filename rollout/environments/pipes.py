"""Messages between an environment server and the processes in which episodes are played.

Each is MessagePack behind its length, 4 bytes little-endian, on a Unix socket. What comes from a process
is treated as if anybody might have sent it, since its code is the user's and acts on what a policy wrote.
A process imports this module, and so it imports nothing but msgspec.
"""

from __future__ import annotations

import socket
import struct
from typing import Annotated, Any, Literal

import msgspec

LENGTH = struct.Struct("<I")
MAX_TO_PROCESS = 48 << 20
MAX_FROM_PROCESS = 1 << 20
MOST_METRICS = 64
"""Figures of one episode that are kept."""

Phase = Literal["reset", "step", "model", "reward", "agent"]
"""What an episode is doing, and so which deadline counts."""


class _Message(
    msgspec.Struct, frozen=True, array_like=True, tag=str.lower, forbid_unknown_fields=True
):
    """A list of the class's name, in lower case, and its fields."""

    def pack(self) -> bytes:
        """The message as it is sent."""
        data = msgspec.msgpack.encode(self)
        return LENGTH.pack(len(data)) + data


# Server to process.


class Order(_Message, frozen=True):
    """The first message: what to load, and what limits the process."""

    form: str
    target: str
    params: dict[str, Any]
    path: list[str]
    """Folders that are added at the end of the import path."""
    memory_bytes: int
    user: int | None
    """User that root's process becomes if that user can read the environment's file."""
    folder: str
    """Working folder of the process, which no other process has."""
    reads: list[str] = []
    """Files and folders that the user must be able to read besides the environment's module."""
    outputs: str | None = None
    """Folder that is made for the process, outside its own, and removed with it."""


class Play(_Message, frozen=True):
    """Play one episode."""

    row: dict[str, Any]
    base_url: str
    api_key: str
    model: str
    sampling: dict[str, Any]
    turns: int
    calls: int
    observation_tokens: int
    seconds: float


# Process to server.


class Ready(_Message, frozen=True):
    """The environment is loaded."""

    why_root: Annotated[str, msgspec.Meta(max_length=5000)] = ""
    """Why root's process has stayed root; empty if it hasn't, or never was."""


class Doing(_Message, frozen=True):
    """The episode has entered a phase."""

    phase: Phase


class Done(_Message, frozen=True):
    """The episode was played to its end."""

    reward: float | None
    turn_rewards: Annotated[list[float | None], msgspec.Meta(max_length=10_000)]
    metrics: Annotated[dict[str, float], msgspec.Meta(max_length=MOST_METRICS)]
    ended: Annotated[str, msgspec.Meta(max_length=200)]
    """Why it ended."""


class Raised(_Message, frozen=True):
    """The user's code raised an exception."""

    error: Annotated[str, msgspec.Meta(max_length=4000)]
    """The exception in a line, and where it was raised."""
    way_out: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """What to do about it, where that is known."""


ToProcess = Order | Play
FromProcess = Ready | Doing | Done | Raised
_TO_PROCESS = msgspec.msgpack.Decoder(ToProcess)


class Channel:
    """The process's end of the socket: it blocks, and ends the process when the server is gone."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def hear(self) -> ToProcess | None:
        """The next message; None if the server has closed the socket."""
        head = self._read(LENGTH.size)
        if head is None:
            return None
        data = self._read(LENGTH.unpack(head)[0])
        return None if data is None else _TO_PROCESS.decode(data)

    def say(self, message: FromProcess) -> None:
        """Sends a message."""
        self._socket.sendall(message.pack())

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)
