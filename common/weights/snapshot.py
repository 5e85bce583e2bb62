"""The way over a disk: a version of the weights as a folder, for workers that no channel reaches.

::

    weights/LATEST              name of the newest one
    weights/3.120/              term 3, step 120
        model.safetensors       as transformers and vLLM read it
        manifest.json           layout, checksums, digest

A folder is written under a temporary name, synced and renamed, so that it is never seen incomplete.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import WeightsError
from .channel import Arrival, OwnBuffer, Pair, Parcel, Way
from .manifest import WeightManifest
from .protocol import Meeting
from .staging import views

KEPT = 2
"""Number of newest snapshots to keep; a worker may still be reading the last but one."""
LATEST = "LATEST"
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
_NAME = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")


class Snapshot(Way):
    """Writes a version into the run's folder of snapshots, and reads it from there."""

    name: ClassVar[str] = "snapshot"

    @classmethod
    def obstacle(cls, pair: Pair) -> str:
        """None that the learner can see; the worker says whether it sees the folder."""
        return ""

    def offer(self, parcel: Parcel, at: Meeting | str) -> str:
        """Writes a snapshot; returns its folder."""
        return str(write(Path(str(at)), parcel.manifest, parcel.buffer))

    def fetch(self, manifest: WeightManifest, at: Meeting | str, own: OwnBuffer) -> Arrival:
        """Reads a snapshot into the worker's own buffer."""
        buffer, segment = own(manifest.total_bytes)
        read(Path(str(at)), manifest, buffer)
        return Arrival(buffer=buffer, segment=segment, full=range(manifest.layout.bucket_count))


def write(folder: Path, manifest: WeightManifest, buffer: torch.Tensor) -> Path:
    """Writes a version, points ``LATEST`` to it and removes old ones; returns its folder.

    Args:
        folder: the folder of all snapshots; created if need be.

    Raises:
        WeightsError: it couldn't be written; the folder is unchanged.
    """
    name = str(manifest.version)
    target = folder / name
    beside = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        if not target.is_dir():
            beside.mkdir(parents=True)
            save_file(dict(views(buffer, manifest.layout)), beside / MODEL, {"format": "pt"})
            (beside / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            for file in beside.iterdir():
                _sync(file)
            _sync(beside)
            beside.rename(target)
        pointer = folder / f".{LATEST}.{secrets.token_hex(4)}"
        pointer.write_text(name, encoding="ascii")
        _sync(pointer)
        pointer.rename(folder / LATEST)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise WeightsError(
            f"no snapshot of version {manifest.version} could be written to {folder}: {error}; "
            f"check free space and permissions, or set weights.snapshot_folder"
        ) from None
    _remove_old(folder)
    return target


def read(place: Path, manifest: WeightManifest, buffer: torch.Tensor) -> None:
    """Fills a flat buffer from a snapshot; the caller checks the buckets' sums.

    Raises:
        WeightsError: the snapshot can't be read, or holds something else.
    """
    path = place / MODEL
    buffer.zero_()
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            there = set(file.keys())
            for name, view in views(buffer, manifest.layout):
                if name not in there:
                    raise WeightsError(f"{path} lacks {name}")
                tensor = file.get_tensor(name)
                if tensor.shape != view.shape or tensor.dtype != view.dtype:
                    raise WeightsError(
                        f"{name} is {tensor.dtype} {list(tensor.shape)} in {path}, not "
                        f"{view.dtype} {list(view.shape)}"
                    )
                view.copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the snapshot {place} can't be read here: {error}") from None


def _versions(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), int(match[2])), path) for match, path in found)


def _remove_old(folder: Path) -> None:
    for _, path in _versions(folder)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.*"):
        # Left by a learner that died while writing; there is only one learner at a time.
        if _NAME.match(path.name[1:]):
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
