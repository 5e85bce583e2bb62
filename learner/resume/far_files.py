"""A checkpoint's files where ranks of the learner are on hosts that may not have the run's folder.

Before anything is trained, rank 0 writes a random word into the run's ``checkpoints/``, and every rank looks for it
and answers beside it. Ranks that find it, and whose answer rank 0 finds, write and read checkpoints there
themselves. For the others rank 0 does: their files come to it over the process group when one is saved, and all
files go to their host, once, when one is loaded. What a checkpoint holds is the same in both cases.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from ...common import disk
from ...common.errors import ConfigError, DataError
from ...common.plain import read_json
from ..rendezvous import broadcast_bytes, gather_names, sum_over_ranks

log = logging.getLogger("tandem.learner")

BLOCK = 16 << 20
"""Number of bytes that are sent at a time."""
SIGN_BLOCKS = 64
"""After so many of them the ranks that wait hear that the others go on."""
PREFIX = ".shared-"
"""How the names of the files begin by which hosts look for the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """Where this rank writes and reads its files; without arguments, in the run's folder."""

    far: tuple[int, ...] = ()
    """Ranks that don't have the run's folder, ascending."""
    receivers: tuple[int, ...] = ()
    """The first of them on each host, which gets all files of a checkpoint that is loaded."""
    place: Path | None = None
    """A folder that the far ranks of a host share."""

    @classmethod
    def agreed(
        cls,
        setting: str,
        checkpoints: Path | None,
        place: Path,
        *,
        local_rank: int,
        several_hosts: bool,
    ) -> CheckpointFiles:
        """Finds out which ranks have the run's folder. Collective.

        Args:
            setting: ``learner.checkpoints``.
            checkpoints: the run's ``checkpoints/``, on rank 0.
            place: a folder of this rank's host.
            local_rank: this rank's place among those of its host.
            several_hosts: whether there are any other hosts.

        Raises:
            ConfigError: ``learner.checkpoints=shared``, and a rank doesn't have it.
        """
        if not several_hosts or dist.get_world_size() == 1:
            return cls()
        seen = _look(checkpoints)
        mine = [str(local_rank), "yes" if seen else "", socket.gethostname()]
        everyone = gather_names(["|".join(mine)])
        if checkpoints is not None:
            for path in checkpoints.glob(f"{PREFIX}*"):
                path.unlink(missing_ok=True)
        ranks = [line.split("|", 2) for (line,) in everyone]
        # Ranks are numbered host by host, and on each host from 0.
        hosts: list[int] = []
        for local, _, _ in ranks:
            hosts.append((hosts[-1] if hosts else -1) + (local == "0" or not hosts))
        lacking = [rank for rank, (_, yes, _) in enumerate(ranks) if not yes]
        if setting == "gathered":
            lacking = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        if setting == "shared" and lacking:
            names = ", ".join(f"rank {rank} on {ranks[rank][2]}" for rank in lacking)
            raise ConfigError(
                f"learner.checkpoints=shared, and {names} can't read and write the run's checkpoints folder under "
                f"the head's path: mount it there, or set learner.checkpoints=gathered"
            )
        if checkpoints is not None:
            if lacking:
                listed = ", ".join(str(rank) for rank in lacking)
                log.info(f"checkpoints are gathered by rank 0 for ranks on other hosts: {listed}")
            else:
                log.info(f"checkpoints are written by all hosts into {checkpoints}")
        first = {hosts[rank]: rank for rank in reversed(lacking)}
        return cls(far=tuple(lacking), receivers=tuple(sorted(first.values())), place=place)

    @contextmanager
    def writing(self, folder: Path, share: int) -> Iterator[Path]:
        """The folder into which this rank writes; afterwards everything is in the run's ``folder``. Collective.

        Args:
            folder: the checkpoint's folder.
            share: bytes that each rank writes, for which other hosts must have room.

        Raises:
            DiskFull: this rank's host had no room for too long.
        """
        rank = dist.get_rank() if self.far else 0
        # It removes what a killed save has left there, so it comes before the look at the room.
        own = self._own(f"checkpoint-of-rank-{rank}") if rank in self.far else folder
        try:
            for first, after in pairwise((*self.receivers, math.inf)):
                on_host = sum(first <= one < after for one in self.far)
                self._await_room(int(first), on_host * share)
            yield own
            for far in self.far:
                _move(own, far, 0)
        finally:
            if rank in self.far:
                shutil.rmtree(own, ignore_errors=True)

    @contextmanager
    def reading(self, folder: Path) -> Iterator[Path]:
        """A folder with all that is in the run's ``folder``, for this rank to read. Collective."""
        if not self.far:
            yield folder
            return
        rank = dist.get_rank()
        place = folder
        if rank in self.far:
            assert self.place is not None
            place = self.place / "checkpoint-to-load"
        if rank in self.receivers:
            self._own(place.name)
        for receiver in self.receivers:
            _move(place, 0, receiver)
        # The files of a host are there for all of its ranks once everybody has come here.
        sum_over_ranks([0.0])
        try:
            yield place
            sum_over_ranks([0.0])
        finally:
            if rank in self.receivers:
                shutil.rmtree(place, ignore_errors=True)

    def _await_room(self, source: int, nbytes: int) -> None:
        """Returns once a rank's host has room; the other ranks wait for it, and the head says so. Collective."""
        rank, wait = dist.get_rank(), None
        if rank == source:
            assert self.place is not None
            while not disk.has_room(self.place, nbytes):
                wait = wait or disk.SpaceWait(self.place, nbytes)
                wait.go_on()
                _goes_on(source)
            if wait is not None:
                wait.over()
            _goes_on(source, False)
            return
        told = False
        while _goes_on(source):
            if not (told or rank):
                log.warning(
                    f"the host of rank {source} has no room for its part of a checkpoint: waiting for it"
                )
            told = True

    def _own(self, name: str) -> Path:
        """An empty folder on this host."""
        assert self.place is not None
        path = self.place / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)
        return path


