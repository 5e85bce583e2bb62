"""What a process tells: JSON lines that a crash can't spoil, and where its time went."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tandem.common.errors import DataError
from tandem.common.telemetry import Clock, JsonLines, read_json_lines


def test_records_are_read_back(tmp_path: Path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1, "loss": 0.5, "text": "été"})
    lines.write({"step": 2})
    lines.close()
    assert list(read_json_lines(tmp_path / "m.jsonl")) == [
        {"step": 1, "loss": 0.5, "text": "été"},
        {"step": 2},
    ]


def test_each_record_is_on_disk_before_the_next(tmp_path: Path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"step": 1})
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1}\n'
    lines.close()


def test_a_file_is_continued(tmp_path: Path):
    for step in (1, 2):
        lines = JsonLines(tmp_path / "m.jsonl")
        lines.write({"step": step})
        lines.close()
    assert [r["step"] for r in read_json_lines(tmp_path / "m.jsonl")] == [1, 2]


def test_numbers_that_json_can_not_hold_are_null(tmp_path: Path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"a": float("nan"), "b": [float("inf")], "c": {"d": np.float32("nan")}})
    lines.close()
    assert list(read_json_lines(tmp_path / "m.jsonl")) == [
        {"a": None, "b": [None], "c": {"d": None}}
    ]


def test_numbers_of_numpy_are_plain(tmp_path: Path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"a": np.int64(3), "b": np.float32(0.5), "c": (np.bool_(True),)})
    lines.close()
    assert list(read_json_lines(tmp_path / "m.jsonl")) == [{"a": 3, "b": 0.5, "c": [True]}]


def test_a_missing_file_has_no_records(tmp_path: Path):
    assert list(read_json_lines(tmp_path / "no.jsonl")) == []


@pytest.mark.parametrize("tail", [b'{"step"', '{"text": "é'.encode()[:-1]])
def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path: Path, tail: bytes):
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1}\n' + tail)
    assert list(read_json_lines(tmp_path / "m.jsonl")) == [{"step": 1}]


def test_a_file_cut_by_a_crash_is_continued_on_a_line_of_its_own(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(path)
    lines.write({"step": 2})
    lines.close()
    assert [r["step"] for r in read_json_lines(path)] == [1, 2]


def test_a_last_record_that_lost_only_its_line_end_is_kept(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    lines = JsonLines(path)
    lines.write({"step": 3})
    lines.close()
    assert [r["step"] for r in read_json_lines(path)] == [1, 2, 3]


def test_a_long_cut_line_is_taken_away_whole(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"text": "' + b"x" * 200_000)
    JsonLines(path).close()
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        list(read_json_lines(tmp_path / "m.jsonl"))


def test_line_separators_inside_a_text_do_not_split_a_record(tmp_path: Path):
    text = "a\u2028b\u2029c\x85d\x0be\nf"
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"text": text})
    lines.close()
    assert list(read_json_lines(tmp_path / "m.jsonl")) == [{"text": text}]


def test_a_clock_gives_seconds_by_activity_and_starts_anew():
    clock = Clock()
    for _ in range(2):
        with clock.doing("wait/batch"):
            pass
    taken = clock.take()
    assert set(taken) == {"wait/batch", "total"}
    assert 0 <= taken["wait/batch"] <= taken["total"]
    assert set(clock.take()) == {"total"}


def test_a_clock_counts_what_ended_in_an_error():
    clock = Clock()
    with pytest.raises(KeyError):
        with clock.doing("train"):
            raise KeyError
    assert "train" in clock.take()


def test_records_are_valid_json_for_other_readers(tmp_path: Path):
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write({"a": float("-inf")})
    lines.close()
    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
