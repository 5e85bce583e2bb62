"""Metrics and samples are cut back to a checkpoint, and nothing of them is lost for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.common.parts import part_of, parts, read_parts
from tandem.learner.resume import cut_back as module
from tandem.learner.resume.cut_back import cut_back


def records(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().split(b"\n")[:-1]]


def test_metrics_are_cut_back_to_the_checkpoint_and_the_rest_is_kept(tmp_path: Path) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "cut"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 0, 2, 4)))
    cut_back(path, 2, aside)
    assert records(path) == [1, 2, 0, 2]
    assert records(aside / "metrics-above-2.1.jsonl") == [3, 4]
    cut_back(tmp_path / "absent.jsonl", 2, aside)


def test_a_file_with_nothing_to_cut_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    inode = path.stat().st_ino
    cut_back(path, 2, tmp_path / "cut")
    assert path.stat().st_ino == inode
    assert not (tmp_path / "cut").exists()


def test_what_a_killed_learner_left_of_its_cut_is_removed(tmp_path: Path) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "cut"
    path.write_text('{"step": 1}\n')
    aside.mkdir()
    other = tmp_path / ".samples.jsonl.4711"
    left = [tmp_path / ".metrics.jsonl.4711", tmp_path / ".metrics-0002.jsonl.4711"]
    left.append(aside / ".metrics-above-1.1.jsonl")
    for one in (other, *left):
        one.write_text('{"step": 1}\n')
    cut_back(path, 1, aside)
    assert other.exists()
    assert not any(one.exists() for one in left)


def test_a_line_that_cannot_be_read_is_kept_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, aside = tmp_path / "samples.jsonl", tmp_path / "cut"
    bad = ['{"step": 2, "te', "[]", '{"step": "x"}', '{"step": 1, "x"']
    path.write_text("\n".join(['{"step": 1}', *bad]))
    cut_back(path, 2, aside)
    assert records(path) == [1]
    (place,) = aside.iterdir()
    assert place.read_text().splitlines() == bad
    assert f"can't be read and was moved to {place}: line 2 of {path}, line 3 of" in caplog.text


def test_what_is_kept_of_the_cuts_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "cut"
    other = aside / "samples-above-1.1.jsonl"
    for number in range(module.KEPT_FILES + 3):
        path.write_text(f'{{"step": {number + 5}}}\n')
        cut_back(path, 1, aside)
        other.touch()
    kept = sorted(aside.glob("metrics-*"), key=lambda one: one.stat().st_mtime_ns)
    assert [records(one) for one in kept] == [[n] for n in range(8, 8 + module.KEPT_FILES)]
    assert other.exists()
    monkeypatch.setattr(module, "KEPT_BYTES", 1)
    path.write_text('{"step": 99}\n')
    cut_back(path, 1, aside)
    (last,) = aside.glob("metrics-*")
    assert records(last) == [99]


def test_parts_from_the_end_to_the_step_are_cut(tmp_path: Path) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "cut"
    last = '{"step": 20, "eval/id": "held@20"}\n'
    texts = {1: (10, 20), 2: (30, 40), 3: (50, 60), 4: ()}
    for number, steps in texts.items():
        lines = "".join(f'{{"step": {step}}}\n' for step in steps)
        # An evaluation of long past, alone in the part that was just begun.
        part_of(path, number).write_text(lines + last * (number == 4))
    inode = path.stat().st_ino
    cut_back(path, 35, aside)
    assert [part.name for part in parts(path)] == [
        "metrics.jsonl",
        "metrics-0002.jsonl",
        "metrics-0004.jsonl",
    ]
    assert [record["step"] for record in read_parts(path)] == [10, 20, 30, 20]
    assert path.stat().st_ino == inode
    assert records(aside / "metrics-above-35.1.jsonl") == [40, 50, 60]


def test_records_with_other_line_separators_in_their_texts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    text = '{"step": 1, "text": "a\u2028b\x85c"}\n'
    path.write_text(text + '{"step": 3}\n', encoding="utf-8")
    cut_back(path, 2, tmp_path / "cut")
    assert path.read_text(encoding="utf-8") == text