def _look(checkpoints: Path | None) -> bool:
    """Whether this rank reads what rank 0 has written, and rank 0 what this one answers. Collective."""
    rank = dist.get_rank()
    told: bytes | None = None
    if checkpoints is not None:
        word = secrets.token_hex(16)
        (checkpoints / f"{PREFIX}{word[:8]}").write_text(word)
        told = json.dumps([str(checkpoints), word]).encode()
    path, word = read_json(broadcast_bytes(told), "rank 0's word about its folder", DataError)
    place = Path(path) / f"{PREFIX}{word[:8]}"
    answer = place.with_name(f"{place.name}-{rank}")
    try:
        found = place.read_text() == word
        if found:
            answer.write_text(word)
    except OSError:
        found = False
    sum_over_ranks([0.0])
    answered = [0.0] * dist.get_world_size()
    if checkpoints is not None:
        answered = [
            float(place.with_name(f"{place.name}-{r}").exists()) for r in range(len(answered))
        ]
    # Only rank 0 has anything to add.
    return found and sum_over_ranks(answered)[rank] == 1.0


def _move(folder: Path, source: int, to: int) -> None:
    """Brings all files below one rank's folder into another rank's. Collective: the other ranks wait."""
    rank = dist.get_rank()
    if rank not in (source, to):
        while _goes_on(source):
            pass
        return
    if rank == source:
        _send(folder, to)
    else:
        _receive(folder, source)
    _goes_on(source, False)


def _goes_on(source: int, yes: bool = True) -> bool:
    """Whether a rank still sends, as it says itself; all ranks hear it, each before it gives up waiting. Collective."""
    sign = torch.tensor([yes])
    dist.broadcast(sign, source)
    return bool(sign)


def _send(folder: Path, to: int) -> None:
    """Sends all files below a folder to another rank."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    sizes = [(folder / name).stat().st_size for name in names]
    head = json.dumps(list(zip(names, sizes, strict=True))).encode()
    dist.send(torch.tensor([len(head)], dtype=torch.int64), to)
    dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), to)
    sent = 0
    for name, size in zip(names, sizes, strict=True):
        with open(folder / name, "rb") as file:
            for start in range(0, size, BLOCK):
                block = bytearray(min(BLOCK, size - start))
                if file.readinto(block) != len(block):
                    raise DataError(f"{folder / name} has become shorter while it was sent")
                dist.send(torch.frombuffer(block, dtype=torch.uint8), to)
                sent += 1
                if sent % SIGN_BLOCKS == 0:
                    _goes_on(dist.get_rank())


def _receive(folder: Path, source: int) -> None:
    """The other end of :func:`_send`."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    head = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(head, source)
    what = f"the list of files of rank {source}"
    received = 0
    for name, size in read_json(head.numpy().tobytes(), what, DataError):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"rank {source} sends a file named {name!r}")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for start in range(0, size, BLOCK):
                block = torch.empty(min(BLOCK, size - start), dtype=torch.uint8)
                dist.recv(block, source)
                file.write(block.numpy().data)
                received += 1
                if received % SIGN_BLOCKS == 0:
                    _goes_on(source)
