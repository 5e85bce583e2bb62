"""Dead letters are put back: where they come in, what is refused, and what survives it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.common.errors import StoreError
from tandem.common.records import Version
from tandem.replay.dead_letters import retry
from tandem.replay.ledger_records import Lease, Row
from tandem.replay.rules import leases as rules

Worlds = Callable[..., Any]


def given_up(w: Any, lease: Lease) -> str:
    """Fails a lease whose group has one attempt only."""
    assert w.settings.max_attempts == 1
    assert w.ledger.give_back(lease.group_id, lease.attempt, reason="no memory", failed=True)
    assert w.ledger.state_of(lease.group_id) == "rejected(attempts, 0)"
    return lease.group_id


def sums_to_the_cursor(w: Any) -> bool:
    cursor = int(w.store.redis.hget(w.store.key("meta"), "cursor"))
    return sum(w.ledger.counts().values()) == cursor


def test_a_dead_letter_is_leased_again_with_a_number_of_its_own(world: Worlds):
    w = world(max_attempts=1)
    (lease,) = w.lease()
    name = given_up(w, lease)
    assert retry(w.ledger, [name]).returned == (name,)
    assert w.ledger.state_of(name) == "admitted"
    assert w.ledger.dead_letters() == []
    assert (w.ledger.counts()["admitted"], w.ledger.counts()["rejected:attempts"]) == (1, 0)
    assert sums_to_the_cursor(w)
    (again,) = w.lease()
    assert again.group_id == name
    assert again.attempt > lease.attempt + 1


def test_its_failures_are_forgotten(world: Worlds):
    w = world(max_attempts=2)
    for _ in range(2):
        (lease,) = w.lease()
        w.ledger.give_back(lease.group_id, lease.attempt, failed=True)
    retry(w.ledger, ["0-0"])
    (lease,) = w.lease()
    w.ledger.give_back(lease.group_id, lease.attempt, failed=True)
    assert w.ledger.state_of("0-0") == "admitted"


def test_a_late_commit_of_an_attempt_before_is_superseded(world: Worlds):
    w = world(max_attempts=1)
    (old,) = w.lease()
    given_up(w, old)
    retry(w.ledger, ["0-0"])
    assert w.commit([old]) == ["superseded"]
    (new,) = w.lease()
    assert w.commit([old]) == ["superseded"]
    assert w.commit([new]) == ["committed"]


def test_it_comes_behind_what_is_on_its_way_and_makes_nothing_too_old(world: Worlds):
    w = world(max_attempts=1, max_staleness=0)
    dead, kept = w.lease(count=2)
    given_up(w, dead)
    kept = [kept, *w.lease(count=1)]
    # Two live groups fill row 1; in front of them it would push the second into row 2.
    retry(w.ledger, ["0-0"])
    assert w.wait() == "admission: staleness"
    w.commit(kept)
    assert [entry.group_id for entry in w.ledger.take(1, w.term).ids] == ["0-1", "0-2"]
    later = w.lease(held=1, count=2)
    assert [lease.group_id for lease in later] == ["0-0", "0-3"]
    w.commit(later, step=1)
    row = w.ledger.take(2, w.term)
    assert isinstance(row, Row)
    assert w.ledger.counts()["rejected:stale"] == 0


def test_a_row_stays_in_the_order_of_positions(world: Worlds):
    w = world(max_attempts=1, groups_per_step=3)
    dead, *others = w.lease(count=4)
    given_up(w, dead)
    w.commit(others[:2])
    retry(w.ledger, ["0-0"])
    w.commit(others[2:])
    assert [entry.group_id for entry in w.ledger.take(1, w.term).ids] == ["0-1", "0-2", "0-3"]
    w.commit(w.lease(held=1, count=3), step=1)
    assert [entry.group_id for entry in w.ledger.take(2, w.term).ids] == ["0-0", "0-4", "0-5"]


def test_its_place_survives_a_lease_that_expires_and_a_late_commit(world: Worlds):
    w = world(max_attempts=2, max_staleness=3)
    first, *others = w.lease(count=3)
    w.expire(first)
    (again,) = w.lease()
    w.ledger.give_back(again.group_id, again.attempt, failed=True)
    retry(w.ledger, ["0-0"])
    (mine,) = w.lease()
    w.expire(mine)
    w.ledger.take(1, w.term)  # it expires here
    assert w.commit([mine, *others]) == ["committed"] * 3
    assert [entry.group_id for entry in w.ledger.take(1, w.term).ids] == ["0-1", "0-2"]


def test_a_cut_waits_for_what_is_before_it_and_says_so(world: Worlds):
    w = world(max_attempts=1)
    dead, _ = w.lease(count=2)
    given_up(w, dead)
    retry(w.ledger, ["0-0"])
    assert w.ledger.take(1, w.term).group_id == "0-1"
    assert "group 0-1, leased" in w.ledger.waiting_for()


def test_several_keep_the_order_in_which_they_were_put_back(world: Worlds):
    w = world(max_attempts=1, max_staleness=3)
    leases = w.lease(count=4)
    for lease in leases[:3]:
        given_up(w, lease)
    retry(w.ledger, ["0-2", "0-0"])
    retry(w.ledger, ["0-1"])
    again = w.lease(count=4)
    assert [lease.group_id for lease in again] == ["0-2", "0-0", "0-1", "0-4"]
    places = dict(w.store.redis.zrange(w.store.key("leased"), 0, -1, withscores=True))
    expected = rules.place_behind(4, [3])
    assert places[b"2"] == expected
    assert places[b"0"] == rules.place_behind(4, [3, expected])


@pytest.mark.parametrize("leased", [0, 4])
def test_a_run_of_passes_that_is_given_more_of_them_takes_them_back(world: Worlds, leased: int):
    w = world(sources=(("a", 4, 1),), steps=None, passes=1, max_attempts=1, max_staleness=9)
    dead, *others = w.lease(count=4)
    given_up(w, dead)
    w.commit(others)
    assert not w.ledger.take(1, w.term).short
    assert w.ledger.take(2, w.term).short
    with pytest.raises(StoreError, match="its last row, 2, is written"):
        retry(w.ledger, ["0-0"])
    w.ledger.create({**{n: getattr(w.settings, n) for n in w.settings.__slots__}, "passes": 2})
    later = w.lease(held=2, count=leased) if leased else []
    assert len(later) == leased
    assert retry(w.ledger, ["0-0"]).returned == ("0-0",)


def test_what_is_no_dead_letter_is_refused_with_the_reason(world: Worlds):
    w = world(max_attempts=1, groups_per_step=1)
    w.step(1)
    w.ledger.confirm(1, w.term)
    w.step(2)
    w.ledger.quarantine(2, w.term, "nan", 0)
    w.lease(held=2, count=2)
    w.ledger.give_back("0-3", 1)
    before = w.ledger.counts()
    told = retry(w.ledger, ["0-0", "0-1", "0-2", "0-3", "0-4", "0-100", "zero"])
    assert told.returned == ()
    assert told.refused["0-0"] == "is trained(1): no dead letter"
    assert "row 2, which was quarantined" in told.refused["0-1"]
    assert told.refused["0-2"] == "is leased: no dead letter"
    assert "admitted already" in told.refused["0-3"]
    assert told.refused["0-4"] == "was never leased yet"
    assert "from 0 to 99" in told.refused["0-100"]
    assert "isn't a group id" in told.refused["zero"]
    assert w.ledger.counts() == before


def test_asking_twice_puts_back_once(world: Worlds):
    w = world(max_attempts=1)
    given_up(w, *w.lease())
    command = w.store.command("retry", 0)
    first, again = w.store.batch([command, command])
    assert first == again == b'{"back":[0]}'
    assert retry(w.ledger, ["0-0"]).refused == {"0-0": "is admitted already: it waits for a worker"}


def test_a_run_that_cuts_no_more_rows_takes_none_back(world: Worlds):
    w = world(max_attempts=1, steps=1, groups_per_step=1, max_staleness=0)
    given_up(w, *w.lease())
    w.step(1)
    with pytest.raises(StoreError, match=r"its last row, 1, is written.*run\.steps=N"):
        retry(w.ledger, ["0-0"])
    w.ledger.end("it has trained its last step", w.term)
    with pytest.raises(StoreError, match="it has trained its last step"):
        retry(w.ledger, ["0-0"])
    assert w.ledger.state_of("0-0") == "rejected(attempts, 0)"
    w.ledger.create({**{n: getattr(w.settings, n) for n in w.settings.__slots__}, "steps": 2})
    assert retry(w.ledger, ["0-0"]).returned == ("0-0",)


@pytest.mark.parametrize("groups", [2, 3])
def test_a_run_of_passes_has_one_short_row_whenever_it_is_asked(world: Worlds, groups: int):
    w = world(sources=(("a", groups, 1),), steps=None, passes=1, max_attempts=1, max_staleness=9)
    dead, *others = w.lease(count=groups)
    given_up(w, dead)
    w.commit(others)
    assert isinstance(w.ledger.take(1, w.term), Row)
    # Of 2 groups the one row was short; of 3 it was whole, and the run ends when it is asked on.
    if groups == 3:
        assert w.ledger.take(2, w.term).ended
    with pytest.raises(StoreError, match="takes no more groups"):
        retry(w.ledger, ["0-0"])
    assert w.ledger.take(2, w.term).ended


def test_a_row_of_the_journal_counts_more_than_a_rejection_that_redis_came_back_with(
    world: Worlds,
):
    """Redis lost that a dead letter was put back, and the row that it then stood in."""
    w = world(max_attempts=1, groups_per_step=1, max_staleness=3)
    given_up(w, *w.lease())
    row = Row.from_dict(
        {
            "step": 1,
            "short": False,
            "groups": [{"id": "0-0", "attempt": 3, "digest": "d", "bytes": 1, "traces": []}],
        }
    )
    assert w.ledger.reassert([row], w.term) == 1
    assert w.ledger.state_of("0-0") == "taken(1)"
    assert w.ledger.counts()["rejected:attempts"] == 0
    assert w.ledger.dead_letters() == []
    assert sums_to_the_cursor(w)


def test_a_full_server_still_puts_them_back(own_server: Any, make: Any):
    from tandem.replay.connection import connect

    store = connect(own_server.join())
    w = make.world(store, max_attempts=1)
    given_up(w, *w.lease())
    store.redis.config_set("maxmemory", 1)
    try:
        assert retry(w.ledger, ["0-0"]).returned == ("0-0",)
    finally:
        store.redis.config_set("maxmemory", 0)
        store.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("staleness", "window", "late"),
    [(0, 1, "wait"), (1, 1, "wait"), (3, 1, "wait"), (1, 2, "wait"), (3, 3, "drop")],
)
def test_over_random_histories_nothing_is_swept_lost_or_taken_twice(
    world: Worlds, staleness: int, window: int, late: str, seed: int
):
    """Workers at any version that fail, a learner, and a person who puts back what was given up."""
    w = world(groups_per_step=3, max_staleness=staleness, window=window, late=late, max_attempts=1)
    chance = random.Random(seed)
    rows: list[Row] = []
    out: list[tuple[Lease, int]] = []
    held, put_back = [0, 0, 0], 0

    def lease() -> None:
        version = chance.choice(held)
        reply = w.ledger.lease(Version(term=w.term, step=version), chance.randrange(1, 7))
        out.extend((one, version) for one in reply.leases)

    def commit() -> None:
        if out:
            one, version = out.pop(chance.randrange(len(out)))
            w.commit([one], step=version)

    def fail() -> None:
        if out:
            one, _ = out.pop(chance.randrange(len(out)))
            w.ledger.give_back(one.group_id, one.attempt, failed=True)

    def publish() -> None:
        held[chance.randrange(3)] = len(rows)

    def take() -> None:
        row = w.ledger.take(len(rows) + 1, w.term)
        if isinstance(row, Row):
            rows.append(row)

    def put() -> None:
        nonlocal put_back
        dead = [letter["group_id"] for letter in w.ledger.dead_letters()]
        put_back += len(retry(w.ledger, chance.sample(dead, len(dead))).returned)

    actions = [lease] * 4 + [commit] * 8 + [take] * 3 + [publish] * 3 + [fail] * 2 + [put]
    for _ in range(3000):
        chance.choice(actions)()
        assert sums_to_the_cursor(w)
        if len(rows) == 15:
            break
    else:
        pytest.fail(f"the run stands still at step {len(rows)}: {w.ledger.waiting_for()}")
    assert put_back > 3
    assert w.ledger.counts()["rejected:stale"] == 0
    ids = [entry.group_id for row in rows for entry in row.ids]
    assert len(ids) == len(set(ids))
    for row in rows:
        serials = [w.ledger.order.serial(entry.group_id) for entry in row.ids]
        assert serials == sorted(serials)
