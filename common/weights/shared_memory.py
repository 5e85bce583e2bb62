"""Versions in the host's memory, and the way within one host: workers map the learner's buffer.

A version's tensors lie in one flat buffer, if there is room in a *segment*: a file in ``/dev/shm``. A
segment's creator keeps its file locked; the kernel drops the lock when the creator dies, so a
file that nobody has locked was left behind and may be removed. (A process id in the name wouldn't
do: containers may share ``/dev/shm``, but each counts its own processes.) A mapping keeps its
memory whether or not the file still exists.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import xxhash

from ..errors import WeightsError
from ..run_folder import try_lock
from .manifest import Layout, SegmentPlace, WeightManifest
from .protocol import Pair

log = logging.getLogger("tandem.weights")

PREFIX = "tandem-weights-"
SUFFIX = ".buffer"
SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAPPED = 4
"""Number of other processes' segments that a process keeps mapped."""
CHUNK_BYTES = 1 << 20
"""xxhash holds the GIL; between pieces of 1 MB (about 0.1 ms) other threads get their turn."""
MADV_POPULATE_READ = 22
"""``madvise`` to map all pages for reading (linux/mman.h): MAP_POPULATE would copy private ones."""


def places() -> tuple[Path, ...]:
    """Folders for segments, the fastest first; the second may be on a disk."""
    return tuple(path for path in (SHARED_MEMORY, Path(tempfile.gettempdir())) if path.is_dir())


@lru_cache(maxsize=1)
def shared_memory_name() -> str:
    """A name for this host's ``/dev/shm``: processes with the same name see the same files.

    Empty if there is none. Containers of one host have the same boot id, but the same device
    number only if they share the mount.
    """
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot}/{SHARED_MEMORY.stat().st_dev}/{os.getuid()}"
    except OSError:
        return ""


def remove_left_behind() -> int:
    """Removes this user's segments whose creators have died; returns how many."""
    removed = 0
    for folder in places():
        for path in folder.glob(f"{PREFIX}*"):
            try:
                if path.stat().st_uid != os.getuid():
                    continue
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed += 1
            except OSError:
                continue  # It has gone in the meantime, is in use, or nobody can know whether it is.
    return removed


class Segment:
    """A zeroed flat buffer ``[n]`` uint8 and the file through which others can map it.

    Args:
        nbytes: size of the buffer, at least one.
        where: folders to choose from; the first one with room is used.

    Raises:
        WeightsError: there is no room.
    """

    def __init__(self, nbytes: int, where: Sequence[Path] | None = None) -> None:
        folders = places() if where is None else tuple(where)
        folder = _place(nbytes, folders)
        self.path = folder / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        self._descriptor = _create(self.path)
        try:
            # Reserves the blocks: writing to a sparse file in a full /dev/shm raises SIGBUS.
            os.posix_fallocate(self._descriptor, 0, nbytes)
            # Maps all pages at once instead of one by one when they are first touched.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapping = mmap.mmap(self._descriptor, nbytes, flags=flags)
        except OSError as error:
            self.close()
            raise WeightsError(
                f"weights of {nbytes:,} bytes can't be written to {self.path}: {error.strerror}"
            ) from None
        self.buffer = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)

    def close(self) -> None:
        """Removes the file; existing mappings keep the memory. Safe to call twice."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def map_segment(path: str | Path, nbytes: int) -> torch.Tensor:
    """Maps another process's segment for reading, as ``[nbytes]`` uint8.

    Raises:
        WeightsError: there is no such segment, it isn't this user's or it has another size.
    """
    path = Path(path)
    if path.parent not in places() or not path.name.startswith(PREFIX):
        raise WeightsError(f"{path} isn't a place where weights are shared")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"the weights in {path} can't be read: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise WeightsError(f"{path} isn't this user's: its weights aren't loaded")
        if found.st_size != nbytes:
            raise WeightsError(f"{path} has {found.st_size:,} bytes, not the {nbytes:,} of weights")
        # A private mapping shows what the file holds, and a stray write here (some models' loaders
        # change their input) only copies the page, which harms nobody.
        mapping = mmap.mmap(
            descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        try:
            mapping.madvise(MADV_POPULATE_READ)
        except OSError:
            pass  # A kernel before 5.14 maps the pages as they are touched.
    except OSError as error:
        raise WeightsError(f"the weights in {path} can't be mapped: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedTensors:
    """A version's tensors in a flat buffer, as ways carry them and as an engine loads them."""

    layout: Layout
    buffer: torch.Tensor
    """``[total_bytes]`` uint8 in the host's memory."""
    path: str
    """The segment's file; empty if the buffer isn't in shared memory."""
    segment: Segment | None = None
    """The segment, if this process has created it."""

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(name, view) of every tensor, sharing the buffer's memory."""
        found: list[tuple[str, torch.Tensor]] = []
        for tensor, offset in zip(self.layout.tensors, self.layout.offsets, strict=False):
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            piece = self.buffer[offset : offset + tensor.nbytes]
            found.append((tensor.name, piece.view(dtype).view(tensor.shape)))
        return found

    @property
    def place(self) -> SegmentPlace | None:
        """Where other processes of the host can map them; None if they can't."""
        return SegmentPlace(self.path, self.layout.text) if self.path else None

    def close(self) -> None:
        """Removes the file, if this process has created it."""
        if self.segment is not None:
            self.segment.close()


