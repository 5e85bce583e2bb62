"""K texts that hang among M good ones, with N graders: what they cost, and whom.

All K hang for ever if nobody ends them: some in sympy, some in a function of the user's own that
loops, in Python or in C. The bound is ceil(K / N) deadlines and a second.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.records import Verdict
from tandem.reward.grading import Grade, GradeItem, Grader

DEADLINE = 2.0
GRADERS = 4
GOOD = 80
BUSY = 6.0
"""Times that the good ones alone took, beyond the bound: a machine with few cores and other things
to do grades them slower beside four loops. tests/benchmarks/grading.py measures the bound itself."""

LOOPS = """
import re

def loops(completions, **columns):
    for text in completions:
        while "loop" in text:
            pass
        if "backtrack" in text:  # in C, where no Python signal handler runs
            re.match("(a+)+$", "a" * 60 + "b")
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def grader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grader]:
    folder = tmp_path_factory.mktemp("loops")
    (folder / "looping_rewards.py").write_text(LOOPS)
    parts = (ComponentConfig(name="accuracy"), ComponentConfig(name="looping_rewards:loops"))
    config = RewardConfig(
        components=parts, graders=GRADERS, deadline_seconds=DEADLINE, timeout_pays=-1.0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with Grader(config) as made:
            made.canary()
            yield made


def boxed(answer: str, gold: str, thoughts: str = "") -> GradeItem:
    return GradeItem(text=f"{thoughts}</think> \\boxed{{{answer}}}", gold=gold)


def good(first: int) -> list[GradeItem]:
    """Half of them right and half wrong, all for a grader process to say (j may be imaginary)."""
    numbers = range(first, first + GOOD // 2)
    right = [boxed(f"{n}(j+2)", f"{n}j+{2 * n}") for n in numbers]
    return right + [boxed(f"{n}(j+2)", f"{n}j+{3 * n}") for n in numbers]


def seconds_of(grader: Grader, items: list[GradeItem], found: list[Grade] | None = None) -> float:
    start = time.monotonic()
    grades = grader.grade_texts(items)
    if found is not None:
        found += grades
    return time.monotonic() - start


def until(condition: Any, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_hangs_cost_their_own_deadlines_and_nobody_elses_verdict(grader: Grader, make: Any) -> None:
    hangs = [boxed(make.hang, f"{n}x+1") for n in range(2, 5)]
    hangs += [boxed(f"{n}", f"{n}", "loop") for n in range(3)]
    hangs += [boxed(f"{n}", f"{n}", "backtrack") for n in range(2)]
    alone = seconds_of(grader, good(1_000))
    right, wrong = good(2)[: GOOD // 2], good(2)[GOOD // 2 :]
    # Spread among the others, as they come.
    items = [*right, *wrong]
    every = len(items) // len(hangs)
    for place, item in enumerate(hangs):
        items.insert(place * (every + 1), item)
    before = set(grader.grader_pids())
    found: list[Grade] = []
    seconds = seconds_of(grader, items, found)
    grades = dict(zip(map(id, items), found, strict=True))
    assert [grades[id(item)].verdict for item in hangs] == [Verdict.TIMEOUT] * len(hangs)
    assert [grades[id(item)].reward for item in hangs] == [-1.0] * len(hangs)
    assert {(grades[id(item)].verdict, grades[id(item)].reward) for item in right} == {
        (Verdict.CORRECT, 2.0)
    }
    assert {(grades[id(item)].verdict, grades[id(item)].reward) for item in wrong} == {
        (Verdict.WRONG, 1.0)
    }
    assert seconds < math.ceil(len(hangs) / GRADERS) * DEADLINE + 1.0 + BUSY * alone
    assert [r.reason for r in grader.restarts] == ["deadline"] * len(hangs)
    # Every one that was killed is replaced and reaped.
    grader.wait(lambda: len(grader.grader_pids()) == GRADERS, "new graders")
    killed = {restart.pid for restart in grader.restarts}
    assert len(killed) == len(hangs)
    assert killed & before
    until(lambda: not any(psutil.pid_exists(pid) for pid in killed))
    zygote = psutil.Process(grader.zygote_pid())
    assert {child.pid for child in zygote.children()} == set(grader.grader_pids())


def test_copies_of_a_hang_cost_one_deadline(grader: Grader, make: Any) -> None:
    before = len(grader.restarts)
    items = [boxed(make.hang, "9x+1", f"copy {n}") for n in range(8)]
    assert [g.verdict for g in grader.grade_texts(items)] == [Verdict.TIMEOUT] * 8
    assert len(grader.restarts) == before + 1
