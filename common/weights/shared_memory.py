"""The way within one host: workers map the learner's flat buffer, a file in ``/dev/shm``.

A segment's creator keeps its file locked; the kernel drops the lock when the creator dies, so a
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
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from ..config import WeightsConfig
from ..errors import WeightsError
from .channel import Arrival, OwnBuffer, Pair, Parcel, Way
from .manifest import WeightManifest
from .protocol import Meeting

log = logging.getLogger("tandem.weights")

PREFIX = "tandem-weights-"
SUFFIX = ".buffer"
SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAPPED = 4
"""Number of other processes' segments that a process keeps mapped."""
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
            except (FileNotFoundError, PermissionError, BlockingIOError):
                continue  # It has gone in the meantime, or is in use.
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


def flat_buffer(
    nbytes: int, where: Sequence[Path] | None = None
) -> tuple[torch.Tensor, Segment | None]:
    """A zeroed buffer ``[nbytes]`` uint8, with its :class:`Segment` if there was room for one."""
    try:
        segment = Segment(nbytes, where)
        return segment.buffer, segment
    except (WeightsError, OSError) as error:
        log.warning(f"weights are staged in memory that isn't shared: {error}")
        return torch.zeros(nbytes, dtype=torch.uint8), None


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


class Mappings:
    """Other processes' segments, kept mapped because their owner uses two or three in turn."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def get(self, path: str, nbytes: int) -> torch.Tensor:
        """``[nbytes]`` uint8 as from :func:`map_segment`, which is called only if need be."""
        found = self._kept.pop(path, None)
        # A mapping keeps its memory alive even if the segment's owner has no more use for it.
        for other in [other for other in self._kept if not os.path.exists(other)]:
            del self._kept[other]
        while len(self._kept) >= MAPPED:
            del self._kept[next(iter(self._kept))]
        # Pages that a reader wrote to are copies, which later changes don't reach.
        if found is None or found.numel() != nbytes or found._version:
            found = map_segment(path, nbytes)
        self._kept[path] = found
        return found


class SharedMemory(Way):
    """Carries no bytes: the worker reads the version where the learner has put it.

    The learner never writes into a segment that a worker may still read (``StagingSlot.retired``).
    """

    name: ClassVar[str] = "shared_memory"

    def __init__(self, settings: WeightsConfig, device: torch.device) -> None:
        super().__init__(settings, device)
        self._mapped = Mappings()

    @classmethod
    def obstacle(cls, pair: Pair) -> str:
        """Both ends must see the file."""
        if pair.same_memory:
            return ""
        return (
            "needs a learner and a worker that see the same /dev/shm (not two hosts, two containers "
            "without --ipc=host, two users) with room in it: set weights.transport=auto"
        )

    def offer(self, parcel: Parcel, at: Meeting | str) -> str:
        """Returns the path of the segment's file."""
        return parcel.segment

    def fetch(self, manifest: WeightManifest, at: Meeting | str, own: OwnBuffer) -> Arrival:
        """Maps the segment unless it is mapped already."""
        place = str(at)
        buffer = self._mapped.get(place, manifest.layout.total_bytes)
        return Arrival(buffer=buffer, segment=place, full=range(manifest.layout.bucket_count))


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
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            pass
        # Another process's search for left-behind files came between the two calls.
        os.close(descriptor)
        path.unlink(missing_ok=True)
