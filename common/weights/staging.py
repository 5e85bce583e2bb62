"""The learner's staging buffers: one version each, overwritten when nobody reads it any more."""

from __future__ import annotations

import threading

import torch

from ..records import Version
from .buffer import flat_buffer, views
from .checksum import algorithm_for, checksum
from .manifest import Layout, WeightManifest, make_manifest, restamped


class StagingSlot:
    """One staging buffer with the version that it holds."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.buffer = flat_buffer(layout.total_bytes, device)
        self.tensors = views(self.buffer, layout.params)
        self.version: Version | None = None
        self.published = 0.0
        self.pins = 0
        """Readers and writers; with none it may be overwritten."""
        self.started = False
        """Somebody has begun to receive the version."""
        self.copied: torch.cuda.Event | None = None
        self._manifest: WeightManifest | None = None
        self._host: torch.Tensor | None = None
        self._host_lock = threading.Lock()

    def reset(self) -> None:
        """Before it is overwritten."""
        self.version = None
        self.started = False
        self._manifest = None
        self._host = None

    def manifest_of(self, run_id: str, version: Version) -> WeightManifest:
        """Checksums are taken when the first worker is to be sent them."""
        if self._manifest is None:
            self._settle()
            kind = algorithm_for(self.buffer.device)
            sums = [checksum(piece, kind) for piece in self._pieces(self.buffer)]
            self._manifest = make_manifest(run_id, version, self.layout, sums, kind)
        if self._manifest.version == version:
            return self._manifest
        return restamped(self._manifest, version)

    def _settle(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def _pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[offset : offset + nbytes] for offset, nbytes in self.layout.ranges]

    def pieces(self, on_host: bool) -> list[torch.Tensor]:
        """The buckets, where a transport can read them."""
        self._settle()
        if not (on_host and self.buffer.is_cuda):
            return self._pieces(self.buffer)
        with self._host_lock:
            if self._host is None:
                self._host = self.buffer.cpu()
            return self._pieces(self._host)


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

    def release(self) -> None:
        """Gives the hold up; a second call does nothing."""
        with self._lock:
            if self._held:
                self._held = False
                self.slot.pins -= 1
