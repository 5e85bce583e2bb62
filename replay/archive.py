"""An archive: every group that was trained on, as parquet, which reads back to equal records.

A run writes one file per step (``log.archive``), before it trains on the step, and ``tandem archive``
joins them. A row is a group; its columns have the records' own names and types:

=====================  ========================================================================
column                 content
=====================  ========================================================================
``step``, ``place``    the step that took the group, and its place among the step's groups
``row``                the step's row as the journal has it, as JSON; only at place 0
``group_id``, …        the fields of :class:`~tandem.common.records.Group`
``samples``            list of :class:`~tandem.common.records.Sample`, ``sampling`` in columns of its own
``traces``             list of :class:`~tandem.common.records.ExpertTrace`: the expert rows
``replaced``           samples that traces have replaced; they are in no loss
=====================  ========================================================================

Free-form values (``extra``) and episodes, which older files lack, are JSON. The file's metadata has :data:`VERSION` as ``tandem.archive``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
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
    Source,
    Verdict,
    VersionSpan,
)
from ..common.run_folder import replace_folder, write_atomic

VERSION = 2
"""Raised when the columns change in a way that older readers would misread. Files without traces in which others
wrote tokens have version 1, so that older versions read them as well."""
_KEY = b"tandem.archive"
FILE_BYTES = 256 << 20
"""Size from which on :func:`join` begins a new file."""
_LENGTH_AND_MAGIC = 8
"""Bytes at the very end of a parquet file, before which its footer stands."""
READ_GROUPS = 16
"""Groups that are held at a time while an archive is read."""

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


def write(path: Path, groups: Sequence[ArchivedGroup]) -> None:
    """Writes groups into one file, in the order given.

    Raises:
        OSError: it can't be written; nothing is left behind.
    """
    made = io.BytesIO()
    pq.write_table(table(groups), made, compression="zstd")
    write_atomic(path, made.getvalue())


def read(path: Path, part: int | None = None) -> Iterator[ArchivedGroup]:
    """Groups of one file, in its order, a few at a time.

    Args:
        path: the file.
        part: only this one of its row groups; None = all.

    Raises:
        DataError: it isn't an archive, of a newer version, or damaged.
    """
    with _opened(path) as file:
        parts = None if part is None else [part]
        for batch in file.iter_batches(batch_size=READ_GROUPS, row_groups=parts):
            yield from _groups(batch)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            version = (file.schema_arrow.metadata or {}).get(_KEY)
            if version is None:
                raise DataError(f"{path} isn't an archive: `tandem archive RUN` writes one")
            if int(version) > VERSION:
                raise DataError(
                    f"{path} is an archive of version {int(version)}, and this Tandem reads up to "
                    f"{VERSION}: read it with the version that wrote it"
                )
            yield file
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path} can't be read as an archive: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedStep:
    """Where the groups of one step are."""

    step: int
    path: Path
    part: int
    """The file's row group; a step's groups are in one."""

    def read(self) -> Iterator[ArchivedGroup]:
        """Yields the step's groups, in order."""
        return (one for one in read(self.path, self.part) if one.step == self.step)


def steps(folder: Path) -> Iterator[ArchivedStep]:
    """The steps of an archive, in order.

    Args:
        folder: what ``tandem archive`` has written, or a run's ``archive/``.

    Raises:
        DataError: it has no such files, or one of them isn't an archive.
    """
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise DataError(f"{folder} has no archive: `tandem archive RUN --out DIR` writes one")
    for path in files:
        with _opened(path) as file:
            for part in range(file.num_row_groups):
                found = file.read_row_group(part, columns=["step"])["step"].unique().to_pylist()
                yield from (ArchivedStep(step=step, path=path, part=part) for step in found)


def digest(folder: Path) -> str:
    """Tells an archive from one with other groups, by the ends of its files: a parquet file's last bytes have the
    place, the size and the bounds of every column of every row group. So it takes a moment, however large they are.

    Raises:
        DataError: a file can't be read.
    """
    made = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.parquet")):
        try:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _LENGTH_AND_MAGIC))
                length = int.from_bytes(file.read(4), "little")
                file.seek(max(0, size - _LENGTH_AND_MAGIC - length))
                made.update(f"{path.name} {size}\n".encode() + file.read())
        except OSError as error:
            raise DataError(f"{path} can't be read as an archive: {error}") from None
    return made.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """What a group's rows were paid; rows without a verdict are left out."""

    own: tuple[tuple[float, FinishReason], ...]
    """Rewards of the own samples, and why each ended."""
    expert: tuple[float, ...]
    """Rewards of the traces."""


_REWARDS = (
    "step",
    *(
        f"{kind}.list.element.{name}"
        for kind, name in (
            ("samples", "reward"),
            ("samples", "verdict"),
            ("samples", "finish_reason"),
            ("traces", "reward"),
            ("traces", "verdict"),
        )
    ),
)


def rewards(where: ArchivedStep) -> tuple[list[GroupRewards], bool]:
    """Rewards of a step's groups, without reading tokens or texts.

    Returns:
        The groups' rewards, and whether a sample may hold tokens that it didn't sample itself, by the
        statistics of the file's column.

    Raises:
        DataError: the file isn't an archive, or is damaged.
    """
    with _opened(where.path) as file:
        part = file.metadata.row_group(where.part)
        columns = {c.path_in_schema: c for c in map(part.column, range(part.num_columns))}
        source = columns["samples.list.element.source.list.element"].statistics
        foreign = source is None or not source.has_min_max or source.max != Source.OWN
        found = file.read_row_group(where.part, columns=list(_REWARDS)).to_pylist()
    return [
        GroupRewards(
            own=tuple(
                (one["reward"], FinishReason(one["finish_reason"]))
                for one in row["samples"]
                if _has_verdict(one)
            ),
            expert=tuple(one["reward"] for one in row["traces"] if _has_verdict(one)),
        )
        for row in found
        if row["step"] == where.step
    ], foreign


