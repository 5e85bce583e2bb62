"""Every function of the project that reads bytes of another process."""

from __future__ import annotations

from decoder import Decoder
from file_decoders import Files, from_files
from redis_decoders import from_redis
from socket_decoders import from_sockets


def all_decoders(files: Files) -> list[Decoder]:
    """Every one."""
    return [*from_sockets(), *from_redis(), *from_files(files)]
