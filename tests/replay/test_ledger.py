"""The ledger, transition by transition."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tandem.common import wire
from tandem.common.errors import FencedError, StoreError
from tandem.common.records import CommitResult, Group, Verdict, Version
from tandem.replay.connection import Store
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings, Row, Waiting
from tandem.replay.payloads import Payload
from tandem.replay.rules.order import Order

Worlds = Callable[..., Any]


def ids(row: Row) -> list[str]:
    return [entry.group_id for entry in row.ids]


def payload_of(w: Any, group: Group) -> Payload:
    return Payload.of(group, w.ledger.order.serial(group.group_id))


# -- create ------------------------------------------------------------------------------------


def test_creating_again_with_the_same_settings_joins(world: Worlds):
    w = world()
    assert w.member("launch").create(w.settings) is False


def test_frozen_settings_that_differ_are_named(world: Worlds):
    w = world()
    other = LedgerSettings(**{**_fields(w.settings), "seed": 8, "data_digest": "e"})
    with pytest.raises(StoreError, match=r"data_digest is d there and e here; .*seed is 7"):
        w.member("launch").create(other)


def test_changeable_settings_are_taken_over(world: Worlds):
    w = world(steps=10)
    w.ledger.create({**_fields(w.settings), "steps": 20, "lease_seconds": 3.0})
    assert w.member("x").settings.steps == 20
    assert w.ledger.lease(Version(term=1, step=0), 1).lease_seconds == 3.0


def test_settings_come_back_as_they_were_stored(world: Worlds):
    w = world(sources=(("a", 4, 1), ("b", 9, 2)), passes=3, steps=None, group_bytes=5)
    assert w.member("x").settings == w.settings


def test_a_redis_without_the_run_is_refused_and_not_treated_as_new(store: Store):
    ledger = Ledger(store, "rollout-0")
    assert not store.holds_run()
    with pytest.raises(StoreError, match="holds no ledger of run"):
        ledger.lease(Version(term=1, step=0), 1)
    with pytest.raises(StoreError, match="holds no ledger of run"):
        _ = ledger.settings


def test_settings_that_do_not_go_together_are_refused(world: Worlds):
    with pytest.raises(StoreError, match="window=2 is over max_staleness"):
        world(window=2, max_staleness=0)
    with pytest.raises(StoreError, match="exactly one"):
        world(steps=None)


def _fields(settings: LedgerSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__slots__}


# -- lease -------------------------------------------------------------------------------------


def test_leases_are_positions_in_order_with_the_problem_that_stands_there(world: Worlds):
    w = world()
    leases = w.lease(count=3)
    order = Order(w.settings.sources, w.settings.seed)
    assert [lease.group_id for lease in leases] == ["0-0", "0-1", "0-2"]
    assert [lease.problem_id for lease in leases] == [f"a/{order.place(0, p)[1]}" for p in range(3)]
    assert {lease.attempt for lease in leases} == {1}


def test_positions_run_on_over_the_border_of_a_pass(world: Worlds):
    w = world(sources=(("a", 3, 1),), max_staleness=3)
    assert [lease.group_id for lease in w.lease(count=5)] == ["0-0", "0-1", "0-2", "1-0", "1-1"]


def test_admission_holds_back_what_would_become_stale(world: Worlds):
    w = world(max_staleness=1)  # B = 2: two steps ahead, no more
    reply = w.ledger.lease(Version(term=1, step=0), 99)
    assert len(reply.leases) == 4
    assert reply.wait == "admission: staleness"


def test_a_late_worker_is_leased_nothing_that_would_be_stale(world: Worlds):
    w = world(max_staleness=0)
    w.step(1)
    assert w.lease(held=0) == []
    assert len(w.lease(held=1, count=9)) == 2


def test_max_inflight_bounds_leases(world: Worlds):
    w = world(max_inflight=1)
    assert len(w.lease(count=5)) == 1
    assert w.wait() == "admission: inflight"


def test_no_lease_beyond_the_last_step(world: Worlds):
    w = world(steps=1, max_staleness=3)
    assert len(w.lease(count=99)) == 2
    assert w.wait() == "admission: the last step has its groups"


def test_no_lease_beyond_the_last_pass(world: Worlds):
    w = world(sources=(("a", 3, 1),), steps=None, passes=1, max_staleness=9)
    assert len(w.lease(count=99)) == 3
    assert "every group" in w.wait()


def test_nothing_is_leased_while_the_run_drains(world: Worlds):
    w = world()
    w.store.script("set_state", "draining")
    reply = w.ledger.lease(Version(term=1, step=0), 1)
    assert (reply.leases, reply.wait, reply.state) == ((), "run is draining", "draining")


def test_an_offline_run_leases_nothing(world: Worlds):
    w = world(offline=True)
    assert w.lease() == []
    assert w.wait() == "ledger: training is offline"


def test_leases_stop_at_three_quarters_of_maxmemory(world: Worlds):
    w = world(group_bytes=100)
    w.ledger._memory = (float("inf"), 500, 1000)  # two more of 100 bytes fit under 750
    assert len(w.lease(count=9)) == 2
    assert w.wait() == "admission: memory"


def test_an_expired_lease_is_served_before_new_positions(world: Worlds):
    w = world(max_staleness=3)
    first, second = w.lease(count=2)
    w.expire(first)
    other = w.member("rollout-1")
    again = w.lease(count=2, ledger=other)
    assert [lease.group_id for lease in again] == [first.group_id, "0-2"]
    assert again[0].attempt == 2
    assert w.ledger.renew([first.group_id, second.group_id]) == [first.group_id]


def test_an_expired_group_of_low_rank_is_still_under_admission(world: Worlds):
    w = world(max_staleness=0)
    w.step(1)
    (lease, _) = w.lease(held=1, count=2)
    w.expire(lease)
    assert w.lease(held=0) == []
    assert w.lease(held=1)[0].group_id == lease.group_id


def test_a_lease_of_short_time_expires_by_itself(world: Worlds):
    w = world(lease_seconds=0.001)
    w.lease()
    other = w.member("rollout-1")
    hints = w.store.hints("taken")
    for _ in range(100):
        if w.lease(ledger=other)[:1] and w.ledger.counts()["leased"] == 1:
            break
        hints.wait(0.01)
    assert w.ledger.state_of("0-0") == "leased"
    hints.close()


def test_a_renewed_lease_does_not_expire(world: Worlds):
    w = world()
    (lease,) = w.lease()
    w.expire(lease)
    assert w.ledger.renew([lease.group_id]) == []
    assert w.lease(ledger=w.member("rollout-1"))[0].group_id == "0-1"


def test_renewal_is_refused_past_the_group_deadline_and_one_lease_time(world: Worlds):
    w = world(lease_seconds=0.001, group_deadline_seconds=0.001)
    (lease,) = w.lease()
    for _ in range(1000):
        if w.ledger.renew([lease.group_id]):
            break
    assert w.ledger.state_of(lease.group_id) == "admitted"


def test_another_worker_can_not_renew_a_lease(world: Worlds):
    w = world()
    (lease,) = w.lease()
    assert w.member("rollout-1").renew([lease.group_id]) == [lease.group_id]


def test_a_lease_given_back_goes_to_the_next_worker_and_is_no_failure(world: Worlds):
    w = world(max_attempts=1)
    (lease,) = w.lease()
    assert w.ledger.give_back(lease.group_id, lease.attempt)
    assert w.ledger.state_of(lease.group_id) == "admitted"
    assert w.lease()[0].group_id == lease.group_id


def test_a_lease_that_is_no_longer_held_can_not_be_given_back(world: Worlds):
    w = world()
    (lease,) = w.lease()
    assert not w.member("rollout-1").give_back(lease.group_id, lease.attempt)
    assert not w.ledger.give_back(lease.group_id, lease.attempt + 1)


def test_a_group_that_fails_too_often_is_rejected_and_listed(world: Worlds):
    w = world(max_attempts=2)
    for attempt in (1, 2):
        (lease,) = w.lease()
        assert lease.attempt == attempt
        w.ledger.give_back(lease.group_id, attempt, reason="too few samples", failed=True)
    assert w.ledger.state_of("0-0") == "rejected(attempts, 0)"
    (letter,) = w.ledger.dead_letters()
    assert letter["group_id"] == "0-0"
    assert letter["reason"] == "too few samples"
    assert w.lease()[0].group_id == "0-1"


def test_a_restarted_worker_gets_back_at_once_what_its_earlier_life_held(
    world: Worlds, server: Any
):
    from tandem.replay.connection import connect

    w = world()
    (lease,) = w.lease()
    later = connect(server.join(w.store.run_id))
    (again,) = Ledger(later, "rollout-0").lease(Version(term=1, step=0), 1).leases
    assert (again.group_id, again.attempt) == (lease.group_id, 2)
    later.close()


def test_a_worker_that_reclaims_keeps_what_its_present_life_holds(world: Worlds):
    w = world()
    (lease,) = w.lease()
    assert w.ledger.reclaim() == []
    assert w.ledger.state_of(lease.group_id) == "leased"


def test_a_repeated_lease_request_leases_once(world: Worlds):
    w = world()
    w.lease()
    command = w.store.command("lease", "rollout-0", w.ledger._holder, 1, 0, 2, 0, 0)
    first = w.store.redis.execute_command(*command)
    assert w.store.redis.execute_command(*command) == first
    assert w.ledger.counts()["leased"] == 3


# -- commit ------------------------------------------------------------------------------------


def test_a_commit_grades_a_group_and_keeps_its_payload(world: Worlds):
    w = world()
    leases = w.lease()
    assert w.commit(leases) == ["committed"]
    assert w.ledger.state_of("0-0") == "graded"
    (payload,) = w.store.redis.keys(w.store.key("payload:*"))
    assert w.store.redis.ttl(payload) == -1


def test_a_commit_stores_least_and_greatest_reward_and_the_oldest_step(world: Worlds, make: Any):
    w = world()
    (lease,) = w.lease()
    samples = (make.sample(3, reward=0.25), make.sample(2, reward=0.75), make.sample(None))
    w.commit([lease], samples=samples[:2])
    stored = w.store.redis.hgetall(w.store.key("group:0"))
    assert (float(stored[b"least"]), float(stored[b"greatest"])) == (0.25, 0.75)
    assert (float(stored[b"total"]), int(stored[b"rewards"])) == (1.0, 2)
    assert w.store.redis.zscore(w.store.key("ages"), "0") == 2


def test_a_group_committed_twice_is_a_duplicate(world: Worlds):
    w = world()
    leases = w.lease()
    assert w.commit(leases) + w.commit(leases) == ["committed", "duplicate"]
    assert w.ledger.counts()["graded"] == 1


def test_a_repeat_neither_expires_nor_changes_what_was_committed(world: Worlds, make: Any):
    w = world(groups_per_step=1)
    leases = w.lease()
    w.commit(leases)
    w.commit(leases)
    w.commit(leases, samples=(make.sample(0, reward=0.5), make.sample(0, reward=0.5)))
    row = w.ledger.take(1, w.term)
    name = f"payload:{row.ids[0].group_id}:1:{row.ids[0].digest}"
    assert w.store.redis.ttl(w.store.key(name)) == -1
    assert w.ledger.fetch(row)[0].samples[0].reward == 1.0


def test_a_commit_repeated_because_its_answer_was_lost_gets_its_first_answer(
    world: Worlds, make: Any
):
    w = world()
    (lease,) = w.lease()
    command = w.store.command("commit", *payload_of(w, make.graded(lease)).arguments)
    answers = [w.store.redis.execute_command(*command) for _ in range(2)]
    assert answers == [b'{"words":["committed"]}'] * 2


def test_an_attempt_that_was_leased_again_is_superseded(world: Worlds):
    w = world()
    leases = w.lease()
    w.expire(*leases)
    again = w.lease(ledger=w.member("rollout-1"))
    assert w.commit(leases) == ["superseded"]
    assert w.commit(again) == ["committed"]


def test_an_expired_attempt_that_nobody_leased_again_commits(world: Worlds):
    w = world(max_inflight=1)
    (lease,) = w.lease()
    w.expire(lease)
    assert isinstance(w.ledger.take(1, w.term), Waiting)  # looks, and finds it expired
    assert w.ledger.state_of(lease.group_id) == "admitted"
    assert w.commit([lease]) == ["committed"]
    assert w.ledger.counts()["admitted"] == 0


def test_a_late_duplicate_of_a_trained_group_is_still_a_duplicate(world: Worlds):
    w = world(groups_per_step=1)
    leases = w.lease()
    w.commit(leases)
    w.ledger.take(1, w.term)
    assert w.commit(leases) == ["duplicate"]
    w.ledger.confirm(1, w.term)
    w.ledger.durable(1, w.term)
    assert w.commit(leases) == ["duplicate"]


def test_a_group_with_fewer_than_two_own_verdicts_is_rejected(world: Worlds, make: Any):
    w = world()
    (lease,) = w.lease()
    samples = (
        make.sample(0),
        make.sample(0, reward=None, verdict=Verdict.CRASHED),
        make.sample(0, reward=None, verdict=Verdict.GOLD_UNPARSABLE),
        make.sample(0, reward=None, verdict=None),
        # Correct, and no component that pays had anything to say: there is nothing to learn from.
        make.sample(0, reward=None),
    )
    (receipt,) = w.ledger.commit_many([make.graded(lease, samples=samples)])
    assert receipt.result is CommitResult.REJECTED
    assert "1 of its own samples have a verdict, and the objective needs 2" in receipt.detail
    assert w.ledger.state_of(lease.group_id) == "rejected(ungraded, 0)"
    assert w.commit([lease]) == ["rejected"]


def test_a_group_that_outgrew_a_message_while_graded_is_rejected_and_the_others_are_kept(
    world: Worlds, make: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4000)
    w = world()
    first, long, last = w.lease(count=3)
    told = make.sample(0, extracted="x" * 5000)
    groups = [make.graded(first), make.graded(long, samples=(told, told)), make.graded(last)]
    receipts = w.ledger.commit_many(groups)
    assert [r.result.value for r in receipts] == ["committed", "rejected", "committed"]
    assert "over the limit of 4,000" in receipts[1].detail
    assert w.ledger.state_of(long.group_id) == "rejected(ungraded, 0)"
    # Sent again, as by a worker whose receipt was lost.
    assert w.ledger.commit_many(groups[1:2])[0].result is CommitResult.REJECTED


def test_a_group_of_one_verdict_is_kept_where_rows_are_not_compared(world: Worlds, make: Any):
    w = world(group_size=1, least_verdicts=1)
    one, none = w.lease(count=2)
    crashed = make.sample(0, reward=None, verdict=Verdict.CRASHED)
    assert w.commit([one], samples=(make.sample(0), crashed)) == ["committed"]
    assert w.commit([none], samples=(crashed,)) == ["rejected"]
    assert w.ledger.state_of(none.group_id) == "rejected(ungraded, 0)"


def test_the_floor_of_verdicts_can_not_change_in_a_run(world: Worlds):
    w = world()
    with pytest.raises(StoreError, match="least_verdicts is 2 there and 1 here"):
        w.ledger.create({**_fields(w.settings), "least_verdicts": 1})


@pytest.mark.parametrize("least", [1, 2])
def test_a_ledger_of_an_older_version_goes_on_with_two_verdicts(
    world: Worlds, make: Any, least: int
):
    w = world()
    w.store.redis.hdel(w.store.key("meta"), "least_verdicts")
    assert not w.ledger.create({**_fields(w.settings), "least_verdicts": least})
    assert w.ledger.settings.least_verdicts == 2
    one, two = w.lease(count=2)
    assert w.commit([one], samples=(make.sample(0),)) == ["rejected"]
    assert w.commit([two]) == ["committed"]


def test_a_group_that_was_never_leased_is_rejected(world: Worlds, make: Any):
    w = world()
    (lease,) = w.lease()
    stranger = make.graded(lease, group_id="0-50")
    (receipt,) = w.ledger.commit_many([stranger])
    assert receipt.result is CommitResult.REJECTED
    assert "never leased" in receipt.detail


def test_a_commit_without_its_payload_changes_nothing(world: Worlds, make: Any):
    w = world()
    (lease,) = w.lease()
    figures = payload_of(w, make.graded(lease)).figures
    assert w.store.script("commit", *figures, b"") == b'{"words":["resend"]}'
    assert w.ledger.state_of(lease.group_id) == "leased"


def test_many_commits_travel_together(world: Worlds, make: Any):
    w = world(max_staleness=40, sources=(("a", 200, 1),))
    leases = w.lease(count=70)
    assert w.commit(leases) == ["committed"] * 70


# -- take --------------------------------------------------------------------------------------


def test_a_row_holds_the_lowest_groups_in_ascending_order(world: Worlds):
    w = world()
    leases = w.lease(count=4)
    w.commit(leases[::-1])
    row = w.ledger.take(1, w.term)
    assert ids(row) == ["0-0", "0-1"]
    assert (row.step, row.short) == (1, False)
    assert w.ledger.counts()["taken"] == 2


def test_a_row_asked_for_again_is_the_same(world: Worlds):
    w = world()
    row = w.step(1)
    w.step(2)
    assert w.ledger.take(1, w.term) == row


def test_a_resumed_learner_gets_the_rows_of_the_old_one(world: Worlds):
    w = world()
    rows = [w.step(1), w.step(2)]
    term = w.ledger.new_term()
    assert [w.ledger.take(n, term) for n in (1, 2)] == rows
    assert w.ledger.journalled() == 2


def test_a_row_holds_attempt_digest_size_and_traces(world: Worlds):
    w = world(groups_per_step=1)
    leases = w.lease()
    w.commit(leases, trace_ids=("a/3#0",))
    (entry,) = w.ledger.take(1, w.term).ids
    assert (entry.attempt, entry.trace_ids) == (1, ("a/3#0",))
    (payload,) = w.store.redis.keys(w.store.key("payload:*"))
    assert w.store.redis.strlen(payload) == entry.nbytes
    assert payload.decode().endswith(entry.digest)


def test_fetched_groups_are_the_ones_committed_in_the_row_order(world: Worlds):
    w = world()
    row = w.step(1)
    groups = w.ledger.fetch(row)
    assert [g.group_id for g in groups] == ids(row)
    assert [s.reward for s in groups[0].samples] == [1.0, 0.0]


def test_large_rows_are_fetched_in_chunks(world: Worlds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tandem.replay.payloads.CHUNK_BYTES", 1500)
    w = world(groups_per_step=5)
    row = w.step(1)
    assert [g.group_id for g in w.ledger.fetch(row)] == ids(row)


def test_a_payload_that_was_damaged_is_refused(world: Worlds):
    w = world()
    row = w.step(1)
    (name, *_) = w.store.redis.keys(w.store.key("payload:*"))
    w.store.redis.setrange(name, 40, b"!")
    with pytest.raises(StoreError, match="are not the ones that the row was made of"):
        w.ledger.fetch(row)


def test_too_few_graded_groups_make_no_row_and_name_who_is_waited_for(world: Worlds):
    w = world()
    leases = w.lease(count=2)
    w.commit(leases[1:])
    waiting = w.ledger.take(1, w.term)
    assert isinstance(waiting, Waiting)
    assert (waiting.group_id, waiting.state, waiting.worker) == ("0-0", "leased", "rollout-0")
    assert "waiting for group 0-0, leased (rollout-0)" in str(waiting)
    assert "rollout-0" in w.ledger.waiting_for()
    assert w.ledger.journalled() == 0


def test_before_any_lease_the_next_position_is_waited_for(world: Worlds):
    waiting = world().ledger.take(1, 1)
    assert (waiting.group_id, waiting.reason) == ("0-0", "no worker has leased it yet")


def test_strict_order_waits_for_the_lowest_id(world: Worlds):
    w = world(max_staleness=3)
    leases = w.lease(count=4)
    w.commit(leases[1:])
    waiting = w.ledger.take(1, w.term)
    assert isinstance(waiting, Waiting)
    assert waiting.group_id == "0-0"
    w.commit(leases[:1])
    assert ids(w.ledger.take(1, w.term)) == ["0-0", "0-1"]


def test_only_the_next_row_can_be_taken(world: Worlds):
    w = world()
    with pytest.raises(StoreError, match="row 2 can not be taken: 0 rows are written"):
        w.ledger.take(2, w.term)


def test_the_sweep_rejects_what_is_too_old_and_lets_its_payload_go(world: Worlds):
    w = world(groups_per_step=1, max_staleness=0)
    w.step(1)
    (lease,) = w.lease(held=1)
    w.commit([lease], step=0)  # a worker that lies about its version
    assert isinstance(w.ledger.take(2, w.term), Waiting)
    assert w.ledger.state_of(lease.group_id) == "rejected(stale, 2)"
    assert w.ledger.counts()["rejected:stale"] == 1
    assert len(w.store.redis.keys(w.store.key("payload:*"))) == 1
    (after,) = w.lease(held=1)
    w.commit([after], step=1)
    assert ids(w.ledger.take(2, w.term)) == [after.group_id]


def test_a_group_without_own_tokens_is_never_too_old(world: Worlds):
    w = world(groups_per_step=1, max_staleness=0)
    w.step(1)
    leases = w.lease(held=1)
    w.commit(leases, step=None)
    assert isinstance(w.ledger.take(2, w.term), Row)


def test_a_window_lets_later_groups_pass_a_late_one(world: Worlds):
    w = world(window=2, max_staleness=1)
    leases = w.lease(count=4)
    w.commit(leases[1:3])
    assert ids(w.ledger.take(1, w.term)) == ["0-1", "0-2"]


def test_the_window_passes_over_no_more_than_its_steps_allow(world: Worlds):
    w = world(window=2, max_staleness=3)
    leases = w.lease(count=8)
    w.commit(leases[3:])
    waiting = w.ledger.take(1, w.term)
    assert isinstance(waiting, Waiting)
    assert "window" in waiting.reason


def test_wait_holds_the_cut_that_would_make_a_lease_too_stale(world: Worlds):
    w = world(window=2, max_staleness=1, late="wait")
    leases = w.lease(count=4)
    w.commit(leases[1:3])
    w.ledger.take(1, w.term)
    more = w.lease(held=1, count=4)
    w.commit([leases[3], *more], step=1)
    waiting = w.ledger.take(2, w.term)
    assert isinstance(waiting, Waiting)
    assert waiting.group_id == "0-0"
    w.commit(leases[:1])
    assert ids(w.ledger.take(2, w.term))[0] == "0-0"
    assert w.ledger.counts()["rejected:stale"] == 0


def test_a_wait_names_the_lease_that_is_late_and_not_a_fresh_one_before_it(world: Worlds):
    w = world(groups_per_step=1, max_staleness=3, window=3, late="wait")
    first, second, *others = w.lease(count=4)
    w.commit(others)
    w.ledger.take(1, w.term)
    w.ledger.take(2, w.term)
    # The lowest goes to a worker with newer weights; the next one is still of step 0.
    w.ledger.give_back(first.group_id, first.attempt)
    (again,) = w.lease(held=2, ledger=w.member("rollout-1"))
    assert again.group_id == first.group_id
    w.commit(w.lease(held=2), step=2)
    waiting = w.ledger.take(3, w.term)
    assert isinstance(waiting, Waiting)
    assert (waiting.group_id, waiting.worker) == (second.group_id, "rollout-0")


def test_drop_revokes_the_lease_that_would_become_too_stale(world: Worlds):
    w = world(window=2, max_staleness=1, late="drop", max_attempts=1)
    leases = w.lease(count=4)
    w.commit(leases[1:3])
    w.ledger.take(1, w.term)
    more = w.lease(held=1, count=4)
    w.commit([leases[3], *more], step=1)
    assert ids(w.ledger.take(2, w.term)) == ["0-3", "0-4"]
    assert w.ledger.renew(["0-0"]) == ["0-0"]
    assert w.commit(leases[:1]) == ["superseded"]
    (again,) = w.lease(held=2)
    assert again.group_id == "0-0"  # not a failed attempt: max_attempts is 1
    assert w.commit([again], step=2) == ["committed"]


def test_the_run_ends_after_its_steps(world: Worlds):
    w = world(steps=1)
    w.step(1)
    waiting = w.ledger.take(2, w.term)
    assert isinstance(waiting, Waiting)
    assert waiting.ended


def test_a_run_of_passes_ends_with_one_short_row(world: Worlds):
    w = world(sources=(("a", 3, 1),), steps=None, passes=1)
    assert not w.step(1).short
    w.commit(w.lease(held=1), 1)
    row = w.ledger.take(2, w.term)
    assert (ids(row), row.short) == (["0-2"], True)
    assert w.ledger.take(2, w.term) == row
    assert w.ledger.take(3, w.term).ended


def test_no_short_row_while_a_group_is_still_out(world: Worlds):
    w = world(sources=(("a", 3, 1),), steps=None, passes=1, groups_per_step=4)
    leases = w.lease(count=3)
    w.commit(leases[:2])
    assert not w.ledger.take(1, w.term).ended
    w.expire(leases[2])
    assert isinstance(w.ledger.take(1, w.term), Waiting)


def test_a_run_whose_last_groups_are_rejected_ends_without_a_row(world: Worlds, make: Any):
    w = world(sources=(("a", 2, 1),), steps=None, passes=1)
    w.commit(w.lease(count=2), samples=(make.sample(0),))
    assert w.ledger.take(1, w.term).ended


# -- confirm, quarantine, durable --------------------------------------------------------------


def test_confirmed_groups_are_trained_once(world: Worlds):
    w = world()
    row = w.step(1)
    w.ledger.confirm(1, w.term)
    w.ledger.confirm(1, w.term)
    assert w.ledger.state_of(ids(row)[0]) == "trained(1)"
    assert w.ledger.counts()["trained"] == 2
    assert w.ledger.counts()["taken"] == 0


def test_a_row_that_is_not_written_can_not_be_confirmed(world: Worlds):
    w = world()
    with pytest.raises(StoreError, match="only 0 rows are written"):
        w.ledger.confirm(1, w.term)


def test_quarantine_uses_the_number_and_keeps_the_payloads(world: Worlds):
    w = world()
    row = w.step(1)
    w.ledger.quarantine(1, w.term, "loss is nan", 0)
    w.ledger.quarantine(1, w.term, "loss is nan", 0)
    assert w.ledger.state_of("0-0") == "rejected(quarantined, 1)"
    w.step(2)
    w.ledger.confirm(2, w.term)
    w.ledger.durable(2, w.term)
    again = w.ledger.take(1, w.term)
    assert again.ids == row.ids
    assert again.quarantined == "loss is nan"
    assert len(w.ledger.fetch(again)) == 2
    assert {"step": 1, "reason": "loss is nan"} in w.ledger.dead_letters()


def test_a_trained_step_is_quarantined_where_the_learner_went_back_before_it(world: Worlds):
    w = world()
    for step in (1, 2, 3):
        w.step(step)
        w.ledger.confirm(step, w.term)
    w.ledger.durable(1, w.term)
    for step, checkpoint in ((2, 2), (2, 3), (1, 0)):
        with pytest.raises(StoreError, match="it is trained, and a checkpoint has it"):
            w.ledger.quarantine(step, w.term, "x", checkpoint)
    w.ledger.quarantine(2, w.term, "loss is nan", 1)
    assert w.ledger.state_of("0-2") == "rejected(quarantined, 2)"
    counts = w.ledger.counts()
    assert (counts["trained"], counts["rejected:quarantined"], counts["taken"]) == (4, 2, 0)
    again = w.ledger.take(2, w.term)
    assert again.quarantined == "loss is nan"


def test_durable_lets_payloads_and_rows_go_and_keeps_final_states(world: Worlds):
    w = world()
    for step in (1, 2, 3):
        w.step(step)
        w.ledger.confirm(step, w.term)
    w.ledger.durable(2, w.term)
    assert len(w.store.redis.keys(w.store.key("payload:*"))) == 2
    assert w.ledger.state_of("0-0") == "trained(1)"
    assert isinstance(w.ledger.take(3, w.term), Row)
    with pytest.raises(StoreError, match="before the oldest checkpoint kept"):
        w.ledger.take(2, w.term)


def test_durable_goes_on_in_small_calls(world: Worlds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tandem.replay.ledger.TRIM_BUDGET", 1)
    w = world()
    for step in (1, 2, 3):
        w.step(step)
        w.ledger.confirm(step, w.term)
    w.ledger.durable(3, w.term)
    assert w.store.redis.keys(w.store.key("payload:*")) == []


def test_a_checkpoint_is_not_durable_over_an_unconfirmed_step(world: Worlds):
    w = world()
    w.step(1)
    with pytest.raises(StoreError, match="step 1 is not confirmed"):
        w.ledger.durable(1, w.term)


# -- terms -------------------------------------------------------------------------------------


def test_a_newer_learner_fences_every_write_of_an_older_one(world: Worlds):
    w = world()
    row = w.step(1)
    w.ledger.confirm(1, w.term)
    old, new = w.term, w.ledger.new_term()
    assert new > old
    for call in (
        lambda: w.ledger.take(1, old),
        lambda: w.ledger.confirm(1, old),
        lambda: w.ledger.quarantine(1, old, "x", 0),
        lambda: w.ledger.durable(1, old),
        lambda: w.ledger.reassert([row], old),
        lambda: w.ledger.end("its steps are done", old),
    ):
        with pytest.raises(FencedError, match=f"term {old}, the ledger has term {new}"):
            call()
    assert w.ledger.term() == new


def test_a_term_is_greater_than_the_journal_knows(world: Worlds):
    assert world().ledger.new_term(at_least=41) == 42


def test_a_repeated_new_term_is_one_term(world: Worlds):
    w = world()
    command = w.store.command("new_term", 0)
    answers = {int(w.store.redis.execute_command(*command)) for _ in range(3)}
    assert len(answers) == 1


# -- reassert ----------------------------------------------------------------------------------


def test_rows_that_redis_lost_are_written_again_from_the_journal(world: Worlds, server: Any):
    from tandem.replay.connection import connect

    w = world()
    rows = [w.step(1), w.step(2)]
    # What Redis looks like if it lost everything after the ledger was created.
    lost = connect(server.join())
    world2 = type(w)(lost)
    again = world2.ledger
    plain = [Row.from_dict(json.loads(json.dumps(row.to_dict()))) for row in rows]
    assert again.reassert(plain, world2.term) == 2
    assert again.journalled() == 2
    assert again.take(2, world2.term) == rows[1]
    assert again.state_of("0-3") == "taken(2)"
    assert again.reassert(plain, world2.term) == 0
    assert world2.lease(held=2)[0].group_id == "0-4"
    lost.close()


def test_ids_between_reasserted_ones_are_admitted_and_never_lost(world: Worlds):
    w = world(max_staleness=9, window=4)
    row = Row.from_dict(
        {
            "step": 1,
            "short": False,
            "groups": [
                {"id": i, "attempt": 1, "digest": "0" * 16, "bytes": 1, "traces": []}
                for i in ("0-1", "0-3")
            ],
        }
    )
    w.lease(count=2)  # 0-0 and 0-1 are out while the journal says that 0-1 was taken
    w.ledger.reassert([row], w.term)
    assert w.ledger.renew(["0-0", "0-1"]) == ["0-1"]
    found = [lease.group_id for lease in w.lease(held=1, count=2)]
    assert found == ["0-2", "0-4"]


def test_a_journal_of_another_history_is_refused(world: Worlds):
    w = world()
    row = w.step(1).to_dict()
    row["groups"][0]["digest"] = "f" * 16
    with pytest.raises(StoreError, match="different histories"):
        w.ledger.reassert([Row.from_dict(row)], w.term)


def test_a_journal_with_a_gap_is_refused(world: Worlds):
    w = world()
    row = w.step(1).to_dict()
    row["step"] = 3
    with pytest.raises(StoreError, match="gap"):
        w.ledger.reassert([Row.from_dict(row)], w.term)


def test_a_reasserted_row_displaces_what_redis_thought_of_its_groups_since(
    world: Worlds, make: Any
):
    w = world(max_staleness=3, groups_per_step=3, max_attempts=1)
    graded, ungraded, given_up = w.lease(count=3)
    w.commit([graded])
    w.commit([ungraded], samples=(make.sample(0),))
    w.ledger.give_back(given_up.group_id, given_up.attempt, failed=True)
    row = Row.from_dict(
        {
            "step": 1,
            "short": False,
            "groups": [
                {"id": f"0-{i}", "attempt": 1, "digest": "0" * 16, "bytes": 1, "traces": []}
                for i in range(3)
            ],
        }
    )
    assert w.ledger.reassert([row], w.term) == 1
    assert {kind: n for kind, n in w.ledger.counts().items() if n} == {"taken": 3}
    assert w.ledger.dead_letters() == []
    payloads = w.store.redis.keys(w.store.key("payload:0-0:*"))
    assert payloads == []


# -- repeats -----------------------------------------------------------------------------------


def test_a_repeat_of_any_call_gets_its_first_answer(world: Worlds):
    """Its answer was lost on the way, and others have gone on from what it did."""
    w = world(max_staleness=9, steps=5)
    rows = [w.step(1), w.step(2), w.step(3)]
    lease, _ = w.lease(count=2)
    lost = type(w)(connect_again(w.store))
    calls = [
        (w, "give_back", w.ledger._holder, 6, lease.attempt, "drain", 0),
        (w, "reclaim", "rollout-0", "rollout-0@later"),
        (w, "confirm", 1, w.term),
        (w, "quarantine", 2, w.term, "loss is nan", 0),
        (w, "set_state", "draining"),
        (w, "end", "done", w.term),
        (lost, "reassert", lost.term, json.dumps(rows[0].to_dict())),
    ]
    sent = [(one, one.store.command(*call)) for one, *call in calls]
    answers = [one.store.redis.execute_command(*command) for one, command in sent]
    assert 0 not in answers
    w.ledger.create({**_fields(w.settings), "steps": 9})
    w.store.script("set_state", "running")
    w.lease(held=3, ledger=w.member("rollout-1"))
    before = w.ledger.counts()
    assert [one.store.redis.execute_command(*command) for one, command in sent] == answers
    assert w.ledger.counts() == before
    assert w.ledger.lease(Version(term=1, step=3), 1).wait != "run ended"
    lost.store.close()


def connect_again(store: Store) -> Store:
    """A run of its own on the same server."""
    other = copy.copy(store)
    other.run_id = f"{store.run_id}-lost"
    other._prefix = f"tandem:{other.run_id}:"
    return other


# -- end ---------------------------------------------------------------------------------------


def test_the_end_rejects_all_that_is_not_taken(world: Worlds):
    w = world(max_staleness=3)
    w.step(1)
    leases = w.lease(held=1, count=3)
    w.commit(leases[:1], step=1)
    w.ledger.give_back(leases[1].group_id, 1)
    assert w.ledger.end("its steps are done", w.term) == 3
    counts = w.ledger.counts()
    assert counts["rejected:run_ended"] == 3
    assert counts["taken"] == 2
    assert (counts["admitted"], counts["leased"], counts["graded"]) == (0, 0, 0)
    assert w.wait(held=1) == "run ended"
    assert w.commit(leases[2:]) == ["rejected"]
    assert w.ledger.take(2, w.term).ended


def test_a_run_that_ended_goes_on_with_more_steps(world: Worlds):
    w = world(steps=1)
    w.step(1)
    w.ledger.end("its steps are done", w.term)
    w.ledger.create({**_fields(w.settings), "steps": 2})
    w.step(2)
