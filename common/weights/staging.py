"""The learner's staging buffers: one version each, overwritten when nobody reads it any more."""

from __future__ import annotations

import logging
import threading
import time

import torch

from ..errors import WeightsError
from ..records import Version
from .buffer import flat_buffer, views
from .checksum import algorithm_for, checksum
from .manifest import Layout, WeightManifest, make_manifest, make_outline, restamped
from .scored_rows import ScoredRows
from .segment import SHARED_MEMORY, Segment

log = logging.getLogger("tandem.learner.weights")

COPY_SECONDS = 60.0
"""Deadline for a copy within the host that is under way."""
POLL_SECONDS = 0.001


class StagingSlot:
    """One staging buffer with the version that it holds.

    Args:
        layout: where each tensor lies.
        device: where the buffer is. On a CPU it lies in shared memory, so that workers of this
            host may map it, unless there is no room.
        shared: False = never in shared memory.
        pin: a GPU copies to or from the host's buffer.
    """

    def __init__(
        self, layout: Layout, device: torch.device, *, shared: bool = True, pin: bool = False
    ) -> None:
        self.layout = layout
        self.segment: Segment | None = None
        self._shared = shared
        self._pin = pin
        self._pinned: torch.Tensor | None = None
        self._why_not_shared = "" if shared else "it isn't wanted"
        if device.type == "cpu":
            self.buffer = self._host_buffer()
        else:
            self.buffer = flat_buffer(layout.total_bytes, device)
        self.tensors = views(self.buffer, layout.params)
        self.version: Version | None = None
        self.scored: ScoredRows | None = None
        """What the version makes of some rows; travels with it and with its re-stamps."""
        self.published = 0.0
        self.pins = 0
        """Readers and writers; with none it may be overwritten."""
        self.started = False
        """Somebody has begun to receive the version."""
        self.retired = False
        """Somebody who doesn't answer may still read the segment, or load from it: it is never
        overwritten. Its mapping keeps the old bytes, and the learner takes a new one."""
        self.copied: torch.cuda.Event | None = None
        self.counted_from = 0
        """Of the segment, before the version's first byte."""
        ends = [p.offset for p in layout.params[1:]]
        self.ends = [*ends, layout.total_bytes]
        """Where each tensor's bytes end, padding included."""
        self._manifests: dict[str, WeightManifest] = {}
        self._host: torch.Tensor | None = None
        self._host_lock = threading.Lock()

    def reset(self) -> None:
        """Before it is overwritten."""
        self.version = None
        self.scored = None
        self.started = False
        self._manifests = {}
        self._host = None
        if self.segment is not None:
            self.counted_from = self.segment.count

    def filled(self, end: int) -> None:
        """Tells readers of the segment that the version's bytes up to ``end`` are there."""
        if self.segment is not None:
            self.segment.count = self.counted_from + end

    def close(self) -> None:
        """Removes the segment's file."""
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
            self._pinned = None
        if self.segment is not None:
            self.segment.close()

    def manifest_of(self, run_id: str, version: Version, *, on_host: bool = True) -> WeightManifest:
        """Checksums are taken when the first worker is to be sent them.

        Args:
            run_id: of the run.
            version: that the weights go by.
            on_host: of the buffer in the host's memory, which has another checksum than a GPU's.
        """
        buffer = self.on_host() if on_host else self.buffer
        manifest = self._manifests.get(buffer.device.type)
        if manifest is None:
            self._settle()
            kind = algorithm_for(buffer.device)
            sums = [checksum(piece, kind) for piece in self._pieces(buffer)]
            manifest = make_manifest(run_id, version, self.layout, sums, kind, self.scored)
            self._manifests[buffer.device.type] = manifest
        return restamped(manifest, version)

    def outline_of(self, run_id: str, version: Version) -> WeightManifest:
        """What a worker that reads the same host memory needs to begin; has the checksums at once
        where they were taken before."""
        known = self._manifests.get("cpu")
        if known is not None:
            return restamped(known, version)
        kind = algorithm_for(torch.device("cpu"))
        return make_outline(run_id, version, self.layout, kind, self.scored)

    def pieces(self, on_host: bool) -> list[torch.Tensor]:
        """The buckets, where a transport can read them."""
        self._settle()
        return self._pieces(self.on_host() if on_host else self.buffer)

    def place(self) -> str:
        """The file through which workers of this host can map the version.

        Raises:
            WeightsError: there was no room for one in shared memory.
        """
        self._settle()
        self.on_host()
        if self.segment is None:
            raise WeightsError(
                f"weights.transport=shared_memory: the weights don't lie in {SHARED_MEMORY}: "
                f"{self._why_not_shared}"
            )
        return str(self.segment.path)

    @property
    def is_shared(self) -> bool:
        """Whether :meth:`place` has one, or will have on a GPU's first copy to the host."""
        return self.segment is not None or (self.buffer.is_cuda and not self._why_not_shared)

    def on_host(self) -> torch.Tensor:
        """The buffer in the host's memory."""
        if not self.buffer.is_cuda:
            return self.buffer
        self._settle()
        with self._host_lock:
            if self._host is None:
                self._host = self._copied_to_host()
            return self._host

    def _host_buffer(self) -> torch.Tensor:
        if self._shared:
            try:
                self.segment = Segment(self.layout.total_bytes, (SHARED_MEMORY,))
                return self._locked(self.segment.buffer)
            except (WeightsError, OSError) as error:
                self._why_not_shared = str(error)
                log.warning(f"weights aren't staged in shared memory: {error}")
        return self._locked(flat_buffer(self.layout.total_bytes, torch.device("cpu")))

    def _locked(self, buffer: torch.Tensor) -> torch.Tensor:
        """Pins host memory for a GPU's copies; without that a copy is slower, and as right."""
        if self._pin:
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
            if int(status) == 0:
                self._pinned = buffer
            else:
                log.info(f"{buffer.numel():,} bytes of memory can't be pinned (CUDA {status})")
        return buffer

    def _copied_to_host(self) -> torch.Tensor:
        """Runs on GPUs only: a copy on a stream of its own into pinned memory."""
        host = self.segment.buffer if self.segment is not None else self._host_buffer()
        stream = torch.cuda.Stream(self.buffer.device)
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            host.copy_(self.buffer, non_blocking=True)
            done.record(stream)
        _await_event(done, "the copy of the weights to the host")
        return host

    def _settle(self) -> None:
        if self.copied is not None:
            _await_event(self.copied, "the copy of the weights out of the model")

    def _pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[offset : offset + nbytes] for offset, nbytes in self.layout.ranges]


