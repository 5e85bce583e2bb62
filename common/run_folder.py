"""The folder of a run: every path in it, and the file that lets a process join.

``config.yaml metrics.jsonl samples.jsonl summary.json report.png journal.jsonl model/
checkpoints/ logs/ redis/ data/ run.json join.json``, ``cut/`` with the metrics and samples of
steps that were trained again, ``archive/`` with all groups if they are kept, ``inspect/`` with logs for Inspect's viewer, ``reference/`` with a
reference's log-probs of stored rows, ``schedule.json`` with the factors of a user's own schedule (``critic-schedule.json``: the critic's), and
``wandb/ tensorboard/ trackers/`` if those are on. A copy of the folder, made while the run is stopped,
is the whole run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from msgspec import structs

from .errors import DataError
from .plain import Record, read_object, read_record, sealed, unsealed

CONFIG_SEAL = "# xxh3 of what stands above: "


class JoinInfo(Record, frozen=True, kw_only=True):
    """Everything that a process must know to join a run."""

    run_id: str
    """Random name of the run; every key in Redis carries it."""
    host: str
    """Host of redis-server."""
    port: int
    """Port of redis-server."""
    db: int = 0
    """Redis database."""
    username: str | None = None
    """User name, if an external server wants one."""
    password: str | None = None
    """Never logged, printed or put on a command line."""
    tls: bool = False
    """Whether the URL's scheme is ``rediss://``."""
    ca: str | None = None
    """File with certificates of authorities (PEM) that the server's may be of, besides this host's own."""
    cert: str | None = None
    """File with this side's certificate (PEM), if the server asks for one."""
    key: str | None = None
    """File with its private key (PEM); None: it is in the same file."""

    def __repr__(self) -> str:
        return f"JoinInfo(run_id={self.run_id!r}, host={self.host!r}, port={self.port}, …)"


SCORE = "best.json"
"""File in the folder of a run's best model that says which step's weights these are, and why: of no other model."""
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""System errors of a file system that knows no locks."""


def try_lock(descriptor: int) -> bool:
    """Locks an open file (``flock(2)``) if nobody else has locked it.

    Returns:
        Whether this process may go on; on a file system without locks it always may.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk, so that a file made in it is there after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Syncs every file and folder below a folder, and the folder itself, to disk."""
    for root, _, names in os.walk(folder):
        for place in [*(os.path.join(root, name) for name in names), root]:
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def replace_folder(staging: Path, folder: Path) -> None:
    """Replaces one folder by another; a reader sees the old one, briefly none, or the new one."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.replace(folder, aside)
    os.replace(staging, folder)
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read (0600), atomically."""
    _replace(path, text.encode(), 0o600)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old or the new content, never half of one."""
    _replace(path, content.encode() if isinstance(content, str) else content, 0o666)


