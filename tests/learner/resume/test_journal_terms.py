"""Each term has a file of its own in the journal, and says what it builds on."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tandem.common.errors import FencedError, StoreError
from tandem.learner.resume.journal import History, Journal, digest_of, read
from tandem.learner.resume.journal_file import encoded


def row(step: int, name: str = "0-0") -> dict[str, Any]:
    return {"step": step, "groups": [{"id": name, "attempt": 1}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files needn't reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def train(journal: Journal, term: int, first: int, last: int, name: str = "0-0") -> None:
    for step in range(first, last + 1):
        journal.row(term, step, row(step, name))()
        journal.applied(term, step)()


def begun(path: Path, term: int, step: int) -> Journal:
    """A learner that goes on from a checkpoint."""
    journal = Journal(path)
    assert journal.last_term < term
    journal.resumed(term, step)
    return journal


def told(path: Path) -> list[tuple[str, int, int]]:
    return [(record["kind"], record["term"], record["step"]) for record in read(path)]


def test_a_term_writes_to_a_file_of_its_own_and_names_the_record_before(path: Path) -> None:
    first = Journal(path)
    train(first, 1, 1, 2)
    first.close()
    before = path.read_bytes()
    second = begun(path, 2, 1)
    train(second, 2, 2, 3)
    second.close()
    assert path.read_bytes() == before
    line, *_ = (path.parent / "journal-0002.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["kind"], record["term"], record["step"]) == ("resumed", 2, 1)
    assert record["after"]["file"] == "journal.jsonl"
    assert record["after"]["bytes"] == len(before)
    assert told(path) == [
        ("row", 1, 1), ("applied", 1, 1), ("row", 1, 2), ("applied", 1, 2),
        ("resumed", 2, 1), ("applied", 2, 2), ("row", 2, 3), ("applied", 2, 3),
    ]  # fmt: skip


def test_a_stopped_learner_that_continues_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Journal(path)
    train(old, 1, 1, 2)
    new = begun(path, 2, 2)
    # Both write, in turns, and to the same steps.
    train(old, 1, 3, 3, "0-7")
    train(new, 2, 3, 3, "0-9")
    old.row(1, 4, row(4, "0-7"))()
    train(new, 2, 4, 4, "0-9")
    old.applied(1, 4)()
    old.close()
    new.close()
    third = begun(path, 3, 4)
    train(third, 3, 5, 5)
    third.close()
    rows = [(r["step"], r["row"]["groups"][0]["id"]) for r in read(path) if r["kind"] == "row"]
    assert rows == [(1, "0-0"), (2, "0-0"), (3, "0-9"), (4, "0-9"), (5, "0-0")]
    assert "journal.jsonl has 4 line(s) of a learner that was overtaken" in caplog.text


def test_a_learner_that_begins_late_is_passed_over(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(path)
    train(first, 1, 1, 2)
    late, second = Journal(path), Journal(path)
    second.resumed(3, 2)
    train(second, 3, 3, 3, "0-3")
    # It took term 2 before, and was stopped in between.
    late.resumed(2, 0)
    train(late, 2, 3, 6, "0-2")
    history = Journal(path)
    assert (history.last_step, history.last_term) == (3, 3)
    assert history.row_of(3) == row(3, "0-3")
    assert "journal-0002.jsonl has 9 line(s) of a learner that was overtaken" in caplog.text


def test_the_same_term_begins_once(path: Path) -> None:
    train(Journal(path), 1, 1, 1)
    one, other = Journal(path), Journal(path)
    one.resumed(2, 1)
    with pytest.raises(FencedError, match=r"journal-0002\.jsonl already exists"):
        other.resumed(2, 1)
    fresh, twin = Journal(path.with_name("new.jsonl")), Journal(path.with_name("new.jsonl"))
    fresh.row(1, 1, row(1))()
    with pytest.raises(FencedError, match=r"new\.jsonl already exists"):
        twin.row(2, 1, row(1))


def test_a_journal_that_has_records_is_gone_on_with_by_a_word_of_where(path: Path) -> None:
    train(Journal(path), 1, 1, 1)
    with pytest.raises(StoreError, match="say first where term 2 goes on"):
        Journal(path).row(2, 2, row(2))


def test_a_kill_at_every_byte_leaves_a_journal_that_opens(path: Path, tmp_path: Path) -> None:
    """Whatever was written of a term's file when its learner was killed, the next goes on."""
    first = Journal(path)
    train(first, 1, 1, 2)
    first.close()
    second = begun(path, 2, 1)
    train(second, 2, 3, 3)
    second.close()
    whole = (tmp_path / "journal-0002.jsonl").read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        copy = tmp_path / "copy"
        copy.mkdir()
        shutil.copy(path, copy)
        (copy / "journal-0002.jsonl").write_bytes(whole[:size])
        lines = sum(end <= size for end in ends)
        history = History(copy / "journal.jsonl")
        assert history.last_step == (2 if lines < 2 else 3), size
        assert history.outcomes() == [
            {1: "applied", 2: "applied"}, {1: "applied"}, {1: "applied"}, {1: "applied", 3: "applied"}
        ][lines], size  # fmt: skip
        third = begun(copy / "journal.jsonl", 3, 1)
        train(third, 3, 2, 3)
        train(third, 3, 4, 4)
        third.close()
        after = History(copy / "journal.jsonl")
        assert after.outcomes() == dict.fromkeys(range(1, 5), "applied")
        assert sum(kind == "row" for kind, _, _ in told(copy / "journal.jsonl")) == 4
        shutil.rmtree(copy)


