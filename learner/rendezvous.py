"""Brings the learner's ranks together, on one host or several, without a socket that listens on all addresses.

Rank 0's store listens on loopback, or on the one private address of the head that all hosts reach, and only until
every rank has come: nobody who comes later is let in. Neither the store nor gloo and NCCL have credentials, so a
learner on several hosts needs a private network (docs/hosts.md).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..common.errors import ConfigError, TandemError
from ..common.sockets import address_towards, interface_of, is_loopback, local_address

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=10)
"""A rank that waits longer than this for another gives up; rank 0 sends signs of life while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of this process among the learner's ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Its place among the ranks of its host."""
    address: str = LOOPBACK
    """Where rank 0's store listens."""
    port: int | None = None
    """The store's port; needed with more than one rank."""
    agent_store: str | None = None
    """torchrun's own store listens there, and the ranks use this prefix in it; None = rank 0 makes the store."""


def _store(seat: Seat) -> tuple[dist.Store, int | None]:
    """The ranks' store, and the descriptor at which it listens if it is here."""
    if seat.world_size == 1:
        # A single rank meets nobody and needs no socket.
        return dist.HashStore(), None
    if seat.port is None:
        raise ConfigError(f"learner.ranks={seat.world_size} needs the port at which the ranks meet")
    if seat.agent_store is not None:
        store = dist.TCPStore(seat.address, seat.port, is_master=False, timeout=TIMEOUT)
        return dist.PrefixStore(seat.agent_store, store), None
    listener = None
    if seat.rank == 0:
        # By itself, TCPStore listens on every address of the host.
        family = socket.AF_INET6 if ":" in seat.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((seat.address, seat.port))
        except OSError as error:
            listener.close()
            message = f"port {seat.port} of {seat.address}, where the learner's ranks meet, can't be bound: {error}"
            if error.errno == errno.EADDRINUSE:
                # Somebody was quicker; the supervisor starts the ranks again, with another port.
                raise TandemError(f"{message}; start the ranks again with another port") from None
            raise ConfigError(message) from None
        listener.listen(seat.world_size + 8)
    # The store takes over the socket, so it must not be closed here.
    descriptor = None if listener is None else listener.detach()
    store = dist.TCPStore(
        seat.address,
        seat.port,
        seat.world_size,
        seat.rank == 0,
        timeout=TIMEOUT,
        master_listen_fd=descriptor,
    )
    return store, descriptor


def _stop_listening(descriptor: int) -> None:
    """Puts a socket that nobody can connect to in the place of the store's own.

    The store can't be told to stop listening. The ranks' connections to it stay.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as nothing:
        os.dup2(nothing.fileno(), descriptor, inheritable=False)


def device_of(local_rank: int) -> torch.device:
    """``cuda:<local rank>`` if there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def variables(seat: Seat) -> dict[str, str]:
    """The environment variables that DeepSpeed reads instead of asking torch."""
    # DeepSpeed takes LOCAL_RANK for the number of the GPU. In a run each rank sees its own one alone.
    gpu = device_of(seat.local_rank).index
    return {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank if gpu is None else gpu),
        "WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": seat.address,
        "MASTER_PORT": str(seat.port or 0),
    }


def interfaces(seat: Seat, weights: str | None = None) -> dict[str, str]:
    """The variables that bind gloo and NCCL to the interface from which this host reaches rank 0.

    By themselves they take the address of the host's name, which is often one of loopback.

    Args:
        seat: this rank's place.
        weights: address or interface of the weight channel, if NCCL may carry it.

    Raises:
        ConfigError: no address of this host reaches it, or no interface holds that address.
    """
    address = address_towards(seat.address) if seat.world_size > 1 else LOOPBACK
    name = interface_of(address)
    if not torch.cuda.is_available():
        return {"GLOO_SOCKET_IFNAME": name}
    if weights is not None and is_loopback(address):
        # NCCL reads its variable once in a process, and this one may send weights to other hosts later.
        address = local_address(weights)
    # NCCL takes a bare name for a prefix.
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={interface_of(address)}"}


@contextmanager
def process_group(seat: Seat, weights: str | None = None) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, and NCCL for CUDA tensors if there are GPUs.

    After an error the group of several ranks is still there: with NCCL a rank that leaves it waits for the others,
    which may wait for this one. The process should then end by ``os._exit``, since the group's destructor may wait too.

    Args:
        seat: this rank's place.
        weights: address or interface of the weight channel, if NCCL may carry it.

    Raises:
        ConfigError: the port is missing or can't be bound, or no interface of this host reaches rank 0.
        TandemError: the port is taken; another one may be free.
    """
    for variable, name in interfaces(seat, weights).items():
        os.environ.setdefault(variable, name)
    os.environ.update(variables(seat))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, descriptor = _store(seat)
    dist.init_process_group(
        backend,
        store=store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=TIMEOUT,
    )
    if descriptor is not None and backend == "gloo":
        # NCCL's watchdog may open a connection of its own later.
        _stop_listening(descriptor)
    failed = True
    try:
        yield
        failed = False
    finally:
        if seat.world_size == 1 or not failed:
            dist.destroy_process_group()


def broadcast_bytes(payload: bytes | None, source: int = 0) -> bytes:
    """One rank's bytes on every rank; the other ranks pass None."""
    if dist.get_world_size() == 1:
        assert payload is not None
        return payload
    size = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64)
    dist.broadcast(size, source)
    data = torch.empty(int(size), dtype=torch.uint8)
    if payload:
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
