"""Two whole runs at once on a TLS server that is somebody else's, each as a user who may do no more than the rule says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
from audit import examine, gather, journal_of
from processes import Run
from scripted_engine import STEP_SECONDS
from shared_servers import Certificates, allow, in_scripts
from storm import HERE

from tandem.common.run_folder import read_join
from tandem.launch.cli import main
from tandem.replay.access import COMMANDS

pytestmark = pytest.mark.timeout(300)

GROUPS = {"first": 41, "second": 201}
"""Of each run; the second one's last for minutes at its pace."""
DATABASE = 3
OTHERS = {
    0: {"tandem": "a key of that very name", "session:1": "theirs"},
    DATABASE: {"cache:1": "theirs", "tandem-old:1": "theirs", "tandem:0123456789ab:meta": "theirs"},
}
"""Keys of other people, by database."""
PASSWORD = "TANDEM_REDIS_PASSWORD"


@dataclass(slots=True, kw_only=True)
class Shared:
    """What the two runs leave to be looked at."""

    server: Any
    folders: list[Path]
    passwords: list[str]
    output: list[str]
    """All that each run has printed."""
    while_up: dict[str, Any]
    """What was seen while both were up."""
    before: dict[tuple[int, bytes], bytes]
    """Other people's keys, serialized, before."""


def serialized(server: Any, *, runs: list[str]) -> dict[tuple[int, bytes], bytes]:
    """Every key of the server that isn't of these runs."""
    found = {}
    for db in range(16):
        client = server.client(db)
        for name in client.scan_iter():
            if not name.decode().startswith(tuple(f"tandem:{run}:" for run in runs)):
                found[db, name] = client.dump(name)
        client.close()
    return found


def command_lines(run: Run) -> str:
    """Of the processes that a run has started."""
    lines = []
    for process in run.tree.children(recursive=True):
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return "\n".join(lines)


