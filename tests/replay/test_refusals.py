"""What can't be is refused by name before anything is written; a full server still serves those who
free it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from tandem.common.errors import FullError, StoreError
from tandem.common.records import Version
from tandem.replay.answers import read_take
from tandem.replay.connection import Store, connect, readable_error
from tandem.replay.evaluating.evaluations import EvaluationRequest, EvaluationResult
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Row
from tandem.replay.members import Members
from tandem.replay.store import RunStore

Worlds = Callable[..., Any]


def everything(store: Store) -> dict[bytes, bytes]:
    # Answers apart: a read may put a hash in another order.
    names = [n for n in store.redis.scan_iter(store.key("*")) if b":answers:" not in n]
    return {name: store.redis.dump(name) for name in names}


@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        ("lease", ("rollout-0", "h", 1, 0, "many", 0, 0), r"argument 7 \(count\) is 'many'"),
        ("lease", ("rollout-0", "h"), "4 arguments, not 9"),
        ("take", ("nan", 1), r"argument 3 \(step\) is 'nan', not a whole number"),
        ("take", ("1.5", 1), r"argument 3 \(step\)"),
        ("renew", ("h", "0", "9999999999"), r"argument 5 \(serial\)"),
        ("new_term", ("1e308",), r"argument 3 \(term\)"),
        ("quarantine", (1, 1, b"\xff", 0), "UTF-8"),
        ("set_state", ("stopped",), "one of running, draining, finished, failed"),
        ("append", ("leased", "x", 5), "no name of another key"),
        ("beat", ("m", "[1]"), "a JSON object"),
        ("create", ('{"seed": "1"}', "{}"), "setting [a-z_]+ is missing"),
        ("reassert", (1, '{"step": 1, "short": false, "groups": {}}'), "has 0 groups"),
    ],
)
def test_a_call_that_can_not_be_is_refused_by_name_and_changes_nothing(
    world: Worlds, script: str, args: tuple[Any, ...], said: str
):
    w = world()
    w.commit(w.lease(count=1))
    before = everything(w.store)
    with pytest.raises(StoreError, match=said):
        w.store.script(script, *args)
    assert everything(w.store) == before


def test_what_the_client_library_can_not_send_is_refused(world: Worlds):
    with pytest.raises(StoreError, match="can't be sent this"):
        world().store.script("take", None, 1)


def test_a_request_number_of_another_script_does_not_give_its_answer(world: Worlds):
    w = world()
    command = list(w.store.command("new_term", 0))
    w.store.batch([tuple(command)])
    other = list(w.store.command("finish_evaluation", "h@1", "{}"))
    other[4:6] = command[4:6]
    (answer,) = w.store.batch([tuple(other)])
    assert "was a new_term" in str(answer)


def test_a_group_that_can_not_be_stored_does_not_spoil_its_batch(world: Worlds, make: Any):
    w = world()
    leases = w.lease(count=2)
    groups = [make.graded(one) for one in leases]
    groups[0] = make.graded(leases[0], trace_ids=("x" * 300,))
    first, second = w.ledger.commit_many(groups)
    assert (first.result, second.result) == ("rejected", "committed")
    assert "trace ids" in first.detail


def test_a_journal_whose_row_holds_a_group_of_another_row_is_refused_whole(world: Worlds):
    w = world()
    row = w.step(1).to_dict()
    again = [Row.from_dict({**row, "step": step}) for step in (2, 3)]
    before = everything(w.store)
    with pytest.raises(StoreError, match="stands in row 1 as well"):
        w.ledger.reassert(again, w.term)
    assert everything(w.store) == before


def test_a_reasserted_row_keeps_samples_whose_commit_was_lost(world: Worlds, make: Any):
    w = world()
    (lease, other) = w.lease(count=2)
    w.commit([lease, other])
    row = w.ledger.take(1, w.term)
    redis, key = w.store.redis, w.store.key
    # Redis forgets all since the samples were put, as after a crash of its host.
    for name in ("taken", "rows", "final:0"):
        redis.delete(key(name))
    redis.hset(key("meta"), mapping={"journalled": 0, "cursor": 0})
    names = [key(f"payload:{e.group_id}:{e.attempt}:{e.digest}") for e in row.ids]
    for name in names:
        redis.expire(name, 600)
    assert w.ledger.reassert([row], w.term) == 1
    assert [redis.ttl(name) for name in names] == [-1, -1]


def test_an_evaluation_whose_result_is_there_is_not_asked_for_again(world: Worlds):
    run = RunStore(world().store)
    result = EvaluationResult(
        id="h@1",
        set_name="h",
        step=1,
        accuracy=0.5,
        problems=3,
        format_share=1.0,
        mean_length=4.0,
        seconds=1.0,
        member="rollout-0",
    )
    run.request_evaluation(EvaluationRequest(id="h@1", set_name="h", step=1), 1)
    run.finish_evaluation("h@1", result)
    run.request_evaluation(EvaluationRequest(id="h@1", set_name="h", step=1), 1)
    assert run.open_evaluations() == []


def test_a_full_server_hears_heartbeats_renews_leases_and_lets_a_learner_start(
    own_server: Any, make: Any
):
    store = connect(own_server.join())
    w = make.world(store)
    (lease,) = w.lease()
    store.redis.config_set("maxmemory", 1)
    Members(store).register("learner", "learner", {})
    assert w.ledger.renew([lease.group_id]) == []
    assert w.ledger.new_term() == w.term + 1
    assert not w.ledger.create(w.settings)
    with pytest.raises(StoreError, match=r"Redis is full: raise replay\.maxmemory_mb"):
        store.call("set", store.key("large"), "x", deadline=0.1)
    store.redis.config_set("maxmemory", 0)
    store.close()


def test_a_write_that_a_full_server_refuses_names_the_setting():
    why = readable_error(OutOfMemoryError("command not allowed when used memory > 'maxmemory'."))
    assert isinstance(why, FullError)
    assert "raise replay.maxmemory_mb" in str(why)


def test_a_damaged_entry_of_the_registry_hides_nobody_else(store: Store):
    members = Members(store)
    members.register("reward", "reward-0", {"endpoint": "x"})
    members.register("reward", "reward-1", {})
    store.redis.hset(store.key("members"), "reward-1", b'{"role": 5}')
    assert [member.member for member in members.live("reward")] == ["reward-0"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"waiting": {"group_id": 1}}',
        b'{"row": {"step": 1}, "quarantined": ""}',
    ],
)
def test_an_answer_that_is_none_is_named(raw: bytes):
    with pytest.raises(StoreError, match=r"answer to a take|row 1 of the ledger"):
        read_take(raw)


def test_settings_that_are_damaged_in_redis_are_named(world: Worlds):
    w = world()
    w.store.redis.hset(w.store.key("meta"), "seed", "seven")
    with pytest.raises(StoreError, match=r"has a setting that can't be read.*seven"):
        Ledger(w.store, "rollout-1").lease(Version(term=1, step=0), 1)


def test_a_report_with_words_for_seconds_is_named(world: Worlds):
    w = world()
    w.store.redis.hset(w.store.key("reports"), "rollout-0", json.dumps({"time": "noon"}))
    with pytest.raises(StoreError, match="has 'noon' for seconds"):
        RunStore(w.store).reports()
