"""The one record of how a run stands: made of a history and a look into Redis, real ones too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from board_examples import KNOWN, NOW, REPORTS, facts, history, member, record, snapshot

from tandem.common.errors import StoreError
from tandem.common.run_folder import RunFolder
from tandem.launch.board.assembly import assemble
from tandem.launch.board.facts import Activity, ask
from tandem.launch.board.history import History
from tandem.launch.board.inspection import Inspection
from tandem.launch.board.look import known_of, look, may_answer
from tandem.launch.board.page import more
from tandem.launch.board.snapshot import Known, Queues
from tandem.launch.host.folder_lock import FolderLock
from tandem.replay.connection import Store, connect
from tandem.replay.hosts import HEAD, Host, HostState
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.members import Members
from tandem.replay.store import RunStore


def test_it_tells_steps_pace_and_time_left() -> None:
    made = snapshot()
    assert (made.step, made.total_steps) == (100, 250)
    assert made.seconds_per_step == pytest.approx(0.5)
    assert made.seconds_left == pytest.approx(75.0)
    assert made.tokens_sampled_per_second == 1500.0
    assert made.tokens_trained_per_second == pytest.approx(2400.0)


def test_queues_come_from_the_ledger_and_from_the_reports() -> None:
    assert snapshot().queues == Queues(
        returned=1, leased=8, submitted=3, grading=2, graded=4, taken=5, evaluations=1
    )


def test_each_role_tells_how_long_it_waits_and_for_whom() -> None:
    told = {role.role: (role.idle, role.waits_for, role.waits_what) for role in snapshot().roles}
    assert told["learner"] == (pytest.approx(0.4), "rollout", "the next batch")
    assert told["rollout"] == (pytest.approx(0.5), "learner", "staleness")
    assert told["reward"] == (pytest.approx(0.9), "rollout", "groups to grade")


def test_a_wait_under_way_makes_the_learner_idle_before_its_step_is_written() -> None:
    waits = {**REPORTS, "learner-0": {**REPORTS["learner-0"], "waiting": "for group 0-7"}}
    later = assemble(KNOWN, history(), facts(reports=waits), now=NOW + 8)
    (learner,) = (role for role in later.roles if role.role == "learner")
    assert learner.idle == pytest.approx((4.0 + 8.0) / (10.0 + 8.0))


def test_a_process_that_was_not_heard_of_grows_silent_and_its_report_old() -> None:
    gone = member("rollout-0", age=30.0, version=[1, 99])
    old = {**REPORTS, "rollout-0": {**REPORTS["rollout-0"], "time": NOW - 30}}
    made = snapshot(members=(gone,), reports=old)
    assert [(one.member, one.age, one.version) for one in made.members] == [
        ("rollout-0", 30.0, (1, 99))
    ]
    assert made.queues.submitted == 0
    assert made.tokens_sampled_per_second is None


def test_evaluations_are_told_before_the_learner_writes_them() -> None:
    assert [(one.step, one.accuracy) for one in snapshot().evaluations] == [
        (0, 0.0),
        (50, 0.25),
        (100, 0.5),
    ]


def test_a_report_counts_once_and_for_as_long_as_it_is_recent() -> None:
    activity = Activity(seconds=5.0)
    for moment in (10.0, 12.0, 12.0, 30.0):
        activity.add({"reward-0": {"time": moment, "clock": {"wait/groups": 1.0, "total": 2.0}}})
        if moment == 12.0:
            assert activity.seconds("reward-0") == {"wait/groups": 2.0, "total": 4.0}
    assert activity.seconds("reward-0") == {"wait/groups": 1.0, "total": 2.0}


def test_without_redis_the_folder_and_the_metrics_tell_what_they_can() -> None:
    made = assemble(KNOWN, history(), now=NOW)
    assert (made.state, made.step, made.members) == ("running", 100, ())


@pytest.mark.parametrize(
    ("leaving", "age", "state", "told"),
    [
        (False, 0.5, "running", "running"),
        (True, 0.5, "running", "draining"),
        (True, 0.5, "finished", "finished"),
        # An earlier start of the head has left it.
        (True, 300.0, "running", "running"),
    ],
)
def test_a_run_drains_while_its_head_says_so(
    leaving: bool, age: float, state: str, told: str
) -> None:
    said = HostState(
        host="here", address="127.0.0.1", pid=77, role=HEAD, processes=3, leaving=leaving
    )
    head = Host(member="here-0a1b2c", state=said, age=age)
    assert snapshot(state=state, hosts=(head,)).state == told


def test_without_a_folder_the_learners_report_tells_the_step() -> None:
    made = assemble(Known(run="join.json"), History(), facts(), now=NOW)
    assert (made.step, made.total_steps, made.reward) == (100, 250, 0.4)


def test_it_can_be_written_as_json() -> None:
    plain = json.loads(json.dumps(snapshot().to_json()))
    assert plain["ledger"]["leased"] == 8
    assert plain["staleness"] == {"mean": 0.75, "max": 1.0, "limit": 1, "shares": [0.25, 0.75]}
    assert plain["members"][2]["version"] == [1, 99]


# --- real parts ---


@pytest.fixture
def store(server: Any) -> Iterator[Store]:
    made = connect(server.join(), name="test")
    yield made
    made.close()


SETTINGS = LedgerSettings(
    sources=(("a", 20, 1),),
    seed=0,
    data_digest="d",
    group_size=4,
    groups_per_step=2,
    max_staleness=1,
    steps=9,
)


def test_a_look_into_a_real_redis(store: Store) -> None:
    Ledger(store, "supervisor").create(SETTINGS)
    RunStore(store).report("rollout-0", {**REPORTS["rollout-0"], "time": NOW})
    Members(store).register("rollout", "rollout-0", {"pid": 5, "host": "h", "version": [1, 3]})
    RunStore(store).count_restart("reward-0", "grader 7: deadline")
    found = ask(store, dead_letters=True)
    assert (found.steps, found.limit, found.journalled, found.grader_restarts) == (9, 1, 0, 1)
    made = assemble(Known(run="r"), History(), found, now=found.time)
    (worker,) = made.members
    assert (worker.member, worker.pid, worker.version) == ("rollout-0", 5, (1, 3))
    assert worker.age < 10
    assert made.waiting_for.startswith("row 1 is waiting for group 0-0, admitted")
    assert made.ledger["leased"] == 0


def test_a_run_whose_redis_does_not_answer_is_told_from_its_folder(
    tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.launch.board.look.ANSWER_SECONDS", 0.1)
    folder = RunFolder(tmp_path / "run")
    folder.make()
    with servers.running(tmp_path) as server:
        folder.write_join(server.join())
    folder.write_run({"preset": "miniature", "state": "running"})
    folder.metrics.write_text(json.dumps(record(7)) + "\n")
    lock = FolderLock(folder)
    lock.take()
    try:
        made = look(folder, folder.join)
        assert (made.state, made.step, made.members) == ("running", 7, ())
        assert "didn't answer" in made.problem
    finally:
        lock.release()
    with pytest.raises(StoreError, match="didn't answer"):
        look(None, folder.join)


@pytest.mark.parametrize("before", ["stopped", "failed", "running"])
def test_a_run_that_is_being_resumed_starts_and_its_standstill_is_no_time(
    before: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    now = time.time()
    # It was up for 100 s, an hour ago; a supervisor that was killed leaves "running".
    began = {"state": before, "began": now - 3700, "alive": now - 3600}
    folder.write_run({**began, "wall_seconds": 100.0 if before == "stopped" else 0.0})
    lock = FolderLock(folder)
    lock.take()
    try:
        made = known_of(folder)
        assert made.state == "starting"
        assert made.elapsed_seconds == pytest.approx(100.0)
        folder.write_run({**began, "state": "running", "began": now - 5, "alive": time.time()})
        made = known_of(folder)
        assert made.state == "running"
        assert made.elapsed_seconds == pytest.approx(5.0, abs=60)
    finally:
        lock.release()


def test_a_run_whose_report_is_being_drawn_has_finished_and_its_time_counts_once(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    lock = FolderLock(folder)
    lock.take()
    try:
        now = time.time()
        ended = {"state": "finished", "began": now - 100, "alive": now, "wall_seconds": 100.0}
        folder.write_run(ended)
        made = known_of(folder)
        assert (made.state, made.elapsed_seconds) == ("finished", 100.0)
        # Its own Redis has ended.
        assert not may_answer(folder, made)
    finally:
        lock.release()


def test_a_run_that_starts_is_told_so_though_its_external_redis_says_it_runs() -> None:
    known = replace(KNOWN, state="starting")
    assert assemble(known, history(), facts(members=()), now=NOW).state == "starting"
    assert assemble(known, history(), facts(), now=NOW).state == "running"


def held_elsewhere(folder: RunFolder) -> None:
    """A shared folder as another host's supervisor leaves it while it runs, or when it is killed."""
    folder.make()
    folder.write_run({"preset": "miniature", "state": "running"})
    lock = {"host": "node3.elsewhere", "supervisor": {"pid": 7, "started": 1.5}}
    folder.lock.write_text(json.dumps(lock))


