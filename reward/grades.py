"""What is graded and what comes of it: the grader's items and grades."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ..common.records import FinishReason, Int32Array, Sample, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeItem:
    """One text to grade."""

    text: str
    """The response."""
    gold: str
    """The gold answer as the data set states it."""
    data_source: str = ""
    """The data set's name."""
    finish_reason: FinishReason = FinishReason.STOP
    """A truncated text is graded only on a closed box or answer tag."""
    prompt_text: str = ""
    """The prompt, where it is known: it tells whether the text begins inside ``<think>``."""
    tokens: Int32Array | None = None
    """``[L]`` token ids, for the components that count tokens."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The problem's ``extra``."""
    group: str = ""
    """Items of one name are a group, for what compares samples; without a name each is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What was found and what it pays."""

    verdict: Verdict
    """What the grader found."""
    reward: float | None
    """The composed reward; None where the row has no verdict to pay."""
    components: dict[str, float | None]
    """Every component by name, unweighted."""
    extracted: str | None
    """The answer that was read."""
    seconds: float
    """In the grader process; 0 where none was needed."""
    cached: bool
    """Another text's verdict was used."""


def with_grade(sample: Sample, grade: Grade, grader: str) -> Sample:
    """The sample with what was found of it."""
    return replace(
        sample,
        reward=grade.reward,
        verdict=grade.verdict,
        components=grade.components,
        extracted=grade.extracted,
        grader=grader,
    )
