"""What ``tandem status`` tells beside the live view: leases, ages, letters, memory and disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from board_examples import snapshot

from tandem.common.run_folder import RunFolder
from tandem.launch.board.inspection import Inspection, inspect
from tandem.launch.board.on_disk import DiskUse, JournalEnd, disk_use, journal_end
from tandem.launch.board.page import more
from tandem.launch.board.snapshot import Episodes, Grading, Judging
from tandem.launch.cli import main
from tandem.learner.resume.journal import Journal
from tandem.replay.hosts import HEAD, Host, HostState
from tandem.replay.inspecting.inspection import KINDS, MemoryUse, OldestLease, WaitingAges

FOUND = Inspection(
    oldest_lease=OldestLease(group_id="0-801", worker="rollout-0", attempt=2, seconds=12.3),
    waiting_ages=WaitingAges(counts=(3, 1, 0, 0, 0, 0, 0, 0, 2), without_own_tokens=1),
    memory=MemoryUse(
        used=3 << 20,
        limit=512 << 20,
        kinds={**dict.fromkeys(KINDS, 0), "payloads_waiting": 2048, "problems": 1 << 20},
        estimated=True,
    ),
    disk=DiskUse(parts={"redis": 1 << 20, "model": 0, "other": 1 << 10}, free=5 << 30),
    journal=JournalEnd(rows=101, applied=100, quarantined=(7, 9)),
    notes=("ages: no answer",),
)


def test_each_finding_is_a_line() -> None:
    lines = more(snapshot(), FOUND)
    assert "ledger: admitted 1, leased 8, graded 4, taken 5, trained 792, rejected:stale 6" in lines
    assert "oldest lease: group 0-801, attempt 2, with rollout-0 for 12.3 s" in lines
    assert "graded groups by age in steps: 0 3, 1 1, 8+ 2  (and 1 of traces alone)" in lines
    assert "journal: 101 rows, applied up to step 100, quarantined: 7, 9" in lines
    assert "redis: 3 MB of 512 MB; about payloads waiting 2 KB, problems 1 MB" in lines
    assert "disk: 1 MB, 5 GB free; redis 1 MB, other 1 KB" in lines
    assert lines[-1] == "note: ages: no answer"


def test_the_first_ten_dead_letters_are_listed_and_the_others_counted() -> None:
    letter = {"attempt": 5, "worker": "rollout-1", "reason": "lease expired", "failures": 5}
    letters = [{"group_id": f"0-{n}", **letter} for n in range(13)]
    row = {"step": 4, "reason": "loss or gradient not finite"}
    told = more(snapshot(dead_letters=(*letters, row)), Inspection())
    first = told.index(
        "given up: 13 group(s) after too many failed attempts; `tandem retry` puts them back"
    )
    assert told[first + 1] == (
        "  0-0: 5 failures, the last in attempt 5 with rollout-1: lease expired"
    )
    assert told[first + 10].startswith("  0-9:")
    assert told[first + 11] == "  and 3 more (--json lists all)"
    assert told[first + 12] == "quarantined: row 4: loss or gradient not finite"
    over = replace(snapshot(dead_letters=letters), state="finished")
    assert not any("tandem retry" in line for line in more(over, Inspection()))


def test_the_disk_is_added_up_by_part(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    (folder.redis / "appendonly.aof").write_bytes(b"x" * 1000)
    (folder.checkpoints / "step-1").mkdir()
    (folder.checkpoints / "step-1" / "a").write_bytes(b"x" * 70)
    folder.metrics.write_bytes(b"x" * 30)
    (folder.path / "mine.txt").write_bytes(b"x" * 5)
    os.symlink("/etc", folder.data / "elsewhere")
    found = disk_use(folder)
    assert (found.parts["redis"], found.parts["checkpoints"]) == (1000, 70)
    assert (found.parts["metrics"], found.parts["other"], found.parts["model"]) == (30, 5, 0)
    assert found.parts["data"] < 100
    assert found.free > 0


def test_the_journal_is_told_on_its_present_line_of_history(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert journal_end(folder) is None
    first = Journal(folder.journal)
    for step in (1, 2, 3):
        first.row(1, step, {"step": step})
        first.quarantined(1, step, "nan") if step == 2 else first.applied(1, step)
    first.close()
    second = Journal(folder.journal)
    second.resumed(2, 1)
    second.close()
    with open(folder.path / "journal-0002.jsonl", "a") as file:
        file.write('{"kind":"row","te')
    assert disk_use(folder).parts["other"] == 0
    assert journal_end(folder) == JournalEnd(rows=3, applied=1, quarantined=(2,))


def test_what_can_not_be_asked_is_a_note_and_nothing_else_is_lost(
    tmp_path: Path, server: Any
) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    folder.journal.write_text("no json\n{}\n")
    folder.write_join(server.join())
    found = inspect(folder, folder.join, redis_answers=True, deadline=1.0)
    assert found.disk is not None
    assert found.memory is None
    assert [note.partition(":")[0] for note in found.notes] == [
        "journal.jsonl",
        "bytes by kind",
    ]
    far = inspect(None, folder.join, redis_answers=False, deadline=1.0)
    assert (far.disk, far.journal) == (None, None)
    assert "on its own host" in far.notes[0]


# --- the page of the keys ---


@pytest.fixture(scope="module")
def documented(root: Path) -> set[str]:
    """Keys that docs/status.md has in its table."""
    text = (root / "docs" / "status.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([a-z_.\[\]]+)` \|", text, flags=re.MULTILINE))


def keys(plain: Any, prefix: str = "") -> Iterator[str]:
    """``a``, ``a.b`` and ``a[].b`` of nested data."""
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            yield prefix + name
            yield from keys(value, f"{prefix}{name}.")
    elif isinstance(plain, list | tuple):
        for value in plain:
            yield from keys(value, prefix.removesuffix(".") + "[].")


HOST = Host(
    member="b-2f",
    state=HostState(host="b", address="10.0.0.2", pid=7, role="learner", processes=2, leaving=True),
    age=3.0,
)


def test_hosts_are_listed_with_the_head_first() -> None:
    head = HostState(host="a", address="10.0.0.1", pid=5, role=HEAD, processes=4)
    made = snapshot(hosts=(HOST, Host(member="z-1a", state=head, age=1.0)))
    assert [host.name for host in made.hosts] == ["a", "b"]
    lines = [line for line in more(made, Inspection()) if line.startswith("host ")]
    assert lines[1] == (
        "host b (10.0.0.2): learner, 2 processes, supervised by pid 7, last heard of 3.0 s ago, leaving"
    )


def test_every_key_of_the_json_is_on_the_page(documented: set[str], root: Path) -> None:
    letter = {"group_id": "0-1", "attempt": 1, "worker": "w", "reason": "r", "failures": 1}
    graded = Grading(
        samples=9,
        verdicts={},
        to_process=1,
        cached=2,
        queued=0,
        queue_wait=0.1,
        seconds=0.2,
        hang_share=0.0,
        crash_share=0.0,
        judge=Judging(
            asked=1, failed=0, retries=0, cached=0, waiting=0, seconds=0.5, failed_share=0.0
        ),
    )
    made = snapshot(dead_letters=(letter, {"step": 1, "reason": "r"}), hosts=(HOST,))
    played = Episodes(
        under_way=1, played=9, failed=1, turns=18, retokenised=0,
        environment_seconds=1.5, model_seconds=4.5,
    )  # fmt: skip
    made = replace(made, grading=graded, episodes=played)
    plain = json.loads(json.dumps({**made.to_json(), **FOUND.to_json()}))
    # Their names are data.
    plain["ledger"] = {}
    plain["memory_peaks"] = {}
    plain["disk"]["parts"] = {}
    plain["grading"]["verdicts"] = {}
    for one in plain["evaluations"]:
        one["figures"] = {}
    assert set(keys(plain)) == documented - {"ledger.STATE", "disk.parts.PART"}
    page = (root / "docs" / "status.md").read_text(encoding="utf-8")
    for part in disk_use(RunFolder(root / "docs")).parts:
        assert f"`{part}`" in page


def test_a_finished_run_has_them_all(
    finished_run: Path, documented: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(finished_run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert {key for key in status if key not in documented} == set()
    assert status["journal"] == {"rows": 250, "applied": 250, "quarantined": []}
    assert status["memory"] is None
    parts = status["disk"]["parts"]
    assert all(parts[name] > 0 for name in ("redis", "checkpoints", "model", "journal", "metrics"))
    assert main(["status", str(finished_run)]) == 0
    assert "journal: 250 rows, applied up to step 250" in capsys.readouterr().out
