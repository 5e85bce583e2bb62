"""TRL's environment class: ``reset(**row)``, public methods that are tools, and perhaps ``get_reward()``.

::

    class Calculator:
        def reset(self, answer, **row):
            self.answer, self.result = answer, None

        def add(self, a: int, b: int) -> int:
            '''Adds two numbers.'''
            self.result = a + b
            return self.result

        def get_reward(self):
            return float(self.result == self.answer)

``reset`` gets the whole row, its prompt included; what it returns is appended to the prompt's last message.
Methods are found on the class, may be coroutines, and run in the order of the calls; an exception of one is
its result, ``{"error": text}``. The episode ends with a turn that calls no tool. Without ``get_reward``, or
if that returns None, the episode has no reward. The instance is used again: ``reset`` clears its state.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..pipes import Done, Phase, Play
from .asking import Answer, Asker, EpisodeTooLong
from .schemas import schema_of, takes_names
from .values import Awaiting, as_text, bounded, bounded_messages, messages, number, opening

MALFORMED = (
    "{} tool call(s) of your last message can't be parsed, so no tool was called. Write each call as one "
    "JSON object with the keys name and arguments."
)
"""Told to the model after a turn with calls that the endpoint couldn't parse."""
OWN = ("reset", "get_reward")
"""Public methods that aren't tools."""


class ToolEpisodes:
    """Plays the episodes of one such class.

    Args:
        target: the class, or a callable that makes an instance.
        params: its keyword arguments.
    """

    def __init__(self, target: Callable[..., Any], params: Mapping[str, Any]) -> None:
        self._environment = target(**params)
        kind = type(self._environment)
        if not callable(getattr(kind, "reset", None)):
            raise TypeError(f"{kind.__name__} has no method reset")
        if not takes_names(self._environment.reset):
            raise TypeError(
                f"{kind.__name__}.reset takes nothing by name, and gets each column of a row so: write reset(self, **row)"
            )
        self._tools = {name: getattr(self._environment, name) for name in tools_of(kind)}
        self._schemas = [schema_of(getattr(kind, name), name) for name in self._tools]
        self._finish = Awaiting()

    def play(self, play: Play, tell: Callable[[Phase], None]) -> Done:
        """Plays one episode."""
        tell("reset")
        history = self._opening(play)
        model = Asker(play.base_url, play.api_key, play.model, play.sampling, play.seconds)
        ended, calls = "max_turns", 0
        try:
            for _ in range(play.turns):
                tell("model")
                answer = model.chat(history, self._schemas)
                history.append(dict(answer.message))
                if not answer.calls and not answer.malformed:
                    ended = "done"
                    break
                calls += len(answer.calls)
                if calls > play.calls:
                    ended = "max_calls"
                    break
                tell("step")
                history += self._results(answer, play.observation_tokens)
        except EpisodeTooLong:
            ended = "context_length"
        finally:
            model.close()
        tell("reward")
        get_reward = getattr(self._environment, "get_reward", None)
        paid = self._finish(get_reward()) if callable(get_reward) else None
        return Done(number(paid, "what get_reward returned"), [], {}, ended)

    def _opening(self, play: Play) -> list[dict[str, Any]]:
        """The row's prompt, with what reset has returned at the end of its last message."""
        more = self._finish(self._environment.reset(**play.row))
        history = opening(play.row) if _has_prompt(play.row) else []
        if more is not None:
            # The row's prompt is the task, not an observation.
            found = messages(_joined(more), "what reset returned")
            added = bounded_messages(found, play.observation_tokens)
            last = history[-1] if history else None
            if last is not None and isinstance(last.get("content"), str) and len(added) == 1:
                history[-1] = {**last, "content": last["content"] + str(added[0]["content"])}
            else:
                history += added
        if not history:
            raise TypeError(
                f"the row has no prompt, and reset returned None: {sorted(play.row)!r:.200}"
            )
        return history

    def _results(self, answer: Answer, tokens: int) -> list[dict[str, Any]]:
        """Messages with what the called tools returned, and with what is wrong with malformed calls."""
        results = []
        for call in answer.calls:
            function = call.get("function")
            function = function if isinstance(function, dict) else {}
            name = str(function.get("name", ""))
            content = bounded(self._call(name, function.get("arguments")), tokens)
            results.append(
                {"role": "tool", "tool_call_id": call.get("id"), "name": name, "content": content}
            )
        if answer.malformed:
            # There is no call that a tool's message could answer, so it is the user who says it.
            results.append({"role": "user", "content": MALFORMED.format(answer.malformed)})
        return results

    def _call(self, name: str, arguments: Any) -> str:
        """What a tool returned as the model reads it, or why there is nothing."""
        try:
            return as_text(self._result(name, arguments))
        except Exception as error:  # noqa: BLE001 - the model gets whatever a tool raises as its result
            return as_text({"error": str(error) or type(error).__name__})

    def _result(self, name: str, arguments: Any) -> Any:
        tool = self._tools.get(name)
        if tool is None:
            there = ", ".join(self._tools) or "none"
            return {"error": f"there is no tool {name[:100]!r}; there are: {there}"}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                return {"error": f"the arguments of {name} aren't JSON: {error}"}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            return {"error": f"the arguments of {name} should be an object"}
        return self._finish(tool(**arguments))


def tools_of(kind: type) -> list[str]:
    """Names of a class's public methods, those of its bases first, in the order in which they are written."""
    names: dict[str, None] = {}
    for base in reversed(kind.__mro__[:-1]):
        for name, member in vars(base).items():
            plain = inspect.isfunction(member) or isinstance(member, staticmethod | classmethod)
            if plain and not name.startswith("_") and name not in OWN:
                names.setdefault(name)
    return [name for name in names if callable(getattr(kind, name, None))]


def _has_prompt(row: Mapping[str, Any]) -> bool:
    return any(row.get(name) is not None for name in ("prompt", "messages", "question"))


def _joined(found: Any) -> Any:
    """The texts of content blocks as one text; anything else as it is."""
    if (
        isinstance(found, list)
        and found
        and all(isinstance(one, Mapping) and one.get("type") == "text" for one in found)
    ):
        return "".join(str(one.get("text", "")) for one in found)
    return found
