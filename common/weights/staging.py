"""Versions of the weights in the host's memory: flat buffers, their checksums, and who reads them.

A version is never on a GPU as a whole: its tensors are copied out of the model one by one into a
buffer in shared memory, pinned if a GPU copies to it, and are sent from there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash

from ..records import Version
from ..waiting import Wait
from .channel import Parcel
from .manifest import Layout, ScoredRows, SegmentPlace, make_manifest, plan
from .nccl import await_event
from .shared_memory import SHARED_MEMORY, Segment, flat_buffer

log = logging.getLogger("tandem.learner.weights")

COPY_SECONDS = 60.0
"""Deadline for a running copy within the host."""
CHUNK_BYTES = 1 << 20
"""xxhash holds the GIL; between pieces of 1 MB (about 0.1 ms) other threads get their turn."""


def views(buffer: torch.Tensor, layout: Layout) -> list[tuple[str, torch.Tensor]]:
    """(name, view) of every tensor, sharing the buffer's memory."""
    found: list[tuple[str, torch.Tensor]] = []
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=False):
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        piece = buffer[offset : offset + tensor.nbytes]
        found.append((tensor.name, piece.view(dtype).view(tensor.shape)))
    return found


def checksum(data: torch.Tensor) -> int:
    """XXH3-64 of a uint8 tensor on the CPU, ``[n]``, as an unsigned 64-bit number."""
    view, digest = data.numpy().data, xxhash.xxh3_64()
    for start in range(0, len(view), CHUNK_BYTES):
        digest.update(view[start : start + CHUNK_BYTES])
    return digest.intdigest()


class _Sums:
    """Checksums of a buffer's buckets, computed as it is filled from its first byte on."""

    def __init__(self, buffer: torch.Tensor, layout: Layout) -> None:
        self._bytes = buffer.numpy().data
        self._ends = [bucket.stop for bucket in layout.buckets]
        self._digests = [xxhash.xxh3_64() for _ in self._ends]
        self._summed = 0

    def up_to(self, end: int) -> None:
        """Sums the bytes before ``end``, which have all been written."""
        for bucket_end, digest in zip(self._ends, self._digests, strict=True):
            while self._summed < min(end, bucket_end):
                stop = min(end, bucket_end, self._summed + CHUNK_BYTES)
                digest.update(self._bytes[self._summed : stop])
                self._summed = stop

    def all(self) -> list[int]:
        """The checksum of each bucket, once all bytes have been written."""
        self.up_to(self._ends[-1])
        return [digest.intdigest() for digest in self._digests]


@contextlib.contextmanager
def handed_over(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[SegmentPlace]:
    """Copies tensors into a new segment for other processes of the host, and removes it at the end.

    Raises:
        WeightsError: there is no room for the segment.
    """
    content = [(name, tensor.detach()) for name, tensor in tensors]
    layout = plan(((name, tensor.shape, tensor.dtype) for name, tensor in content), 1 << 30)
    segment = Segment(layout.total_bytes)
    try:
        copies = views(segment.buffer, layout)
        for (_, tensor), (_, copy) in zip(content, copies, strict=True):
            copy.copy_(tensor)
        yield SegmentPlace(path=str(segment.path), nbytes=layout.total_bytes, layout=layout.text)
    finally:
        segment.close()


class StagingSlot:
    """One of the learner's buffers with the version that it holds.

    Args:
        run_id: the run.
        layout: where each tensor is.
        shared: whether to use shared memory if there is room, so that workers of this host can map it.
        pin: whether a GPU copies to and from it.
        base: the manifest's, see :class:`.manifest.WeightManifest`.
    """

    def __init__(
        self,
        run_id: str,
        layout: Layout,
        *,
        shared: bool = True,
        pin: bool = False,
        base: str = "",
    ) -> None:
        self._run_id, self._base = run_id, base
        self.layout = layout
        self.segment: Segment | None = None
        if shared:
            self.buffer, self.segment = flat_buffer(layout.total_bytes, (SHARED_MEMORY,))
        else:
            self.buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        self._pinned = pin and self._pin()
        self.tensors = views(self.buffer, layout)
        self.version: Version | None = None
        self.published = 0.0
        """``perf_counter`` at the end of the copy out of the model."""
        self.scored: ScoredRows | None = None
        """Log-probs that the version gives some rows; sent with it and with its re-stamps."""
        self.pins = 0
        """Number of readers and writers; without any it may be overwritten."""
        self.started = False
        """Whether somebody has begun to receive the version."""
        self.retired = False
        """Whether a silent worker may still read the segment or load from it. If so it is never
        overwritten: the worker's mapping keeps the old bytes, and the learner uses a new segment."""
        self.copied: torch.cuda.Event | None = None
        """Marks the end of a GPU's copies out of the model."""
        self._sums = _Sums(self.buffer, layout)
        self._summing = threading.Lock()

    def reset(self) -> None:
        """Prepares the slot for being overwritten."""
        self.version = None
        self.scored = None
        self.started = False
        self._sums = _Sums(self.buffer, self.layout)

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copies the layout's next tensor out of the model. A GPU may still be copying when this
        returns; on a CPU the tensor is summed at once, while much of it is in the cache."""
        _, view = self.tensors[index]
        view.copy_(tensor, non_blocking=True)
        if not tensor.is_cuda:
            self._sums.up_to(self.layout.offsets[index + 1])

    def close(self) -> None:
        """Removes the segment's file."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
            self._pinned = False
        if self.segment is not None:
            self.segment.close()

    def parcel(self, version: Version) -> Parcel:
        """The slot's weights under a version's name, in the form that ways carry. Checksums of what a
        GPU has copied are computed when they are first needed.

        Raises:
            WeightsError: a GPU's copy didn't end in time.
        """
        with self._summing:
            if self.copied is not None:
                what = "copy the weights out of the model"
                await_event(self.copied, Wait("the GPU", what, COPY_SECONDS))
            sums = self._sums.all()
        return Parcel(
            manifest=make_manifest(
                self._run_id, version, self.layout, sums, self.scored, self._base
            ),
            buffer=self.buffer,
            segment=str(self.segment.path) if self.segment is not None else "",
        )

    def _pin(self) -> bool:
        """Pins the buffer for a GPU's copies, which are slower but just as correct without it."""
        nbytes = self.buffer.numel()
        status = torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), nbytes, 0)
        if int(status) != 0:
            log.info(f"{nbytes:,} bytes of memory can't be pinned (CUDA {status})")
        return int(status) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A reader's hold on a version in a slot, to be released once (:meth:`StagingSlots.release`)."""

    slot: StagingSlot
    version: Version
    """The slot's version when it was pinned; a re-stamp may since have given it a newer one."""
    published: float
    """``perf_counter`` when that version was published."""

    def parcel(self) -> Parcel:
        """See :meth:`StagingSlot.parcel`."""
        return self.slot.parcel(self.version)


