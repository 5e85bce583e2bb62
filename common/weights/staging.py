"""The learner's versions in the host's memory: the buffers that hold them, their checksums, and who reads them.

A version is never on a GPU as a whole: its tensors are copied out of the model one by one into a
buffer in shared memory, pinned if a GPU copies to it, and are sent from there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field

import torch
import xxhash

from ..records import Version
from ..waiting import Wait
from .manifest import Layout, ScoredRows, WeightManifest
from .nccl import await_event
from .shared_memory import CHUNK_BYTES, SHARED_MEMORY, stage

log = logging.getLogger("tandem.learner.weights")

COPY_SECONDS = 60.0
"""Deadline for a running copy within the host."""


class StagingSlot:
    """One of the learner's buffers.

    Args:
        layout: where each tensor is.
        shared: whether to use shared memory if there is room, so that workers of this host can map it.
        pin: whether a GPU copies to and from it.
    """

    def __init__(
        self, layout: Layout, *, shared: bool = True, pin: bool = False, required: bool = False
    ) -> None:
        self.layout = layout
        self.staged = stage(layout, (SHARED_MEMORY,) if shared else (), required=required)
        self.tensors = self.staged.tensors()
        self._pinned = pin and self._pin()
        self.pins = 0
        """Number of readers and writers; without any it may be overwritten."""
        self.retired = False
        """Whether a silent worker may still read the segment or load from it. If so it is never
        overwritten: the worker's mapping keeps the old bytes, and the learner uses a new segment."""
        self.copied: torch.cuda.Event | None = None
        """Marks the end of a GPU's copies out of the model."""
        self._bytes = self.staged.buffer.numpy().data
        self._summing = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Prepares the slot for being overwritten."""
        self._ends = [bucket.stop for bucket in self.layout.buckets]
        self._digests = [xxhash.xxh3_64() for _ in self._ends]
        self._summed = 0

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copies the layout's next tensor out of the model. A GPU may still be copying when this
        returns; on a CPU the tensor is summed at once, while much of it is in the cache."""
        _, view = self.tensors[index]
        view.copy_(tensor, non_blocking=True)
        if not tensor.is_cuda:
            self._sum(self.layout.offsets[index + 1])

    def checksums(self) -> tuple[int, ...]:
        """The checksum of each bucket, once all tensors are there. Those of what a GPU has copied are
        computed when they are first needed.

        Raises:
            WeightsError: a GPU's copy didn't end in time.
        """
        with self._summing:
            if self.copied is not None:
                what = "copy the weights out of the model"
                await_event(self.copied, Wait("the GPU", what, COPY_SECONDS))
            self._sum(self._ends[-1])
            return tuple(digest.intdigest() for digest in self._digests)

    def close(self) -> None:
        """Removes the segment's file."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.staged.buffer.data_ptr())
            self._pinned = False
        self.staged.close()

    def _sum(self, end: int) -> None:
        """Sums the bytes before ``end``, which have all been written."""
        for bucket_end, digest in zip(self._ends, self._digests, strict=True):
            while self._summed < min(end, bucket_end):
                stop = min(end, bucket_end, self._summed + CHUNK_BYTES)
                digest.update(self._bytes[self._summed : stop])
                self._summed = stop

    def _pin(self) -> bool:
        """Pins the buffer for a GPU's copies, which are slower but just as correct without it."""
        buffer = self.staged.buffer
        status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(status) == 0:
            return True
        log.info(f"{buffer.numel():,} bytes of memory can't be pinned (CUDA {status})")
        # CUDA keeps the error for whoever asks next, which is torch after its next kernel: one of the model's.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda").neg()
        return False


@dataclass(slots=True, kw_only=True, eq=False)
class Published:
    """A version that was published. Whoever reads its slot pins it (:meth:`StagingSlots.pin`), since a slot
    that nobody reads may be overwritten."""

    slot: StagingSlot
    version: Version
    scored: ScoredRows | None
    """Log-probs that the weights give some rows."""
    since: float = field(default_factory=time.perf_counter)
    """``perf_counter`` when it was published."""
    started: bool = False
    """Whether somebody has begun to receive it."""
    manifest: WeightManifest | None = None
    """See :meth:`StagingSlots.manifest`."""


