"""The order of problems: seeded, the same everywhere, mixed by weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tandem.common.errors import DataError
from tandem.replay.rules import order as rules_order
from tandem.replay.rules.order import Cipher, Order, permutation

FIRST_EIGHT = [7, 2, 1, 3, 0, 4, 6, 5]
FIRST_OF_A_MILLION = [687659, 975634, 439827, 232947, 237964, 278817, 84953, 810177]


def places(order: Order, pass_: int) -> list[tuple[int, int]]:
    return [order.place(pass_, position) for position in range(order.pass_length)]


def test_the_permutation_is_the_one_of_every_machine():
    # Written down once: a change would make every run in flight resume with other problems.
    assert permutation(8, "order", 0, "a", 0).tolist() == FIRST_EIGHT


def test_the_order_of_a_large_source_is_the_one_of_every_machine():
    order = Order([("a", 10**6, 1)], seed=0)
    assert [order.place(0, position)[1] for position in range(8)] == FIRST_OF_A_MILLION


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_a_cipher_is_a_permutation(size: int):
    cipher = Cipher(size, "order", 0)
    assert sorted(cipher[place] for place in range(size)) == list(range(size))


def test_many_sources_in_turn_are_each_sorted_once_a_round(monkeypatch: pytest.MonkeyPatch):
    sorted_: list[tuple[int | str, ...]] = []

    def counted(size: int, *key: int | str) -> Any:
        sorted_.append(key)
        return permutation(size, *key)

    monkeypatch.setattr(rules_order, "permutation", counted)
    places(Order([(f"s{number}", 8, 1) for number in range(40)], seed=0), 0)
    assert len(sorted_) == 40


def test_a_cipher_shows_no_order():
    """As with random numbers: no place keeps its number, neighbours lie far apart, and each part of the
    places goes to each part of the numbers alike."""
    size, parts = 65_536, 16
    shuffled = np.array(
        [Cipher(size, "order", seed)[place] for seed in [3] for place in range(size)]
    )
    distances = np.abs(np.diff(shuffled))
    assert abs(distances.mean() / (size / 3) - 1) < 0.02
    assert (shuffled == np.arange(size)).sum() < 10
    cells, _, _ = np.histogram2d(np.arange(size), shuffled, bins=parts)
    expected = size / parts**2
    assert ((cells - expected) ** 2 / expected).sum() < 225 + 5 * (2 * 225) ** 0.5


def test_sources_over_the_limit_have_another_order_and_the_same_problems():
    sources = [("a", 50, 1), ("b", 10, 1)]
    one, other = Order(sources, seed=1), Order(sources, seed=1, sorted_up_to=10)
    first, second = places(one, 0), places(other, 0)
    assert [place for place in first if place[0] == 1] == [
        place for place in second if place[0] == 1
    ]
    assert sorted(first) == sorted(second)
    assert first != second
    assert places(other, 1) != second


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