class StagingSlots:
    """The learner's staging buffers, including that of the newest version.

    The training thread takes and fills slots, the service's threads pin and read them; the lock
    is held only for microseconds.
    """

    def __init__(self, run_id: str, base: str = "") -> None:
        self._run_id, self._base = run_id, base
        self.device = torch.device("cpu")
        """The learner's GPU through which buckets may pass."""
        self.superseded = 0
        """Number of versions that a newer one overtook before anybody began to receive them."""
        self._lock = threading.Lock()
        self._slots: list[StagingSlot] = []
        self._newest: StagingSlot | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def newest(self) -> Version | None:
        """The newest version; None before the first."""
        slot = self._newest
        return slot.version if slot is not None else None

    def take(self, layout: Layout, *, shared: bool, pin: bool) -> StagingSlot:
        """A buffer that nobody reads, with one pin.

        Two are enough unless a slow worker still holds an old version's; then there is one more for
        each such version.
        """
        with self._lock:
            unread = [slot for slot in self._slots if slot.pins == 0]
            free = [slot for slot in unread if slot is not self._newest and not slot.retired]
            newest = self._newest
            spare = newest if newest in unread and len(self._slots) >= 2 else None
            if not free and spare is not None and not spare.retired:
                # Nobody reads the newest, so it may be overwritten.
                self._overtake()
                self._newest = None
                free = [spare]
            for slot in unread:
                # Retired, or left over from a time when a worker was slow.
                if slot is not self._newest and slot not in free[:1]:
                    self._drop(slot)
            if free:
                free[0].reset()
                free[0].pins += 1
                return free[0]
        slot = StagingSlot(self._run_id, layout, shared=shared, pin=pin, base=self._base)
        slot.pins += 1
        with self._lock:
            self._slots.append(slot)
            count = len(self._slots)
        if count > 3:
            log.warning(f"{count} staging buffers are held: slow workers pin old versions")
        return slot

    def give_back(self, slot: StagingSlot) -> None:
        """Undoes :meth:`take` for a slot that couldn't be filled."""
        with self._lock:
            slot.pins -= 1

    def publish(self, slot: StagingSlot, version: Version) -> None:
        """Makes a filled slot the newest."""
        with self._lock:
            slot.pins -= 1
            self._newest_is(slot, version)

    def restamp(self, version: Version) -> bool:
        """Gives the newest weights a newer version; returns False if there are none."""
        with self._lock:
            if self._newest is not None:
                self._newest_is(self._newest, version)
            return self._newest is not None

    def pin_newest(self) -> Pin | None:
        """A hold on the newest version; None before the first."""
        with self._lock:
            slot = self._newest
            if slot is None or slot.version is None:
                return None
            slot.pins += 1
            return Pin(slot=slot, version=slot.version, published=slot.published)

    def pin_again(self, pin: Pin) -> Pin:
        """One more hold on the same version."""
        with self._lock:
            pin.slot.pins += 1
            return pin

    def release(self, pin: Pin, *, retire: bool = False) -> None:
        """Gives up a hold.

        Args:
            retire: whether somebody may still be reading the slot's segment.
        """
        with self._lock:
            pin.slot.pins -= 1
            pin.slot.retired |= retire

    def close(self) -> None:
        """Removes all segments' files."""
        with self._lock:
            for slot in list(self._slots):
                self._drop(slot)
            self._newest = None

    def _newest_is(self, slot: StagingSlot, version: Version) -> None:
        self._overtake()
        slot.version = version
        slot.started = False
        slot.published = time.perf_counter()
        self._newest = slot

    def _overtake(self) -> None:
        """Counts the newest version if nobody has begun to receive it."""
        self.superseded += self._newest is not None and not self._newest.started

    def _drop(self, slot: StagingSlot) -> None:
        self._slots.remove(slot)
        slot.close()
