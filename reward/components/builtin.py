"""All reward components by name; importing this module fills the registry.

To add one, write a factory whose keyword arguments are the component's parameters, and register it
(in one of the modules beside this one, or here).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...common.records import Verdict
from . import classifier, code, equation, formats, judge, lengths, programs
from .registry import COMPONENTS, Component, Graded, Kind, component, register

__all__ = [
    "COMPONENTS",
    "Component",
    "Graded",
    "Kind",
    "classifier",
    "code",
    "component",
    "equation",
    "formats",
    "judge",
    "lengths",
    "programs",
]


@register("accuracy", needs_verdict=True)
def accuracy() -> Component:
    """1 for the verdict ``correct``, 0 if the answer isn't right, None without a verdict."""

    def value(sample: Graded) -> float | None:
        if sample.verdict is Verdict.CORRECT:
            return 1.0
        return None if sample.verdict.leaves_baseline else 0.0

    return value


@register("environment")
def environment() -> Component:
    """The episode's reward; None if its environment gave none, or the sample isn't an episode.

    Where the environment pays single turns, each turn's reward is earned by its last token, and what is left of
    the episode's reward by the last token of the last turn.
    """

    def value(sample: Graded) -> float | Sequence[float] | None:
        episode = sample.episode
        if episode is None or episode.failure is not None or episode.reward is None:
            return None
        turns = [turn for turn in episode.turns if turn.end > turn.start]
        if sample.tokens is None or not any(turn.reward is not None for turn in turns):
            return episode.reward
        earned = [0.0] * len(sample.tokens)
        for turn in turns:
            earned[turn.end - 1] += turn.reward or 0.0
        earned[turns[-1].end - 1] += episode.reward - sum(earned)
        return earned

    return value
