"""Checkpoints as folders that exist completely or not at all.

``checkpoints/step-00000050/``: parameters and optimizer states by name below ``policy/`` and ``critic/``
(:mod:`.state_files`), the ranks' random states (:mod:`.rank_state`), and ``state.json`` with the step, the
version, the position in the journal, and size and digest (xxh3-64) of every file. A folder is written under
another name, synced and renamed; ``LATEST`` names the newest. Sizes are compared at every look, digests only for
what is loaded. Whoever reads one while a run goes on holds a lock on its ``state.json``, and it stays until then.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ...common.errors import DataError
from ...common.plain import SEAL, damaged, fits, read_object, sealed, unsealed
from ...common.records import Version
from ...common.run_folder import RunFolder, replace_folder, sync_tree, write_atomic

log = logging.getLogger("tandem.learner")

PREFIX = "step-"
STATE = "state.json"
LATEST = "LATEST"
_KINDS = {"term": int, "step": int, "ranks": int, "state": dict, "files": dict}
_KEYS = {*_KINDS, SEAL}
WAY_OUT = "remove this checkpoint, and an older one is resumed from"
DIGEST_THREADS = 8
"""Number of files that are read at a time; xxhash lets other threads run meanwhile."""
TOLD_BYTES = 100 << 20
"""Size of a checkpoint from which on the speed of its digests is logged."""
DIGEST_BLOCK = 4 << 20
"""Number of bytes that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint on disk."""

    folder: Path
    version: Version
    """The version of its weights; the step is the position in the journal."""
    ranks: int
    """Number of ranks that wrote it."""
    state: dict[str, Any]
    """The other content of ``state.json``."""
    digests: dict[str, str]
    """File to xxh3-64, hexadecimal; empty if an older version of Tandem wrote it."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: the run's ``checkpoints/``.
        kept: number of newest checkpoints that are kept, at least 2.
    """

    def __init__(self, folder: Path, kept: int = 2) -> None:
        self.folder = folder
        self.kept = max(2, kept)
        self._damaged: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def all(self) -> list[Checkpoint]:
        """Whole checkpoints, oldest first; damaged ones are logged and left out."""
        checkpoints = []
        for path in sorted(self.folder.glob(f"{PREFIX}*")):
            if path in self._damaged:
                continue
            try:
                checkpoints.append(_read_named(path))
            except DataError as error:
                # Or it has been let go in the meantime.
                if path.exists():
                    self._damaged.add(path)
                    log.warning(f"left out a checkpoint: {error}")
        return sorted(checkpoints, key=lambda c: c.version.step)

    def newest(self, last_step: int | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, every file of which was read and is as it was written.

        Args:
            last_step: the journal's last step; later checkpoints are ignored.
        """
        for checkpoint in reversed(self.all()):
            step = checkpoint.version.step
            if last_step is not None and step > last_step:
                log.warning(f"left out {checkpoint.folder}: the journal ends at step {last_step}")
                continue
            if self._is_whole(checkpoint):
                return checkpoint
        return None

    @contextmanager
    def hold(self, step: int | None = None) -> Iterator[Checkpoint | None]:
        """The newest whole checkpoint, or that of a step; it stays while it is held, whatever a run saves meanwhile.

        Args:
            step: the step whose checkpoint is wanted; None = the newest one.
        """
        while True:
            wanted = [c for c in self.all() if step in (None, c.version.step)]
            if not wanted:
                yield None
                return
            with _locked(wanted[-1].folder, fcntl.LOCK_SH) as locked:
                # It may have been let go before it was locked, and then there is a newer one.
                if locked and self._is_whole(wanted[-1]):
                    yield wanted[-1]
                    return

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        try:
            verify(checkpoint)
        except DataError as error:
            self._damaged.add(checkpoint.folder)
            log.warning(f"left out a checkpoint: {error}")
            return False
        return True

    def save(
        self,
        version: Version,
        write: Callable[[Path], None],
        *,
        ranks: int,
        state: dict[str, Any],
        may_finish: Callable[[], None] | None = None,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Checkpoint:
        """Writes a checkpoint and removes the oldest ones.

        Args:
            version: version of the weights.
            write: writes the engine's files into a folder; returns when all ranks are done.
            ranks: number of ranks.
            state: plain data to keep with it.
            may_finish: called before the new one is put in place; raises if a newer learner has
                taken over.
            meanwhile: entered once all ranks are done, while this one goes on alone.
        """
        staging = self.staging(version)
        write(staging)
        with meanwhile():
            return self._finish(staging, version, ranks, state, may_finish)

    def _finish(
        self,
        staging: Path,
        version: Version,
        ranks: int,
        state: dict[str, Any],
        may_finish: Callable[[], None] | None,
    ) -> Checkpoint:
        names = [str(p.relative_to(staging)) for p in sorted(staging.rglob("*")) if p.is_file()]
        digests = digests_of(staging, names)
        content = {
            "term": version.term,
            "step": version.step,
            "ranks": ranks,
            "state": state,
            "files": {
                name: {"bytes": (staging / name).stat().st_size, "xxh3": digests[name]}
                for name in names
            },
        }
        write_atomic(staging / STATE, json.dumps(sealed(content), indent=1) + "\n")
        sync_tree(staging)
        if may_finish is not None:
            may_finish()
        place = self.folder / f"{PREFIX}{version.step:08d}"
        replace_folder(staging, place)
        self._damaged.discard(place)
        self.point_to(place)
        self._let_go(version.step)
        return read(place)

    def staging(self, version: Version) -> Path:
        """An empty folder to write into."""
        place = self.folder / f".{PREFIX}{version.step:08d}.tmp"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def point_to(self, place: Path) -> None:
        """Has ``LATEST`` name the checkpoint in this folder."""
        path, content = self.folder / LATEST, place.name + "\n"
        if not path.exists() or path.read_bytes() != content.encode():
            write_atomic(path, content)

    def clean(self) -> None:
        """Removes what an interrupted write has left."""
        for path in self.folder.glob(".*"):
            if path.is_dir() and (path.name.endswith((".tmp", ".old"))):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f".{LATEST}."):
                path.unlink(missing_ok=True)

    def _let_go(self, newest: int) -> None:
        everything = self.all()
        # Checkpoints above the newest belong to a line of history that was given up.
        behind = [c for c in everything if c.version.step <= newest]
        above = [c for c in everything if c.version.step > newest]
        for folder in [c.folder for c in behind[: -self.kept] + above] + sorted(self._damaged):
            if not folder.exists():
                continue
            doomed = folder.with_name(f".{folder.name}.old")
            with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
                if not free:
                    log.info(f"{folder} stays as long as somebody reads it")
                    continue
                # Renamed first, so that a folder being removed is never taken for a checkpoint.
                os.replace(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        self._damaged.clear()


@contextmanager
def _locked(folder: Path, operation: int) -> Iterator[bool]:
    """Locks a checkpoint against its removal or its readers; whether it is there and nobody else has locked it."""
    try:
        file = open(folder / STATE, "rb")  # noqa: SIM115 - closed below
    except OSError:
        # Damaged, so that nobody reads it, or gone.
        yield bool(operation & fcntl.LOCK_EX)
        return
    with file:
        try:
            fcntl.flock(file, operation)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            log.debug(f"{folder} can't be locked: {error}")
        try:
            same = os.path.samestat(os.fstat(file.fileno()), (folder / STATE).stat())
        except OSError:
            same = False
        yield same


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """xxh3-64 of files in a folder, hexadecimal; reads several at a time, and none into memory as a whole.

    Raises:
        OSError: a file can't be read.
    """
    names = list(names)
    began = time.monotonic()
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        digests = pool.map(lambda name: _file_digest(folder / name), names)
        by_name = dict(zip(names, digests, strict=True))
    seconds = max(1e-9, time.monotonic() - began)
    total = sum((folder / name).stat().st_size for name in names)
    log.log(
        logging.INFO if total >= TOLD_BYTES else logging.DEBUG,
        f"digests of {folder}: {len(names)} file(s), {total / 1e9:.2f} GB in {seconds:.2f} s "
        f"({total / 1e9 / seconds:.1f} GB/s)",
    )
    return by_name


def _file_digest(path: Path) -> str:
    state = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        block = bytearray(DIGEST_BLOCK)
        while count := file.readinto(block):
            state.update(memoryview(block)[:count])
    return state.hexdigest()


def verify(checkpoint: Checkpoint) -> None:
    """Reads every file of a checkpoint.

    Raises:
        DataError: a file can't be read, or isn't as it was written.
    """
    folder = checkpoint.folder
    if not checkpoint.digests:
        log.warning(
            f"{folder} has no digests, as an older version of Tandem wrote it: its files' sizes "
            f"are right, and no more than that is known"
        )
        return
    try:
        digests = digests_of(folder, checkpoint.digests)
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error}") from None
    for name, digest in checkpoint.digests.items():
        if digests[name] != digest:
            raise damaged(
                f"{folder}/{name}",
                f"has the digest {digests[name]}, and was written with {digest}",
                DataError,
                "an older checkpoint is resumed from",
            )


