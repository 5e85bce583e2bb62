"""The journal: what is on disk, and what a torn or foreign one means."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tandem.common.errors import StoreError
from tandem.learner import journal as journals
from tandem.learner.journal import Journal, cut_back, read


def row(step: int, name: str = "0-0") -> dict[str, object]:
    return {"step": step, "groups": [{"id": name, "attempt": 1}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def filled(path: Path, steps: int) -> Journal:
    journal = Journal(path)
    for step in range(1, steps + 1):
        journal.row(1, step, row(step))()
        journal.applied(1, step)()
    return journal


def test_a_row_is_on_disk_once_its_wait_returns(path: Path) -> None:
    journal = Journal(path)
    journal.row(1, 1, row(1))()
    (record,) = read(path)
    assert record["kind"] == "row"
    assert record["row"] == row(1)
    journal.applied(1, 1)()
    assert [r["kind"] for r in read(path)] == ["row", "applied"]
    assert len({r["digest"] for r in read(path)}) == 1


def test_a_disk_that_takes_nothing_is_an_error_and_no_endless_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journals, "DISK_SECONDS", 0.02)
    journal = Journal(path)
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait(20))
    written = journal.row(1, 1, row(1))
    with pytest.raises(StoreError, match="the disk hasn't taken a record"):
        written()
    assert "waiting for the disk" in caplog.text
    answers.set()
    journal.close()


def test_a_torn_last_line_is_cut_off_and_written_anew(path: Path) -> None:
    filled(path, 2).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    journal = Journal(path)
    assert journal.outcomes == {1: "applied"}
    journal.applied(2, 2)()
    journal.close()
    records = list(read(path))
    assert [r["kind"] for r in records] == ["row", "applied", "row", "applied"]
    assert records[-1]["term"] == 2


def test_damage_before_the_last_line_is_never_guessed_at(path: Path) -> None:
    filled(path, 2).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"kind": "ap\n' + lines[2])
    with pytest.raises(StoreError, match=r"line 2 of .* is damaged"):
        Journal(path)


def test_each_step_has_one_row(path: Path) -> None:
    filled(path, 2).close()
    journal = Journal(path)
    journal.row(2, 2, row(2))()
    assert sum(r["kind"] == "row" for r in read(path)) == 2
    with pytest.raises(StoreError, match="step 2 has another row"):
        journal.row(2, 2, row(2, "0-9"))
    with pytest.raises(StoreError, match="step 4 can't follow step 2"):
        journal.row(2, 4, row(4))


def test_a_resumed_line_gives_up_what_was_applied_above_it(path: Path) -> None:
    journal = filled(path, 4)
    journal.row(1, 5, row(5))()
    journal.quarantined(1, 5, "not finite")()
    journal.resumed(2, 2)
    for seen in (journal, Journal(path)):
        assert seen.outcomes == {1: "applied", 2: "applied", 5: "quarantined"}
        assert sorted(seen.rows) == [1, 2, 3, 4, 5]
        assert seen.last_term == 2


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "x": 1}) for step in (1, 2, 3, 0, 2)]
    path.write_text("\n".join(lines) + '\n{"step": 1, "x"')
    cut_back(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 0, 2]
    cut_back(tmp_path / "absent.jsonl", 2)


def test_a_row_that_is_not_the_one_of_its_digest_is_damage(path: Path) -> None:
    filled(path, 2).close()
    path.write_bytes(path.read_bytes().replace(b'"attempt":1', b'"attempt":2', 1))
    with pytest.raises(StoreError, match=r"isn't the one of its digest.*never guessed at"):
        Journal(path)


def test_an_outcome_without_a_row_and_a_row_out_of_turn_are_damage(path: Path) -> None:
    filled(path, 2).close()
    lines = path.read_bytes().splitlines(keepends=True)
    for kept, said in ((lines[2:], "has row 2 after row 0"), (lines[1:2], "and no row of it")):
        path.write_bytes(b"".join(kept))
        with pytest.raises(StoreError, match=said):
            Journal(path)


def test_records_with_other_line_separators_in_their_texts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1, "text": "a\u2028b\x85c"}\n[]\n{"step": "x"}\n', encoding="utf-8")
    cut_back(path, 2)
    assert path.read_text(encoding="utf-8") == '{"step": 1, "text": "a\u2028b\x85c"}\n'
