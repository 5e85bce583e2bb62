"""Learner and worker processes of the weight tests: real sockets, real gloo, tiny tensors."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from tandem.common.config import Config, build
from tandem.common.errors import WeightsError
from tandem.common.records import Version
from tandem.common.run_folder import JoinInfo
from tandem.common.weights import shared_memory
from tandem.common.weights.gloo import Gloo
from tandem.common.weights.protocol import Meeting
from tandem.common.weights.receiver import Target, WeightReceiver
from tandem.common.weights.sender import WeightSender
from tandem.common.weights.shared_memory import StagedTensors
from tandem.common.weights.ways import WAYS, Way
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.members import membership

Named = list[tuple[str, torch.Tensor]]


def config(*, lora: bool = False, **weights: Any) -> Config:
    """A config with short deadlines and buckets of one megabyte; with ``lora`` adapters travel."""
    short = {"open_seconds": 10, "stage_seconds": 20, "commit_seconds": 20, "bucket_mb": 1}
    tree = {
        "run": {"steps": 1},
        "data": {"train": [{"path": "unused"}]},
        "weights": {"transport": "gloo", **short, **weights},
    }
    if lora:
        tree["learner"] = {"lora": {}}
    return build(tree)


def model(seed: int, *, big: bool = False) -> Named:
    """A few tensors of odd sizes; with ``big`` they take three buckets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (7, 5), "layer.bias": (3,), "scale": (), "head.weight": (5, 11)}
    if big:
        shapes["layer.weight"] = (700, 1000)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def specs_of(named: Named) -> list[tuple[str, tuple[int, ...], str]]:
    """What an engine with these parameters can load."""
    return [(name, tuple(tensor.shape), "float32") for name, tensor in named]


def as_bytes(named: Named) -> dict[str, bytes]:
    """Every bit of the tensors."""
    return {name: tensor.detach().cpu().numpy().tobytes() for name, tensor in named}


class FlippedByte(Gloo):
    """Damages one byte of the first version that it sends."""

    damaged = 0

    def send(self, staged: StagedTensors, at: Meeting) -> None:
        if FlippedByte.damaged == 0:
            FlippedByte.damaged = 1
            last = staged.layout.buckets[-1]
            buffer = staged.buffer.clone()
            buffer[last.start + 17] ^= 1
            staged = dataclasses.replace(staged, buffer=buffer)
        super().send(staged, at)


def stop_half_way(pipe: Connection) -> None:
    """Makes gloo's channels of this process carry one bucket, say ``half`` and go no further."""

    class Half(Gloo):
        def _transfer(self, pieces: Sequence[torch.Tensor], verb: str) -> Iterator[int]:
            yield from super()._transfer(pieces[:1], verb)
            pipe.send("half")
            threading.Event().wait(60)

    WAYS["gloo"] = Way(channel=Half)


def worker(pipe: Connection, join: JoinInfo, member: str, options: dict[str, Any]) -> None:
    """A rollout worker without an engine: tells of each commit what it was given.

    Sends ``(version, {name: bytes})`` at each commit. With ``gate`` it commits only when it is
    told to go on, with ``late`` it reads the bytes only then; ``blind`` sees no shared memory; with ``broken`` its engine fails; ``quiet`` says nothing.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def commit(staged: StagedTensors | None, version: Version) -> float:
        if options.get("broken"):
            raise RuntimeError("half of the layers are on the meta device")
        if options.get("late"):
            pipe.send("committing")
            pipe.recv()
        if not options.get("quiet"):
            pipe.send((version, as_bytes(staged.tensors() if staged is not None else [])))
        if options.get("gate") and not options.get("late"):
            pipe.recv()
        return 0.0

    def sees_nothing(path: str, nbytes: int) -> None:
        raise WeightsError(f"{path} can't be mapped: a container of its own")

    if options.get("blind"):
        shared_memory.map_segment = sees_nothing  # type: ignore[assignment]
    store = connect(join, name=member)
    if options.get("half"):
        stop_half_way(pipe)
    receiver = WeightReceiver(
        membership(store, member),
        options["config"],
        Target(
            specs=options["specs"],
            load=commit,
            base=options.get("base", ""),
            device=options.get("device", "cpu"),
        ),
        Ledger(store, member).term,
    )
    receiver.start()
    threading.Event().wait(120)


def learner(pipe: Connection, join: JoinInfo, term: int, options: dict[str, Any]) -> None:
    """A learner that publishes ``model(seed)`` as each version that it is told.

    With ``halfway`` it says ``half`` in the middle of copying that version's tensors, and goes no further.
    """
    torch.set_num_threads(1)
    store = connect(join, name="learner-0")
    if options.get("half"):
        stop_half_way(pipe)
    publisher = WeightSender(membership(store, "learner-0"), options["config"], term)
    publisher.start()
    while True:
        step, seed = pipe.recv()
        named = model(seed, big=options.get("big", False))

        def gathered(stop: bool, named: Named = named) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(named):
                if stop and number == len(named) // 2:
                    pipe.send("half")
                    threading.Event().wait(60)
                yield item

        publisher.publish(Version(term=term, step=step), gathered(step == options.get("halfway")))


def listening(pid: int) -> list[str]:
    """Hexadecimal ``address:port`` of every TCP socket on which a process listens."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            for line in list(lines)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.append(fields[1])
    return found
