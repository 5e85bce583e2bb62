"""The learner's own record on disk of what it took and what it applied.

One JSON object a line, fsynced. Kinds::

    {"kind": "row", "term", "step", "row", "digest"}        before the step's optimizer step
    {"kind": "applied", "term", "step", "digest"}           after it
    {"kind": "quarantined", "term", "step", "reason"}       instead of it
    {"kind": "resumed", "term", "step"}                     history goes on from this checkpoint

Each step has one row. ``applied`` and ``quarantined`` above the step of a later ``resumed``
belong to a line of history that was given up; the step then stands there again.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import xxhash

from ..common.errors import StoreError
from ..common.plain import damaged, read_object

log = logging.getLogger("tandem.learner")
DISK_SECONDS = 300.0
"""For the disk to take a record; a network's file system may hang for minutes and come back."""

WAY_OUT = (
    "the journal is the record of what was trained, so it is never guessed at; restore it from a "
    "copy of the run's folder"
)


def digest_of(row: Mapping[str, Any]) -> str:
    """xxh3-64 of a row's canonical JSON, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(json.dumps(row, sort_keys=True, separators=(",", ":")).encode())


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a journal; a last line without its end, cut by a crash, is left out.

    Raises:
        StoreError: a line before the last isn't one, or its row isn't that of its digest.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        what = f"line {number} of {path}"
        record = read_object(line, what, StoreError, WAY_OUT)
        why = _misfit(record)
        if why:
            raise damaged(what, why, StoreError, WAY_OUT)
        yield record


def _misfit(record: Mapping[str, Any]) -> str:
    """Why a record isn't one of a journal; empty where it is."""
    kind = record.get("kind")
    if kind not in ("row", "applied", "quarantined", "resumed"):
        return f"has the kind {str(kind)[:40]!r}"
    for name, least in (("term", 0), ("step", 0 if kind == "resumed" else 1)):
        value = record.get(name)
        if type(value) is not int or value < least:
            return f"has {name}={str(value)[:40]!r}"
    if kind == "resumed":
        return ""
    if not isinstance(record.get("digest"), str):
        return "has no digest"
    if kind == "row":
        row = record.get("row")
        if not isinstance(row, dict) or _digest_or_none(row) != record["digest"]:
            return "has a row that isn't the one of its digest"
        if row.get("step") != record["step"]:
            return f"has the row of another step than {record['step']}"
    return ""


def _digest_or_none(row: Mapping[str, Any]) -> str | None:
    try:
        return digest_of(row)
    except RecursionError:
        return None


class Journal:
    """Appends to the journal of a run, in the background where that is asked for.

    Opening cuts off a torn last line. ``rows`` and ``outcomes`` are what stands there on the
    present line of history.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[int, dict[str, Any]] = {}
        """Row of each step, as it was written."""
        self.outcomes: dict[int, str] = {}
        """``applied`` or ``quarantined`` of each step."""
        self.last_term = 0
        for record in read(path):
            self._check(record)
            self._note(record)
        self._cut()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @property
    def last_step(self) -> int:
        """The last step that has a row; 0 without one."""
        return max(self.rows, default=0)

    def row(self, term: int, step: int, row: dict[str, Any]) -> Callable[[], None]:
        """Writes a step's row unless it stands there; the callable waits until it is on disk.

        Raises:
            StoreError: another row stands there for that step, or it isn't the next one.
        """
        known = self.rows.get(step)
        if known is not None:
            if digest_of(known) != digest_of(row):
                raise StoreError(
                    f"step {step} has another row in {self.path} than in Redis: they are of "
                    f"different runs; don't mix folders and servers"
                )
            return lambda: None
        if step != self.last_step + 1:
            raise StoreError(f"step {step} can't follow step {self.last_step} in {self.path}")
        record = {
            "kind": "row",
            "term": term,
            "step": step,
            "row": row,
            "digest": digest_of(row),
            "time": time.time(),
        }
        self._note(record)
        written = self._append(record)
        return lambda: self._wait(written)

    def applied(self, term: int, step: int) -> Callable[[], None]:
        """The step's update is in the weights."""
        return self._outcome({"kind": "applied", "term": term, "step": step})

    def quarantined(self, term: int, step: int, reason: str) -> Callable[[], None]:
        """The step used its number and changed nothing."""
        return self._outcome({"kind": "quarantined", "term": term, "step": step, "reason": reason})

    def resumed(self, term: int, step: int) -> None:
        """The line of history goes on from the checkpoint of ``step``."""
        record = {"kind": "resumed", "term": term, "step": step, "time": time.time()}
        self._note(record)
        self._wait(self._append(record))

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()
        self._file.close()

    def _outcome(self, record: dict[str, Any]) -> Callable[[], None]:
        record["digest"] = digest_of(self.rows[record["step"]])
        record["time"] = time.time()
        self._note(record)
        written = self._append(record)
        return lambda: self._wait(written)

    def _append(self, record: dict[str, Any]) -> Future[None]:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        return self._writer.submit(self._write, line)

    def _wait(self, written: Future[None]) -> None:
        """Until a record is on disk.

        Raises:
            StoreError: the disk doesn't answer.
        """
        if not wait([written], timeout=DISK_SECONDS / 2).done:
            log.warning(
                f"waiting for the disk to take a record of {self.path} for {DISK_SECONDS / 2:.0f} s"
            )
            if not wait([written], timeout=DISK_SECONDS / 2).done:
                raise StoreError(
                    f"{self.path}: the disk hasn't taken a record in {DISK_SECONDS:.0f} s: look "
                    f"whether its file system is there and has room; the run goes on from the "
                    f"journal when it is started again"
                )
        written.result()

    def _write(self, line: bytes) -> None:
        done = 0
        while done < len(line):
            done += self._file.write(line[done:])
        os.fsync(self._file.fileno())

    def _check(self, record: Mapping[str, Any]) -> None:
        kind, step = record["kind"], record["step"]
        why = ""
        if kind == "row" and step != self.last_step + 1:
            why = f"has row {step} after row {self.last_step}"
        elif kind == "resumed":
            if step > self.last_step:
                why = f"is resumed from step {step} and has {self.last_step} rows"
        elif kind != "row" and step not in self.rows:
            why = f"has step {step} {kind} and no row of it"
        elif kind != "row" and digest_of(self.rows[step]) != record["digest"]:
            why = f"has step {step} {kind} with the digest of another row"
        if why:
            raise damaged(str(self.path), why, StoreError, WAY_OUT)

    def _note(self, record: Mapping[str, Any]) -> None:
        kind, step = record["kind"], record["step"]
        self.last_term = max(self.last_term, record["term"])
        if kind == "row":
            self.rows[step] = record["row"]
        elif kind in ("applied", "quarantined"):
            self.outcomes[step] = kind
        elif kind == "resumed":
            # Quarantined stays: the same samples would fail again.
            self.outcomes = {
                s: outcome
                for s, outcome in self.outcomes.items()
                if s <= step or outcome == "quarantined"
            }

    def _cut(self) -> None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with open(self.path, "r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())


def cut_back(path: Path, step: int) -> None:
    """Takes the records above a step out of a ``.jsonl`` file of steps (metrics, samples)."""
    if not path.exists():
        return
    kept = []
    # At b"\n" alone: a sample's text may hold other line separators.
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        at = record.get("step", 0)
        if isinstance(at, int | float) and at <= step:
            kept.append(line + b"\n")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)