def test_one_flipped_bit_is_refused_or_costs_the_last_line_with_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(path)
    train(first, 1, 1, 2)
    first.close()
    second = begun(path, 2, 1)
    second.row(2, 3, row(3))()
    second.close()
    right, said = told(path), ""
    for file in (path, path.with_name("journal-0002.jsonl")):
        whole = file.read_bytes()
        for bit in range(8 * len(whole)):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            caplog.clear()
            try:
                Journal(path).close()
                found = told(path)
            except StoreError as error:
                said = str(error)
            if str(file) in said:
                said = ""
                continue
            # The end of the newest file's last line: as if a crash had cut it.
            assert bit // 8 == len(whole) - 1, (file, bit)
            assert found == right[:-1]
            assert f"the last line of {file.name} has no end and is left out" in caplog.text
        file.write_bytes(whole)


def test_another_record_in_the_place_of_the_one_that_is_built_on_is_refused(path: Path) -> None:
    first = Journal(path)
    first.row(1, 1, row(1))()
    first.close()
    begun(path, 2, 0).close()
    record, other = json.loads(path.read_bytes()), row(1, "0-1")
    del record["sum"]
    path.write_bytes(encoded({**record, "digest": digest_of(other), "row": other}))
    with pytest.raises(StoreError, match="doesn't have the record at byte"):
        History(path)


def test_a_file_that_the_newest_builds_on_must_be_there(path: Path) -> None:
    train(Journal(path), 1, 1, 2)
    begun(path, 2, 2).close()
    cut = path.read_bytes()
    path.write_bytes(cut[: cut.index(b"\n") + 1])
    with pytest.raises(StoreError, match="doesn't have the record at byte"):
        History(path)
    path.unlink()
    with pytest.raises(StoreError, match=r"builds on 'journal\.jsonl', and that is missing"):
        History(path)


def test_the_journal_of_an_older_version_is_gone_on_with(path: Path) -> None:
    """It is one file, of all terms, whose lines have no digest of their own."""
    old: list[dict[str, Any]] = []
    for term, steps in ((1, (1, 2, 3)), (4, (4,))):
        if term > 1:
            old.append({"kind": "resumed", "term": term, "step": 2, "time": 1.5})
        for step in steps:
            head = {"term": term, "step": step}
            digest = digest_of(row(step))
            old.append({"kind": "row", **head, "row": row(step), "digest": digest, "time": 1.5})
            old.append({"kind": "applied", **head, "digest": digest, "time": 1.5})
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in old))
    assert History(path).outcomes() == {1: "applied", 2: "applied", 4: "applied"}
    journal = begun(path, 5, 2)
    journal.applied(5, 3)()
    journal.applied(5, 4)()
    train(journal, 5, 5, 5)
    journal.close()
    history = History(path)
    assert history.outcomes() == dict.fromkeys(range(1, 6), "applied")
    assert [history.row_of(step) for step in range(1, 6)] == [row(step) for step in range(1, 6)]


def test_an_older_versions_file_with_two_writers_is_gone_on_with(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A learner of term 1 that was stopped and continued wrote behind term 2's ``resumed``."""

    def old(kind: str, term: int, step: int, name: str = "0-0") -> str:
        record: dict[str, Any] = {"kind": kind, "term": term, "step": step, "time": 1.5}
        if kind != "resumed":
            record["digest"] = digest_of(row(step, name))
        if kind == "row":
            record["row"] = row(step, name)
        return json.dumps(record, separators=(",", ":")) + "\n"

    path.write_text(
        old("row", 1, 1) + old("applied", 1, 1) + old("row", 1, 2) + old("resumed", 2, 1)
        + old("applied", 1, 2) + old("row", 1, 3, "0-7") + old("applied", 2, 2)
        + old("row", 2, 3, "0-9") + old("applied", 1, 3, "0-7")
    )  # fmt: skip
    journal = Journal(path)
    assert "journal.jsonl has 3 record(s) of a learner that was overtaken" in caplog.text
    assert journal.outcomes() == {1: "applied", 2: "applied"}
    assert journal.row_of(3) == row(3, "0-9")
    journal.resumed(3, 2)
    train(journal, 3, 3, 4, "0-9")
    journal.close()
    assert History(path).outcomes() == dict.fromkeys(range(1, 5), "applied")
    assert [step for kind, _, step in told(path) if kind == "row"] == [1, 2, 3, 4]


def test_what_is_held_of_a_long_journal_is_a_few_bytes_a_step(path: Path) -> None:
    steps = 4000
    groups = [{"id": f"0-{n}", "attempt": 1, "digest": "a" * 16, "bytes": 48123} for n in range(8)]
    with open(path, "wb") as file:
        for step in range(1, steps + 1):
            batch = {"step": step, "groups": groups}
            head = {"term": 1, "step": step, "digest": digest_of(batch), "time": 1.5}
            file.write(encoded({"kind": "row", **head, "row": batch}))
            file.write(encoded({"kind": "applied", **head}))
    tracemalloc.start()
    try:
        history = History(path)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert history.outcomes() == dict.fromkeys(range(1, steps + 1), "applied")
    assert held < 60 * steps
    assert most < 200 * steps < path.stat().st_size / 3
