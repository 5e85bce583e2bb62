"""The folder of a run: every path in it, and the file that lets a process join.

``config.yaml metrics.jsonl samples.jsonl summary.json report.png journal.jsonl model/
checkpoints/ logs/ redis/ data/ run.json join.json``, and ``wandb/ tensorboard/ trackers/`` where
those are on. A run's folder, copied while the run is stopped, is the whole run.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import DataError
from .plain import read_object, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinInfo:
    """All that a process must know to join a run."""

    run_id: str
    """Random name of the run; every key in Redis carries it."""
    host: str
    """Of redis-server."""
    port: int
    """Of redis-server."""
    db: int = 0
    """Redis database."""
    username: str | None = None
    """Where an external server wants one."""
    password: str | None = None
    """Never logged, printed or put on a command line."""
    tls: bool = False
    """rediss://."""

    def __repr__(self) -> str:
        return f"JoinInfo(run_id={self.run_id!r}, host={self.host!r}, port={self.port}, …)"


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read (0600), atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_atomic(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new text, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_join(path: Path) -> JoinInfo:
    """Reads a join file.

    Raises:
        DataError: it is missing or isn't one.
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
    return read_record(
        JoinInfo,
        data,
        f"{path}, which isn't a join file,",
        DataError,
        "copy it anew with `tandem join-file`",
    )


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.run_json = self.path / "run.json"
        self.join = self.path / "join.json"
        self.lock = self.path / "lock"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.journal = self.path / "journal.jsonl"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.png"
        self.model = self.path / "model"
        self.checkpoints = self.path / "checkpoints"
        self.weights = self.path / "weights"
        self.logs = self.path / "logs"
        self.redis = self.path / "redis"
        self.data = self.path / "data"
        self.wandb = self.path / "wandb"
        self.tensorboard = self.path / "tensorboard"
        self.trackers = self.path / "trackers"

    def make(self) -> None:
        """Creates the folder and its sub-folders (0700)."""
        for folder in (self.path, self.logs, self.redis, self.checkpoints, self.data):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write_join(self, info: JoinInfo) -> None:
        """Writes ``join.json``, 0600."""
        write_private(self.join, json.dumps(asdict(info)) + "\n")

    def read_run(self) -> dict[str, Any]:
        """``run.json`` (run id, Redis version, state); empty where there is none yet."""
        try:
            data = self.run_json.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DataError(f"{self.run_json} can't be read: {error.strerror}") from None
        return read_object(
            data, str(self.run_json), DataError, "restore it from a copy of the run's folder"
        )

    def write_run(self, content: dict[str, Any]) -> None:
        """Replaces ``run.json`` atomically."""
        write_atomic(self.run_json, json.dumps(content, indent=1) + "\n")

    def resolve(self, path: str) -> Path:
        """A path of the config: ``{run}`` is this folder, else relative to the working one."""
        return Path(path.replace("{run}", str(self.path))).expanduser()
