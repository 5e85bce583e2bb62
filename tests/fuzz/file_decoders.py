"""Decoders of what lies in a run's folder, or beside it."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import xxhash
from decoder import Decoder, text
from examples import (
    METRICS,
    SAFETENSORS,
    a_journal,
    summed,
)
from frames import (
    flipped,
    mutated_json,
    mutated_lines,
)

from tandem.common import run_folder, telemetry
from tandem.launch.board import history, look
from tandem.launch.board.tail import MetricsTail
from tandem.launch.callbacks.host import read_tallies
from tandem.launch.host import folder_lock
from tandem.launch.plan.sizes import count_parameters
from tandem.launch.trackers.following import Sent
from tandem.learner.resume import cut_back, journal


class Files:
    """A folder in memory where there is one, in which a decoder finds what was written for it."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self.made = tempfile.TemporaryDirectory(
            prefix="tandem-fuzz-", dir=memory if memory.is_dir() else None
        )
        self.path = Path(self.made.name)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.made.cleanup()

    def reading(self, name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
        """``read`` of a file with the frame's bytes."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)

        def decode(data: bytes) -> Any:
            path.write_bytes(data)
            return read(path)

        return decode


def open_journal(path: Path) -> Any:
    """Opens it as a resumed learner does; then all must be readable."""
    opened = journal.Journal(path)
    opened.close()
    again = journal.Journal(path)
    again.close()
    return (*(_said(one) for one in (opened, again)),)


def _said(opened: journal.Journal) -> Any:
    rows = {step: opened.row_of(step) for step in range(1, opened.last_step + 1)}
    return rows, opened.outcomes(), opened.applied_step, opened.last_term


def check_journal(found: Any) -> str:
    """Rows one after another, each with a whole row; the second look is the first."""
    first, second = found
    if first != second:
        return "the second look differs"
    rows, outcomes, *_ = first
    if any(row.get("step") != step for step, row in rows.items()):
        return f"it has the rows {rows}"
    return "" if outcomes.keys() <= rows.keys() else "it has an outcome without a row"


def write_json_line(path: Path) -> Any:
    """A file that is opened again after a crash takes a record that can be read."""
    lines = telemetry.JsonLines(path)
    lines.write({"step": 99})
    lines.close()
    return path.read_bytes()


def cut(path: Path) -> Any:
    """What ``cut_back`` leaves."""
    cut_back.cut_back(path, 2, path.parent / "cut")
    return path.read_bytes()


def check_cut(data: bytes) -> str:
    """Objects alone, none above the step."""
    for line in data.split(b"\n")[:-1]:
        if json.loads(line).get("step", 0) > 2:
            return f"it kept {line!r:.100}"
    return ""


def metrics_of(path: Path) -> Any:
    """All that the live view asks of a history."""
    found = history.read(path)
    shares = found.staleness(), found.seconds_per_step(), found.per_second("train/rows")
    MetricsTail(path).read()
    return (
        found.evaluations,
        found.last("loss"),
        found.mean("loss"),
        shares,
        found.learner_seconds(),
    )


def lock_of(path: Path) -> Any:
    """Supervisor and Redis in a lock file."""
    with open(path, "rb") as file:
        content = folder_lock._read(file.fileno())
    return folder_lock._holder(content, "supervisor"), folder_lock._holder(content, "redis")


def known_of(path: Path) -> Any:
    """A run's folder as ``tandem status`` reads it, with these bytes as each of its files in turn."""
    folder = run_folder.RunFolder(path.parent)
    for file in (folder.config, folder.summary, folder.lock, folder.run_json):
        try:
            file.write_bytes(path.read_bytes())
            look.known_of(folder)
        finally:
            file.write_bytes(b"{}")


def mutated_table(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A safetensors file: its length and its table of contents."""
    if c.random() < 0.2:
        return flipped(data, c)
    table = mutated_json(data[8:], [one[8:] for one in corpus], c)
    length = len(table) if c.random() < 0.9 else c.choice((0, 1, 2**20, 2**40, 2**63))
    return length.to_bytes(8, "little") + table


def from_files(files: Files) -> Iterable[Decoder]:
    """What lies in a run's folder, or beside it."""
    join = {
        "run_id": "r", "host": "127.0.0.1", "port": 1, "db": 0, "username": None, "password": "p",
        "tls": False,
    }  # fmt: skip
    lock = {
        "host": "h",
        "supervisor": {"pid": 5, "started": 1.5},
        "redis": {"pid": 6, "started": 1.5},
    }
    run = {"run_id": "r", "preset": "p", "state": "running", "wall_seconds": 3.0, "began": 1.0}
    table = json.dumps(SAFETENSORS).encode()

    def one(
        name: str, file: str, corpus: list[bytes], read: Callable[[Path], Any], **more: Any
    ) -> Decoder:
        more = {"mutate": mutated_json, **more}
        return Decoder(name=name, corpus=corpus, decode=files.reading(file, read), **more)

    lines = {"mutate": mutated_lines}
    yield one(
        "journal",
        "j/journal.jsonl",
        [a_journal(), summed(a_journal())],
        open_journal,
        check=check_journal,
        **lines,
    )
    yield one("cut_back.cut_back", "c/metrics.jsonl", [METRICS], cut, check=check_cut, **lines)
    yield one(
        "telemetry.read_json_lines", "t/m.jsonl", [METRICS],
        lambda path: list(telemetry.read_json_lines(path)), **lines,
    )  # fmt: skip
    yield one("telemetry.JsonLines", "w/m.jsonl", [METRICS], write_json_line, **lines)
    yield one("board.history", "h/metrics.jsonl", [METRICS], metrics_of, **lines)
    yield one("run_folder.read_join", "join.json", text(join), run_folder.read_join)
    yield one(
        "run_folder.read_run", "r/run.json", text(run),
        lambda path: run_folder.RunFolder(path.parent).read_run(),
    )  # fmt: skip
    yield one("folder_lock", "lock", text(lock), lock_of)
    yield one(
        "board.known_of", "k/any", text(run, lock, {"run": {"steps": 3}}), known_of,
        mutate=lambda data, corpus, c: mutated_json(data, corpus, c)[:600],  # YAML is slow
    )  # fmt: skip
    yield one(
        "trackers.sent",
        "wandb.json",
        text({"rows": 3, "step": 2, "applied": True, "evaluations": ["h@1"], "latest": [2, "h@1"]}),
        Sent.read,
    )
    tally = {"calls": 3, "errors": 1, "ended": 0, "missed": 2, "off": False}
    yield one("callbacks.tallies", "tally.json", text({"m:f": tally}), read_tallies)
    yield one(
        "safetensors.header", "s/model.safetensors", [len(table).to_bytes(8, "little") + table],
        lambda path: count_parameters(path.parent), mutate=mutated_table,
    )  # fmt: skip
    state = {"term": 1, "step": 5, "ranks": 1, "state": {"x": 1}, "files": {}}
    plain = json.dumps(state, sort_keys=True, separators=(",", ":"))
    digested = {**state, "xxh3": xxhash.xxh3_64_hexdigest(plain.encode())}
    yield one(
        "checkpoints.read",
        "p/state.json",
        text(state, digested),
        lambda path: _checkpoint(path.parent),
        imports="tandem.learner.resume.checkpoints",
    )
    piece = {"shape": [4, 2], "start": 3, "step": 7.0}
    yield one(
        "checkpoints.pieces",
        "s/pieces.json",
        text({"model.a": piece, "b": {**piece, "step": None}}),
        _pieces,
        imports="tandem.learner.resume.state_files",
    )


def _pieces(path: Path) -> Any:
    from tandem.learner.resume.state_files import read_pieces

    return read_pieces(path.read_bytes(), str(path))


def _checkpoint(folder: Path) -> Any:
    from tandem.learner.resume.checkpoints import read  # imports DeepSpeed

    return read(folder)