def test_a_run_that_another_host_supervises_is_asked_for_its_state(
    tmp_path: Path, server: Any
) -> None:
    folder = RunFolder(tmp_path / "run")
    held_elsewhere(folder)
    join = server.join()
    folder.write_join(join)
    store = connect(join, name="test")
    Ledger(store, "supervisor").create(SETTINGS)
    Members(store).register("rollout", "rollout-0", {"pid": 5, "host": "node3", "version": [1, 3]})
    store.close()
    made = look(folder, folder.join)
    assert (made.state, made.supervisor, made.problem) == ("running", None, "")
    assert [one.member for one in made.members] == ["rollout-0"]
    # Its end is in the record, though its name stays in the lock.
    folder.write_run({"preset": "miniature", "state": "stopped"})
    made = look(folder, folder.join)
    assert (made.state, made.members) == ("stopped", ())


def test_where_that_redis_does_not_answer_it_is_said_who_supervises_the_run(
    tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.launch.board.look.ANSWER_SECONDS", 0.1)
    folder = RunFolder(tmp_path / "run")
    held_elsewhere(folder)
    with servers.running(tmp_path) as server:
        folder.write_join(server.join())
    said = "supervised by process 7 on node3.elsewhere, whose Redis doesn't answer here: "
    made = look(folder, folder.join)
    assert (made.state, made.members) == ("running", ())
    assert made.problem.startswith(said)
    folder.join.unlink()
    assert "join.json is missing" in look(folder, folder.join).problem


def test_a_finished_run_is_told_from_its_folder(finished_run: Path) -> None:
    folder = RunFolder(finished_run)
    made = look(folder, folder.join)
    assert (made.state, made.supervisor) == ("finished", None)
    assert made.step == made.total_steps == 250
    assert made.ledger["trained"] == 250 * 8
    assert {role.role for role in made.roles} == {"learner", "rollout", "reward"}
    assert made.evaluations[-1].step == 250
    assert sum(made.staleness.shares) == pytest.approx(1.0)
    assert made.entropy is not None
    assert any("heldout at step 250" in line for line in more(made, Inspection()))
    assert folder.report.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_failed_is_told_so_though_its_external_redis_answers(
    tmp_path: Path, server: Any
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    join = server.join()
    folder.write_join(join)
    folder.config.write_text("replay: {redis_url: 'redis://elsewhere:6379'}\nrun: {steps: 9}\n")
    folder.write_run({"preset": "miniature", "state": "failed"})
    folder.metrics.write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2)))
    store = connect(join, name="test")
    Ledger(store, "supervisor").create(SETTINGS)
    RunStore(store).set_state("running")
    store.close()
    made = look(folder, folder.join)
    assert (made.state, made.seconds_left, made.term) == ("failed", None, 0)


def test_a_run_that_ends_before_its_last_step_is_measured_by_its_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.config.write_text("run: {steps: 1000, last_step: 50}\n")
    folder.write_run({"preset": "miniature", "state": "finished"})
    folder.metrics.write_text(json.dumps(record(50)) + "\n")
    made = look(folder, folder.join)
    assert (made.step, made.total_steps) == (50, 50)
    # The ledger knows all steps, and the learner hasn't reported yet.
    begun = assemble(
        replace(KNOWN, total_steps=50), History(), facts(steps=1000, reports={}), now=NOW
    )
    assert begun.total_steps == 50