def stage(
    layout: Layout, where: Sequence[Path] | None = None, *, required: bool = False
) -> StagedTensors:
    """Zeroed tensors, in a segment if there is room for one.

    Args:
        layout: where each tensor is.
        where: folders as for :class:`Segment`; with none at all, no other process sees the tensors.
        required: whether the run has set ``weights.transport=shared_memory``, so that no other way would do.

    Raises:
        WeightsError: a segment is required, and there is no room.
    """
    if where is None or where:
        try:
            segment = Segment(layout.total_bytes, where)
            path = str(segment.path)
            return StagedTensors(layout=layout, buffer=segment.buffer, path=path, segment=segment)
        except (WeightsError, OSError) as error:
            if required:
                raise WeightsError(
                    f"weights.transport=shared_memory needs room in {SHARED_MEMORY} for two versions of the "
                    f"weights, {layout.total_bytes:,} bytes each: enlarge it (docker run --shm-size), or set "
                    f"weights.transport=auto ({error})"
                ) from None
            log.warning(f"weights are staged in memory that isn't shared: {error}")
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    return StagedTensors(layout=layout, buffer=buffer, path="")


def checksum(data: torch.Tensor) -> int:
    """XXH3-64 of a uint8 tensor on the CPU, ``[n]``, as an unsigned 64-bit number."""
    view, digest = data.numpy().data, xxhash.xxh3_64()
    for start in range(0, len(view), CHUNK_BYTES):
        digest.update(view[start : start + CHUNK_BYTES])
    return digest.intdigest()


class Memory:
    """Where a reader finds versions: segments of other processes, and one buffer of its own.

    Segments stay mapped, because their owner uses two or three in turn. Ways copy into the own buffer
    what isn't in a segment. Only one thread at a time uses it, since each version overwrites the last.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}
        self._own: StagedTensors | None = None

    def map(self, path: str, layout: Layout) -> StagedTensors:
        """What another process has put into a segment; maps it if need be, see :func:`map_segment`."""
        found = self._mapped.pop(path, None)
        # A mapping keeps its memory alive even if the segment's owner has no more use for it.
        for other in [other for other in self._mapped if not os.path.exists(other)]:
            del self._mapped[other]
        while len(self._mapped) >= MAPPED:
            del self._mapped[next(iter(self._mapped))]
        # Pages that a reader wrote to are copies, which later changes don't reach.
        if found is None or found.numel() != layout.total_bytes or found._version:
            found = map_segment(path, layout.total_bytes)
        self._mapped[path] = found
        return StagedTensors(layout=layout, buffer=found, path=path)

    def own(self, layout: Layout) -> StagedTensors:
        """The own buffer, in shared memory if there is room, so that an engine in another process can load
        it from there. What is in it is of the version before."""
        if self._own is None or self._own.layout != layout:
            self.close()
            self._own = stage(layout)
        return self._own

    def close(self) -> None:
        """Removes the file of the own buffer."""
        if self._own is not None:
            self._own.close()


def obstacle(pair: Pair) -> str:
    """Why a pair can't share memory: both ends must see the file."""
    if pair.same_memory:
        return ""
    return (
        "needs a learner and a worker that see the same /dev/shm (not two hosts, two containers "
        "without --ipc=host, two users) with room in it: set weights.transport=auto"
    )


def fetch(manifest: WeightManifest, place: str, memory: Memory) -> StagedTensors:
    """Maps the version where the learner has put it; no bytes are carried.

    The learner never writes into a segment that a worker may still read (``StagingSlot.retired``).
    """
    return memory.map(place, manifest.layout)


def _place(needed: int, folders: Sequence[Path]) -> Path:
    free = {path: shutil.disk_usage(path).free for path in folders}
    for path, room in free.items():
        if room > needed:
            return path
    found = ", ".join(f"{path} {room:,}" for path, room in free.items()) or "no folder at all"
    raise WeightsError(
        f"weights of {needed:,} bytes have to pass through a file and there is no room (bytes "
        f"free: {found}): enlarge /dev/shm (docker run --shm-size), or set TMPDIR to a larger disk"
    )


def _create(path: Path) -> int:
    """Creates and locks the file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor
        # Another process's search for left-behind files came between the two calls.
        os.close(descriptor)
        path.unlink(missing_ok=True)
