"""A rollout worker that stands still in the middle of an update, for as long as a test wants."""

from __future__ import annotations

import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import torch
from weight_processes import as_bytes

from tandem.common.errors import WeightsError
from tandem.common.records import Version
from tandem.common.run_folder import JoinInfo
from tandem.common.weights import receiver as receiving
from tandem.common.weights.receiver import Target, WeightReceiver
from tandem.common.weights.shared_memory import StagedTensors
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.members import membership


class Holds:
    """Stands still at one place, once: says so, and waits to be told to go on.

    The places: ``bucket``, the first of a version's is checked; ``staged``, all are and the engine
    hasn't begun; ``commit``, the engine has loaded the first half of the tensors.
    """

    def __init__(self, pipe: Connection, at: str, after: int) -> None:
        self._pipe = pipe
        self._at = at
        self.commits_before = after

    def __call__(self, place: str) -> None:
        """The thread is there."""
        if place == self._at and self.commits_before == 0:
            self._at = ""
            self._pipe.send(("holds", place))
            self._pipe.recv()


def worker(pipe: Connection, join: JoinInfo, member: str, options: dict[str, Any]) -> None:
    """Tells ``(version, {name: bytes})`` of its engine's own tensors after each commit.

    With ``writes`` its engine then writes into the tensors that it was given; it refuses the versions of
    the steps in ``broken`` once each, and changes nothing. With ``hold`` it stands still at that place, in the update after the first ``after`` ones.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    holds = Holds(pipe, options.get("hold", ""), options.get("after", 0))
    served: dict[str, torch.Tensor] = {}

    refusals = set(options.get("broken", ()))

    def commit(staged: StagedTensors | None, version: Version) -> float:
        if version.step in refusals:
            refusals.remove(version.step)
            raise WeightsError("the engine takes nothing at first")
        tensors = staged.tensors() if staged is not None else []
        for number, (name, tensor) in enumerate(tensors):
            if number == len(tensors) // 2:
                holds("commit")
            served[name] = tensor.clone()
            if options.get("writes"):
                tensor.fill_(float("nan"))
        holds.commits_before -= 1
        pipe.send((version, as_bytes(list(served.items()))))
        return 0.0

    store = connect(join, name=member)
    ledger = Ledger(store, member)

    def current_term() -> int:
        holds("staged")
        return ledger.term()

    checksum = receiving.checksum

    def checked(data: torch.Tensor) -> int:
        found = checksum(data)
        holds("bucket")
        return found

    receiving.checksum = checked
    receiver = WeightReceiver(
        membership(store, member),
        options["config"],
        Target(specs=options["specs"], load=commit, base=options.get("base", "")),
        current_term,
    )
    receiver.start()
    threading.Event().wait(120)
