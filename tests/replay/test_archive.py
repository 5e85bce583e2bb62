"""Archives read back to equal records."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.common import wire
from tandem.common.errors import DataError
from tandem.common.records import (
    EPISODE_FAILURES,
    Episode,
    ExpertTrace,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Turn,
    Verdict,
    VersionSpan,
)
from tandem.replay import archive
from tandem.replay.archive_columns import ArchivedGroup

TEXTS = ("", "7", "x\ny\t\\boxed{½} 🙂", "\x00\u202e", "=" * 300)


def components(noise: Random) -> dict[str, float | None]:
    values = (None, 0.0, -1.5, 1 / 3, math.inf)
    return {name: noise.choice(values) for name in noise.sample(["accuracy", "format", "ü"], 2)}


def sample(noise: Random) -> Sample:
    length = noise.choice((0, 1, 7, 300))
    numbers = np.random.default_rng(noise.randrange(1 << 30))
    logprobs = numbers.normal(size=length).astype(np.float32)
    logprobs[::3] = np.nan
    cut = noise.randint(0, length)
    return Sample(
        tokens=numbers.integers(0, 1 << 31, length).astype(np.int32),
        source=numbers.integers(0, 3, length).astype(np.uint8),
        logprobs=logprobs,
        spans=(
            VersionSpan(term=1, step=2, start=0, end=cut),
            VersionSpan(term=1, step=1 << 40, start=cut, end=length),
        )[: noise.randint(0, 2)],
        finish_reason=noise.choice(list(FinishReason)),
        sampling=SamplingParams(temperature=1 / 3, top_p=1.0, top_k=0, max_new_tokens=300),
        text=noise.choice(TEXTS),
        reward=noise.choice((None, 0.0, 0.1)),
        verdict=noise.choice((None, *Verdict)),
        components=components(noise),
        extracted=noise.choice((None, *TEXTS)),
        grader=noise.choice((None, "math@3")),
        token_rewards=noise.choice((None, numbers.normal(size=length).astype(np.float32))),
        episode=noise.choice((None, episode(noise, length))),
    )


def episode(noise: Random, length: int) -> Episode:
    failure = noise.choice((None, *sorted(EPISODE_FAILURES)))
    cut = noise.randint(0, length)
    return Episode(
        environment=noise.choice(("sums", "ü")),
        reward=None if failure is not None else noise.choice((None, 1 / 3)),
        failure=failure,
        detail=noise.choice(TEXTS),
        turns=(
            Turn(start=0, end=cut, reward=noise.choice((None, 0.1)), malformed=False),
            Turn(start=cut, end=length, reward=None, malformed=True),
        )[: noise.randint(0, 2)],
        metrics=noise.choice(({}, {"tool_calls": 2.0, "own": math.inf})),
    )


def trace(noise: Random) -> ExpertTrace:
    tokens = np.arange(noise.choice((0, 3, 50)), dtype=np.int32)
    return ExpertTrace(
        trace_id="a/1#0",
        problem_id="a/1",
        tokens=tokens,
        logprobs=noise.choice((None, -tokens.astype(np.float32))),
        text=noise.choice(TEXTS),
        tokenizer_digest="0f",
        reward=noise.choice((None, 1.0)),
        verdict=noise.choice(list(Verdict)),
        components=components(noise),
        grader=noise.choice((None, "math@3")),
        source=noise.choice((None, 1 + (tokens % 2).astype(np.uint8))),
    )


def archived(noise: Random, step: int, place: int) -> ArchivedGroup:
    return ArchivedGroup(
        step=step,
        place=place,
        group=Group(
            group_id=f"0-{place}",
            attempt=noise.randint(0, 3),
            worker="rollout-0",
            problem_id="a/1",
            prompt_tokens=np.arange(noise.choice((0, 1, 20)), dtype=np.int32),
            prompt_text=noise.choice(TEXTS),
            gold=noise.choice(TEXTS),
            data_source="a",
            samples=tuple(sample(noise) for _ in range(noise.choice((0, 1, 4)))),
            trace_ids=noise.choice(((), ("a/1#0",), ("x", "y"))),
            extra=noise.choice(({}, {"a": [1, None, {"b": 0.1}], "ü": "x\n", "n": 1 << 60})),
        ),
        traces=tuple(trace(noise) for _ in range(noise.choice((0, 1, 2)))),
        replaced=tuple(sample(noise) for _ in range(noise.choice((0, 0, 2)))),
        row={"step": step, "ids": [["0-1", 2, None]]} if place == 0 else None,
    )


def as_bytes(one: ArchivedGroup) -> tuple[Any, ...]:
    records = [wire.encode(record) for record in (one.group, *one.traces, *one.replaced)]
    return (one.step, one.place, one.row, len(one.traces), *records)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_is_read_again(seed: int, tmp_path: Path) -> None:
    noise = Random(seed)
    groups = [archived(noise, 17, place) for place in range(noise.choice((1, 5, 40)))]
    archive.write(tmp_path / "a.parquet", groups)
    found = list(archive.read(tmp_path / "a.parquet"))
    assert list(map(as_bytes, found)) == list(map(as_bytes, groups))
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def without(table: pa.Table, name: str, *fields: str) -> pa.Table:
    """The table without some fields of the records in one of its columns."""
    column = table[name].combine_chunks()
    inner = column.values
    kept = [field.name for field in inner.type if field.name not in fields]
    inner = pa.StructArray.from_arrays([inner.field(one) for one in kept], kept)
    column = pa.ListArray.from_arrays(column.offsets, inner)
    return table.set_column(table.column_names.index(name), name, column)


def as_before(path: Path, to: Path) -> None:
    """Writes a file as it was before tokens had rewards and samples episodes."""
    table = pq.read_table(path)
    for name in ("samples", "replaced"):
        table = without(table, name, "token_rewards", "episode")
    pq.write_table(table, to)


def masked(one: ArchivedGroup, *, is_masked: bool) -> ArchivedGroup:
    """The group with a trace, of which another may have written the second token."""
    source = np.array([1, 2, 1], np.uint8) if is_masked else None
    made = msgspec.structs.replace(
        trace(Random(0)), tokens=np.arange(3, dtype=np.int32), logprobs=None, source=source
    )
    return dataclasses.replace(one, traces=(made,))


def test_an_archive_from_before_traces_said_who_wrote_a_token_is_read_and_joined_with_newer_ones(
    tmp_path: Path,
) -> None:
    """A reader that doesn't know of it would train on what users wrote: only files with such traces are of a newer
    version."""
    old, new = (masked(archived(Random(1), 1 + step, 0), is_masked=step == 1) for step in range(2))
    archive.write(tmp_path / "new.parquet", [new])
    bare = without(archive.table([old]), "traces", "source")
    pq.write_table(bare, tmp_path / "old.parquet")
    versions = {
        path.stem: pq.read_schema(path).metadata[b"tandem.archive"]
        for path in tmp_path.glob("*.parquet")
    }
    assert versions == {"old": b"1", "new": b"2"}
    files = [tmp_path / "old.parquet", tmp_path / "new.parquet"]
    assert archive.join(files, tmp_path / "joined") == (2, 2)
    found = [one for path in sorted((tmp_path / "joined").iterdir()) for one in archive.read(path)]
    assert list(map(as_bytes, found)) == [as_bytes(old), as_bytes(new)]


def test_an_archive_from_before_tokens_had_rewards_and_samples_episodes_is_read(
    tmp_path: Path,
) -> None:
    noise = Random(1)
    groups = [archived(noise, 1, place) for place in range(5)]
    archive.write(tmp_path / "a.parquet", groups)
    as_before(tmp_path / "a.parquet", tmp_path / "old.parquet")
    samples = [s for one in groups for s in (*one.group.samples, *one.replaced)]
    found = [
        s
        for one in archive.read(tmp_path / "old.parquet")
        for s in (*one.group.samples, *one.replaced)
    ]
    assert any(one.token_rewards is not None for one in samples)
    assert any(one.episode is not None for one in samples)
    bare = [msgspec.structs.replace(one, token_rewards=None, episode=None) for one in samples]
    assert list(map(wire.encode, found)) == list(map(wire.encode, bare))


def test_files_of_two_versions_are_joined(tmp_path: Path) -> None:
    noise = Random(2)
    whole = [archived(noise, step, place) for step in range(1, 7) for place in range(3)]
    files = []
    for step in range(1, 7):
        path = tmp_path / archive.file_name(step)
        archive.write(path, [one for one in whole if one.step == step])
        if step in (1, 2, 5):
            as_before(path, path)
        files.append(path)
    groups, number = archive.join(files, tmp_path / "out")
    joined = sorted((tmp_path / "out").iterdir())
    assert (groups, number) == (18, len(joined))
    assert [one.step for one in archive.steps(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    found = [one for path in joined for one in archive.read(path)]
    before = [one for path in files for one in archive.read(path)]
    assert list(map(as_bytes, found)) == list(map(as_bytes, before))


@pytest.mark.parametrize("changed", [False, True])
def test_each_step_of_an_archive_that_is_joined_again_can_be_read_alone(
    tmp_path: Path, changed: bool
) -> None:
    noise = Random(3)
    whole = [archived(noise, step, place) for step in range(1, 5) for place in range(3)]
    for step in range(1, 5):
        of_step = [one for one in whole if one.step == step]
        archive.write(tmp_path / archive.file_name(step), of_step)
    archive.join(sorted(tmp_path.glob("*.parquet")), tmp_path / "joined")
    (joined,) = (tmp_path / "joined").iterdir()
    asked: list[set[int]] = []

    def change(groups: list[ArchivedGroup]) -> list[ArchivedGroup]:
        asked.append({one.step for one in groups})
        return groups

    out = tmp_path / "again"
    assert archive.join([joined], out, change=change if changed else None) == (12, 1)
    steps = list(archive.steps(out))
    assert [(one.step, one.part) for one in steps] == [(n, n - 1) for n in range(1, 5)]
    found = [one for step in steps for one in archive.read(step.path, step.part)]
    assert list(map(as_bytes, found)) == list(map(as_bytes, whole))
    assert asked == ([{n} for n in (1, 2, 3, 4)] if changed else [])


def test_other_files_and_newer_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"step": [1]}), path)
    with pytest.raises(DataError, match=r"a\.parquet isn't an archive"):
        list(archive.read(path))
    newer = archive.table([]).replace_schema_metadata({"tandem.archive": "3"})
    pq.write_table(newer, path)
    with pytest.raises(DataError, match="archive of version 3, and this Tandem reads up to 2"):
        list(archive.read(path))
    archive.write(path, [archived(Random(0), 1, 0)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"a\.parquet can't be read as an archive"):
        list(archive.read(path))
    with pytest.raises(DataError, match="No such file"):
        list(archive.read(tmp_path / "b.parquet"))
