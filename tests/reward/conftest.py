"""Real graders for all tests of the room, and what they are given."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.config import RewardConfig
from tandem.common.records import (
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    VersionSpan,
)
from tandem.reward.grading import Grade, GradeItem, Grader

# The judge's server, which other tests start too.
sys.path.insert(0, str(Path(__file__).parents[1]))

HANG = "(x+y+z+w+v+1)^{97}"
"""Comparing it with a polynomial keeps sympy busy for far longer than any deadline here."""


@pytest.fixture(scope="session")
def grader() -> Iterator[Grader]:
    """Two warm graders that all tests share."""
    with Grader(RewardConfig(deadline_seconds=10.0)) as made:
        yield made


@pytest.fixture(scope="session")
def grade(grader: Grader) -> Callable[[str, str], Grade]:
    """Grades one boxed answer through the real path."""

    def one(answer: str, gold: str) -> Grade:
        return grader.grade_texts([item(answer, gold)])[0]

    return one


def item(answer: str, gold: str) -> GradeItem:
    """A response that thinks, then boxes its answer."""
    return GradeItem(text=f"some thoughts</think> So it is \\boxed{{{answer}}}.", gold=gold)


def sample(text: str, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "tokens": np.arange(4, dtype=np.int32),
        "source": np.zeros(4, np.uint8),
        "logprobs": np.full(4, -0.5, np.float32),
        "spans": (VersionSpan(term=1, step=0, start=0, end=4),),
        "finish_reason": FinishReason.STOP,
        "sampling": SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        "text": text,
        "reward": None,
        "verdict": None,
        "components": {},
        "extracted": None,
        "grader": None,
    }
    return Sample(**{**values, **changes})


def group(texts: list[str], gold: str = "2", **changes: Any) -> Group:
    values: dict[str, Any] = {
        "group_id": "0-0",
        "attempt": 1,
        "worker": "rollout-0",
        "problem_id": "a/0",
        "prompt_tokens": np.arange(5, dtype=np.int32),
        "prompt_text": "1+1=?<think>",
        "gold": gold,
        "data_source": "miniature",
        "samples": tuple(sample(text) for text in texts),
        "trace_ids": (),
        "extra": {},
    }
    return Group(**{**values, **changes})


def until(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """Waits for a condition; its value once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come in {seconds:.0f} s")


class Make:
    """What tests make: items, samples, groups; and ``until``."""

    hang = HANG
    item = staticmethod(item)
    sample = staticmethod(sample)
    group = staticmethod(group)
    until = staticmethod(until)


@pytest.fixture(scope="session")
def make() -> Make:
    """See :class:`Make`."""
    return Make()
