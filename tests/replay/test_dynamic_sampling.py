"""Groups that teach nothing are left out of a row, and later ones take their places."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.common.errors import StoreError
from tandem.common.records import Verdict
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings, Row, Waiting

W, C = (0.0, Verdict.WRONG), (1.0, Verdict.CORRECT)


def commit(w: Any, make: Any, *groups: str, traces: tuple[str, ...] = ()) -> list[str]:
    """Leases and commits a group for each word, a sample a letter: correct or wrong; returns their ids."""
    of = {"c": C, "w": W}
    leases = w.lease(0, len(groups))
    assert len(leases) == len(groups)
    for lease, word in zip(leases, groups, strict=True):
        samples = tuple(make.sample(0, reward=of[one][0], verdict=of[one][1]) for one in word)
        group = make.graded(lease, 0, samples=samples, trace_ids=traces)
        assert w.ledger.commit(group).value == "committed"
    return [lease.group_id for lease in leases]


def test_a_row_is_filled_with_groups_that_have_a_signal(world: Any, make: Any) -> None:
    w = world(groups_per_step=2, max_staleness=3, dynamic_sampling=4)
    ids = commit(w, make, "ww", "cw", "cc", "wc")
    row = w.ledger.take(1, w.term)
    assert [entry.group_id for entry in row.ids] == [ids[1], ids[3]]
    assert row.left_out == 2
    assert w.ledger.state_of(ids[0]) == "rejected(no_signal, 1)"
    counts = w.ledger.counts()
    assert (counts["rejected:no_signal"], counts["taken"], counts["graded"]) == (2, 2, 0)
    # Their samples are no longer kept, and the next row counts anew.
    assert len(w.store.redis.keys(w.store.key("payload:*"))) == 2
    commit(w, make, "cw", "cw")
    assert w.ledger.take(2, w.term).left_out == 0


def test_strictly_on_policy_others_are_leased_for_what_was_left_out(world: Any, make: Any) -> None:
    w = world(groups_per_step=2, max_staleness=0, dynamic_sampling=4)
    commit(w, make, "ww", "cw")
    assert not w.lease(0, 1), "a step's groups are out or graded"
    assert isinstance(w.ledger.take(1, w.term), Waiting)
    third = commit(w, make, "wc")
    row = w.ledger.take(1, w.term)
    assert isinstance(row, Row)
    assert row.ids[-1].group_id == third[0]


def test_past_the_limit_groups_without_a_signal_are_trained_on(world: Any, make: Any) -> None:
    w = world(groups_per_step=2, max_staleness=3, dynamic_sampling=2)
    ids = commit(w, make, "ww", "cc", "ww", "cc")
    row = w.ledger.take(1, w.term)
    assert [entry.group_id for entry in row.ids] == ids[2:]
    assert row.left_out == 2


def test_without_the_setting_every_group_is_trained_on(world: Any, make: Any) -> None:
    w = world(groups_per_step=2)
    commit(w, make, "ww", "cc")
    row = w.ledger.take(1, w.term)
    assert (len(row.ids), row.left_out) == (2, 0)
    assert "left_out" not in row.to_dict()


@pytest.mark.parametrize(
    ("when", "groups", "left_out"),
    [
        # A correct trace beside samples that all failed is a signal, beside correct ones none.
        ("always", ("ww", "cc", "cw"), 1),
        # The trace doesn't enter beside a correct sample.
        ("all_failed", ("ww", "cc", "cw"), 1),
    ],
)
def test_expert_rows_count(
    world: Any, make: Any, when: str, groups: tuple[str, ...], left_out: int
) -> None:
    w = world(groups_per_step=2, max_staleness=3, dynamic_sampling=4, traces_when=when)
    w.store.redis.hset(w.store.key("trace_rewards"), "a/1#0", "1.0")
    ids = commit(w, make, *groups, traces=("a/1#0",))
    row = w.ledger.take(1, w.term)
    assert [entry.group_id for entry in row.ids] == [ids[0], ids[2]]
    assert row.left_out == left_out


@pytest.mark.parametrize(
    ("means", "kept"),
    [
        ((0.2, 0.8), (1, 2)),
        ((0.25, 0.5), (1, 2)),
        ((0.0, 0.3), (0, 1)),
        ((0.5, 1.0), (2, 3)),
        (None, (0, 1)),
    ],
)
def test_a_group_whose_mean_reward_is_out_of_bounds_gives_way(
    world: Any, make: Any, means: tuple[float, float] | None, kept: tuple[int, int]
) -> None:
    w = world(groups_per_step=2, max_staleness=3, dynamic_sampling=4, mean_rewards=means)
    ids = commit(w, make, "wwwwwwwc", "wcww", "cwcw", "cccccccw")
    row = w.ledger.take(1, w.term)
    assert [entry.group_id for entry in row.ids] == [ids[place] for place in kept]
    assert row.left_out == sum(place not in kept for place in range(kept[1]))


def test_expert_rows_count_in_the_mean(world: Any, make: Any) -> None:
    w = world(groups_per_step=1, max_staleness=3, dynamic_sampling=4, mean_rewards=(0.2, 0.7))
    w.store.redis.hset(w.store.key("trace_rewards"), "a/1#0", "1.0")
    # With the trace: means of 0.75, 0.5.
    ids = commit(w, make, "ccw", "cww", traces=("a/1#0",))
    assert [entry.group_id for entry in w.ledger.take(1, w.term).ids] == ids[1:]


def test_a_group_that_was_committed_without_its_sum_is_kept(world: Any, make: Any) -> None:
    w = world(groups_per_step=1, max_staleness=3, dynamic_sampling=4, mean_rewards=(0.4, 0.6))
    ids = commit(w, make, "wwwc", "cw")
    w.store.redis.hdel(w.store.key("group:0"), "total", "rewards")
    assert [entry.group_id for entry in w.ledger.take(1, w.term).ids] == ids[:1]


def test_a_trace_whose_reward_is_not_known_keeps_its_group(world: Any, make: Any) -> None:
    w = world(groups_per_step=2, max_staleness=3, dynamic_sampling=4)
    commit(w, make, "cc", "ww", traces=("a/1#0",))
    assert w.ledger.take(1, w.term).left_out == 0


def test_a_row_that_redis_lost_says_again_what_it_left_out(world: Any, make: Any) -> None:
    w = world(groups_per_step=2, max_staleness=3, dynamic_sampling=4)
    commit(w, make, "ww", "cw", "wc")
    row = w.ledger.take(1, w.term)
    plain = json.loads(json.dumps(row.to_dict()))
    assert plain["left_out"] == 1
    w.store.redis.hdel(w.store.key("rows"), "1")
    w.store.redis.hset(w.store.key("meta"), "journalled", 0)
    for entry in row.ids:
        w.store.redis.hdel(w.store.key("final:0"), str(w.ledger.order.serial(entry.group_id)))
    assert w.ledger.reassert([Row.from_dict(plain)], w.term) == 1
    assert w.ledger.take(1, w.term) == row


def test_the_limit_may_change_and_older_ledgers_have_none(world: Any) -> None:
    w = world(dynamic_sampling=3)
    assert Ledger(w.store, "other").settings.dynamic_sampling == 3
    fields = {name: getattr(w.settings, name) for name in w.settings.__slots__}
    assert not w.ledger.create(LedgerSettings(**{**fields, "dynamic_sampling": 0}))
    assert w.ledger.settings.dynamic_sampling == 0
    w.ledger.create(LedgerSettings(**{**fields, "mean_rewards": (-0.5, 1.0)}))
    assert Ledger(w.store, "another").settings.mean_rewards == (-0.5, 1.0)
    w.store.redis.hdel(w.store.key("meta"), "dynamic_sampling", "least_mean", "greatest_mean")
    older = Ledger(w.store, "third").settings
    assert (older.dynamic_sampling, older.mean_rewards) == (0, None)
    assert isinstance(w.ledger.take(1, w.term), Waiting)


def test_a_negative_limit_is_refused(world: Any) -> None:
    with pytest.raises(StoreError, match="dynamic_sampling"):
        world(dynamic_sampling=-1)
    with pytest.raises(StoreError, match="greatest_mean is 'inf'"):
        world(mean_rewards=(0.0, float("inf")))
