"""The ledger's rules as functions: admission, age, window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.replay.rules import cutting
from tandem.replay.rules import leases as rules


@pytest.mark.parametrize(
    ("journalled", "rank", "held", "staleness", "allowed"),
    [
        (0, 0, 0, 0, True),
        (0, 7, 0, 0, True),
        (0, 8, 0, 0, False),  # the second batch needs version 1 at eta = 0
        (0, 8, 0, 1, True),
        (0, 16, 0, 1, False),
        (5, 0, 5, 0, True),
        (5, 0, 4, 0, False),  # a late worker isn't leased what would be stale
        (5, 8, 4, 1, False),
        (5, 7, 4, 1, True),
    ],
)
def test_admission(journalled: int, rank: int, held: int, staleness: int, allowed: bool):
    assert rules.may_lease(journalled, rank, 8, held, staleness) is allowed


def test_a_group_admitted_is_never_stale_at_the_step_that_its_rank_promises():
    for journalled in range(6):
        for rank in range(20):
            for held in range(journalled + 1):
                for staleness in range(4):
                    step = rules.expected_step(journalled, rank, 4)
                    stale = cutting.is_stale(step, held, staleness)
                    assert rules.may_lease(journalled, rank, 4, held, staleness) is not stale


def test_age_counts_steps_between_the_oldest_token_and_the_weights_that_train_on_it():
    assert cutting.age(step=8, oldest_token_step=7) == 0
    assert cutting.age(step=8, oldest_token_step=5) == 2


def test_a_group_without_own_tokens_has_no_age():
    assert not cutting.is_stale(100, None, 0)


def test_a_window_of_one_step_passes_over_nothing():
    assert cutting.window_allows(0, 8, 1)
    assert not cutting.window_allows(1, 8, 1)


def test_a_window_of_two_steps_passes_over_one_step_of_groups():
    assert cutting.window_allows(8, 8, 2)
    assert not cutting.window_allows(9, 8, 2)


def test_a_cut_may_pass_over_a_lease_only_while_it_stays_fresh():
    assert not cutting.must_not_pass_over(0, 0, 8, held_step=0, max_staleness=1)
    assert cutting.must_not_pass_over(1, 0, 8, held_step=0, max_staleness=1)


def test_what_came_back_is_leased_first_lowest_first():
    assert rules.next_to_lease({7: 7, 5: 5}, cursor=9) == 5
    assert rules.next_to_lease({}, cursor=9) == 9


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"leased": 3}, "admission: inflight"),
        ({"used": 551, "maxmemory": 1000}, "admission: memory"),
        ({"serial": 8}, "admission: every group of the run is leased"),
        ({"serial": 8, "is_new": False}, ""),
        ({"rank": 4}, "admission: staleness"),
    ],
)
def test_why_a_group_is_not_leased(changes: dict[str, Any], why: str):
    limits = rules.Limits(
        groups_per_step=2, max_staleness=1, max_inflight=3, total_groups=8, group_bytes=100
    )
    asked = {"serial": 3, "is_new": True, "rank": 3, "leased": 1, "journalled": 0, "held_step": 0}
    assert rules.why_not_leased(limits, **{**asked, **changes}) == why


def test_no_group_is_leased_that_would_come_after_the_last_step():
    limits = rules.Limits(groups_per_step=2, max_staleness=9, steps=2)
    asked = {"serial": 9, "is_new": True, "leased": 0, "journalled": 1, "held_step": 1}
    assert rules.why_not_leased(limits, rank=1, **asked) == ""
    assert "last step" in rules.why_not_leased(limits, rank=2, **asked)


@pytest.mark.parametrize(
    ("why", "failed"),
    [
        (rules.Release.EXPIRED, True),
        (rules.Release.PAST_DEADLINE, True),
        (rules.Release.WORKER_DIED, True),
        (rules.Release.FAILED, True),
        (rules.Release.RETURNED, False),
        (rules.Release.REVOKED, False),
    ],
)
def test_a_drain_a_revocation_and_an_outage_are_no_failed_attempts(
    why: rules.Release, failed: bool
):
    assert rules.counts_as_failed(why) is failed
    # Of these, an outage may be the reason.
    of_outage = why in (rules.Release.EXPIRED, rules.Release.WORKER_DIED)
    assert rules.counts_as_failed(why, moved=True) is (failed and not of_outage)


LIMITS = rules.Limits(groups_per_step=2, max_staleness=1, window=2)


def cut(limits: rules.Limits = LIMITS, **changes: Any) -> cutting.Cut:
    asked: dict[str, Any] = {"step": 1, "graded": {}, "leased": {}, "returned": set(), "cursor": 9}
    return cutting.cut(limits, **{**asked, **changes})


def test_the_sweep_takes_what_is_too_old_though_no_row_comes_of_it():
    done = cut(step=3, graded={0: 0, 1: 1})
    assert (done.stale, done.row, done.held_by) == ((0,), (), "groups")


def test_a_cut_waits_for_the_lowest_that_is_out_or_for_the_next_new_one():
    assert cut(graded={2: 0}, leased={3: 0}, returned={1}).waits_for == 1
    assert cut(graded={2: 0}).waits_for == 9


def test_the_last_row_is_short_once_nothing_is_out():
    limits = replace(LIMITS, total_groups=9)
    assert cut(limits, graded={8: 0}) == cutting.Cut(row=(8,), short=True)
    assert not cut(limits, graded={8: 0}, returned={7}).row
    assert not cut(limits, graded={8: 0}, cursor=8).row
    assert cut(limits).ended


def test_a_lease_that_a_row_would_make_too_old_holds_it_or_is_revoked():
    late = {"step": 2, "graded": {4: 1, 5: 1}, "leased": {2: 1, 3: 0}}
    held = cut(replace(LIMITS, late="wait"), **late)
    assert (held.held_by, held.waits_for, held.row) == ("staleness", 3, ())
    dropped = cut(replace(LIMITS, late="drop"), **late)
    assert (dropped.row, dropped.revoked) == ((4, 5), (3,))


@pytest.mark.parametrize(
    ("rewards", "traces", "none"),
    [
        ((0.0, 0.0), [], True),
        ((0.3, 0.3000005), [], True),
        ((0.3, 0.301), [], False),
        ((1.0,), [1.0], True),
        ((0.0, 0.0), [1.0], False),  # an expert can help where all failed
        ((1.0, 1.0), [None], False),
        ((), [], False),
    ],
)
def test_a_group_has_no_signal_where_all_rows_have_one_reward(
    rewards: tuple[float, ...], traces: list[float | None], none: bool
):
    assert cutting.has_no_signal(rewards, traces) is none


@pytest.mark.parametrize(
    ("rewards", "traces", "none"),
    [
        ((1.0, 0.0, 0.0, 0.0, 0.0), [], False),  # a mean of 0.2, the bound itself
        ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), [], True),
        ((0.0, 1.0, 1.0, 1.0), [], False),
        ((0.0, 1.0, 1.0, 1.0), [1.0, 1.0], True),  # the traces lift it over 0.8
        ((0.5, 0.5), [], True),
        ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), [None], False),
    ],
)
def test_a_group_whose_mean_reward_is_out_of_bounds_has_no_signal(
    rewards: tuple[float, ...], traces: list[float | None], none: bool
):
    assert cutting.has_no_signal(rewards, traces, (0.2, 0.8)) is none


def test_groups_without_a_signal_give_way_to_later_ones_up_to_a_limit():
    limits = replace(LIMITS, window=1, dynamic_sampling=3)
    graded = dict.fromkeys(range(7), 0)
    done = cut(limits, graded=graded, no_signal={0, 2, 3, 4, 6})
    assert (done.row, done.no_signal) == ((1, 4), (0, 2, 3))
    spent = cut(limits, graded=graded, no_signal=set(range(7)), left_out=3)
    assert (spent.row, spent.no_signal) == ((0, 1), ())
    assert not cut(LIMITS, graded=graded, no_signal={0}).no_signal


def test_in_strict_order_nothing_goes_before_all_ahead_of_it_is_decided():
    limits = replace(LIMITS, window=1, dynamic_sampling=3)
    asked = {"graded": {0: 0, 2: 0, 4: 0}, "no_signal": {0, 2, 4}}
    assert cut(limits, leased={1: 0}, returned={3}, **asked).no_signal == (0,)
    assert cut(limits, returned={3}, **asked).no_signal == (0, 2)
    # A window of two steps may pass over two.
    assert cut(replace(limits, window=2), leased={1: 0}, returned={3}, **asked).no_signal == (
        0,
        2,
        4,
    )


def test_a_run_that_ended_goes_on_with_more_steps_or_groups_only():
    assert rules.goes_on(replace(LIMITS, steps=3), journalled=2, cursor=99)
    assert not rules.goes_on(replace(LIMITS, steps=2), journalled=2, cursor=0)
    assert rules.goes_on(replace(LIMITS, total_groups=9), journalled=2, cursor=8)


def test_a_term_greater_than_the_ledgers_is_fenced_as_well():
    assert rules.is_fenced(held=4, term=3)
    assert rules.is_fenced(held=4, term=5)
    assert not rules.is_fenced(held=4, term=4)


def test_what_was_put_back_is_cut_behind_the_others_and_told_by_its_number():
    asked = {"graded": {2: 0, 5: 0, 6: 0}, "places": {2: 6.5}}
    assert cut(**asked).row == (5, 6)
    assert cut(LIMITS, graded={2: 0, 6: 0}, places={2: 6.5}).row == (2, 6)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"ended": "done"}, "done"),
        ({"steps": 3}, "its last row, 3, is written"),
        ({"steps": 4}, ""),
        ({"last_is_short": True}, "its last row, 3, is written"),
    ],
)
def test_dead_letters_are_put_back_only_where_a_row_will_take_them(
    changes: dict[str, Any], why: str
):
    asked = {"ended": None, "steps": 0, "journalled": 3, "last_is_short": False}
    assert rules.why_not_retried(**{**asked, **changes}) == why