def command(*words: str) -> tuple[int, str, str]:
    """A short command in this process: exit code, standard output, standard error."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def rows(folder: Path) -> int:
    return sum(record["kind"] == "row" for record in journal_of(folder)) if folder.exists() else 0


@pytest.fixture(scope="module")
def shared(
    tls_server: Any, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """Two runs at once; the first one ends, the second is stopped on its way."""
    place = tmp_path_factory.mktemp("runs")
    folders = [place / "first", place / "second"]
    for db, keys in OTHERS.items():
        client = tls_server.client(db)
        client.mset(keys)
        client.rpush("list", *range(100))
        client.close()
    owner = tls_server.client()
    bystander = tls_server.client().pubsub()
    bystander.subscribe("news")
    assert bystander.get_message(timeout=5.0)["type"] == "subscribe"
    before = serialized(tls_server, runs=[])
    owner.config_resetstat()
    owner.acl_log_reset()
    passwords = [allow(tls_server, user=user) for user in ("first", "second")]
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    runs: list[Run] = []

    def words(folder: Path) -> list[str]:
        cert, key = certificates.client
        return [
            "start",
            str(HERE / "storm.yaml"),
            f"run.dir={folder}",
            f"replay.redis_url=rediss://{folder.name}@127.0.0.1:{tls_server.port}/{DATABASE}",
            f"replay.redis_ca={certificates.ca}",
            f"replay.redis_cert={cert}",
            f"replay.redis_key={key}",
            f"data.miniature_fresh={GROUPS[folder.name]}",
            "rollout.workers=1",
            "reward.graders=1",
            "learner.checkpoint_every=3",
        ]

    try:
        # The second one is slow enough for all that is asked of it, until it is stopped.
        for folder, password, seconds in zip(folders, passwords, ("0.003", "0.05"), strict=True):
            patch.setenv(STEP_SECONDS, seconds)
            patch.setenv(PASSWORD, password)
            runs.append(Run(place, *words(folder)))
        patch.delenv(PASSWORD)
        second = folders[1]
        for run, folder in zip(runs, folders, strict=True):
            # The first has been trained on then.
            run.wait_for(lambda folder=folder: rows(folder) >= 2, "row 2")
        seen: dict[str, Any] = {"lines": "".join(map(command_lines, runs))}
        join_file = place / "join.json"
        patch.chdir(place)
        command("join-file", str(join_file), "--run", str(second))
        seen["status"] = command("status", "--join", str(join_file), "--json")
        seen["retry"] = command("retry", "--join", str(join_file), "--all")
        seen["again"] = command(*words(second))
        copy = place / "copy"
        shutil.copytree(second, copy)
        of_copy = [word.replace(f"dir={second}", f"dir={copy}") for word in words(second)]
        seen["copy"] = command(*of_copy)
        seen["stop"] = command("stop", str(second))
        assert runs[1].wait() == 128 + 15, runs[1].said()
        assert runs[0].wait() == 0, runs[0].said()
        owner.publish("news", "still here")
        seen["news"] = bystander.get_message(timeout=5.0)["data"]
        seen["stats"] = owner.info("commandstats")
        seen["denied"] = owner.acl_log()
        output = [run.said() for run in runs]
        yield Shared(
            server=tls_server,
            folders=folders,
            passwords=passwords,
            output=output,
            while_up=seen,
            before=before,
        )
    finally:
        for run in runs:
            run.end()
        patch.undo()
        bystander.close()
        owner.close()


def trained_once(server: Any, folder: Path) -> None:
    client = server.client(DATABASE)
    found = examine(gather(folder, client))
    client.close()
    assert found.breaches == []
    groups = GROUPS[folder.name]
    assert found.figures["groups trained"] == found.figures["groups of the run"] == groups


def test_every_group_is_trained_once_while_another_run_uses_the_database(shared: Shared) -> None:
    trained_once(shared.server, shared.folders[0])
    first, second = (read_join(folder / "join.json") for folder in shared.folders)
    assert first.run_id != second.run_id
    assert (first.port, first.db) == (second.port, second.db)
    assert 1 <= rows(shared.folders[1]) < GROUPS["second"] // 4


def test_nothing_of_other_people_is_touched(shared: Shared) -> None:
    ids = [read_join(folder / "join.json").run_id for folder in shared.folders]
    assert len(shared.before) == 7
    assert serialized(shared.server, runs=ids) == shared.before
    assert shared.while_up["news"] == b"still here"


def test_nothing_is_asked_for_that_the_rule_forbids_but_one_setting(shared: Shared) -> None:
    denied = {
        (entry["username"], entry["reason"], entry["object"]) for entry in shared.while_up["denied"]
    }
    assert denied == {(user, "command", "config|get") for user in ("first", "second")}


def test_the_rule_permits_nothing_that_no_run_asks_for(shared: Shared) -> None:
    asked = {name.removeprefix("cmdstat_") for name in shared.while_up["stats"]}
    assert COMMANDS.keys() - in_scripts() <= asked


def test_passwords_stay_in_the_join_file(shared: Shared) -> None:
    for folder, password in zip(shared.folders, shared.passwords, strict=True):
        holds = {
            path.name
            for path in folder.rglob("*")
            if path.is_file() and password.encode() in path.read_bytes()
        }
        assert holds == {"join.json"}
        assert (folder / "join.json").stat().st_mode & 0o077 == 0
        assert password not in "".join(shared.output)
        assert password not in shared.while_up["lines"]
        assert not list((folder / "redis").iterdir())
    assert "rollout-0" in shared.while_up["lines"]
    assert shared.passwords[0] not in "".join(shared.while_up["status"][1:])


def test_a_run_there_is_looked_at_and_mended_from_elsewhere(shared: Shared) -> None:
    code, out, err = shared.while_up["status"]
    assert code == 0, err
    status = json.loads(out)
    assert status["ledger"]["trained"] > 0
    assert 0 < sum(status["memory"]["kinds"].values()) < status["memory"]["used"]
    code, out, err = shared.while_up["retry"]
    assert (code, "0 group(s) put back" in out) == (0, True), err


def test_a_second_owner_is_refused_and_so_is_a_copy(shared: Shared) -> None:
    code, out, err = shared.while_up["again"]
    assert code == 75, out + err
    assert "is in use by process" in err
    code, out, err = shared.while_up["copy"]
    assert code == 75, out + err
    assert "is under way elsewhere" in err


def test_what_a_start_can_not_ask_for_is_told(shared: Shared) -> None:
    assert all("doesn't let this user ask for appendfsync" in text for text in shared.output)


@pytest.mark.byhand
def test_a_stopped_run_goes_on_without_being_told_the_password_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = shared.while_up["stop"]
    assert code == 0, err
    folder = shared.folders[1]
    monkeypatch.setenv(STEP_SECONDS, "0.003")
    # The password is in the join file, the settings in the run's folder.
    run = Run(folder.parent, "start", str(HERE / "storm.yaml"), f"run.dir={folder}")
    try:
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    assert "storm resumes in" in run.said()
    trained_once(shared.server, folder)
