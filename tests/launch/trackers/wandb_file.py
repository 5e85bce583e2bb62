"""Reads W&B's own file of an offline run: LevelDB's log format with a header, protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
FILE_HEADER = 7


def records(path: Path) -> Iterator[bytes]:
    """Whole records; one may be cut over several blocks (1 = whole, 2 first, 3 middle, 4 last)."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at, whole = FILE_HEADER, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if kind == 0:
            return
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the run is called, and its rows."""
    from wandb.proto import wandb_internal_pb2

    about: dict[str, Any] = {}
    rows = []
    for content in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.HasField("run"):
            run = record.run
            about = {"id": run.run_id, "project": run.project, "name": run.display_name}
        elif record.HasField("history"):
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append(row | {"_step": record.history.step.num})
    return about, rows


def alerts(path: Path) -> list[str]:
    """The texts of its alerts."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for content in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.HasField("alert"):
            found.append(record.alert.text)
    return found
