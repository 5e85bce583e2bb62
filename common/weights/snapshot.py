"""The way over a disk: a version of the weights as a folder, for workers that no channel reaches.

::

    weights/LATEST              name of the newest one; the folder is one run's
    weights/3.120/              term 3, step 120
        model.safetensors       as transformers and vLLM read it
        manifest.json           version, layout, checksums

A folder is written under a temporary name, synced and renamed, so that it is never seen incomplete.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import WeightsError
from ..run_folder import sync_folder, sync_tree, write_atomic
from .manifest import WeightManifest
from .shared_memory import Memory, StagedTensors

KEPT = 2
"""Number of newest snapshots to keep besides those that are being read; the last but one is offered while the next is written."""
LATEST = "LATEST"
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
_NAME = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")


def write(
    manifest: WeightManifest, staged: StagedTensors, folder: Path, being_read: Collection[str] = ()
) -> None:
    """The learner's end: writes a version into the folder of all snapshots, which is created if need be,
    in the place of one of the same version, points ``LATEST`` to it and removes old ones.

    Args:
        being_read: names of older snapshots that workers may be reading, which are kept.

    Raises:
        WeightsError: it couldn't be written; all is as before.
    """
    version = manifest.version
    target = folder / str(version)
    beside = folder / f".{version}.{secrets.token_hex(4)}"
    old = folder / f"{beside.name}.old"
    try:
        beside.mkdir(parents=True)
        save_file(dict(staged.tensors()), beside / MODEL, {"format": "pt"})
        (beside / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        sync_tree(beside)
        if target.is_dir():
            # It was damaged. Whoever reads it has its file open.
            target.rename(old)
        beside.rename(target)
        write_atomic(folder / LATEST, target.name)
        sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        if old.is_dir() and not target.exists():
            with contextlib.suppress(OSError):
                old.rename(target)
        raise WeightsError(
            f"no snapshot of version {version} could be written to {folder}: {error}; "
            f"check free space and permissions, or set weights.snapshot_folder"
        ) from None
    _remove_old(folder, being_read)


def is_there(place: str) -> bool:
    """Whether this host sees the files of a snapshot."""
    return (Path(place) / MODEL).is_file()


def fetch(manifest: WeightManifest, place: str, memory: Memory) -> StagedTensors:
    """The worker's end: reads a version from its folder into the worker's own buffer.

    Raises:
        WeightsError: the folder can't be read here, or holds something else.
    """
    staged = memory.own(manifest.layout)
    # Padding is summed too.
    staged.buffer.zero_()
    path = Path(place) / MODEL
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            there = set(file.keys())
            for name, view in staged.tensors():
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
        raise WeightsError(
            f"the snapshot {place} can't be read here: {error}; it must be in a folder that learner and workers "
            f"share (weights.snapshot_folder)"
        ) from None
    return staged


def _remove_old(folder: Path, being_read: Collection[str]) -> None:
    """Removes all but the newest snapshots and those that are being read, and what a learner left that died while writing."""
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda each: (int(each[0][1]), int(each[0][2])))
    for _, path in found[:-KEPT]:
        if path.name not in being_read:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.*"):
        # There is only one learner at a time.
        if _NAME.match(path.name[1:]):
            shutil.rmtree(path, ignore_errors=True)
