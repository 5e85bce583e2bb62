"""Which traces enter a group, and which rows they replace."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.replay.rules.mixing import choose_replaced, choose_traces

TRACES = tuple(f"a/0#{k}" for k in range(6))


def test_a_problem_without_traces_gets_none(make: Any):
    assert choose_traces(make.problem(), 0, "0-0", 1) == ()


def test_nothing_is_attached_where_none_is_asked_for(make: Any):
    assert choose_traces(make.problem(trace_ids=TRACES), 0, "0-0", 0) == ()


def test_few_traces_all_enter_in_ledger_order(make: Any):
    assert choose_traces(make.problem(trace_ids=TRACES), 0, "0-0", 8) == TRACES


def test_a_group_leased_again_holds_the_same_traces(make: Any):
    problem = make.problem(trace_ids=TRACES)
    first = choose_traces(problem, 3, "0-9", 2)
    assert first == choose_traces(problem, 3, "0-9", 2)
    assert len(first) == 2
    assert list(first) == sorted(first)


def test_the_draw_differs_between_groups(make: Any):
    problem = make.problem(trace_ids=TRACES)
    assert len({choose_traces(problem, 0, f"0-{i}", 1) for i in range(40)}) == len(TRACES)


def test_replaced_rows_are_own_ones_and_depend_on_the_step():
    drawn = {choose_replaced(0, step, "0-0", (0, 2, 4, 6), 2) for step in range(30)}
    assert len(drawn) > 1
    assert all(set(rows) <= {0, 2, 4, 6} and len(set(rows)) == 2 for rows in drawn)


def test_more_traces_than_own_rows_are_refused():
    with pytest.raises(ValueError, match="0-3"):
        choose_replaced(0, 1, "0-3", (0,), 2)
