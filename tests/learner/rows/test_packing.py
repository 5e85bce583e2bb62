"""Micro-batches: within the budget, units whole, as many on every rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.common.errors import ConfigError
from tandem.learner.rows.packing import plan


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    per_unit=st.integers(1, 4),
    ranks=st.integers(1, 4),
    room=st.integers(0, 400),
)
def test_every_row_is_somewhere_once_and_no_unit_is_split(
    lengths: list[int], per_unit: int, ranks: int, room: int
) -> None:
    sizes = np.array(lengths, np.int64)
    units = np.arange(len(sizes)) // per_unit
    budget = per_unit * int(sizes.max()) + room
    made = plan(sizes, units, budget=budget, ranks=ranks)
    assert len(made) == ranks
    assert len({len(mine) for mine in made}) == 1
    everything = [row for mine in made for micro in mine for row in micro.tolist()]
    assert sorted(everything) == list(range(len(sizes)))
    home: dict[int, tuple[int, int]] = {}
    for rank, mine in enumerate(made):
        for number, micro in enumerate(mine):
            if len(micro):
                assert len(micro) * sizes[micro].max() <= budget
            for row in micro.tolist():
                assert home.setdefault(int(units[row]), (rank, number)) == (rank, number)


def test_rows_are_sorted_so_that_little_is_padding() -> None:
    lengths = np.array([10, 50, 11, 49, 12, 48], np.int64)
    (mine,) = plan(lengths, np.arange(6), budget=150)
    assert [micro.tolist() for micro in mine] == [[1, 3, 5], [4, 2, 0]]


def test_a_rank_without_rows_gets_an_empty_micro_batch() -> None:
    made = plan(np.array([5], np.int64), np.zeros(1, np.int64), budget=10, ranks=2)
    assert [[len(micro) for micro in mine] for mine in made] == [[1], [0]]


def test_no_rows_make_no_micro_batch() -> None:
    assert plan(np.zeros(0, np.int64), np.zeros(0, np.int64), budget=10, ranks=2) == [[], []]


def test_a_sample_over_the_budget_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_tokens=512 .* at least 1,204"):
        plan(np.array([1204], np.int64), np.zeros(1, np.int64), budget=512)


# Packed rows.


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    per_unit=st.integers(1, 4),
    ranks=st.integers(1, 4),
    room=st.integers(0, 400),
)
def test_packed_rows_fill_the_budget_with_real_tokens(
    lengths: list[int], per_unit: int, ranks: int, room: int
) -> None:
    sizes = np.array(lengths, np.int64)
    units = np.arange(len(sizes)) // per_unit
    budget = int(np.bincount(units, sizes).max()) + room
    made = plan(sizes, units, budget=budget, ranks=ranks, packed=True)
    assert len({len(mine) for mine in made}) == 1
    everything = [row for mine in made for micro in mine for row in micro.tolist()]
    assert sorted(everything) == list(range(len(sizes)))
    for mine in made:
        loads = [int(sizes[micro].sum()) for micro in mine if len(micro)]
        assert all(load <= budget for load in loads)
        # No two could have been one.
        assert all(a + b > budget for a, b in itertools.pairwise(loads))
    home: dict[int, tuple[int, int]] = {}
    for rank, mine in enumerate(made):
        for number, micro in enumerate(mine):
            for row in micro.tolist():
                assert home.setdefault(int(units[row]), (rank, number)) == (rank, number)


def test_padding_counts_only_where_there_is_some() -> None:
    lengths = np.array([40, 10, 10, 10, 10], np.int64)
    (padded,) = plan(lengths, np.arange(5), budget=80)
    assert [micro.tolist() for micro in padded] == [[0, 1], [2, 3, 4]]
    (packed,) = plan(lengths, np.arange(5), budget=80, packed=True)
    assert [micro.tolist() for micro in packed] == [[0, 1, 2, 3, 4]]


def test_a_packed_unit_over_the_budget_is_refused_by_its_real_tokens() -> None:
    lengths, unit = np.array([30, 10], np.int64), np.zeros(2, np.int64)
    assert len(plan(lengths, unit, budget=40, packed=True)[0]) == 1
    with pytest.raises(ConfigError, match=r"one unit of 2 rows \(40 tokens\)"):
        plan(lengths, unit, budget=39, packed=True)
    with pytest.raises(ConfigError, match=r"one unit of 2 rows \(60 tokens\)"):
        plan(lengths, unit, budget=40)
