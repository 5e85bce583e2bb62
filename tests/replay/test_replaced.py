"""Traces that enter groups that all failed: which groups, whose place they take, what a row keeps."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tandem.common.errors import StoreError
from tandem.common.records import Sample, Verdict
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Row, RowEntry
from tandem.replay.rules.mixing import choose_replaced, mix

GROUP_SIZE = 4


def samples(make: Any, verdicts: str) -> tuple[Sample, ...]:
    """One a letter: correct, wrong, or no verdict (-)."""
    of = {"c": Verdict.CORRECT, "w": Verdict.WRONG, "-": Verdict.CRASHED}
    pays = {"c": 1.0, "w": 0.0, "-": None}
    return tuple(make.sample(0, verdict=of[one], reward=pays[one]) for one in verdicts)


@pytest.fixture
def w(world: Any) -> Any:
    return world(
        group_size=GROUP_SIZE, groups_per_step=4, max_staleness=4, traces_when="all_failed"
    )


def row_of(w: Any, make: Any, *groups: str, traces: tuple[str, ...] = ("a/0#0",)) -> Row:
    """The row of groups with such verdicts."""
    for lease, verdicts in zip(w.lease(0, len(groups)), groups, strict=True):
        graded = make.graded(lease, 0, samples=samples(make, verdicts), trace_ids=traces)
        assert w.ledger.commit(graded).value == "committed"
    row = w.ledger.take(1, w.term)
    assert isinstance(row, Row)
    return row


def by_hand(seed: int, step: int, entry: RowEntry, rows: list[int], count: int) -> tuple[int, ...]:
    """The places whose SHA-1 is least, worked out apart from the code."""
    keys = {
        place: hashlib.sha1(
            b"replaced:%d:%d:%s:%d" % (seed, step, entry.group_id.encode(), place)
        ).digest()
        for place in rows
    }
    return tuple(sorted(sorted(rows, key=keys.__getitem__)[:count]))


def test_a_trace_takes_the_place_of_an_own_row_only_where_all_failed(w: Any, make: Any) -> None:
    row = row_of(w, make, "wwww", "wcww", "wwww", "cccc")
    found = [(entry.trace_ids, len(entry.replaced)) for entry in row.ids]
    assert found == [(("a/0#0",), 1), ((), 0), (("a/0#0",), 1), ((), 0)]
    for entry in (row.ids[0], row.ids[2]):
        assert entry.replaced == by_hand(w.settings.seed, 1, entry, [0, 1, 2, 3], 1)


def test_samples_without_a_verdict_give_way_first(w: Any, make: Any) -> None:
    row = row_of(w, make, "w-ww", "w-w-", "wwww", "-www", traces=("a/0#0", "a/0#1"))
    assert [len(entry.replaced) for entry in row.ids] == [1, 0, 2, 1]
    for entry, rows in zip(row.ids, ([0, 2, 3], [], [0, 1, 2, 3], [1, 2, 3]), strict=True):
        assert entry.trace_ids == ("a/0#0", "a/0#1")
        assert entry.replaced == by_hand(w.settings.seed, 1, entry, rows, len(entry.replaced))


def test_a_group_without_a_trace_keeps_its_samples(w: Any, make: Any) -> None:
    row = row_of(w, make, "wwww", "wwww", "wwww", "wwww", traces=())
    assert {(entry.trace_ids, entry.replaced) for entry in row.ids} == {((), ())}


def test_a_row_is_the_same_whenever_it_is_taken(w: Any, make: Any) -> None:
    row = row_of(w, make, "wwww", "wcww", "wwww", "ww-w")
    assert w.ledger.take(1, w.term) == row
    assert Row.from_dict(json.loads(json.dumps(row.to_dict()))) == row


def test_what_the_journal_has_is_written_again_with_who_gave_way(
    w: Any, make: Any, world: Any
) -> None:
    row = row_of(w, make, "wwww", "wcww", "wwww", "ww-w")
    w.store.redis.hdel(w.store.key("rows"), "1")
    w.store.redis.hset(w.store.key("meta"), "journalled", 0)
    for entry in row.ids:
        bucket, field = divmod(w.ledger.order.serial(entry.group_id), 256)
        w.store.redis.hdel(w.store.key(f"final:{bucket}"), field)
    term = w.ledger.new_term()
    assert w.ledger.reassert([row], term) == 1
    assert w.ledger.take(1, term) == row


@pytest.mark.parametrize("places", [[1, 0], [1.5], ["0"], [-1], "0", {"a": 1}])
def test_a_row_whose_places_are_none_is_refused(w: Any, make: Any, places: Any) -> None:
    row = row_of(w, make, "wwww", "wcww", "wwww", "ww-w").to_dict()
    row["step"] = 2
    row["groups"][0]["replaced"] = places
    with pytest.raises(StoreError, match="damaged entry for group"):
        w.store.script("reassert", w.term, json.dumps(row))


def test_traces_that_enter_always_replace_nothing(world: Any, make: Any) -> None:
    w = world(group_size=GROUP_SIZE, groups_per_step=2, max_staleness=4)
    row = row_of(w, make, "www", "wcw")
    assert [(entry.trace_ids, entry.replaced) for entry in row.ids] == [(("a/0#0",), ())] * 2
    assert "replaced" not in json.dumps(row.to_dict())


def test_groups_of_a_run_from_before_are_taken_with_their_traces(world: Any, make: Any) -> None:
    """Neither the ledger's setting nor the groups' counts are there."""
    w = world(group_size=GROUP_SIZE, groups_per_step=1, max_staleness=4)
    (lease,) = w.lease(0, 1)
    w.ledger.commit(make.graded(lease, 0, trace_ids=("a/0#0",)))
    serial = w.ledger.order.serial(lease.group_id)
    w.store.redis.hdel(w.store.key(f"group:{serial}"), "correct", "own_rows")
    w.store.redis.hdel(w.store.key("meta"), "traces_when")
    # It is resumed with the settings that it was begun with.
    resumed = Ledger(w.store, "rollout-0")
    assert resumed.create(w.settings) is False
    assert resumed.settings.traces_when == "always"
    row = resumed.take(1, w.term)
    assert isinstance(row, Row)
    assert [(entry.trace_ids, entry.replaced) for entry in row.ids] == [(("a/0#0",), ())]


def test_the_draw_is_keyed_by_seed_step_and_group() -> None:
    rows = tuple(range(8))
    first = choose_replaced(3, 5, "0-1", rows, 3)
    assert first == choose_replaced(3, 5, "0-1", rows, 3)
    others = [
        choose_replaced(seed, step, group, rows, 3)
        for seed, step, group in ((4, 5, "0-1"), (3, 6, "0-1"), (3, 5, "0-2"))
    ]
    assert all(one != first for one in others)
    # Every place is drawn about as often: 3/8 of 4,000 draws, five standard deviations apart.
    drawn = [place for step in range(4000) for place in choose_replaced(0, step, "0-0", rows, 3)]
    for place in rows:
        assert abs(drawn.count(place) - 1500) < 155


def test_more_traces_than_places_replace_every_own_row() -> None:
    found = mix(
        ["a", "b", "c"], when="all_failed", correct=0, own_rows=(0, 1), group_size=2, seed=0,
        step=1, group_id="0-0",
    )  # fmt: skip
    assert found == (("a", "b", "c"), (0, 1))
