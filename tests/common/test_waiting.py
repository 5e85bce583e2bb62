"""A wait tells once at half of its deadline, and again after the party has made progress."""

from __future__ import annotations

import time

from tandem.common.waiting import Wait

SECONDS = 0.2


def asked_until_expired(wait: Wait) -> list[str]:
    told: list[str] = []
    while not wait.expired(told.append):
        time.sleep(wait.pause)
    return told


def test_it_tells_once_whom_it_waits_for_and_ends_at_its_deadline() -> None:
    began = time.monotonic()
    wait = Wait("rollout-0", "acknowledge version 1.7", SECONDS)
    (told,) = asked_until_expired(wait)
    assert time.monotonic() - began >= SECONDS
    assert told.startswith("waiting for rollout-0 to acknowledge version 1.7: ")
    assert str(wait) == "rollout-0 didn't acknowledge version 1.7 within 0.2 s"


def test_nothing_is_told_before_half_of_the_deadline() -> None:
    told: list[str] = []
    wait = Wait("rollout-0", "load", 1000.0)
    assert not wait.expired(told.append)
    assert not told
    assert 499 < wait.pause <= 500


def test_after_a_restart_the_whole_deadline_is_there_and_half_of_it_is_told_again() -> None:
    wait = Wait("graders", "end a request", SECONDS)
    asked_until_expired(wait)
    wait.restart()
    assert not wait.expired(None)
    wait.who = "grader 7"
    (told,) = asked_until_expired(wait)
    assert "waiting for grader 7 to" in told


def test_where_nobody_is_told_it_expires_all_the_same() -> None:
    wait = Wait("Redis", "answer", SECONDS)
    while not wait.expired(None):
        time.sleep(wait.pause)
    assert wait.waited >= SECONDS
