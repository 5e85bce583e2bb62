"""``tandem retry`` as a user types it, on a real ledger with groups that were given up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tandem.common.records import Problem, Version
from tandem.common.run_folder import RunFolder, read_join, write_private
from tandem.launch.cli import main
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.store import RunStore


@pytest.fixture
def folder(tmp_path: Path, server: Any) -> RunFolder:
    """Of a run in a Redis of the user's, which is up without a supervisor."""
    made = RunFolder(tmp_path / "run")
    made.make()
    made.write_join(server.join())
    made.write_run({"preset": "miniature", "state": "stopped"})
    made.config.write_text("replay: {redis_url: redis://there}\n")
    return made


@pytest.fixture
def ledger(folder: RunFolder) -> Iterator[Ledger]:
    """Groups 0-0 to 0-2 were given up, 0-3 is leased."""
    store = connect(read_join(folder.join), name="test")
    RunStore(store).put_problems(_problem(row) for row in range(20))
    made = Ledger(store, "rollout-0")
    made.create(
        LedgerSettings(
            sources=(("a", 20, 1),),
            seed=0,
            data_digest="d",
            group_size=2,
            groups_per_step=4,
            max_staleness=1,
            max_attempts=1,
            steps=9,
        )
    )
    made.new_term()
    for lease in made.lease(Version(term=1, step=0), 4).leases[:3]:
        made.give_back(lease.group_id, lease.attempt, reason="no memory", failed=True)
    yield made
    store.close()


def _problem(row: int) -> Problem:
    return Problem(
        problem_id=f"a/{row}",
        prompt_text="1+1=?",
        prompt_tokens=np.arange(5, dtype=np.int32),
        gold="2",
        data_source="miniature",
        ability="math",
        trace_ids=(),
        extra={},
    )


def retry(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["retry", *words])
    out, err = capsys.readouterr()
    assert len(err.splitlines()) <= 1
    return code, out, err


def test_those_that_are_named_go_back(
    ledger: Ledger, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = retry(capsys, str(folder.path), "0-2", "0-0")
    assert code == 0
    assert out.splitlines() == [
        "0-2        put back  after 1 failure, the last with rollout-0: no memory",
        "0-0        put back  after 1 failure, the last with rollout-0: no memory",
        "2 group(s) put back, 0 not",
    ]
    assert [letter["group_id"] for letter in ledger.dead_letters()] == ["0-1"]


def test_all_of_them_go_back_and_a_program_is_told_as_json(
    ledger: Ledger, folder: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    join = tmp_path / "join-copy.json"
    write_private(join, folder.join.read_text())
    code, out, _ = retry(capsys, "--join", str(join), "--all", "--json")
    assert code == 0
    told = json.loads(out)
    assert [one["group_id"] for one in told["returned"]] == ["0-0", "0-1", "0-2"]
    assert told["returned"][0]["reason"] == "no memory"
    assert (told["refused"], told["quarantined_rows"]) == ([], [])
    assert ledger.counts()["admitted"] == 3
    assert retry(capsys, "--join", str(join), "--all")[:2] == (0, "0 group(s) put back, 0 not\n")


def test_one_that_is_no_dead_letter_makes_the_exit_code_1_and_the_others_go_back(
    ledger: Ledger, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = retry(capsys, "--run", str(folder.path), "0-3", "0-0", "0-77")
    assert code == 1
    assert "0-3        not       is leased: no dead letter" in out
    assert "0-77       not       isn't a group of this run" in out
    assert "1 group(s) put back, 2 not" in out
    assert ledger.state_of("0-0") == "admitted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "for all 3 dead letters"),
        (("0-0", "0_1"), "'0_1' isn't a group id"),
        (("--all", "0-1"), "--all takes no group ids"),
        (("--join", "x"), "one of --run DIR and --join FILE"),
    ],
)
def test_what_was_mistyped_is_told_and_nothing_changes(
    ledger: Ledger,
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    code, out, err = retry(capsys, "--run", str(folder.path), *words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(ledger.dead_letters()) == 3


def test_a_folder_that_is_not_there_is_no_group_either(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'runs/x' is neither the folder" in retry(capsys, "runs/x", "0-1")[2]
    assert "there is no run under runs/" in retry(capsys, "0-1")[2]


def test_a_stopped_run_of_its_own_redis_says_how_to_bring_it_back(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.config.write_text("replay: {redis_url: null}\n")
    code, _, err = retry(capsys, str(folder.path), "--all")
    assert code == 1
    assert "isn't running" in err
    assert "`tandem start` resumes it" in err
    folder.write_run({"preset": "miniature", "state": "finished"})
    assert "run.steps=N" in retry(capsys, str(folder.path), "--all")[2]


def test_a_wrong_password_and_a_dead_redis_are_one_line(
    ledger: Ledger,
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    servers: Any,
    tmp_path: Path,
) -> None:
    known = read_join(folder.join)
    folder.write_join(replace(known, password="wrong"))
    code, _, err = retry(capsys, str(folder.path), "--all")
    assert code == 1
    assert "refused the password" in err
    assert "wrong" not in err
    monkeypatch.setattr("tandem.launch.commands.retry.ANSWER_SECONDS", 0.1)
    with servers.running(tmp_path) as gone:
        folder.write_join(gone.join())
    code, _, err = retry(capsys, str(folder.path), "--all")
    assert code == 1
    assert "didn't answer" in err
    assert len(ledger.dead_letters()) == 3
