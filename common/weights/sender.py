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
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import zmq

from ..config import Config
from ..errors import StoreError, WeightsError
from ..mailbox import Mailbox
from ..records import Version
from ..sockets import Authenticator, bind_router, new_keys
from .couriers import Couriers
from .manifest import Layout, ScoredRows, plan
from .protocol import ROLE, LearnerAddress, Membership
from .shared_memory import remove_left_behind
from .staging import StagingSlot, StagingSlots
from .transfers import Event, Published, Stop, Transfers
from .ways import MakeWay, make_way

log = logging.getLogger("tandem.learner.weights")

BEAT_SECONDS = 2.0
"""Interval between heartbeats of the registry entry."""
SILENT_SECONDS = 10.0
"""A worker that has been silent for this long is given up; it should ask once a second."""


class WeightSender:
    """Serves the newest version to every live worker that holds another one.

    ``publish`` returns once the weights are copied into a flat staging buffer; training goes on
    while they are sent. Latest wins: a version that a newer one overtakes before anybody began
    to receive it is skipped and counted. A worker that joins, comes back or failed is served
    whenever it asks, whether or not training goes on.

    Args:
        silent_seconds: silence after which a worker is given up.
        snapshot_folder: folder of snapshots unless ``weights.snapshot_folder`` is set.
    """

    def __init__(
        self,
        membership: Membership,
        config: Config,
        term: int,
        *,
        make_way: MakeWay = make_way,
        silent_seconds: float = SILENT_SECONDS,
        snapshot_folder: Path | None = None,
    ) -> None:
        self._run_id = membership.run_id
        self._settings = config.weights
        self._term = term
        self._member = membership.member
        self._dtype: torch.dtype = getattr(torch, config.engine_dtype)
        self._registry = membership.registry
        self._client = membership.client
        self._make_way = make_way
        self._silent_seconds = silent_seconds
        self._bind = config.launch.bind
        named = config.weights.snapshot_folder
        if named is not None:
            self._snapshot_folder = Path(named).expanduser().absolute()
        else:
            self._snapshot_folder = snapshot_folder or Path(tempfile.gettempdir()) / (
                f"tandem-{self._run_id}-weights"
            )
        # Two processes that share a GPU can't use NCCL.
        self._may_use_nccl = config.may_use_nccl
        self._shared = config.weights.transport in ("auto", "shared_memory")

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[Event] = Mailbox()
        self._stopping = threading.Event()
        self._slots = StagingSlots(self._run_id)
        self._layout: Layout | None = None
        self._pin = False
        self._last: Version | None = None
        self._published = 0
        self._copy_seconds = 0.0

        self._service: Transfers | None = None
        self._authenticator: Authenticator | None = None
        self._address: LearnerAddress | None = None
        self._threads: list[threading.Thread] = []

    # Public.

    def start(self) -> None:
        """Binds the control socket, announces it in the registry and begins to serve."""
        remove_left_behind()
        keys = new_keys()
        self._authenticator = Authenticator(self._context, self._client.public)
        router, endpoint = bind_router(self._context, self._bind, keys)
        self._service = Transfers(
            run_id=self._run_id,
            member=self._member,
            settings=self._settings,
            slots=self._slots,
            router=router,
            mailbox=self._mailbox,
            couriers=Couriers(
                settings=self._settings,
                slots=self._slots,
                make_way=self._make_way,
                snapshots=self._snapshot_folder,
                post=self._mailbox.post,
            ),
            silent_seconds=self._silent_seconds,
        )
        self._address = LearnerAddress(
            member=self._member, term=self._term, endpoint=endpoint, public_key=keys.public
        )
        self._registry.register(ROLE, self._member, self._info())
        for name, target in (
            ("weights-service", self._service.serve),
            ("weights-announce", self._announce),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

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
                the first publication.
        """
        start = time.perf_counter()
        self._check_newer(version)
        if self._layout is None:
            parameters = self._lay_out(parameters)
        assert self._layout is not None
        slot = self._slots.take(self._layout, shared=self._shared, pin=self._pin)
        slot.scored = scored
        try:
            on_gpu = self._copy(slot, parameters)
        except BaseException:
            self._slots.give_back(slot)
            raise
        if on_gpu:
            # The next training step is queued behind the copies, on the same stream.
            slot.copied = torch.cuda.Event()
            slot.copied.record()
        self._copy_seconds = self._slots.publish(slot, version) - start
        self._last = version
        self._published += 1
        self._mailbox.post(Published())

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
        self._published += 1
        self._mailbox.post(Published())

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the last publication's times, for metrics.

        ``copy_seconds`` is the training thread's, ``latency_seconds`` runs from the end of a copy to
        the last Loaded of that version, and ``transfers`` holds each live worker's last one.
        """
        return {
            "published": self._published,
            "superseded": self._slots.superseded,
            "buffers": len(self._slots),
            "copy_seconds": self._copy_seconds,
            **(self._service.stats() if self._service is not None else {}),
        }

    def close(self) -> None:
        """Cancels rounds, leaves the registry and closes; waits a few seconds at most."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._mailbox.post(Stop())
        for thread in self._threads:
            thread.join(timeout=5.0)
        try:
            self._registry.leave(self._member)
        except StoreError as error:
            log.warning(f"{self._member} couldn't be removed from the registry: {error}")
        self._slots.close()
        if not any(thread.is_alive() for thread in self._threads):
            self._mailbox.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()

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
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Plans the buffer from the first publication."""
        # The buffer's size is known only at the end, and a gather's tensors are gone once the next
        # one is requested, so this first time they are copied twice.
        gathered = not isinstance(parameters, list | tuple)
        device = torch.device("cpu")
        items: list[tuple[str, torch.Tensor]] = []
        for name, tensor in parameters:
            if tensor.is_cuda:
                device = tensor.device
            if gathered:
                tensor = tensor.detach().to("cpu", self._wire_dtype(tensor), copy=True)
            items.append((name, tensor))
        specs = ((name, t.shape, self._wire_dtype(t)) for name, t in items)
        self._layout = plan(specs, self._settings.bucket_mb << 20)
        self._pin = device.type == "cuda"
        if self._may_use_nccl:
            self._slots.device = device
        return items

    def _copy(self, slot: StagingSlot, parameters: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Returns whether a GPU took part, so that copies may still be running."""
        count = 0
        on_gpu = False
        with torch.no_grad():
            for name, tensor in parameters:
                expected, view = slot.tensors[count] if count < len(slot.tensors) else ("", None)
                if view is None or name != expected or tensor.shape != view.shape:
                    raise WeightsError(
                        f"parameter {count} is {name} {list(tensor.shape)}; the first publication "
                        f"had {expected or 'no more'} {list(view.shape) if view is not None else ''}"
                    )
                slot.put(count, tensor)
                on_gpu |= tensor.is_cuda
                count += 1
        if count != len(slot.tensors):
            raise WeightsError(f"{slot.tensors[count][0]} is missing: only {count} parameters came")
        return on_gpu

    # Announcing.

    def _info(self) -> dict[str, Any]:
        assert self._address is not None
        return {
            **self._address.info(),
            "run_id": self._run_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

    def _announce(self) -> None:
        failing = False
        while not self._stopping.wait(BEAT_SECONDS):
            try:
                self._registry.beat(self._member, self._info())
                failing = False
            except StoreError as error:
                if not failing:
                    log.warning(f"the registry can't be reached, trying again: {error}")
                failing = True
