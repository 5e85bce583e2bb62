"""The grader's items and grades: what is graded, and what it results in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from ..common.records import Episode, FinishReason, Group, Int32Array, Problem, Sample, Verdict


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
    """A truncated text is graded only on a closed box or answer tag, unless the mode copies a project
    that grades it like any other (docs/grading.md)."""
    prompt_text: str = ""
    """The prompt, if it is known: it shows whether the text begins inside ``<think>``."""
    tokens: Int32Array | None = None
    """``[L]`` token ids, for the components that count tokens."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The problem's ``extra``."""
    episode: Episode | None = None
    """The episode whose last turn the text is; None for a response to a prompt."""
    group: str = ""
    """Items with the same name form a group, for components that compare samples; an item without a
    name is a group of its own."""

    @classmethod
    def of(cls, asked: Group | Problem, sample: Sample, group: str = "") -> GradeItem:
        """A sample to grade, with what the dataset says of its problem.

        Args:
            asked: what was asked, and its gold answer.
            sample: the response.
            group: see :attr:`group`.
        """
        return cls(
            text=sample.text,
            gold=asked.gold,
            data_source=asked.data_source,
            finish_reason=sample.finish_reason,
            prompt_text=asked.prompt_text,
            tokens=sample.tokens,
            extra=asked.extra,
            episode=sample.episode,
            group=group,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A verdict and the reward that follows from it."""

    verdict: Verdict
    """What the grader found."""
    answer: Verdict
    """What it found of the answer alone: ``verdict`` may be the failure of a component instead."""
    reward: float | None
    """The composed reward; None if the row has no verdict to reward."""
    components: dict[str, float | None]
    """Every component by name, unweighted."""
    extracted: str | None
    """The answer that was read."""
    seconds: float
    """Seconds in the grader process; 0 if none was needed."""
    cached: bool
    """Whether another text's verdict was used."""
    token_rewards: Sequence[float] | None = None
    """``[L]`` the part of the reward that single tokens have earned; None where no token has."""


def with_grade(sample: Sample, grade: Grade, grader: str) -> Sample:
    """A copy of the sample with its grade filled in."""
    earned = grade.token_rewards
    token_rewards = None if earned is None else np.array(earned, np.float32)
    return replace(
        sample,
        reward=grade.reward,
        verdict=grade.verdict,
        components=grade.components,
        extracted=grade.extracted,
        grader=grader,
        token_rewards=token_rewards,
    )
