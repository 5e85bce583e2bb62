"""A run's records as Arrow tables; pure functions of its files, which may grow meanwhile."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...common.errors import DataError
from ...common.parts import HELD_OUT_PAIRS
from ...common.run_folder import RunFolder
from ...replay import archive

WHOLE = ("step", "term")
"""Columns that are whole numbers."""
EVALUATION = "eval/"


def table(rows: Iterable[Mapping[str, Any]], first: Collection[str] = ()) -> pa.Table:
    """A column for each key that any row has, null where a row lacks it.

    Numbers become float64 (``step`` and ``term`` int64), truth values bool, texts string; anything else, and
    columns of several kinds, JSON.

    Args:
        rows: records.
        first: columns that are there in any case, before all others.
    """
    records = list(rows)
    names = dict.fromkeys([*first, *(key for record in records for key in record)])
    columns = {name: _column(name, [record.get(name) for record in records]) for name in names}
    return pa.table(columns)


def _column(name: str, values: list[Any]) -> pa.Array:
    kinds = {_kind(value) for value in values if value is not None}
    if name in WHOLE and kinds <= {float}:
        return pa.array([None if v is None else int(v) for v in values], pa.int64())
    for kind, made in ((float, pa.float64()), (bool, pa.bool_()), (str, pa.string())):
        if kinds <= {kind}:
            return pa.array(values, made)
    return pa.array([None if v is None else json.dumps(v) for v in values], pa.string())


def _kind(value: Any) -> type:
    if isinstance(value, bool | str):
        return type(value)
    return float if isinstance(value, int | float) else object


def metrics(records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The records of ``metrics.jsonl`` that aren't evaluations; of steps that were trained again the last one."""
    last: dict[Any, Mapping[str, Any]] = {}
    for record in records:
        if f"{EVALUATION}id" in record:
            continue
        step = record.get("step")
        # Held-out pairs have a record of their own, after their step's.
        last[step] = {**last.get(step, {}), **record} if HELD_OUT_PAIRS in record else record
    return table(last.values(), ("step", "term", "time"))


def evaluations(records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The evaluations in ``metrics.jsonl``, with the same columns whatever set they are of."""
    rows = []
    for record in records:
        name = record.get(f"{EVALUATION}id")
        if not isinstance(name, str):
            continue
        held = name.rpartition("@")[0]
        prefix = f"{EVALUATION}{held}/"
        figures = {k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)}
        known = {k.removeprefix(EVALUATION): record.get(k) for k in ("eval/due", "eval/version")}
        stamp = {key: record.get(key) for key in ("step", "term", "time")}
        rows.append({"set": held, **stamp, **known, **figures})
    return table(rows, ("set", "step", "term", "time", "due", "version", "accuracy"))


def samples(records: Iterable[Mapping[str, Any]]) -> pa.Table:
    """The rows of the groups in ``samples.jsonl``, each with its group's prompt."""
    rows: list[dict[str, Any]] = []
    for record in records:
        group = {key: value for key, value in record.items() if key != "rows"}
        for place, row in enumerate(record.get("rows") or ()):
            components = row.get("components") or {}
            paid = {f"component/{key}": value for key, value in components.items()}
            own = {key: value for key, value in row.items() if key != "components"}
            rows.append({**group, "place": place, **own, **paid})
    return table(
        rows, ("step", "group_id", "problem_id", "prompt", "gold", "place", "source", "text")
    )


def groups(folder: RunFolder, steps: Collection[int] | None) -> pa.Table:
    """The archived groups of a run, or of some of its steps, in their order."""
    if steps is None:
        files = sorted(folder.archive.glob("[!.]*.parquet"))
    else:
        wanted = (folder.archive / archive.file_name(step) for step in sorted(set(steps)))
        files = [file for file in wanted if file.exists()]
    if not files:
        raise DataError(
            f"{folder.path} has kept no groups{'' if steps is None else ' of these steps'}: set "
            f"log.archive=true when it starts"
        )
    return pa.concat_tables([pq.read_table(file) for file in files])
