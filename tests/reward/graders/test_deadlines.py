"""A deadline is of wall time, put off while other processes keep a grader from its core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.records import Verdict
from tandem.reward.graders.deadlines import (
    InLine,
    fair_share,
    is_over,
    relief,
)
from tandem.reward.grading import Grade, GradeItem, Grader

linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the kernel doesn't count times in line"
)

WORKS = """
import time

def works(completions, **columns):
    begun = time.process_time()
    for text in completions:
        while "loop" in text:
            pass
        if "sleep" in text:
            time.sleep(60)
        while "compute" in text and time.process_time() - begun < 0.2:
            pass
    return [1.0] * len(completions)
"""
DEADLINE = 1.0
NEIGHBOURS = 6
"""Busy processes on the graders' only core: a seventh of it is left to one that computes."""


# --- the rule ---------------------------------------------------------------------------------


def test_a_request_that_had_its_core_ends_at_the_deadline() -> None:
    assert not is_over(elapsed=2.99, waited=0.0, deadline=3.0, fair=1.0)
    assert is_over(elapsed=3.0, waited=0.0, deadline=3.0, fair=1.0)
    # Half a core is enough.
    assert is_over(elapsed=3.0, waited=1.5, deadline=3.0, fair=1.0)


def test_a_request_that_stood_in_line_is_put_off_until_it_has_had_a_quarter() -> None:
    assert not is_over(elapsed=3.0, waited=2.7, deadline=3.0, fair=1.0)
    assert not is_over(elapsed=7.0, waited=6.3, deadline=3.0, fair=1.0)
    assert is_over(elapsed=7.5, waited=6.75, deadline=3.0, fair=1.0)


def test_nothing_runs_for_longer_than_three_deadlines() -> None:
    assert not is_over(elapsed=8.9, waited=8.9, deadline=3.0, fair=1.0)
    assert is_over(elapsed=9.0, waited=9.0, deadline=3.0, fair=1.0)


def test_what_graders_take_from_each_other_puts_nothing_off() -> None:
    """Eight loops on two cores have a quarter of a core each, and end at their deadline."""
    fair = fair_share(8, 2)
    assert fair == 0.25
    assert is_over(elapsed=3.0, waited=2.25, deadline=3.0, fair=fair)
    assert is_over(elapsed=3.0, waited=2.8, deadline=3.0, fair=fair)
    assert fair_share(1, 2) == fair_share(0, 2) == 1.0


def test_half_as_many_graders_stand_in() -> None:
    assert [relief(count) for count in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]


def test_a_process_that_is_gone_or_unknown_stands_in_no_line() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    line = InLine(gone.pid)
    gone.wait()
    assert line.seconds() == 0.0
    line.close()
    line.close()
    assert InLine(0).seconds() == 0.0


# --- real graders -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grader]:
    folder = tmp_path_factory.mktemp("works")
    (folder / "working_rewards.py").write_text(WORKS)
    parts = (ComponentConfig(name="working_rewards:works"),)
    config = RewardConfig(components=parts, graders=1, deadline_seconds=DEADLINE, timeout_pays=-1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with Grader(config) as made:
            made.canary()
            yield made


@pytest.fixture
def grader(shared: Grader) -> Grader:
    shared.wait(lambda: bool(shared.grader_pids()), "a grader")
    shared.restarts.clear()
    return shared


@contextmanager
def busy_neighbours(grader: Grader) -> Iterator[None]:
    """All processes of the grader on one core, among processes that never let go of it."""
    usual = os.sched_getaffinity(0)
    core = min(usual)
    own = [pid for pid in (*grader.grader_pids(), grader.zygote_pid()) if pid is not None]
    for pid in own:
        os.sched_setaffinity(pid, {core})
    loop = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    neighbours = [
        # The kernel may share a core out by session, so each of them has its own.
        subprocess.Popen(
            [sys.executable, "-S", "-c", loop], stdout=subprocess.PIPE, start_new_session=True
        )
        for _ in range(NEIGHBOURS)
    ]
    try:
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()
        os.sched_setaffinity(own[-1], usual)


def verdict_of(grader: Grader, text: str) -> Verdict:
    grade = grader.grade_texts([GradeItem(text=text, gold="")])[0]
    return Verdict.TIMEOUT if grade.reward == -1.0 else Verdict.CORRECT


@pytest.mark.byhand
@linux
def test_a_sleeper_has_its_time_wherever_it_sleeps(
    grader: Grader, caplog: pytest.LogCaptureFixture
) -> None:
    with busy_neighbours(grader):
        assert verdict_of(grader, "sleep") is Verdict.TIMEOUT
    assert [restart.reason for restart in grader.restarts] == ["deadline"]
    assert "of a core" not in caplog.text


@linux
def test_a_starved_grader_gets_its_time(grader: Grader, caplog: pytest.LogCaptureFixture) -> None:
    """A fifth of a second of computing takes more than its deadline here, and is no time-out."""
    with busy_neighbours(grader):
        started = time.monotonic()
        assert verdict_of(grader, "compute") is Verdict.CORRECT
        # Else nobody was starved, and this proves nothing.
        assert time.monotonic() - started > DEADLINE
    assert grader.restarts == []
    assert "of a core" in caplog.text


@pytest.mark.byhand
@linux
def test_a_loop_ends_on_a_starved_machine_too(grader: Grader) -> None:
    with busy_neighbours(grader):
        assert verdict_of(grader, "loop") is Verdict.TIMEOUT
    assert [restart.reason for restart in grader.restarts] == ["deadline"]


def test_good_requests_go_on_while_a_hang_holds_the_only_grader(grader: Grader) -> None:
    ended: list[str] = []

    def into(name: str) -> Any:
        return lambda grades: ended.append(name)

    for name in ("loop", "good", "good too"):
        grader.begin_items([GradeItem(text=name, gold="")], into(name))
    grader.wait(lambda: len(ended) == 3, "all three")
    assert ended == ["good", "good too", "loop"]
    grader.wait(lambda: len(grader.grader_pids()) == 1, "the one that stood in to end")
    assert [restart.reason for restart in grader.restarts] == ["deadline"]


def test_an_answer_that_came_in_time_counts_though_nobody_looked(grader: Grader) -> None:
    """Whoever is told of the first result is busy until after the other's deadline."""
    found: dict[str, float | None] = {}

    def slow(grades: list[Grade]) -> None:
        found["good"] = grades[0].reward
        time.sleep(DEADLINE)

    def into(grades: list[Grade]) -> None:
        found["compute"] = grades[0].reward

    grader.begin_items([GradeItem(text="compute", gold="")], into)
    # A grader that stands in answers this one first.
    grader.begin_items([GradeItem(text="good", gold="")], slow)
    grader.wait(lambda: len(found) == 2, "both")
    assert found == {"good": 1.0, "compute": 1.0}
    assert grader.restarts == []
