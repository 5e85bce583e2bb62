"""Brings the learner's ranks together without a socket that listens beyond loopback."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..common.errors import ConfigError

ADDRESS = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)
"""A rank that waits longer than this for another gives up; rank 0 sends signs of life while it waits."""


def _store(rank: int, world_size: int, port: int | None) -> dist.Store:
    if world_size == 1:
        # A single rank meets nobody and needs no socket.
        return dist.HashStore()
    if port is None:
        raise ConfigError(f"learner.ranks={world_size} needs the port at which the ranks meet")
    listener = None
    if rank == 0:
        # By itself, TCPStore listens on every address of the host.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"port {port} of {ADDRESS}, where the learner's ranks meet, can't be bound: {error}"
            ) from None
        listener.listen(world_size + 8)
    return dist.TCPStore(
        ADDRESS,
        port,
        world_size,
        rank == 0,
        timeout=TIMEOUT,
        # The store takes over the socket, so it must not be closed here.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def device_of(rank: int) -> torch.device:
    """``cuda:<rank>`` if there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def variables(rank: int, world_size: int, port: int | None) -> dict[str, str]:
    """The environment variables that DeepSpeed reads instead of asking torch."""
    # DeepSpeed takes LOCAL_RANK for the number of the GPU. In a run each rank sees its own one alone.
    gpu = device_of(rank).index
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if gpu is None else gpu),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port or 0),
    }


@contextmanager
def process_group(rank: int, world_size: int, port: int | None) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, and NCCL for CUDA tensors if there are GPUs.

    Raises:
        ConfigError: the port is missing or taken.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.update(variables(rank, world_size, port))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=_store(rank, world_size, port),
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def broadcast_bytes(payload: bytes | None, source: int = 0) -> bytes:
    """One rank's bytes on every rank; the other ranks pass None."""
    if dist.get_world_size() == 1:
        assert payload is not None
        return payload
    size = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64)
    dist.broadcast(size, source)
    data = torch.empty(int(size), dtype=torch.uint8)
    if payload is not None:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if len(data):
        dist.broadcast(data, source)
    return data.numpy().tobytes()


def sum_over_ranks(values: list[float]) -> list[float]:
    """Sums over all ranks in float64, the same on each rank."""
    if dist.get_world_size() == 1 or not values:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(v) for v in total]


def max_over_ranks(values: list[float]) -> list[float]:
    """Greatest values over all ranks; a NaN anywhere gives NaN everywhere."""
    if dist.get_world_size() == 1 or not values:
        return values
    gathered = [torch.zeros(len(values), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(values, dtype=torch.float64))
    return [float(v) for v in torch.stack(gathered).amax(0)]


def gather_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """``[n]`` float64 of each rank, concatenated: ``[ranks · n]``, the same on each rank."""
    if dist.get_world_size() == 1:
        return values
    gathered = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return torch.cat(gathered)


def gather_names(names: list[str]) -> list[list[str]]:
    """Every rank's list of names, in the order of ranks."""
    everyone = []
    for rank in range(dist.get_world_size()):
        mine = "\n".join(names).encode() if rank == dist.get_rank() else None
        text = broadcast_bytes(mine, rank).decode()
        everyone.append(text.split("\n") if text else [])
    return everyone
