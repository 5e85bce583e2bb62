"""The main job as a user runs it: real processes, a few steps, every process killed once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import Run, RunOnScreen, gone, listening, mode, step, steps, summary, tandem

from tandem.learner.resume.journal import read

pytestmark = pytest.mark.timeout(400)

FEW = (
    "run.steps=40",
    "learner.checkpoint_every=5",
    "evaluate.every=10",
    "evaluate.limit=20",
    "data.evaluate.0.limit=60",
    "log.every=4",
    "launch.backoff_seconds=0.05",
)


class Survived:
    """A run in which one process of each role was killed, and what was seen meanwhile."""

    folder: Path
    code: int
    output: str
    addresses: set[str]
    refused: tuple[int, str, str]
    status: dict
    status_between: tuple[int, int]
    status_late: dict
    command_lines: str
    pid: int
    children: list[int]


def asked(here: Path) -> dict:
    """``tandem status --json`` of the newest run there."""
    code, out, err = tandem(here, "status", "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survived]:
    here = tmp_path_factory.mktemp("survived")
    seen = Survived()
    seen.folder = folder = here / "runs" / "miniature"
    run = Run(here, "start", *FEW)
    seen.pid = run.process.pid
    try:
        run.wait_for(lambda: step(folder) >= 2, "step 2")
        seen.addresses = listening(run.tree)
        family = [run.tree, *run.tree.children(recursive=True)]
        seen.command_lines = "\n".join(" ".join(process.cmdline()) for process in family)
        seen.refused = tandem(here, "start", *FEW)
        before = step(folder)
        seen.status = asked(here)
        seen.status_between = before, step(folder)
        for at, name in ((6, "reward-0"), (9, "rollout-0"), (12, "learner-0"), (15, "redis")):
            run.wait_for(lambda at=at: step(folder) >= at, f"step {at}")
            # One after another: two deaths within one look of the supervisor have no order.
            run.kill_and_await(name)
        run.wait_for(lambda: step(folder) >= 18, "step 18")
        seen.status_late = asked(here)
        seen.children = [process.pid for process in run.tree.children(recursive=True)]
        seen.code = run.wait()
        seen.output = run.said()
        yield seen
    finally:
        run.end()


def test_a_run_survives_kill_9_of_every_process(survived: Survived) -> None:
    assert survived.code == 0, survived.output
    killed = [r["process"] for r in summary(survived.folder)["restarts"] if r["exit"] == "SIGKILL"]
    assert killed[:4] == ["reward-0", "rollout-0", "learner-0", "redis"]


def test_every_step_is_trained_once(survived: Survived) -> None:
    assert steps(survived.folder) == list(range(1, 41))
    rows = [r["row"] for r in read(survived.folder / "journal.jsonl") if r["kind"] == "row"]
    assert [row["step"] for row in rows] == list(range(1, 41))
    ids = [group["id"] for row in rows for group in row["groups"]]
    assert len(ids) == len(set(ids))


def test_new_weights_are_checked_and_pass(survived: Survived) -> None:
    lines = (survived.folder / "metrics.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    assert sum(r.get("weights/checks", 0) for r in records) > 0
    assert sum(r.get("weights/checks_failed", 0) for r in records) == 0
    scored = [r["time/score"] for r in records if "time/publish" in r]
    assert scored
    assert all(seconds > 0 for seconds in scored)


def test_it_listens_on_loopback_only(survived: Survived) -> None:
    assert survived.addresses
    assert survived.addresses <= {"127.0.0.1", "::1"}


def test_the_folder_holds_the_whole_run(survived: Survived) -> None:
    names = {path.name for path in survived.folder.iterdir()}
    assert names >= {
        *("config.yaml", "run.json", "join.json", "metrics.jsonl", "samples.jsonl"),
        *("journal.jsonl", "summary.json", "model", "checkpoints", "logs", "redis", "data"),
    }
    assert (survived.folder / "model" / "config.json").exists()
    assert list((survived.folder / "model").glob("*.safetensors"))
    logs = {path.stem for path in (survived.folder / "logs").glob("*.log")}
    assert logs >= {"learner-0", "rollout-0", "reward-0", "redis"}


def test_no_secret_is_readable_by_others_or_written_where_it_is_shown(survived: Survived) -> None:
    folder = survived.folder
    password = json.loads((folder / "join.json").read_text())["password"]
    assert mode(folder / "join.json") == mode(folder / "redis" / "redis.conf") == 0o600
    assert mode(folder) == 0o700
    assert password not in survived.command_lines
    assert password not in survived.output
    for path in folder.rglob("*"):
        if path.is_file() and mode(path) & 0o077:
            assert password.encode() not in path.read_bytes(), path


def test_the_summary_tells_what_came_of_it(survived: Survived) -> None:
    made = summary(survived.folder)
    assert made["steps"] == 40
    assert made["accuracy_before"] < 0.1
    assert 0.0 <= made["accuracy_after"] <= 1.0
    assert made["samples_trained"] == 40 * 64
    assert made["staleness_max"] <= 1
    assert set(made["idle_shares"]) >= {"learner", "rollout", "reward"}
    start = list(made["start_seconds"].values())
    assert len(start) == 6
    assert start == sorted(start)
    assert made["ledger"]["trained"] == 40 * 8
    assert "held-out accuracy" in survived.output


def test_a_second_owner_is_refused_while_it_runs(survived: Survived) -> None:
    code, out, err = survived.refused
    assert (code, out) == (75, "")
    assert f"in use by process {survived.pid}" in err
    assert len(err.splitlines()) == 1


def test_the_status_of_a_live_run(survived: Survived) -> None:
    status = survived.status
    assert status["state"] == "running"
    assert status["supervisor"] == survived.pid
    assert {member["role"] for member in status["members"]} == {"learner", "rollout", "reward"}
    assert {role["role"] for role in status["roles"]} == {"learner", "rollout", "reward"}
    earliest, latest = survived.status_between
    # The learner confirms a step before it writes its metrics.
    assert earliest <= status["step"] <= latest
    assert earliest * 8 <= status["ledger"]["trained"] <= (latest + 1) * 8
    assert status["total_steps"] == 40
    (worker,) = (member for member in status["members"] if member["role"] == "rollout")
    assert worker["version"][0] == status["term"] == 1
    assert status["step"] - 2 <= worker["version"][1] <= latest
    assert all(0 <= member["age"] < 10 for member in status["members"])
    assert status["queues"]["leased"] == status["ledger"]["leased"]
    assert sum(status["staleness"]["shares"]) == pytest.approx(1.0)
    assert status["staleness"]["max"] <= status["staleness"]["limit"] == 1
    assert all(0.0 <= role["idle"] <= 1.0 for role in status["roles"])
    assert status["restarts"] == []


def test_the_status_tells_of_restarts(survived: Survived) -> None:
    status = survived.status_late
    died = [restart["process"] for restart in status["restarts"]]
    assert died[:4] == ["reward-0", "rollout-0", "learner-0", "redis"]
    assert status["step"] >= 18


def test_what_is_piped_are_lines(survived: Survived) -> None:
    assert "\x1b" not in survived.output
    assert "\r" not in survived.output
    assert "step 40/40" in survived.output
    assert "report.png" in survived.output
    assert (survived.folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_shows_the_commands_that_ran(survived: Survived) -> None:
    code, out, err = tandem(survived.folder.parent.parent, "start", *FEW, "--dry-run")
    assert (code, err) == (0, "")
    commands = [line for line in out.splitlines() if "tandem.launch.lifeline" in line]
    assert len(commands) == 4
    for command in commands:
        # Behind the pid and before the port, which a run chooses. redis-server replaces the
        # command line that it was started with.
        arguments = command.partition(" $$ ")[2].removesuffix(" PORT")
        if arguments.startswith("exec "):
            arguments = arguments.split()[1]
        assert arguments in survived.command_lines


def test_nothing_is_left_running(survived: Survived) -> None:
    assert gone(survived.children, seconds=1)
    held = [p for p in psutil.process_iter() if str(survived.folder) in " ".join(_words(p))]
    assert held == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_finished_run_is_left_as_it_is(survived: Survived) -> None:
    before = (survived.folder / "metrics.jsonl").read_bytes()
    code, out, err = tandem(survived.folder.parent.parent, "start")
    assert (code, err) == (0, "")
    assert "is finished (40 steps" in out
    assert (survived.folder / "metrics.jsonl").read_bytes() == before


def test_evaluate_reads_a_runs_settings(survived: Survived) -> None:
    model = survived.folder / "model"
    data = survived.folder / "data" / "heldout.parquet"
    code, out, err = tandem(
        survived.folder.parent.parent,
        *("evaluate", "--model", str(model), "--data", str(data), "--limit", "60", "--json"),
    )
    assert code == 0, err
    figures = json.loads(out)
    assert figures["problems"] == 60
    assert figures["accuracy"] == pytest.approx(summary(survived.folder)["accuracy_after"])


@pytest.mark.byhand
def test_kill_9_of_all_then_ctrl_c_then_the_end(tmp_path: Path) -> None:
    words = ("start", "miniature-easy", *FEW, "run.steps=60")
    folder = tmp_path / "runs" / "miniature-easy"
    run = Run(tmp_path, *words)
    try:
        # kill -9 of the supervisor takes its children with it; Redis keeps what it was told.
        run.wait_for(lambda: step(folder) >= 3, "step 3")
        children = [process.pid for process in run.tree.children(recursive=True)]
        run.process.kill()
        run.process.wait()
        assert gone(children, seconds=10)
        code, out, _ = tandem(tmp_path, "status", str(folder))
        assert code == 0
        assert "stopped" in out

        # Ctrl-C drains and checkpoints; this life is watched on a terminal.
        run = RunOnScreen(tmp_path, *words)
        run.view.await_text(lambda told: "resumes" in told)
        run.view.resize(120, 40)
        figures = ("/60 ", "held-out", "idle", "rollout-0 v2.")
        run.view.await_text(lambda told: all(figure in told for figure in figures), 60.0)
        port = json.loads((folder / "join.json").read_text())["port"]
        run.view.type("\x03")
        assert run.wait() == 130, run.said()
        assert "SIGINT: draining and checkpointing" in run.view.text()
        assert "miniature-easy resumes" in run.said()
        assert "goes on from the last checkpoint" in run.said()
        reached = steps(folder)
        assert reached == list(range(1, len(reached) + 1))

        # The same command goes on where it stopped and ends the run.
        run = Run(tmp_path, *words)
        assert run.wait() == 0, run.said()
        assert steps(folder) == list(range(1, 61))
        made = summary(folder)
        assert made["accuracy_after"] > made["accuracy_before"] + 0.2
        assert json.loads((folder / "join.json").read_text())["port"] == port
    finally:
        run.end()


def test_offline_checkpoints_can_be_evaluated_on_the_way(tmp_path: Path) -> None:
    evaluated = ("evaluate.every=2", "evaluate.exact=true", "evaluate.limit=20")
    run = Run(tmp_path, "offline", "run.steps=4", "data.evaluate.0.limit=40", *evaluated)
    folder = tmp_path / "runs" / "miniature-sft"
    try:
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    found = [one["step"] for one in summary(folder)["evaluations"]]
    assert found == [0, 2, 4]


@pytest.mark.byhand
def test_two_ranks_run_and_survive_the_death_of_one(tmp_path: Path) -> None:
    run = Run(tmp_path, "start", *FEW, "run.steps=12", "learner.ranks=2")
    folder = tmp_path / "runs" / "miniature"
    try:
        run.wait_for(lambda: step(folder) >= 4, "step 4")
        run.kill_and_await("learner-1")
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    assert steps(folder) == list(range(1, 13))
    assert [r["process"] for r in summary(folder)["restarts"]] == ["learner-1"]


def test_a_learner_that_cannot_live_ends_the_run_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The start finds nothing wrong with it.
    (tmp_path / "own.py").write_text(
        "import sys\n"
        "assert 'learner' not in sys.argv, 'no such card'\n"
        "def pays(rows, scalars, settings): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = Run(tmp_path, "start", *FEW, "learner.objective.name=own:pays")
    try:
        assert run.wait() != 0
    finally:
        run.end()
    assert "learner-0" in run.said()
    assert "own:pays" in run.said()
    assert "no such card" in run.said()
    assert "Traceback" not in run.said().partition("the last lines of")[0]
