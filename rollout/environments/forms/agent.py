"""A function ``run(task, base_url, api_key)`` that plays a whole episode with any OpenAI client, and returns its reward.

::

    def run(task, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        answer = client.chat.completions.create(model="tandem", messages=task["prompt"])
        return float(task["answer"] in answer.choices[0].message.content)

It may be a coroutine, and may return ``{"reward": …, "metrics": {…}}``. None says that there is no reward.
A request that has no room in the session is answered with 400 ``context_length_exceeded``; an agent that
lets this error through has no reward, and hasn't failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....common.import_path import misfit
from ..pipes import Done, Phase, Play
from .asking import CONTEXT_CODE
from .values import Awaiting, figures, number


class AgentEpisodes:
    """Plays the episodes of one such function.

    Args:
        target: the function.
        params: further keyword arguments.
    """

    def __init__(self, target: Callable[..., Any], params: Mapping[str, Any]) -> None:
        if not callable(target):
            raise TypeError(f"{target!r:.100} isn't a function")
        if why := misfit(target, {}, base_url="", api_key="", **params):
            words = "a task, base_url=, api_key= and environments.use.….params"
            raise TypeError(f"{target!r:.100} can't be called with {words}: {why}")
        self._run, self._params = target, dict(params)
        self._finish = Awaiting()

    def play(self, play: Play, tell: Callable[[Phase], None]) -> Done:
        """Plays one episode."""
        tell("agent")
        try:
            found = self._finish(
                self._run(play.row, base_url=play.base_url, api_key=play.api_key, **self._params)
            )
        except Exception as error:
            if is_too_long(error):
                return Done(None, [], {}, "context_length")
            raise
        metrics: dict[str, float] = {}
        if isinstance(found, Mapping):
            if "reward" not in found:
                raise TypeError(f"run returned {found!r:.100}, which has no reward")
            metrics = figures(found.get("metrics"))
            found = found["reward"]
        return Done(number(found, "the reward that run returned"), [], metrics, "done")


def is_too_long(error: BaseException | None) -> bool:
    """Whether an exception comes from an answer that says that the session has no more room."""
    for _ in range(10):
        if error is None:
            return False
        if isinstance(error, BaseExceptionGroup):
            return any(map(is_too_long, error.exceptions))
        if getattr(error, "code", None) == CONTEXT_CODE:
            return True
        error = error.__cause__ or error.__context__
    return False