def _read_named(folder: Path) -> Checkpoint:
    checkpoint = read(folder)
    if folder.name != f"{PREFIX}{checkpoint.version.step:08d}":
        raise damaged(
            f"{folder}/{STATE}", f"is of step {checkpoint.version.step}", DataError, WAY_OUT
        )
    return checkpoint


def what_is_left(folder: RunFolder) -> str:
    """What can be saved of a run that can't go on, and by which command."""
    kept = Checkpoints(folder.checkpoints).all()
    if not kept:
        return "There is no checkpoint to save"
    return (
        f"The model as it was trained up to step {kept[-1].version.step} can be saved: "
        f"`tandem export {folder.path}`"
    )


def read(folder: Path) -> Checkpoint:
    """Reads a checkpoint's description.

    Raises:
        DataError: the checkpoint isn't whole.
    """
    try:
        data = (folder / STATE).read_bytes()
    except OSError as error:
        raise DataError(f"{folder} has no readable {STATE}: {error}") from None
    content = read_object(data, f"{folder}/{STATE}", DataError, WAY_OUT)
    for name, kind in _KINDS.items():
        if not fits(content.get(name), kind):
            raise damaged(
                f"{folder}/{STATE}",
                f"has {name}={str(content.get(name))[:60]!r}, no {kind.__name__}",
                DataError,
                WAY_OUT,
            )
    try:
        version = Version(term=content["term"], step=content["step"])
    except ValueError as error:
        raise damaged(f"{folder}/{STATE}", f"can't be: {error}", DataError, WAY_OUT) from None
    unknown = content.keys() - _KEYS
    if unknown:
        raise damaged(f"{folder}/{STATE}", f"has the key {min(unknown)[:60]!r}", DataError, WAY_OUT)
    # Older versions wrote only the size of each file.
    old = SEAL not in content and all(type(one) is int for one in content["files"].values())
    content = unsealed(content, f"{folder}/{STATE}", DataError, WAY_OUT, always=not old)
    digests = {}
    for name, entry in content["files"].items():
        size, digest = (entry, "") if old else _described(entry, folder)
        if type(size) is not int or "\0" in name or Path(name).is_absolute() or ".." in name:
            raise damaged(f"{folder}/{STATE}", f"names the file {name[:80]!r}", DataError, WAY_OUT)
        try:
            actual = (folder / name).stat().st_size
        except OSError:
            raise DataError(f"{folder} lacks {name}") from None
        if actual != size:
            raise DataError(f"{folder}/{name} has {actual:,} bytes and should have {size:,}")
        if digest:
            digests[name] = digest
    return Checkpoint(
        folder=folder,
        version=version,
        ranks=content["ranks"],
        state=content["state"],
        digests=digests,
    )


def _described(entry: Any, folder: Path) -> tuple[Any, str]:
    """Size and digest of a file, as ``state.json`` gives them."""
    if not (isinstance(entry, dict) and isinstance(entry.get("xxh3"), str) and entry["xxh3"]):
        raise damaged(
            f"{folder}/{STATE}", f"has no digest of a file: {str(entry)[:60]}", DataError, WAY_OUT
        )
    return entry.get("bytes"), entry["xxh3"]