def _await_event(event: torch.cuda.Event, what: str) -> None:
    """Polls, because a CUDA event can't be waited for with a deadline."""
    end = time.monotonic() + COPY_SECONDS
    while not event.query():
        if time.monotonic() > end:
            raise WeightsError(f"{what} didn't end within {COPY_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


class Pin:
    """A reader's hold on a slot, given up once."""

    def __init__(self, slot: StagingSlot, lock: threading.Lock) -> None:
        self.slot = slot
        self._lock = lock
        self._held = True

    def again(self) -> Pin:
        """One more hold on the same slot."""
        with self._lock:
            self.slot.pins += 1
        return Pin(self.slot, self._lock)

    def release(self, *, retire: bool = False) -> None:
        """Gives the hold up; a second call does nothing.

        Args:
            retire: somebody may go on reading the slot's segment for all that is known.
        """
        with self._lock:
            if self._held:
                self._held = False
                self.slot.pins -= 1
                self.slot.retired |= retire


class StagingSlots:
    """All staging buffers, the newest version among them.

    The training thread takes and fills slots, the service's threads pin and read them; the lock
    is held for microseconds.
    """

    def __init__(self) -> None:
        self.superseded = 0
        """Versions that a newer one overtook before anybody began to receive them."""
        self._lock = threading.Lock()
        self._slots: list[StagingSlot] = []
        self._newest: StagingSlot | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def newest(self) -> Version | None:
        """The newest version."""
        slot = self._newest
        return slot.version if slot is not None else None

    def take(self, layout: Layout, device: torch.device, *, shared: bool, pin: bool) -> StagingSlot:
        """A buffer that nobody reads, pinned once.

        Two are enough unless a worker is slow enough to hold an old version's while others
        have gone on; then there is one more for each such version.
        """
        with self._lock:
            for retired in [s for s in self._slots if s.retired and s.pins == 0]:
                if retired is not self._newest:
                    self._drop(retired)
            free = [s for s in self._slots if s.pins == 0 and not s.retired]
            slot = next((s for s in free if s is not self._newest), None)
            if slot is None and len(self._slots) >= 2 and free:
                # Nobody has begun to read the newest: it may be overwritten.
                slot = free[0]
                self._count_superseded()
                self._newest = None
            if slot is not None:
                for spare in [s for s in free if s is not self._newest and s is not slot]:
                    # Left over from when a worker was slow.
                    self._drop(spare)
                slot.reset()
                slot.pins += 1
                return slot
        slot = StagingSlot(layout, device, shared=shared, pin=pin)
        slot.pins += 1
        with self._lock:
            self._slots.append(slot)
            count = len(self._slots)
        if count > 3:
            log.warning(f"{count} staging buffers are held: slow workers pin old versions")
        return slot

    def pin(self, slot: StagingSlot) -> Pin:
        """A hold on a slot that was taken."""
        with self._lock:
            slot.pins += 1
            return Pin(slot, self._lock)

    def give_back(self, slot: StagingSlot) -> None:
        """Undoes :meth:`take`: it couldn't be filled."""
        with self._lock:
            slot.pins -= 1

    def publish(self, slot: StagingSlot, version: Version) -> float:
        """A filled slot becomes the newest; returns the time, ``perf_counter``."""
        with self._lock:
            self._count_superseded()
            slot.pins -= 1
            slot.version = version
            slot.published = time.perf_counter()
            self._newest = slot
            return slot.published

    def restamp(self, version: Version) -> bool:
        """Gives the newest weights a newer version; False where there are none."""
        with self._lock:
            if self._newest is None:
                return False
            self._count_superseded()
            self._newest.version = version
            self._newest.started = False
            self._newest.published = time.perf_counter()
            return True

    def pin_newest(self, *, begin: bool = True) -> tuple[Pin, Version, float] | None:
        """A hold on the newest version, which is then begun, and when it was published."""
        with self._lock:
            slot = self._newest
            if slot is None or slot.version is None:
                return None
            slot.pins += 1
            slot.started |= begin
            return Pin(slot, self._lock), slot.version, slot.published

    def close(self) -> None:
        """Removes all segments' files."""
        with self._lock:
            for slot in list(self._slots):
                self._drop(slot)
            self._newest = None

    def _drop(self, slot: StagingSlot) -> None:
        self._slots.remove(slot)
        slot.close()

    def _count_superseded(self) -> None:
        if self._newest is not None and not self._newest.started:
            self.superseded += 1
