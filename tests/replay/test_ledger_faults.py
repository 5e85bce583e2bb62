"""The ledger under crashes and races: nothing acknowledged is lost, nothing happens twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tandem.common.records import Version
from tandem.replay.connection import Store, connect, script_names, script_source
from tandem.replay.evaluating.evaluations import EvaluationRequest
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Row
from tandem.replay.members import Members
from tandem.replay.store import RunStore

Worlds = Callable[..., Any]


def test_a_killed_server_comes_back_with_all_that_it_acknowledged(own_server: Any, make: Any):
    store = connect(own_server.join())
    w = make.world(store, max_staleness=3)
    row = w.step(1)
    w.ledger.confirm(1, w.term)
    leases = w.lease(held=1, count=4)
    w.commit(leases[:3], step=1)
    before = (w.ledger.counts(), w.ledger.journalled(), w.ledger.term())
    own_server.kill()
    own_server.start()
    assert (w.ledger.counts(), w.ledger.journalled(), w.ledger.term()) == before
    assert w.ledger.take(1, w.term) == row
    second = w.ledger.take(2, w.term)
    assert [group.group_id for group in w.ledger.fetch(second)] == ["0-2", "0-3"]
    store.close()


def test_a_server_killed_under_load_loses_no_acknowledged_commit(own_server: Any, make: Any):
    store = connect(own_server.join())
    w = make.world(store, max_staleness=1000, sources=(("a", 100, 1),))
    acknowledged: list[str] = []
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            for lease in w.lease(count=4):
                if w.commit([lease]) == ["committed"]:
                    acknowledged.append(lease.group_id)
            if len(acknowledged) > 40:
                begun.set()

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(2):
        assert begun.wait(30)
        own_server.kill()
        own_server.start()
        begun.clear()
    assert begun.wait(30)
    stop.set()
    worker.join(30)
    graded = {w.ledger.order.id_of(int(s)) for s in store.redis.zrange(store.key("graded"), 0, -1)}
    assert graded == set(acknowledged)
    assert len(acknowledged) == len(set(acknowledged))
    store.close()


def test_a_new_life_of_the_server_moves_deadlines_on_before_they_are_judged(
    own_server: Any, make: Any
):
    store = connect(own_server.join())
    w = make.world(store, lease_seconds=60)
    (lease,) = w.lease()
    now = int(store.redis.time()[0]) * 1000
    store.redis.zadd(store.key("deadlines"), {"0": now - 5000})  # it passed while Redis was down
    own_server.kill()
    own_server.start()
    other = Ledger(store, "rollout-1").lease(Version(term=1, step=0), 1)
    assert other.leases[0].group_id == "0-1"
    assert w.ledger.renew([lease.group_id]) == []
    assert store.redis.zscore(store.key("deadlines"), "0") > now
    store.close()


def test_a_server_that_kept_its_scripts_over_a_restart_is_found_out_as_well(
    own_server: Any, make: Any
):
    store = connect(own_server.join())
    w = make.world(store, lease_seconds=60)
    w.lease()
    for name in script_names():
        store.redis.script_load(script_source(name))  # Redis 6.2 keeps these in its file
    now = int(store.redis.time()[0]) * 1000
    store.redis.zadd(store.key("deadlines"), {"0": now - 5000})
    own_server.kill()
    own_server.start()
    assert w.lease(ledger=w.member("rollout-1"))[0].group_id == "0-1"
    store.close()


def test_deadlines_move_on_once_a_life(own_server: Any, make: Any):
    store = connect(own_server.join())
    w = make.world(store, lease_seconds=60)
    w.lease()
    before = store.redis.zscore(store.key("deadlines"), "0")
    own_server.kill()
    own_server.start()
    for _ in range(2):
        other = connect(own_server.join(store.run_id))
        other.redis.script_flush()
        other.script("waiting")
        other.close()
    assert store.redis.zscore(store.key("deadlines"), "0") == before + 60_000
    store.close()


def test_the_first_life_of_a_server_is_no_restart(world: Worlds):
    """On a server that has the scripts of another run, nobody comes by to say so."""
    w = world(lease_seconds=60)
    (lease,) = w.lease()
    now = int(w.store.redis.time()[0]) * 1000
    w.store.redis.zadd(w.store.key("deadlines"), {"0": now - 5000})
    assert w.lease(ledger=w.member("rollout-1"))[0].group_id == lease.group_id


def silence(store: Store, seconds: int, *leases: Any) -> None:
    """Time goes by while the server is stopped: nobody is heard of, and nobody can renew."""
    store.redis.decrby(store.key("heard"), seconds * 1000)
    for lease in leases:
        serial = lease.group_id.partition("-")[2]
        store.redis.zincrby(store.key("deadlines"), -seconds * 1000, serial)
        store.redis.hincrby(store.key(f"group:{serial}"), "cap", -seconds * 1000)


@pytest.mark.parametrize("first", ["lease", "beat", "take"])
def test_time_in_which_the_server_was_stopped_is_not_the_workers(world: Worlds, first: str):
    w = world(lease_seconds=10)
    members = Members(w.store)
    members.register("rollout", "rollout-0", {})
    (lease,) = w.lease()
    silence(w.store, 20, lease)
    # Whoever is heard first when the server goes on.
    if first == "beat":
        members.beat("rollout-0")
    elif first == "take":
        w.ledger.take(1, w.term)
    assert w.lease(ledger=w.member("rollout-1"))[0].group_id == "0-1"
    assert w.ledger.renew([lease.group_id]) == []
    assert w.commit([lease]) == ["committed"]


def test_the_cap_of_a_lease_does_not_run_out_in_a_silence(world: Worlds):
    w = world(lease_seconds=10, group_deadline_seconds=15)
    members = Members(w.store)
    members.register("rollout", "rollout-0", {})
    (lease,) = w.lease()
    silence(w.store, 60, lease)
    assert w.ledger.renew([lease.group_id]) == []


def test_what_is_renewed_together_is_renewed_by_one_lease_time(world: Worlds):
    w = world(lease_seconds=10, group_deadline_seconds=15)
    Members(w.store).register("rollout", "rollout-0", {})
    fresh, old = w.lease(count=2)
    silence(w.store, 60, old)  # seen only when it is the turn of the old one
    assert w.ledger.renew([fresh.group_id, old.group_id]) == []
    now = int(w.store.redis.time()[0]) * 1000
    assert w.store.redis.zscore(w.store.key("deadlines"), "0") <= now + 11_000


def test_a_clock_that_is_put_back_keeps_no_dead_worker_and_no_lease_of_it_alive(world: Worlds):
    w = world(lease_seconds=10)
    members = Members(w.store)
    members.register("rollout", "rollout-0", {})
    members.register("rollout", "rollout-1", {})
    kept, lost = w.lease(count=2)
    hour = 3_600_000
    # Everything was written by a clock that was an hour ahead; rollout-0 had been silent for 30 s by it.
    silence(w.store, -3600, kept, lost)
    for name, ms in (("rollout-0", hour - 30_000), ("rollout-1", hour)):
        w.store.redis.zincrby(w.store.key("beats"), ms, name)
    members.beat("rollout-1")
    assert [m.member for m in members.live()] == ["rollout-1"]
    now = int(w.store.redis.time()[0]) * 1000
    for serial in ("0", "1"):
        assert 0 < w.store.redis.zscore(w.store.key("deadlines"), serial) - now < 12_000
        assert int(w.store.redis.hget(w.store.key(f"group:{serial}"), "cap")) - now < 1_802_000
    assert w.ledger.renew([kept.group_id]) == []
    w.expire(lost)
    assert w.lease(ledger=w.member("rollout-1"))[0].group_id == lost.group_id


def claimed(w: Any) -> RunStore:
    """An evaluation that rollout-0 has claimed."""
    run = RunStore(w.store)
    run.request_evaluation(EvaluationRequest(id="e", set_name="heldout", step=0), w.term)
    assert run.claim_evaluation("rollout-0", Version(term=w.term, step=0)) is not None
    return run


def expires(w: Any) -> int:
    return int(w.store.redis.hget(w.store.key("evaluation_claims"), "e").split()[0])


@pytest.mark.parametrize("first", ["claim", "beat"])
def test_time_in_which_the_server_was_stopped_ends_no_claim_of_an_evaluation(
    world: Worlds, first: str
):
    w = world(lease_seconds=10)
    members = Members(w.store)
    members.register("rollout", "rollout-0", {})
    members.register("rollout", "rollout-1", {})
    run, held = claimed(w), Version(term=w.term, step=0)
    silence(w.store, 60)
    claims = w.store.key("evaluation_claims")
    w.store.redis.hset(claims, "e", f"{expires(w) - 60_000} rollout-0")
    if first == "beat":
        members.beat("rollout-1")
    assert run.claim_evaluation("rollout-1", held) is None
    assert run.renew_evaluation("e", "rollout-0")
    # Others were heard of meanwhile: its worker is dead.
    w.store.redis.hset(claims, "e", "1 rollout-0")
    assert run.claim_evaluation("rollout-1", held) is not None


def test_a_claim_of_the_dead_ends_by_a_clock_that_is_put_back(world: Worlds):
    w = world(lease_seconds=10)
    members = Members(w.store)
    members.register("rollout", "rollout-1", {})
    claimed(w)
    silence(w.store, -3600)
    ahead = expires(w) + 3_600_000
    w.store.redis.hset(w.store.key("evaluation_claims"), "e", f"{ahead} rollout-0")
    members.beat("rollout-1")
    assert expires(w) - int(w.store.redis.time()[0]) * 1000 < 32_000


def test_a_lease_by_a_clock_that_was_put_back_is_told_as_a_new_one(world: Worlds):
    w = world()
    w.lease()
    w.store.redis.hincrby(w.store.key("group:0"), "leased_ms", 3_600_000)
    assert "leased for 0.0 s" in w.ledger.waiting_for()


def test_the_leases_of_the_dead_expire_while_others_are_heard_of(world: Worlds):
    w = world(lease_seconds=10)
    members = Members(w.store)
    members.register("rollout", "rollout-0", {})
    (lease,) = w.lease()
    silence(w.store, 20, lease)
    members.beat("rollout-0")
    w.expire(lease)
    assert w.lease(ledger=w.member("rollout-1"))[0].group_id == lease.group_id


@pytest.mark.parametrize("first", ["its next life", "another member", "a restarted server"])
def test_a_worker_that_an_outage_has_ended_costs_its_groups_no_attempt(
    own_server: Any, make: Any, first: str
):
    store = connect(own_server.join())
    w = make.world(store, lease_seconds=10, max_attempts=1)
    members = Members(store)
    members.register("rollout", "rollout-0", {})
    members.register("rollout", "rollout-1", {})
    (lease,) = w.lease()
    if first == "a restarted server":
        own_server.kill()
        own_server.start()
    else:
        silence(store, 20, lease)
    if first == "another member":
        members.beat("rollout-1")
    later = connect(own_server.join(store.run_id))
    (again,) = w.lease(ledger=Ledger(later, "rollout-0"))
    assert (again.group_id, again.attempt) == (lease.group_id, 2)
    assert w.ledger.dead_letters() == []
    later.close()
    store.close()


def test_a_lease_whose_worker_never_came_back_from_an_outage_expires_uncounted(world: Worlds):
    w = world(lease_seconds=10, max_attempts=1)
    Members(w.store).register("rollout", "rollout-0", {})
    (lease,) = w.lease()
    silence(w.store, 20, lease)
    Members(w.store).register("rollout", "rollout-1", {})
    w.expire(lease)
    (again,) = w.lease(ledger=w.member("rollout-1"))
    assert again.group_id == lease.group_id
    # The next one to die has no outage to blame.
    w.expire(again)
    assert w.lease(ledger=w.member("rollout-2"))[0].group_id == "0-1"
    assert [letter["reason"] for letter in w.ledger.dead_letters()] == ["lease expired"]


def test_a_worker_that_dies_after_it_was_heard_of_again_costs_an_attempt(
    world: Worlds, server: Any
):
    w = world(lease_seconds=10, max_attempts=1)
    Members(w.store).register("rollout", "rollout-0", {})
    (lease,) = w.lease()
    silence(w.store, 20, lease)
    Members(w.store).register("rollout", "rollout-0", {})
    assert w.ledger.renew([lease.group_id]) == []
    later = connect(server.join(w.store.run_id))
    assert w.lease(ledger=Ledger(later, "rollout-0"))[0].group_id == "0-1"
    assert [letter["reason"] for letter in w.ledger.dead_letters()] == ["its worker died"]
    later.close()


def test_workers_that_lease_at_once_never_share_a_group(server: Any, make: Any):
    store = connect(server.join())
    w = make.world(store, max_staleness=1000)
    taken: list[str] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        ledger = Ledger(store, f"rollout-{index}")
        start.wait()
        for _ in range(15):
            taken.extend(lease.group_id for lease in w.lease(count=3, ledger=ledger))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 180
    assert Counter(taken).most_common(1)[0][1] == 1
    store.close()


def test_one_of_two_attempts_that_commit_at_once_counts(server: Any, make: Any):
    store = connect(server.join())
    w = make.world(store, max_staleness=1000)
    for _ in range(10):
        (lease,) = w.lease()
        w.expire(lease)
        (again,) = w.lease(ledger=w.member("rollout-1"))
        start = threading.Barrier(2)
        results: list[str] = []

        def commit(which: Any, start: Any = start, results: Any = results) -> None:
            start.wait()
            results.extend(w.commit([which]))

        threads = [threading.Thread(target=commit, args=(x,)) for x in (lease, again)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == ["committed", "superseded"]
    store.close()


def test_a_stopped_learner_that_wakes_up_can_not_take_what_a_new_one_takes(world: Worlds):
    w = world(max_staleness=9)
    old = w.term
    w.commit(w.lease(count=6))
    rows: list[Row] = []
    fenced: list[BaseException] = []
    w.ledger.take(1, old)
    new = w.ledger.new_term()

    def zombie() -> None:
        try:
            w.ledger.take(2, old)
        except BaseException as error:  # noqa: BLE001 - the thread hands it to the test
            fenced.append(error)

    thread = threading.Thread(target=zombie)
    thread.start()
    rows.append(w.ledger.take(2, new))
    thread.join()
    assert len(fenced) == 1
    assert [entry.group_id for entry in rows[0].ids] == ["0-2", "0-3"]


def test_a_full_server_makes_commits_wait_until_the_learner_frees_memory(
    own_server: Any, make: Any
):
    store = connect(own_server.join())
    w = make.world(store, groups_per_step=2)
    w.step(1)
    w.ledger.confirm(1, w.term)
    leases = w.lease(held=1, count=2)
    store.redis.config_set("maxmemory", "1")  # below what is used: every write that adds fails
    done = threading.Event()
    results: list[str] = []

    def commit() -> None:
        results.extend(w.commit(leases, step=1))
        done.set()

    thread = threading.Thread(target=commit)
    thread.start()
    assert not done.wait(0.1)
    w.ledger.confirm(1, w.term)
    w.ledger.durable(1, w.term)  # what frees memory works when full
    store.redis.config_set("maxmemory", "0")
    assert done.wait(20)
    thread.join()
    assert results == ["committed", "committed"]
    store.close()


def test_a_full_server_still_takes_and_confirms(own_server: Any, make: Any):
    store = connect(own_server.join())
    w = make.world(store)
    w.commit(w.lease(count=2))
    store.redis.config_set("maxmemory", "1")
    row = w.ledger.take(1, w.term)
    assert isinstance(row, Row)
    w.ledger.confirm(1, w.term)
    w.ledger.durable(1, w.term)
    assert w.ledger.counts()["trained"] == 2
    store.close()


def test_a_run_is_not_seen_from_another_run_on_the_same_server(server: Any, make: Any):
    one, two = connect(server.join()), connect(server.join())
    first, second = make.world(one), make.world(two)
    first.lease(count=2)
    assert second.ledger.counts()["leased"] == 0
    assert isinstance(one, Store)
    one.close()
    two.close()