def longest(where: ArchivedStep) -> tuple[int, int, int]:
    """Tokens of the longest prompt and of the longest response in a step's groups, traces included; and of the longest
    episode with its prompt, since groups with episodes count for that alone.

    The lengths of samples are read from ``source``, which has an entry for each token and takes next to no space.

    Raises:
        DataError: the file isn't an archive, or is damaged.
    """
    columns = (
        "step",
        "prompt_tokens",
        "samples.list.element.source",
        "samples.list.element.episode",
        "traces.list.element.tokens",
    )
    with _opened(where.path) as file:
        found = file.read_row_group(where.part, columns=list(columns))
    prompt = response = episode = 0
    for batch in found.filter(pc.field("step") == where.step).to_batches():
        prompts = _lengths(batch["prompt_tokens"])
        played = _played(batch["samples"], len(prompts))
        prompt = max(prompt, *prompts[~played], 0)
        for kind, name in (("samples", "source"), ("traces", "tokens")):
            group = _list_of_each(batch[kind])
            lengths = _lengths(batch[kind].flatten().field(name))
            response = max(response, *lengths[~played[group]], 0)
            episode = max(episode, *(prompts[group] + lengths)[played[group]], 0)
    return int(prompt), int(response), int(episode)


def _lengths(lists: pa.ListArray) -> NDArray[np.int64]:
    return np.asarray(lists.value_lengths().fill_null(0), np.int64)


def _list_of_each(lists: pa.ListArray) -> NDArray[np.int64]:
    """For each item of all lists, which list has it."""
    return np.asarray(pc.list_parent_indices(lists), np.int64)


def _played(samples: pa.ListArray, groups: int) -> NDArray[np.bool_]:
    """Whether each group has an episode; older files have no such column."""
    played = np.zeros(groups, bool)
    if samples.type.value_type.get_field_index("episode") >= 0:
        there = np.asarray(samples.flatten().field("episode").is_valid(), bool)
        played[_list_of_each(samples)[there]] = True
    return played


def _has_verdict(row: Mapping[str, Any]) -> bool:
    verdict = row["verdict"]
    return (
        verdict is not None and row["reward"] is not None and not Verdict(verdict).leaves_baseline
    )


def is_archive(path: Path) -> bool:
    """Whether a file is one of an archive, of any version; False for whatever can't be read as parquet."""
    try:
        return _KEY in (pq.read_schema(path).metadata or {})
    except (OSError, ValueError, pa.ArrowException):
        return False


def extras(path: Path) -> Iterator[Mapping[str, Any]]:
    """The ``extra`` of each group of a file, without reading anything else of it.

    Raises:
        DataError: the file isn't an archive, or is damaged.
    """
    with _opened(path) as file:
        for batch in file.iter_batches(batch_size=READ_GROUPS, columns=["extra"]):
            yield from map(json.loads, batch["extra"].to_pylist())


def file_name(step: int) -> str:
    """Name of a step's file in a run's ``archive/``."""
    return f"step-{step:08d}.parquet"


def join(
    files: Iterable[Path],
    to: Path,
    doing: Callable[[int], None] = lambda groups: None,
    change: Callable[[list[ArchivedGroup]], list[ArchivedGroup]] | None = None,
) -> tuple[int, int]:
    """Joins files of an archive into larger ones of up to :data:`FILE_BYTES` in another folder.

    Each step becomes a row group, whatever it was in, so that it can be read without the others.

    Args:
        files: in the order in which their groups are to be.
        to: the folder, which must be empty or missing.
        doing: called with the number of groups of every step that has been joined.
        change: makes other groups of a step's; None = they stay as they are.

    Returns:
        Numbers of groups and of files written.

    Raises:
        DataError: a file isn't an archive, or the folder isn't empty.
    """
    if to.exists() and any(to.iterdir()):
        raise DataError(f"{to} isn't empty: name another folder")
    staging = to.with_name(f".{to.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    groups = number = 0
    writer, path = None, to
    for part in _tables(files):
        if change is not None:
            every = [one for batch in part.to_batches(READ_GROUPS) for one in _groups(batch)]
            part = table(change(every))
        # Files of an earlier version lack columns, and a file has one schema.
        if writer is not None and not part.schema.equals(writer.schema, check_metadata=True):
            writer.close()
            writer = None
        if writer is None:
            path = staging / f"groups-{number:05d}.parquet"
            writer, number = pq.ParquetWriter(path, part.schema, compression="zstd"), number + 1
        writer.write_table(part)
        groups += part.num_rows
        doing(part.num_rows)
        if path.stat().st_size >= FILE_BYTES:
            writer.close()
            writer = None
    if writer is not None:
        writer.close()
    replace_folder(staging, to)
    return groups, number


def _tables(files: Iterable[Path]) -> Iterator[pa.Table]:
    """The groups of each step, in the order of the files."""
    for source in files:
        with _opened(source) as file:
            for number in range(file.num_row_groups):
                part = file.read_row_group(number)
                found = part["step"].unique().to_pylist()
                for step in found:
                    # Joined files of older versions have all their steps in one row group.
                    yield part if len(found) == 1 else part.filter(pc.equal(part["step"], step))


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
    return made.replace_schema_metadata({_KEY: str(VERSION if masked else 1)})


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


def _groups(batch: pa.RecordBatch) -> Iterator[ArchivedGroup]:
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
