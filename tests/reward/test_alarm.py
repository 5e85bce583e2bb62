"""The alarm: shares of a minute's requests that hung or crashed."""

from __future__ import annotations

import re

import pytest

from tandem.common.records import Verdict
from tandem.reward.alarm import alarm
from tandem.reward.graders.verdicts import Recent


def figures(**changes: float) -> dict[str, float]:
    return {"recent": 100, "hang_share": 0.0, "crash_share": 0.0, **changes}


def test_a_healthy_pool_gives_none() -> None:
    assert alarm(figures(hang_share=0.05, crash_share=0.05)) == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hang_share": 0.06}, "6% of the last minute's requests to graders hung"),
        ({"crash_share": 0.5}, "50% .* crashed.*leave the baseline .the last: KeyError"),
    ],
)
def test_too_many_hangs_or_crashes_give_one(changes: dict[str, float], told: str) -> None:
    assert re.search(told, alarm(figures(**changes), "KeyError"))


def test_a_few_requests_say_nothing() -> None:
    assert alarm(figures(recent=19, hang_share=1.0)) == ""


def test_shares_are_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tandem.reward.graders.verdicts.time.monotonic", lambda: now[0])
    recent = Recent()
    recent.add(Verdict.TIMEOUT)
    now[0] = 50.0
    recent.add(None)
    assert recent.share(Verdict.TIMEOUT) == 0.5
    now[0] = 61.0
    recent.forget()
    assert (recent.share(Verdict.TIMEOUT), len(recent), recent.total) == (0.0, 1, 2)


def test_what_is_wrong_with_a_judge_is_told_however_little_graders_have_done() -> None:
    assert alarm(figures(recent=0), "", "the judge is silent") == "the judge is silent"
    both = alarm(figures(hang_share=0.5), "", "the judge is silent")
    assert both.startswith("the judge is silent; 50% of the last minute's requests")
