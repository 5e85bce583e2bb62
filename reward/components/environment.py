"""The reward that an environment has given an episode, and its turns."""

from __future__ import annotations

from collections.abc import Sequence

from .registry import Component, Graded, register


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
