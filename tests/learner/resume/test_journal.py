"""The journal: what is on disk, and what a torn or foreign one means."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tandem.common.errors import StoreError
from tandem.learner.resume import journal as journals
from tandem.learner.resume.journal import Journal, read, trained


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
    journal = filled(path, 1)
    answers = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answers.wait(20))
    written = journal.row(1, 2, row(2))
    with pytest.raises(StoreError, match=r"the disk didn't take a record of .*journal\.jsonl"):
        written()
    assert "waiting for the disk" in caplog.text
    answers.set()
    journal.close()


def test_a_torn_last_line_is_left_out_and_written_anew(path: Path) -> None:
    filled(path, 2).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    journal = Journal(path)
    assert journal.outcomes() == {1: "applied"}
    journal.resumed(2, 1)
    journal.applied(2, 2)()
    journal.close()
    records = list(read(path))
    assert [r["kind"] for r in records] == ["row", "applied", "row", "resumed", "applied"]
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
    journal.resumed(2, 2)
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
    journal.close()
    journal = Journal(path)
    journal.resumed(2, 2)
    for seen in (journal, Journal(path)):
        assert seen.outcomes() == {1: "applied", 2: "applied", 5: "quarantined"}
        assert [seen.row_of(step)["step"] for step in range(1, 6)] == [1, 2, 3, 4, 5]
        assert (seen.last_step, seen.applied_step, seen.last_term) == (5, 2, 2)
        # What was once in the weights is known however often the run is resumed.
        assert [seen.was_applied(step) for step in range(7)] == [False, *[True] * 4, False, False]


def test_a_quarantined_step_is_none_whose_update_is_in_the_weights(path: Path) -> None:
    journal = filled(path, 2)
    for step in (3, 4):
        journal.row(1, step, row(step))()
        journal.quarantined(1, step, "not finite")()
    for seen in (journal, Journal(path)):
        assert (seen.last_step, seen.applied_step) == (4, 2)
    journal.row(1, 5, row(5))()
    journal.applied(1, 5)()
    journal.close()
    journal = Journal(path)
    assert journal.applied_step == 5
    # Going back to a checkpoint whose last steps were quarantined.
    journal.resumed(2, 4)
    assert journal.applied_step == Journal(path).applied_step == 2


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


def test_a_line_that_is_missing_between_others_is_damage(path: Path) -> None:
    journal = filled(path, 2)
    journal.row(1, 3, row(3))()
    journal.quarantined(1, 3, "not finite")()
    journal.row(1, 4, row(4))()
    journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for left_out in range(len(lines) - 1):
        path.write_bytes(b"".join(lines[:left_out] + lines[left_out + 1 :]))
        with pytest.raises(StoreError, match=r"journal\.jsonl is damaged.*restore it from a copy"):
            Journal(path)
    path.write_bytes(b"".join(lines))
    assert Journal(path).last_step == 4


def test_what_was_trained_is_counted_on_the_present_line_of_history(path: Path) -> None:
    journal = Journal(path)
    for step in range(1, 5):
        journal.row(1, step, row(step))()
        journal.applied(1, step, {"samples": 10 * step, "tokens": 7} if step > 1 else None)()
    assert trained(path) == {1: None, 2: (20, 7), 3: (30, 7), 4: (40, 7)}
    journal.close()
    journal = Journal(path)
    journal.resumed(2, 2)
    journal.applied(2, 3, {"samples": 30, "tokens": 7})()
    assert trained(path) == {1: None, 2: (20, 7), 3: (30, 7)}


def test_no_line_says_that_a_run_goes_on_from_a_step_that_has_no_row(path: Path) -> None:
    journal = filled(path, 2)
    with pytest.raises(StoreError, match=r"the checkpoint is of step 3, and .* ends at step 2"):
        journal.resumed(2, 3)
    journal.close()
    assert Journal(path).last_step == 2
