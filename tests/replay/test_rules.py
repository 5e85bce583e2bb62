"""The ledger's rules as functions: admission, age, window."""

from __future__ import annotations

import pytest

from tandem.replay import rules


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
                    stale = rules.is_stale(step, held, staleness)
                    assert rules.may_lease(journalled, rank, 4, held, staleness) is not stale


def test_the_step_needed_is_the_least_that_is_admitted():
    needed = rules.step_needed(5, 9, 8, 1)
    assert rules.may_lease(5, 9, 8, needed, 1)
    assert not rules.may_lease(5, 9, 8, needed - 1, 1)


def test_age_counts_steps_between_the_oldest_token_and_the_weights_that_train_on_it():
    assert rules.age(step=8, oldest_token_step=7) == 0
    assert rules.age(step=8, oldest_token_step=5) == 2


def test_a_group_without_own_tokens_has_no_age():
    assert not rules.is_stale(100, None, 0)


def test_a_window_of_one_step_passes_over_nothing():
    assert rules.window_allows(0, 8, 1)
    assert not rules.window_allows(1, 8, 1)


def test_a_window_of_two_steps_passes_over_one_step_of_groups():
    assert rules.window_allows(8, 8, 2)
    assert not rules.window_allows(9, 8, 2)


def test_a_cut_may_pass_over_a_lease_only_while_it_stays_fresh():
    assert not rules.must_not_pass_over(0, 0, 8, held_step=0, max_staleness=1)
    assert rules.must_not_pass_over(1, 0, 8, held_step=0, max_staleness=1)
