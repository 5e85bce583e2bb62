"""The order of problems: seeded, the same everywhere, mixed by weight."""

from __future__ import annotations

from collections import Counter

import pytest

from tandem.common.errors import DataError
from tandem.replay.order import Order, permutation

FIRST_EIGHT = [7, 2, 1, 3, 0, 4, 6, 5]


def places(order: Order, pass_: int) -> list[tuple[int, int]]:
    return [order.place(pass_, position) for position in range(order.pass_length)]


def test_the_permutation_is_the_one_of_every_machine():
    # Written down once: a change would make every run in flight resume with other problems.
    assert permutation(8, "order", 0, "a", 0).tolist() == FIRST_EIGHT


def test_one_source_is_a_permutation_of_its_problems_in_every_pass():
    order = Order([("a", 50, 3)], seed=1)
    assert order.pass_length == 50
    first, second = places(order, 0), places(order, 1)
    assert sorted(first) == sorted(second) == [(0, i) for i in range(50)]
    assert first != second


def test_another_seed_gives_another_order():
    assert places(Order([("a", 50, 1)], 1), 0) != places(Order([("a", 50, 1)], 2), 0)


def test_a_source_keeps_its_order_whatever_is_mixed_with_it():
    alone = [i for _, i in places(Order([("a", 30, 1)], 5), 0)]
    mixed = [i for s, i in places(Order([("a", 30, 1), ("b", 30, 2)], 5), 0) if s == 0]
    assert mixed[:30] == alone


def test_a_pass_uses_up_every_source_and_whole_cycles():
    order = Order([("expert", 4, 1), ("fresh", 10, 1)], seed=0)
    assert order.pass_length == 20
    found = Counter(places(order, 0))
    assert all(found[1, i] == 1 for i in range(10))
    assert sum(found[0, i] for i in range(4)) == 10


def test_small_sources_go_on_over_the_pass_border():
    order = Order([("expert", 4, 1), ("fresh", 6, 1)], seed=0)
    expert = [i for p in (0, 1) for s, i in places(order, p) if s == 0]
    rounds = [expert[i : i + 4] for i in range(0, 12, 4)]
    assert all(sorted(r) == [0, 1, 2, 3] for r in rounds)


def test_weights_spread_evenly_over_a_cycle():
    order = Order([("a", 100, 1), ("b", 100, 3)], seed=0)
    sources = [s for s, _ in places(order, 0)]
    assert all(Counter(sources[i : i + 4]) == {0: 1, 1: 3} for i in range(0, 100, 4))


def test_slots_of_a_cycle_are_spread_and_not_in_a_row():
    order = Order([("a", 100, 1), ("b", 100, 3)], seed=0)
    assert [s for s, _ in places(order, 0)[:4]] == [1, 0, 1, 1]


def test_weights_count_by_their_ratio():
    assert places(Order([("a", 9, 2), ("b", 9, 2)], 0), 0) == places(
        Order([("a", 9, 1), ("b", 9, 1)], 0), 0
    )


def test_ids_and_serials_are_inverse_over_pass_borders():
    order = Order([("a", 7, 1)], seed=0)
    for serial in (0, 6, 7, 20):
        assert order.serial(order.id_of(serial)) == serial
    assert order.id_of(8) == "1-1"


@pytest.mark.parametrize("text", ["", "3", "a-1", "1-", "-1", "1-2-3", "r:1-2:0"])
def test_what_is_no_group_id_is_refused(text: str):
    with pytest.raises(ValueError, match="is not a group id"):
        Order.parse(text)


def test_sources_of_one_name_are_refused():
    with pytest.raises(DataError, match=r"data\.train"):
        Order([("a", 1, 1), ("a", 2, 1)], seed=0)


def test_an_empty_source_is_refused():
    with pytest.raises(DataError, match="size 0"):
        Order([("a", 0, 1)], seed=0)
