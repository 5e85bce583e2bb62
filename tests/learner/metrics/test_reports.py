"""Figures of a step's groups for metrics.jsonl."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from tandem.common.records import (
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Verdict,
    VersionSpan,
)
from tandem.learner.metrics.reports import describe
from tandem.learner.rows.groups import MixedGroup


def group_sampled_at(*steps: int) -> MixedGroup:
    """One group, of whose samples each was begun with another step's weights."""
    samples = tuple(
        Sample(
            tokens=np.arange(4, dtype=np.int32),
            source=np.zeros(4, np.uint8),
            logprobs=np.full(4, -0.5, np.float32),
            spans=(VersionSpan(term=1, step=step, start=0, end=4),),
            finish_reason=FinishReason.STOP,
            sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
            text="2",
            reward=1.0,
            verdict=Verdict.CORRECT,
            components={},
            extracted=None,
            grader=None,
        )
        for step in steps
    )
    group = Group(
        group_id="0-0",
        attempt=1,
        worker="rollout-0",
        problem_id="a/0",
        prompt_tokens=np.arange(5, dtype=np.int32),
        prompt_text="1+1=?",
        gold="2",
        data_source="miniature",
        samples=samples,
        trace_ids=(),
        extra={},
    )
    return MixedGroup(group=group)


def test_stragglers_and_their_groups_are_told_apart_from_long_samples() -> None:
    whole = group_sampled_at(9, 9, 9, 9)
    reasons = (FinishReason.DEADLINE, FinishReason.DEADLINE, FinishReason.LENGTH, FinishReason.STOP)
    samples = tuple(
        replace(sample, finish_reason=reason)
        for sample, reason in zip(whole.group.samples, reasons, strict=True)
    )
    late = MixedGroup(group=replace(whole.group, samples=samples))
    told = describe(10, [late, whole])
    assert told["rollout/stragglers"] == 0.25
    assert told["rollout/partial_groups"] == 0.5
    assert told["rollout/truncated"] == 0.125


def shares(told: dict[str, float]) -> dict[int, float]:
    """The histogram of staleness."""
    name = "replay/staleness_share_"
    return {int(key.removeprefix(name)): told[key] for key in told if key.startswith(name)}


def test_the_histogram_of_staleness_adds_up_to_one() -> None:
    told = describe(10, [group_sampled_at(9, 9, 9, 7)])
    assert shares(told) == {0: 0.75, 1: 0.0, 2: 0.25}
    assert told["replay/staleness_mean"] == pytest.approx(0.5)


def test_its_last_bin_also_holds_what_is_older() -> None:
    told = describe(100, [group_sampled_at(99, 91, 50, 0)])
    assert shares(told) == {0: 0.25, **dict.fromkeys(range(1, 8), 0.0), 8: 0.75}
    assert told["replay/staleness_max"] == 99


def test_groups_of_a_later_step_than_the_one_that_trains_on_them_are_fresh() -> None:
    assert shares(describe(1, [group_sampled_at(500)])) == {0: 1.0}
