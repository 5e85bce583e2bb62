"""Records: what they refuse, and what they derive."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tandem.common import records
from tandem.common.records import (
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Verdict,
    Version,
    VersionSpan,
)


def sample(*spans: tuple[int, int, int], length: int = 4, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "source": np.zeros(length, np.uint8),
        "logprobs": np.zeros(length, np.float32),
        "spans": tuple(VersionSpan(term=1, step=s, start=a, end=b) for s, a, b in spans),
        "finish_reason": FinishReason.STOP,
        "sampling": SamplingParams(),
        "text": "",
    }
    return Sample(**{**values, **changes})


def group(*samples: Sample) -> Group:
    return Group(
        group_id="0-0",
        attempt=1,
        worker="w",
        problem_id="a/0",
        prompt_tokens=np.arange(2, dtype=np.int32),
        prompt_text="p",
        gold="1",
        data_source="d",
        samples=samples,
    )


def test_versions_compare_by_term_then_step():
    assert Version(term=2, step=0) > Version(term=1, step=99)
    assert Version(term=2, step=1) > Version(term=2, step=0)
    assert str(Version(term=2, step=7)) == "2.7"


def test_the_oldest_step_is_that_of_the_oldest_span_with_tokens():
    assert sample((5, 0, 2), (6, 2, 4)).oldest_step == 5
    assert sample((3, 0, 0), (6, 0, 4)).oldest_step == 6


def test_a_sample_without_own_tokens_has_no_oldest_step():
    assert sample().oldest_step is None


def test_a_group_is_as_old_as_its_oldest_sample():
    assert group(sample((5, 0, 4)), sample(), sample((4, 0, 4))).oldest_step == 4
    assert group(sample()).oldest_step is None


@pytest.mark.parametrize("field", ["source", "logprobs"])
def test_arrays_of_different_lengths_are_refused(field: str):
    with pytest.raises(ValueError, match="differ in length"):
        sample(**{field: np.zeros(3, np.float32)})


def test_failures_that_are_not_the_texts_own_leave_the_baseline():
    leaving = {verdict for verdict in Verdict if verdict.leaves_baseline}
    assert leaving == {Verdict.CRASHED, Verdict.GOLD_UNPARSABLE}


@pytest.mark.parametrize(
    "cls",
    [c for c in vars(records).values() if dataclasses.is_dataclass(c) and isinstance(c, type)],
)
def test_every_record_is_frozen_slotted_and_keyword_only(cls: type):
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__slots__" in vars(cls)
    assert all(field.kw_only for field in dataclasses.fields(cls))
