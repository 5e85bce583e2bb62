"""The columns of an archive's files (:mod:`.archive`): groups to a table, and back to equal groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..common.errors import DataError
from ..common.plain import as_json, read_record
from ..common.records import (
    Episode,
    ExpertTrace,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Verdict,
    VersionSpan,
)

VERSION = 2
"""Raised when the columns change in a way that older readers would misread. Files without traces in which others
wrote tokens have version 1, so that older versions read them as well."""
KEY = b"tandem.archive"

_TEXT, _REAL, _WHOLE = pa.string(), pa.float64(), pa.int64()
_SPAN = pa.struct([(name, _WHOLE) for name in ("term", "step", "start", "end")])
_COMPONENTS = pa.map_(_TEXT, _REAL)
_ARRAYS = {
    "tokens": pa.int32(),
    "source": pa.uint8(),
    "logprobs": pa.float32(),
    "token_rewards": pa.float32(),
}
_SAMPLE = {
    "spans": pa.list_(_SPAN),
    "finish_reason": _TEXT,
    "temperature": _REAL,
    "top_p": _REAL,
    "top_k": _WHOLE,
    "max_new_tokens": _WHOLE,
    "text": _TEXT,
    "reward": _REAL,
    "verdict": _TEXT,
    "components": _COMPONENTS,
    "extracted": _TEXT,
    "grader": _TEXT,
    "episode": _TEXT,
}
_TRACE_ARRAYS = ("tokens", "logprobs", "source")
_TRACE = {
    "trace_id": _TEXT,
    "problem_id": _TEXT,
    "text": _TEXT,
    "tokenizer_digest": _TEXT,
    "reward": _REAL,
    "verdict": _TEXT,
    "components": _COMPONENTS,
    "grader": _TEXT,
}
_GROUP = {
    "step": _WHOLE,
    "place": _WHOLE,
    "row": _TEXT,
    "group_id": _TEXT,
    "attempt": _WHOLE,
    "worker": _TEXT,
    "problem_id": _TEXT,
    "prompt_text": _TEXT,
    "gold": _TEXT,
    "data_source": _TEXT,
    "trace_ids": pa.list_(_TEXT),
    "extra": _TEXT,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArchivedGroup:
    """One group as a step was given it."""

    step: int
    """The step."""
    place: int
    """Place among the step's groups, from 0."""
    group: Group
    """The group; its samples are the own rows."""
    traces: tuple[ExpertTrace, ...]
    """Expert rows of the group."""
    replaced: tuple[Sample, ...]
    """Own samples that traces have replaced."""
    row: Mapping[str, Any] | None
    """The step's row in the journal; None except at place 0."""


# Records to columns.


def table(groups: Sequence[ArchivedGroup]) -> pa.Table:
    """Groups as a table."""
    plain = [
        {
            "step": one.step,
            "place": one.place,
            "row": None if one.row is None else json.dumps(one.row),
            **{name: getattr(one.group, name) for name in list(_GROUP)[3:-2]},
            "trace_ids": list(one.group.trace_ids),
            "extra": json.dumps(one.group.extra),
        }
        for one in groups
    ]
    columns = {name: _column(plain, name, kind) for name, kind in _GROUP.items()}
    columns["prompt_tokens"] = _ragged([one.group.prompt_tokens for one in groups], pa.int32())
    columns["samples"] = _nested([one.group.samples for one in groups], _samples)
    columns["traces"] = _nested([one.traces for one in groups], _traces)
    columns["replaced"] = _nested([one.replaced for one in groups], _samples)
    masked = any(trace.source is not None for one in groups for trace in one.traces)
    made = pa.table(columns)
    return made.replace_schema_metadata({KEY: str(VERSION if masked else 1)})


def _column(rows: Sequence[Mapping[str, Any]], name: str, kind: pa.DataType) -> pa.Array:
    return pa.array([row[name] for row in rows], kind)