class StagingSlots:
    """The learner's buffers, and which version is the newest.

    The training thread takes and fills slots, the service's threads pin and read them; the lock
    is held only for microseconds.

    Args:
        run_id: the manifests' run.
        base: the manifests' base model.
    """

    def __init__(self, run_id: str, base: str = "") -> None:
        self._run_id, self._base = run_id, base
        self.device = torch.device("cpu")
        """The learner's GPU through which buckets may pass."""
        self.superseded = 0
        """Number of versions that a newer one overtook before anybody began to receive them."""
        self._lock = threading.Lock()
        self._slots: list[StagingSlot] = []
        self._made = 0
        """Number of buffers so far."""
        self._newest: Published | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that all buffers have together."""
        with self._lock:
            return sum(slot.layout.total_bytes for slot in self._slots)

    @property
    def newest(self) -> Version | None:
        """The newest version; None before the first."""
        newest = self._newest
        return newest.version if newest is not None else None

    def take(
        self, layout: Layout, *, shared: bool, pin: bool, required: bool = False
    ) -> StagingSlot:
        """A buffer that nobody reads, with one pin.

        Two are enough unless a slow worker still holds an old version's; then there is one more for
        each such version.
        """
        with self._lock:
            newest = self._newest.slot if self._newest is not None else None
            unread = [slot for slot in self._slots if slot.pins == 0]
            free = [slot for slot in unread if not slot.retired and slot is not newest]
            spare = newest in unread and len(self._slots) >= 2
            if not free and spare and newest is not None and not newest.retired:
                # Nobody reads the newest, so it may be overwritten.
                self._newest_is(None)
                free = [newest]
            for slot in unread:
                # Retired, or left over from a time when a worker was slow.
                if slot is not newest and slot not in free[:1]:
                    self._drop(slot)
            if free:
                free[0].reset()
                free[0].pins += 1
                return free[0]
        # A run that has what it needs isn't ended by a slow worker, for which it is one more.
        required = required and self._made < 2
        slot = StagingSlot(layout, shared=shared, pin=pin, required=required)
        self._made += 1
        slot.pins += 1
        with self._lock:
            self._slots.append(slot)
            count = len(self._slots)
        if count > 3:
            log.warning(f"{count} staging buffers are held: slow workers pin old versions")
        return slot

    def publish(self, slot: StagingSlot, version: Version, scored: ScoredRows | None) -> None:
        """Makes a filled slot the newest version."""
        with self._lock:
            slot.pins -= 1
            self._newest_is(Published(slot=slot, version=version, scored=scored))

    def restamp(self, version: Version) -> bool:
        """Gives the newest weights a newer version; returns False if there are none."""
        with self._lock:
            newest = self._newest
            if newest is not None:
                self._newest_is(Published(slot=newest.slot, version=version, scored=newest.scored))
            return newest is not None

    def pin(self, published: Published | None = None) -> Published | None:
        """A hold on a version, by default the newest, to be released once; None before the first."""
        with self._lock:
            published = published or self._newest
            if published is not None:
                published.slot.pins += 1
            return published

    def release(self, slot: StagingSlot, *, retire: bool = False) -> None:
        """Gives up a hold.

        Args:
            retire: whether somebody may still be reading the slot's segment.
        """
        with self._lock:
            slot.pins -= 1
            slot.retired |= retire

    def manifest(self, published: Published) -> WeightManifest:
        """The manifest of a version that is pinned, made when it is first needed.

        Raises:
            WeightsError: see :meth:`StagingSlot.checksums`.
        """
        if published.manifest is None:
            published.manifest = WeightManifest(
                run_id=self._run_id,
                version=published.version,
                layout=published.slot.layout,
                checksums=published.slot.checksums(),
                base=self._base,
                scored=published.scored,
            )
        return published.manifest

    def close(self) -> None:
        """Removes all segments' files."""
        with self._lock:
            for slot in list(self._slots):
                self._drop(slot)
            self._newest = None

    def _newest_is(self, published: Published | None) -> None:
        self.superseded += self._newest is not None and not self._newest.started
        self._newest = published

    def _drop(self, slot: StagingSlot) -> None:
        self._slots.remove(slot)
        slot.close()
