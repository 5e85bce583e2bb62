"""A class with ``reset(row)``, which returns an observation, and ``step(text)``, which returns an observation, a reward
and whether the episode is over.

::

    class Guess:
        def reset(self, row):
            self.number = row["number"]
            return "I think of a number from 1 to 9. Which?"

        def step(self, text):
            right = text.strip() == str(self.number)
            return ("Yes." if right else "No."), float(right), right

An observation is text, which becomes a message of the user, or a list of messages. A reward of None says
that there is none yet; the episode's reward is the sum of its turns', or None if no turn had one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....common.import_path import misfit
from ..pipes import Done, Phase, Play
from .asking import Asker, EpisodeTooLong
from .values import Awaiting, bounded_messages, messages, number, opening


class TextEpisodes:
    """Plays the episodes of one such class.

    Args:
        target: the class.
        params: keyword arguments with which it is made, once.
    """

    def __init__(self, target: Callable[..., Any], params: Mapping[str, Any]) -> None:
        self._environment = target(**params)
        for name, words in (("reset", "a row"), ("step", "an answer's text")):
            method, kind = getattr(self._environment, name, None), type(self._environment).__name__
            if not callable(method):
                raise TypeError(f"{kind} has no method {name}")
            if why := misfit(method, None):
                raise TypeError(f"{kind}.{name} can't be called with {words}: {why}")
        self._finish = Awaiting()

    def play(self, play: Play, tell: Callable[[Phase], None]) -> Done:
        """Plays one episode."""
        tell("reset")
        first = self._finish(self._environment.reset(play.row))
        # What the row begins with is the task, not an observation.
        history = (
            opening(play.row)
            if first is None
            else bounded_messages(messages(first, "what reset returned"), play.observation_tokens)
        )
        model = Asker(play.base_url, play.api_key, play.model, play.sampling, play.seconds)
        rewards: list[float | None] = []
        ended = "max_turns"
        try:
            while len(rewards) < play.turns:
                tell("model")
                answer = model.chat(history)
                history.append(dict(answer.message))
                tell("step")
                observation, reward, over = self._step(answer.text)
                rewards.append(reward)
                if over:
                    ended = "done"
                    break
                history += bounded_messages(observation, play.observation_tokens)
        except EpisodeTooLong:
            ended = "context_length"
        finally:
            model.close()
        paid = [reward for reward in rewards if reward is not None]
        return Done(sum(paid) if paid else None, rewards, {}, ended)

    def _step(self, text: str) -> tuple[list[dict[str, Any]], float | None, bool]:
        found = self._finish(self._environment.step(text))
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise TypeError(f"step returned {found!r:.100}, not (observation, reward, done)")
        observation, reward, over = found
        if not isinstance(over, bool | int) and not hasattr(over, "__bool__"):
            raise TypeError(f"step returned {over!r:.100} for done, not True or False")
        over = bool(over)
        read = [] if over else messages(observation, "the observation that step returned")
        return read, number(reward, "the reward that step returned"), over