def _replace(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # The file that was asked for: a reader of the message knows no other.
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_join(path: Path) -> JoinInfo:
    """Reads a join file.

    Raises:
        DataError: it is missing, or isn't a join file.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: is the run started? `tandem start` writes it, and "
            f"`tandem join-file` copies it for another host"
        ) from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    what, way_out = f"{path}, which isn't a join file,", "copy it again with `tandem join-file`"
    content = unsealed(read_object(data, what, DataError, way_out), what, DataError, way_out)
    return read_record(JoinInfo, content, what, DataError, way_out)


def wall_seconds(record: Mapping[str, Any]) -> float:
    """Seconds that a run has been up, over all its starts, according to its ``run.json``.

    A supervisor that was killed couldn't add up its own time: it counts to its last sign of life.
    """

    def number(name: str) -> float:
        value = record.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    if record.get("state") in ("stopped", "finished"):
        return number("wall_seconds")
    return number("wall_seconds") + max(0.0, number("alive") - number("began"))


def read_stages(folder: Path) -> dict[str, Any] | None:
    """What is known of the runs that one command makes in this folder, one after another.

    Returns:
        ``preset``, ``preset_path``, ``overrides`` and ``stages``, the names of the runs' folders in their
        order; None where the folder has no such runs.

    Raises:
        DataError: ``stages.json`` is damaged.
    """
    path = RunFolder(folder).stages
    try:
        record = read_object(path.read_bytes(), str(path), DataError)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    names = record.get("stages")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} doesn't name its stages: restore it from a copy of the folder")
    return record


def newest_stage(folder: Path) -> Path:
    """The folder of the stage that was begun last if this one holds stages, else the folder itself.

    Raises:
        DataError: ``stages.json`` is damaged.
    """
    record = read_stages(folder)
    begun = [folder / name for name in record["stages"]] if record else []
    begun = [path for path in begun if RunFolder(path).run_json.exists()]
    return begun[-1] if begun else folder


def existing(path: str) -> RunFolder:
    """The folder of a run that was started before; raises ``DataError`` if it isn't one.

    Of a folder with several stages it is the one that was begun last.
    """
    folder = RunFolder(newest_stage(Path(path)))
    if not folder.run_json.exists():
        raise DataError(f"{path} isn't a run's folder (it has no run.json)")
    return folder


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.run_json = self.path / "run.json"
        self.join = self.path / "join.json"
        self.lock = self.path / "lock"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.cut = self.path / "cut"
        self.archive = self.path / "archive"
        self.inspect = self.path / "inspect"
        self.reference = self.path / "reference"
        self.journal = self.path / "journal.jsonl"
        self.schedule = self.path / "schedule.json"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.png"
        self.model = self.path / "model"
        self.best = self.path / "best"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.stages = self.path / "stages.json"
        self.logs = self.path / "logs"
        self.redis = self.path / "redis"
        self.data = self.path / "data"
        self.wandb = self.path / "wandb"
        self.tensorboard = self.path / "tensorboard"
        self.trackers = self.path / "trackers"
        self.called = self.trackers / "callbacks.json"
        self.callbacks = self.trackers / "callbacks-tally.json"

    def make(self) -> None:
        """Creates the folder and its sub-folders (0700)."""
        for folder in (self.path, self.logs, self.redis, self.checkpoints, self.data):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write_join(self, info: JoinInfo) -> None:
        """Writes ``join.json`` with mode 0600."""
        for left in self.path.glob(f".{self.join.name}.*"):
            left.unlink(missing_ok=True)  # Whoever wrote it was killed, and it holds a password.
        write_private(self.join, json.dumps(sealed(structs.asdict(info))) + "\n")

    def read_run(self) -> dict[str, Any]:
        """``run.json`` (run id, Redis version, state); empty if there is none yet."""
        try:
            data = self.run_json.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DataError(f"{self.run_json} can't be read: {error.strerror}") from None
        what, way_out = str(self.run_json), "restore it from a copy of the run's folder"
        content = read_object(data, what, DataError, way_out)
        return unsealed(content, what, DataError, way_out, always="alive" in content)

    def write_run(self, content: dict[str, Any]) -> None:
        """Replaces ``run.json`` atomically."""
        write_atomic(self.run_json, json.dumps(sealed(content), indent=1) + "\n")

    def write_config(self, text: str) -> None:
        """Replaces ``config.yaml``; its last line is a comment with the digest of all before it."""
        digest = xxhash.xxh3_64_hexdigest(text.encode())
        write_atomic(self.config, f"{text}{CONFIG_SEAL}{digest}\n")

    def check_config(self) -> None:
        """Compares ``config.yaml`` with its digest, if it has one.

        Raises:
            DataError: it isn't as it was written.
        """
        data = self.config.read_bytes()
        text, seal, digest = data.rpartition(CONFIG_SEAL.encode())
        if seal and digest.strip() != xxhash.xxh3_64_hexdigest(text).encode():
            raise DataError(
                f"{self.config} isn't as it was written: restore it from a copy of the run's folder; "
                f"or, if you have edited it, remove its last line"
            )

    def resolve(self, path: str) -> Path:
        """A path from the config: ``{run}`` is this folder; otherwise relative to the working directory."""
        return Path(path.replace("{run}", str(self.path))).expanduser()
