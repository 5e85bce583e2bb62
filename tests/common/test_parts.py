"""A record in parts: written in order, read as one, whatever else lies in the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common import parts as module
from tandem.common.errors import DataError
from tandem.common.parts import PartedLines, is_part, parts, read_parts, whole_end
from tandem.launch.board.history import read as history_of
from tandem.launch.board.tail import MetricsTail
from tandem.learner.loop.evaluations import recorded_in


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 100)


def written(path: Path, first: int, last: int) -> None:
    lines = PartedLines(path)
    for step in range(first, last + 1):
        lines.write({"step": step, "loss": 0.5})
        if step % 7 == 0:
            lines.write({"step": step, "eval/id": f"held@{step}", "eval/held/accuracy": 0.5})
    lines.close()


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_parts(path) if "eval/id" not in record]


def test_a_part_that_is_full_is_never_written_to_again(path: Path) -> None:
    written(path, 1, 10)
    names = [part.name for part in parts(path)]
    assert names[:3] == ["metrics.jsonl", "metrics-0002.jsonl", "metrics-0003.jsonl"]
    before = [part.read_bytes() for part in parts(path)]
    written(path, 11, 40)
    assert [part.read_bytes() for part in parts(path)][: len(before) - 1] == before[:-1]
    assert steps(path) == list(range(1, 41))
    assert all(part.stat().st_size < 200 for part in parts(path))


def test_the_order_is_that_of_the_numbers_and_other_files_are_none(path: Path) -> None:
    for name in ("metrics-10000.jsonl", "metrics-9999.jsonl", "metrics.jsonl"):
        (path.parent / name).write_text("")
    others = ("metrics-2.jsonl", "metrics-00002.jsonl", "metrics-abcd.jsonl", "ametrics.jsonl")
    for name in others:
        (path.parent / name).write_text("")
        assert not is_part(path, name)
    assert [part.name for part in parts(path)] == [
        "metrics.jsonl",
        "metrics-9999.jsonl",
        "metrics-10000.jsonl",
    ]


def test_every_reader_reads_all_parts(path: Path) -> None:
    written(path, 1, 60)
    assert len(parts(path)) > 5
    history = history_of(path)
    assert history.step == 60
    assert [one.step for one in history.evaluations] == [7, 14, 21, 28, 35, 42, 49, 56]
    assert recorded_in(path) == {f"held@{step}" for step in range(7, 60, 7)}


def test_the_tail_goes_on_from_part_to_part(path: Path) -> None:
    tail = MetricsTail(path)
    seen: list[int] = []
    for last in range(5, 50, 5):
        written(path, last - 4, last)
        seen += [record["step"] for record in tail.read() if "eval/id" not in record]
    assert seen == list(range(1, 46))
    late = MetricsTail(path)
    late.skip()
    written(path, 46, 47)
    assert [record["step"] for record in late.read()] == [46, 47]


def test_the_tail_begins_anew_when_its_part_was_cut_off(path: Path) -> None:
    tail = MetricsTail(path)
    written(path, 1, 20)
    tail.read()
    parts(path)[-1].unlink()
    assert [record["step"] for record in tail.read()][:3] == [1, 2, 3]


def test_the_tail_ends_at_a_part_that_is_cut_off_while_it_reads(path: Path) -> None:
    written(path, 1, 20)
    tail = MetricsTail(path)
    records = tail.records()
    assert next(records)["step"] == 1
    first, *others = parts(path)
    assert others
    for part in others:
        part.unlink()
    seen = [record["step"] for record in records]
    assert seen
    assert tail.read() == []
    assert parts(path) == [first]


def test_a_line_that_cannot_be_read_is_told_or_refused(path: Path) -> None:
    written(path, 1, 20)
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": ?'))
    with pytest.raises(DataError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        list(read_parts(path))
    said: list[str] = []
    found = [record["step"] for record in read_parts(path, said.append)]
    assert 2 not in found
    assert {1, 3, 20} <= set(found)
    (line,) = said
    assert "left out: line 2 of" in line


def test_the_end_of_a_files_whole_lines(path: Path) -> None:
    for text, end in ((b"", 0), (b"abc", 0), (b"a\nbc", 2), (b"a\n", 2)):
        path.write_bytes(text)
        assert whole_end(path) == end
    path.write_bytes(b"a\n" + b"x" * 200_000)
    assert whole_end(path) == 2
