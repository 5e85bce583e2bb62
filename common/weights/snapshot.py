"""The way over a disk: a version of the weights as a folder, for workers that no channel reaches.

::

    weights/LATEST              name of the newest one
    weights/3.120/              term 3, step 120
        model.safetensors       as transformers and vLLM read it
        manifest.json           layout, checksums, digest

A folder is written under a temporary name, synced and renamed, so that it is never seen incomplete.
"""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from typing import ClassVar

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import WeightsError
from ..run_folder import sync_folder, sync_tree, write_atomic
from .channel import Arrival, OwnBuffer, Parcel, Way
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

    def offer(self, parcel: Parcel, at: Meeting | str) -> str:
        """Writes a version into the folder of all snapshots, which is created if need be, points
        ``LATEST`` to it and removes old ones; returns its folder. After an error all is unchanged."""
        folder, version = Path(str(at)), parcel.manifest.version
        target = folder / str(version)
        beside = folder / f".{version}.{secrets.token_hex(4)}"
        try:
            if not target.is_dir():
                beside.mkdir(parents=True)
                tensors = dict(views(parcel.buffer, parcel.manifest.layout))
                save_file(tensors, beside / MODEL, {"format": "pt"})
                (beside / MANIFEST).write_bytes(msgspec.json.encode(parcel.manifest))
                sync_tree(beside)
                beside.rename(target)
            write_atomic(folder / LATEST, target.name)
            sync_folder(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise WeightsError(
                f"no snapshot of version {version} could be written to {folder}: {error}; "
                f"check free space and permissions, or set weights.snapshot_folder"
            ) from None
        _remove_old(folder)
        return str(target)

    def fetch(self, manifest: WeightManifest, at: Meeting | str, own: OwnBuffer) -> Arrival:
        """Reads a snapshot into the worker's own buffer."""
        buffer, segment = own(manifest.layout.total_bytes)
        # Padding is summed too.
        buffer.zero_()
        path = Path(str(at)) / MODEL
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
            raise WeightsError(f"the snapshot {at} can't be read here: {error}") from None
        return Arrival(buffer=buffer, segment=segment, full=range(manifest.layout.bucket_count))


def _remove_old(folder: Path) -> None:
    """Removes all but the newest snapshots, and what a learner left that died while writing."""
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda each: (int(each[0][1]), int(each[0][2])))
    for _, path in found[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.*"):
        # There is only one learner at a time.
        if _NAME.match(path.name[1:]):
            shutil.rmtree(path, ignore_errors=True)
