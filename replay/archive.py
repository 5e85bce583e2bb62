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
from ..common.records import FinishReason, Source, Verdict
from ..common.run_folder import replace_folder, sync_folder, write_atomic
from .archive_columns import KEY, VERSION, ArchivedGroup, groups_of, table

FILE_BYTES = 256 << 20
"""Size from which on :func:`join` begins a new file."""
_LENGTH_AND_MAGIC = 8
"""Bytes at the very end of a parquet file, before which its footer stands."""
READ_GROUPS = 16
"""Groups that are held at a time while an archive is read."""


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
            yield from groups_of(batch)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            version = (file.schema_arrow.metadata or {}).get(KEY)
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


_LEARNT = [verdict.value for verdict in Verdict if not verdict.leaves_baseline]
"""Verdicts of samples and traces that are rows."""
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


def sizes(where: ArchivedStep) -> tuple[int, int]:
    """How large a step's groups are, without reading tokens or texts.

    Returns:
        The greatest number of rows of a group: own samples and traces, without those that have no verdict. And the
        greatest number that a group may have had, with samples that have no verdict or were replaced, and with traces
        that a new reward has left out. The group size of the run that made them is neither below the first nor above
        the second.

    Raises:
        DataError: the file isn't an archive, or is damaged.
    """
    paid = ("reward", "verdict")
    columns = (
        "step",
        "trace_ids",
        "replaced.list.element.finish_reason",
        *(f"{kind}.list.element.{name}" for kind in ("samples", "traces") for name in paid),
    )
    with _opened(where.path) as file:
        found = file.read_row_group(where.part, columns=list(columns))
    rows = most = 0
    for batch in found.filter(pc.field("step") == where.step).to_batches():
        trained = np.zeros(len(batch), np.int64)
        for kind in ("samples", "traces"):
            rewards, verdicts = (batch[kind].flatten().field(name) for name in paid)
            is_row = pc.and_(rewards.is_valid(), pc.is_in(verdicts, pa.array(_LEARNT, pa.string())))
            kept = _list_of_each(batch[kind])[np.asarray(is_row, bool)]
            trained += np.bincount(kept, minlength=len(batch))
        own = _lengths(batch["samples"]) + _lengths(batch["replaced"])
        traces = np.maximum(_lengths(batch["traces"]), _lengths(batch["trace_ids"]))
        rows, most = max(rows, *trained), max(most, *(own + traces))
    return int(rows), int(most)


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
        return KEY in (pq.read_schema(path).metadata or {})
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
    # Whoever stands in a folder that is there stays in it, and its disk is the one that was named.
    stays = to.exists()
    staging = to / ".part" if stays else to.with_name(f".{to.name}.part")
    shutil.rmtree(staging, ignore_errors=True)
    if stays and any(to.iterdir()):
        raise DataError(f"{to} isn't empty: name another folder")
    staging.mkdir(parents=True)
    groups = number = 0
    writer, path = None, to
    for part in _tables(files):
        if change is not None:
            every = [one for batch in part.to_batches(READ_GROUPS) for one in groups_of(batch)]
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
    if stays:
        for made in sorted(staging.iterdir()):
            made.replace(to / made.name)
        staging.rmdir()
        sync_folder(to)
    else:
        replace_folder(staging, to)
    return groups, number


def _tables(files: Iterable[Path]) -> Iterator[pa.Table]:
    """The groups of each step, in the order of the files."""
    for source in files:
        with _opened(source) as file:
            yield from map(file.read_row_group, range(file.num_row_groups))
