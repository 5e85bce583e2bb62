"""The learner's end as the trainer sees it: publishes versions, which are served in the background.

Besides the training thread there are two: *service* talks to the workers (:mod:`.transfers`), and
*announce* keeps the registry's entry alive.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from ..adapters import base_of
from ..config import Config
from ..errors import StoreError, WeightsError
from ..records import Version
from ..sockets import Authenticator, bind_router, new_keys
from .manifest import Layout, ScoredRows, plan
from .protocol import ROLE, LearnerAddress, Membership
from .shared_memory import remove_left_behind
from .staging import StagingSlot, StagingSlots
from .transfers import Transfers

log = logging.getLogger("tandem.learner.weights")

BEAT_SECONDS = 2.0
"""Interval between heartbeats of the registry entry."""


class WeightSender:
    """Serves the newest version to every live worker that holds another one.

    ``publish`` returns once the weights are copied into a flat staging buffer; training goes on
    while they are sent. Latest wins: a version that a newer one overtakes before anybody began
    to receive it is skipped and counted. A worker that joins, comes back or failed is served
    whenever it asks, whether or not training goes on.

    Args:
        snapshot_folder: folder of snapshots unless ``weights.snapshot_folder`` is set.

    Raises:
        DataError: with ``learner.lora``, the base model's weights can't be read.
    """

    def __init__(
        self,
        membership: Membership,
        config: Config,
        term: int,
        *,
        snapshot_folder: Path | None = None,
    ) -> None:
        self._settings = config.weights_bound
        self._term = term
        self._member = membership.member
        self._registry = membership.registry
        self._dtype: torch.dtype = getattr(torch, config.engine_dtype)
        # Two processes that share a GPU can't use NCCL.
        self._may_use_nccl = config.may_use_nccl
        self._shared = config.weights.transport in ("auto", "shared_memory")
        self._must_share = config.weights.transport == "shared_memory"
        self._on_gpu = False
        self._layout: Layout | None = None
        self._last: Version | None = None
        self._stopping = threading.Event()
        self._slots = StagingSlots(membership.run_id, base_of(config.model, config.learner.lora))

        snapshots = snapshot_folder or Path(
            tempfile.gettempdir(), f"tandem-{membership.run_id}-weights"
        )
        if config.weights.snapshot_folder is not None:
            # Other runs may have used it, and each run's versions begin at term 1.
            snapshots = Path(config.weights.snapshot_folder, membership.run_id)
        snapshots = snapshots.expanduser().absolute()
        keys, ports = new_keys(), config.launch.port_range
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, membership.client.public)
        router, endpoint = bind_router(self._context, config.launch.bind, keys, ports)
        self._transfers = Transfers(
            self._settings, self._slots, router, snapshots=snapshots, ports=ports
        )
        address = LearnerAddress(
            member=self._member, term=term, endpoint=endpoint, public_key=keys.public
        )
        self._entry = {
            **msgspec.structs.asdict(address),
            "run_id": membership.run_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._threads = [
            threading.Thread(target=self._transfers.serve, name="weights-service", daemon=True),
            threading.Thread(target=self._announce, name="weights-announce", daemon=True),
        ]

    # Public.

    def start(self) -> None:
        """Announces the control socket in the registry and begins to serve."""
        remove_left_behind()
        self._registry.register(ROLE, self._member, self._entry)
        for thread in self._threads:
            thread.start()

    def publish(
        self,
        version: Version,
        parameters: Iterable[tuple[str, torch.Tensor]],
        scored: ScoredRows | None = None,
    ) -> None:
        """Copies a version out of the model and returns; it is served in the background.

        Args:
            version: newer than the last one.
            parameters: (name, tensor) in the same order every time, each tied parameter once.
                Each tensor is read before the next is requested, so it may come from a gather.
            scored: log-probs that these weights give some rows, for workers to check theirs.

        Raises:
            WeightsError: the version isn't newer, or names, order or shapes differ from those of
                the first publication; or ``/dev/shm`` has no room, and ``weights.transport`` names it.
        """
        self._check_newer(version)
        if self._layout is None:
            self._layout, parameters = self._lay_out(parameters)
        slot = self._slots.take(
            self._layout, shared=self._shared, pin=self._on_gpu, required=self._must_share
        )
        try:
            self._copy(slot, parameters)
        except BaseException:
            self._slots.release(slot)
            raise
        self._slots.publish(slot, version, scored)
        self._last = version
        self._transfers.wake()

    def restamp(self, version: Version) -> None:
        """Gives the newest weights a newer version, after a step that changed nothing (quarantine).

        Workers that hold them only change the version; others are sent the bytes.

        Raises:
            WeightsError: nothing has been published yet, or the version isn't newer.
        """
        self._check_newer(version)
        if not self._slots.restamp(version):
            raise WeightsError(f"version {version} would re-stamp weights, but none are published")
        self._last = version
        self._transfers.wake()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and each live worker's version and last transfer."""
        return self._transfers.stats()

    def close(self) -> None:
        """Cancels rounds, leaves the registry and closes; waits a few seconds at most."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._transfers.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5.0)
        try:
            self._registry.leave(self._member)
        except StoreError as error:
            log.warning(f"{self._member} couldn't be removed from the registry: {error}")
        self._slots.close()
        if not any(thread.is_alive() for thread in self._threads):
            self._authenticator.stop()
            self._context.destroy(linger=0)

    # Copying, in the training thread.

    def _check_newer(self, version: Version) -> None:
        if version.term != self._term:
            raise WeightsError(f"version {version} isn't of this learner's term {self._term}")
        if self._last is not None and version <= self._last:
            raise WeightsError(
                f"version {version} isn't newer than {self._last}: versions only go up"
            )

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _lay_out(
        self, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[Layout, list[tuple[str, torch.Tensor]]]:
        """Plans the buffer from the first publication; returns its tensors too."""
        # The buffer's size is known only at the end, and a gather's tensors are gone once the next
        # one is requested, so this first time they are copied twice.
        gathered = not isinstance(parameters, list | tuple)
        items: list[tuple[str, torch.Tensor]] = []
        for name, tensor in parameters:
            if tensor.is_cuda:
                self._on_gpu = True
                if self._may_use_nccl:
                    self._slots.device = tensor.device
            if gathered:
                tensor = tensor.detach().to("cpu", self._wire_dtype(tensor), copy=True)
            items.append((name, tensor))
        specs = ((name, t.shape, self._wire_dtype(t)) for name, t in items)
        return plan(specs, self._settings.bucket_mb << 20), items

    def _copy(self, slot: StagingSlot, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        count = 0
        with torch.no_grad():
            for name, tensor in parameters:
                expected, view = slot.tensors[count] if count < len(slot.tensors) else ("", None)
                if view is None or name != expected or tensor.shape != view.shape:
                    raise WeightsError(
                        f"parameter {count} is {name} {list(tensor.shape)}; the first publication "
                        f"had {expected or 'no more'} {list(view.shape) if view is not None else ''}"
                    )
                slot.put(count, tensor)
                count += 1
        if count != len(slot.tensors):
            raise WeightsError(f"{slot.tensors[count][0]} is missing: only {count} parameters came")
        if self._on_gpu:
            # The next training step is queued behind the copies, on the same stream.
            slot.copied = torch.cuda.Event()
            slot.copied.record()

    # Announcing.

    def _announce(self) -> None:
        failing = False
        while not self._stopping.wait(BEAT_SECONDS):
            try:
                self._registry.beat(self._member, self._entry)
                failing = False
            except StoreError as error:
                if not failing:
                    log.warning(f"the registry can't be reached, trying again: {error}")
                failing = True
