"""Publishes weights: copies them out between two steps, then serves them behind the next ones.

Threads beside the training step's: *service* talks to the workers
(:mod:`tandem.learner.weight_service`), *announce* keeps the registry entry alive.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import zmq

from ..common.config import Config
from ..common.errors import DeadlineError, StoreError, WeightsError
from ..common.records import Version
from ..common.run_folder import JoinInfo
from ..common.sockets import Authenticator, CurveKeys, bind_router, new_keys
from ..common.weights.directory import ROLE, LearnerAddress, Registry
from ..common.weights.mailbox import Mailbox
from ..common.weights.manifest import Layout, plan
from ..common.weights.scored_rows import ScoredRows
from ..common.weights.segment import remove_left_behind
from ..common.weights.staging import StagingSlot, StagingSlots
from ..common.weights.transport import Transport, local_address, make_transport
from .weight_service import WeightService

if TYPE_CHECKING:
    from ..replay.connection import Store

log = logging.getLogger("tandem.learner.weights")

BEAT_SECONDS = 2.0
"""Between two beats of the registry entry."""
SILENT_SECONDS = 10.0
"""A worker that says HAVE once a second and wasn't heard for so long is given up."""


class WeightPublisher:
    """Serves the newest version to every live worker that holds another one.

    ``publish`` returns once the weights are copied into a flat staging buffer; training goes on
    while it is sent. Latest wins: a version that a newer one overtakes before anybody began
    to receive it is skipped and counted. A worker that joins, comes back or failed is served
    whenever it asks, whether or not training goes on.

    Args:
        store: the run's store; registry and client key are read through it.
        join: names the run.
        config: the run's.
        term: this learner's.
        member: member id of this learner.
        dtype: of floating-point tensors on the wire, which is the engine's; None = that of
            the config.
        registry: in place of the store's.
        client: the run's client keys, in place of the store's.
        transports: makes a transport by name and interface.
        silent_seconds: silence after which a worker is given up.
        snapshot_folder: where snapshots lie unless ``weights.snapshot_folder`` names a place.
    """

    def __init__(
        self,
        store: Store | None,
        join: JoinInfo,
        config: Config,
        term: int,
        member: str,
        *,
        dtype: torch.dtype | None = None,
        registry: Registry | None = None,
        client: CurveKeys | None = None,
        transports: Callable[[str, str], Transport] = make_transport,
        silent_seconds: float = SILENT_SECONDS,
        snapshot_folder: Path | None = None,
    ) -> None:
        self._run_id = join.run_id
        self._settings = config.weights
        self._term = term
        self._member = member
        self._dtype: torch.dtype = (
            dtype if dtype is not None else getattr(torch, config.engine_dtype)
        )
        self._registry = registry if registry is not None else _registry_of(store)
        self._client = client if client is not None else _client_of(store)
        self._transports = transports
        self._silent_seconds = silent_seconds
        self._bind = config.launch.bind
        self._interface = local_address(config.weights.interface)

        named = config.weights.snapshot_folder
        if named is not None:
            self._snapshot_folder = Path(named).expanduser().absolute()
        else:
            self._snapshot_folder = snapshot_folder or Path(tempfile.gettempdir()) / (
                f"tandem-{join.run_id}-weights"
            )
        # NCCL alone reads a GPU's memory; whoever shares a GPU can't use it.
        self._on_gpu = config.may_use_nccl
        self._shared = config.weights.transport in ("auto", "shared_memory")

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[tuple[Any, ...]] = Mailbox()
        self._stopping = threading.Event()
        self._slots = StagingSlots()
        self._layout: Layout | None = None
        self._device = torch.device("cpu")
        self._pin = False
        self._last: Version | None = None
        self._published = 0
        self._copy_seconds = 0.0

        self._service: WeightService | None = None
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
        self._service = WeightService(
            run_id=self._run_id,
            member=self._member,
            settings=self._settings,
            slots=self._slots,
            router=router,
            mailbox=self._mailbox,
            transports=self._transports,
            interface=self._interface,
            snapshot_folder=self._snapshot_folder,
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
                Each tensor is read before the next is asked for, so that it may be a gather's.
            scored: what these weights make of some rows, for workers to check theirs by.

        Raises:
            WeightsError: the version isn't newer, or names, order or shapes aren't those of
                the first publication.
        """
        start = time.perf_counter()
        self._check_newer(version)
        if self._layout is None:
            parameters = self._lay_out(parameters)
        assert self._layout is not None
        slot = self._slots.take(self._layout, self._device, shared=self._shared, pin=self._pin)
        slot.scored = scored
        along = slot.segment is not None and not self._pin
        if along:
            # Workers of this host read along. (What a GPU copies is there at some later time.)
            self._mailbox.post(("begun", self._slots.pin(slot), version))
        try:
            on_gpu = self._copy(slot, parameters)
        except BaseException:
            self._slots.give_back(slot)
            if along:
                self._mailbox.post(("broken_off", slot))
            raise
        if on_gpu:
            # What trains next is queued behind the copies on the same stream.
            slot.copied = torch.cuda.Event()
            slot.copied.record()
        self._copy_seconds = self._slots.publish(slot, version) - start
        self._last = version
        self._published += 1
        self._mailbox.post(("newest",))

    def restamp(self, version: Version) -> None:
        """Gives the newest weights a newer version: a step that changed nothing (LEDGER, quarantine).

        Workers that hold them only change the version; others are sent the bytes.

        Raises:
            WeightsError: nothing was published yet, or the version isn't newer.
        """
        self._check_newer(version)
        if not self._slots.restamp(version):
            raise WeightsError(f"version {version} would re-stamp weights, but none are published")
        self._last = version
        self._published += 1
        self._mailbox.post(("newest",))

    def wait_served(self, version: Version, deadline: float, at_least: int = 1) -> None:
        """Waits until so many live workers hold ``version`` or a newer one.

        Raises:
            DeadlineError: not within ``deadline`` seconds; names who doesn't hold it.
        """
        if self._service is None:
            raise WeightsError("the weight service isn't running: start() it first")
        held, served = self._service.held, self._service.served
        end = time.monotonic() + deadline
        told = False
        with served:
            while True:
                behind = {m: v for m, v in held.items() if v is None or v < version}
                if len(held) - len(behind) >= at_least:
                    return
                who = ", ".join(f"{m} (holds {v or 'none'})" for m, v in sorted(behind.items()))
                who = who or "a rollout worker to connect"
                left = end - time.monotonic()
                if left <= 0 or self._stopping.is_set():
                    raise DeadlineError(
                        f"version {version} wasn't served to {at_least} worker(s) within "
                        f"{deadline:.0f} s; waited for {who}"
                    )
                if not told and left <= deadline / 2:
                    told = True
                    log.warning(f"waiting for {who} to hold version {version}")
                served.wait(min(left, deadline / 2))

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the last times, for metrics.

        ``copy_seconds``: of the training thread, last publication. ``latency_seconds``: from
        the end of the last copy to the last COMMITTED of that version. ``transfers``: each live
        worker's last one, see :class:`~tandem.learner.weight_peers.Served`.
        """
        found: dict[str, Any] = {
            "published": self._published,
            "superseded": self._slots.superseded,
            "buffers": len(self._slots),
            "copy_seconds": self._copy_seconds,
        }
        service = self._service
        if service is None:
            return found
        with service.served:
            members = {m: [v.term, v.step] if v else None for m, v in service.held.items()}
            transfers = {member: last.told() for member, last in service.last.items()}
        return {
            **found,
            **service.counts,
            "members": members,
            "transfers": transfers,
            "latency_seconds": service.latency,
        }

    def close(self) -> None:
        """Calls rounds off, leaves the registry and closes; waits at most some seconds."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._mailbox.post(("stop",))
        for thread in self._threads:
            thread.join(timeout=5.0)
        try:
            self._registry.leave(self._member)
        except StoreError as error:
            log.warning(f"left without taking {self._member} out of the registry: {error}")
        if self._service is not None:
            with self._service.served:
                self._service.served.notify_all()
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
        if isinstance(parameters, list | tuple):
            items = list(parameters)
        else:
            # A gather's tensors are gone once the next is asked for, and the size of the
            # buffer is known only at the end: this once they are copied twice.
            items = [(n, t.detach().to(self._wire_dtype(t), copy=True)) for n, t in parameters]
        self._layout = plan(
            ((n, t.shape, self._wire_dtype(t)) for n, t in items),
            self._settings.bucket_mb << 20,
        )
        self._pin = items[0][1].is_cuda
        if self._on_gpu:
            self._device = items[0][1].device
        return items

    def _copy(self, slot: StagingSlot, parameters: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Whether a GPU took part, so that the copies may still be under way."""
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
                view.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    on_gpu = True
                else:
                    slot.filled(slot.ends[count])
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


def _registry_of(store: Store | None) -> Registry:
    from ..replay.members import Members

    return Members(cast("Store", store))


def _client_of(store: Store | None) -> CurveKeys:
    from ..replay.store import RunStore

    return RunStore(cast("Store", store)).curve_client()
