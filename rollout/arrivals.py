"""Where a version of the weights arrives and waits, checked, until it is committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..common.errors import WeightsError
from ..common.weights import snapshots
from ..common.weights.buffer import StagedTensors, flat_buffer, views
from ..common.weights.checksum import checksum
from ..common.weights.manifest import (
    SegmentPlace,
    WeightManifest,
    damage,
    with_checksums,
)
from ..common.weights.protocol import Prepare
from ..common.weights.segment import Mappings, Segment
from ..common.weights.transport import Transport

log = logging.getLogger("tandem.rollout.weights")


SHORTEST_PAUSE, LONGEST_PAUSE = 20e-6, 2e-3
"""Seconds between two looks at how far a segment is filled."""


class DamagedError(WeightsError):
    """A bucket whose checksum is wrong."""


class Arrivals:
    """One version at a time; each overwrites the one before. Used by one thread.

    Args:
        device: where buckets of NCCL arrive; all else arrives in the host's memory.
        on_host: a version is held in the host's memory, wherever it arrives.
    """

    def __init__(self, device: torch.device, *, on_host: bool) -> None:
        self._device = device
        self._on_host = on_host
        self._own: torch.Tensor | None = None
        self._segment: Segment | None = None
        self._mapped = Mappings()
        self._views: dict[str, tuple[torch.Tensor, str, StagedTensors]] = {}
        self._manifest: WeightManifest | None = None
        self._tensors = StagedTensors()

    def receive(self, channel: Transport, manifest: WeightManifest, seconds: float) -> None:
        """Takes a version from a channel within some seconds.

        Raises:
            DamagedError: a checksum is wrong.
            WeightsError: it didn't come.
        """
        by_gpu = channel.name == "nccl"
        buffer = self._own_buffer(manifest, on_host=self._on_host or not by_gpu)
        pieces = _cut(buffer, manifest)
        arriving = pieces
        if by_gpu and self._on_host:
            # Runs on GPUs only: each bucket passes through one piece of GPU memory.
            most = max(bucket.nbytes for bucket in manifest.buckets)
            passage = flat_buffer(most, self._device)
            arriving = [passage[: piece.numel()] for piece in pieces]
        for index in channel.receive(arriving, seconds):
            _check(arriving[index], index, manifest)
            if arriving is not pieces:
                pieces[index].copy_(arriving[index])
        self._hold(manifest, buffer, str(self._segment.path) if self._segment else "")

    def fetch(
        self, offer: Prepare, seconds: float, left: Callable[[], bool] = lambda: False
    ) -> tuple[WeightManifest, tuple[int, ...]]:
        """Takes a version from where PREPARE says that it is.

        Args:
            offer: the PREPARE.
            seconds: deadline for bytes that aren't there yet.
            left: whether nobody wants them any more.

        Returns:
            The manifest, filled in where PREPARE brought an outline; then also the checksums,
            which the learner compares with its own.

        Raises:
            DamagedError: a checksum is wrong.
            WeightsError: it isn't to be had there.
        """
        manifest = offer.manifest
        if offer.transport == "shared_memory":
            # It is read where it lies: the learner never writes into a segment that a worker may
            # still read (``StagingSlot.retired``).
            place = offer.place
            buffer = self._mapped.get(place, manifest.total_bytes)
        else:
            buffer = self._own_buffer(manifest, on_host=True)
            snapshots.read(Path(offer.place), manifest, buffer)
            place = str(self._segment.path) if self._segment else ""
        pieces = _cut(buffer, manifest)
        sums: tuple[int, ...] = ()
        if manifest.is_outline:
            until = time.monotonic() + seconds
            found: list[int] = []
            for piece, b in zip(pieces, manifest.buckets, strict=True):

                def ready(end: int, before: int = offer.counted_from + b.offset) -> None:
                    self._await_count(place, before + end, until, left)

                along = ready if offer.counted_from >= 0 else None
                found.append(checksum(piece, manifest.checksum, along))
            sums = tuple(found)
            manifest = with_checksums(manifest, sums)
        else:
            for index, piece in enumerate(pieces):
                _check(piece, index, manifest)
        self._hold(manifest, buffer, place)
        return manifest, sums

    def _await_count(self, place: str, least: int, until: float, left: Callable[[], bool]) -> None:
        """Returns when so many bytes were counted in a mapped segment."""
        since = time.monotonic()
        while (count := self._mapped.count(place)) < least:
            now = time.monotonic()
            if left() or now > until:
                raise WeightsError(f"{least - count:,} bytes of {place} weren't filled in time")
            time.sleep(min(max(SHORTEST_PAUSE, (now - since) / 16), LONGEST_PAUSE))

    def held(self, manifest: WeightManifest) -> StagedTensors:
        """What was received and checked.

        Raises:
            WeightsError: it is another version.
        """
        if self._manifest is None or self._manifest.digest != manifest.digest:
            raise WeightsError(f"version {manifest.version} isn't what the buffer holds")
        return self._tensors

    def forget(self) -> None:
        """What is held, whole or not, isn't to be committed."""
        self._manifest = None
        self._views = {}
        self._tensors = StagedTensors()

    def close(self) -> None:
        """Removes the segment's file."""
        if self._segment is not None:
            self._segment.close()

    def _own_buffer(self, manifest: WeightManifest, *, on_host: bool) -> torch.Tensor:
        """This worker's own buffer; on the host in shared memory where there is room."""
        device = torch.device("cpu") if on_host else self._device
        own, nbytes = self._own, manifest.total_bytes
        if own is not None and own.numel() == nbytes and own.device.type == device.type:
            return own
        self.forget()
        self._own = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        if on_host:
            try:
                self._segment = Segment(nbytes)
            except (WeightsError, OSError) as error:
                log.info(f"weights are staged in memory that isn't shared: {error}")
        if self._segment is not None:
            self._own = self._segment.buffer
        else:
            self._own = flat_buffer(nbytes, device)
        return self._own

    def _hold(self, manifest: WeightManifest, buffer: torch.Tensor, place: str) -> None:
        known = self._views.get(place)
        if known is None or known[0] is not buffer or known[1] != manifest.layout:
            where = SegmentPlace(path=place, nbytes=buffer.numel(), layout=manifest.layout)
            tensors = StagedTensors(views(buffer, manifest.params), where if place else None)
            known = (buffer, manifest.layout, tensors)
            # Views hold their memory: those of buffers that are no longer in use go.
            live = [self._own, *self._mapped.buffers()]
            self._views = {
                path: found
                for path, found in self._views.items()
                if any(found[0] is one for one in live)
            }
            self._views[place] = known
        self._manifest = manifest
        self._tensors = known[2]


def _cut(buffer: torch.Tensor, manifest: WeightManifest) -> list[torch.Tensor]:
    return [buffer[b.offset : b.offset + b.nbytes] for b in manifest.buckets]


def _check(piece: torch.Tensor, index: int, manifest: WeightManifest) -> None:
    problem = damage(manifest, index, checksum(piece, manifest.checksum))
    if problem is not None:
        raise DamagedError(problem)