def _ragged(parts: Sequence[NDArray[Any] | None], kind: pa.DataType) -> pa.Array:
    """A column of lists, without a Python object per token."""
    lengths = [0 if part is None else len(part) for part in parts]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    filled = [part for part in parts if part is not None]
    values = pa.array(np.concatenate(filled) if filled else np.zeros(0), kind)
    mask = pa.array([part is None for part in parts], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _nested(parts: Sequence[Sequence[Any]], flat: Callable[[list[Any]], pa.Array]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
    every = [one for part in parts for one in part]
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat(every))


def _struct(columns: Mapping[str, pa.Array]) -> pa.StructArray:
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def _samples(samples: list[Sample]) -> pa.StructArray:
    plain = [
        {
            **{name: getattr(sample.sampling, name) for name in SamplingParams.__struct_fields__},
            "spans": [
                {"term": s.term, "step": s.step, "start": s.start, "end": s.end}
                for s in sample.spans
            ],
            **{name: getattr(sample, name) for name in ("text", "reward", "extracted", "grader")},
            "finish_reason": sample.finish_reason.value,
            "verdict": None if sample.verdict is None else sample.verdict.value,
            "components": list(sample.components.items()),
            "episode": sample.episode and as_json(sample.episode),
        }
        for sample in samples
    ]
    columns = {
        n: _ragged([getattr(one, n) for one in samples], kind) for n, kind in _ARRAYS.items()
    }
    columns |= {name: _column(plain, name, kind) for name, kind in _SAMPLE.items()}
    return _struct(columns)


def _traces(traces: list[ExpertTrace]) -> pa.StructArray:
    plain = [
        {
            **{name: getattr(trace, name) for name in _TRACE},
            "verdict": trace.verdict.value,
            "components": list(trace.components.items()),
        }
        for trace in traces
    ]
    columns = {n: _ragged([getattr(one, n) for one in traces], _ARRAYS[n]) for n in _TRACE_ARRAYS}
    columns |= {name: _column(plain, name, kind) for name, kind in _TRACE.items()}
    return _struct(columns)


# Columns to records.


def groups_of(batch: pa.RecordBatch) -> Iterator[ArchivedGroup]:
    """The groups of some rows of a table, of any version."""
    plain = batch.select(list(_GROUP)).to_pylist()
    prompts = _parts(batch["prompt_tokens"])
    samples = _split(batch["samples"], _read_samples)
    traces = _split(batch["traces"], _read_traces)
    replaced = _split(batch["replaced"], _read_samples)
    for place, row in enumerate(plain):
        step, number, text = row.pop("step"), row.pop("place"), row.pop("row")
        extra, names = json.loads(row.pop("extra")), tuple(row.pop("trace_ids"))
        group = Group(
            **row,
            prompt_tokens=prompts[place],
            samples=samples[place],
            trace_ids=names,
            extra=extra,
        )
        yield ArchivedGroup(
            step=step,
            place=number,
            group=group,
            traces=traces[place],
            replaced=replaced[place],
            row=None if text is None else json.loads(text),
        )


def _parts(column: pa.ListArray) -> list[Any]:
    """The arrays of a column of lists; None for an absent one."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths, dtype=np.int64)
    there = column.is_valid().to_pylist()
    return [
        # A copy, so that one kept group doesn't keep all that were read with it.
        values[end - length : end].copy() if is_there else None
        for end, length, is_there in zip(ends, lengths, there, strict=True)
    ]


def _split(
    column: pa.ListArray, read_flat: Callable[[pa.StructArray], Iterable[Any]]
) -> list[tuple[Any, ...]]:
    every = list(read_flat(column.flatten()))
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
    starts = [0, *ends[:-1]]
    return [tuple(every[start:end]) for start, end in zip(starts, ends, strict=True)]


def _plain(column: pa.StructArray, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    lists = {name: column.field(name).to_pylist() for name in names}
    for place in range(len(column)):
        yield {name: values[place] for name, values in lists.items()}


def _read_samples(column: pa.StructArray) -> Iterator[Sample]:
    known = {field.name for field in column.type}
    arrays = {name: _parts(column.field(name)) for name in _ARRAYS if name in known}
    for place, row in enumerate(_plain(column, [name for name in _SAMPLE if name in known])):
        verdict, episode = row.pop("verdict"), row.pop("episode", None)
        yield Sample(
            **{name: parts[place] for name, parts in arrays.items()},
            sampling=SamplingParams(
                **{name: row.pop(name) for name in SamplingParams.__struct_fields__}
            ),
            spans=tuple(VersionSpan(**span) for span in row.pop("spans")),
            finish_reason=FinishReason(row.pop("finish_reason")),
            verdict=None if verdict is None else Verdict(verdict),
            components=dict(row.pop("components")),
            episode=episode and read_record(Episode, episode, "an archive's episode", DataError),
            **row,
        )


def _read_traces(column: pa.StructArray) -> Iterator[ExpertTrace]:
    known = {field.name for field in column.type}
    arrays = {name: _parts(column.field(name)) for name in _TRACE_ARRAYS if name in known}
    for place, row in enumerate(_plain(column, _TRACE)):
        yield ExpertTrace(
            **{name: parts[place] for name, parts in arrays.items()},
            verdict=Verdict(row.pop("verdict")),
            components=dict(row.pop("components")),
            **row,
        )
