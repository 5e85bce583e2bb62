"""What all forms do with the values that a user's code returns: await them, and check that they are what they should be."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

from ..pipes import MOST_METRICS

CHARACTERS_PER_TOKEN = 16
"""Characters of an observation that are sent for each token it may have. The endpoint cuts it by tokens; this keeps ten
megabytes from travelling there again with every turn."""
CUT = "\n[… {} characters left out …]\n"


class Awaiting:
    """One event loop for the coroutines of an environment, kept between episodes since its clients may be bound to it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, value: Any) -> Any:
        """A value as it is, or what a coroutine returns."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)

        async def finish() -> Any:
            return await value

        return self._loop.run_until_complete(finish())


def number(value: Any, what: str) -> float | None:
    """A reward: a finite number, or None.

    >>> number(True, "step's reward"), number(None, "step's reward")
    (1.0, None)

    Raises:
        TypeError: it isn't a number.
        ValueError: it isn't finite.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {value!r:.100}, neither a number nor None")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{what} is {found}; return None if there is none")
    return found


def figures(value: Any) -> dict[str, float]:
    """An episode's ``metrics``, the environment's own figures, by name: the first :data:`~..pipes.MOST_METRICS` of them.

    Raises:
        TypeError, ValueError: they aren't finite numbers with text as names.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"metrics is {value!r:.100}, not a dictionary of numbers")
    found = {}
    for name, figure in value.items():
        if not isinstance(name, str):
            raise TypeError(f"metrics has {name!r:.100} as a name")
        read = number(figure, f"metrics[{name!r:.60}]")
        if read is not None:
            found[name] = read
    return dict(list(found.items())[:MOST_METRICS])


def messages(value: Any, what: str) -> list[dict[str, Any]]:
    """Text as one message of the user, or a list of messages as it is.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping) and "role" in value:
        value = [value]
    if not isinstance(value, list | tuple) or not all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in value
    ):
        raise TypeError(f"{what} is {value!r:.100}, neither text nor a list of messages")
    return [dict(one) for one in value]


def bounded(text: str, tokens: int) -> str:
    """An observation, with its middle left out if it can't have that many tokens."""
    most = max(256, tokens * CHARACTERS_PER_TOKEN)
    if len(text) <= most:
        return text
    head = most // 2
    return text[:head] + CUT.format(len(text) - most) + text[len(text) - (most - head) :]


def bounded_messages(found: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Messages with texts of bounded length. Of a text in parts, which the endpoint joins, one is made where it's cut."""
    return [
        {**one, "content": _bounded_content(one["content"], tokens)} if "content" in one else one
        for one in found
    ]


def _bounded_content(content: Any, tokens: int) -> Any:
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        # The endpoint refuses it.
        return content
    joined = "".join(map(str, texts))
    cut = bounded(joined, tokens)
    return content if cut == joined else cut


def as_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, anything else as JSON where it can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def opening(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row's prompt.

    Raises:
        TypeError: it has none that can be read.
    """
    prompt = row.get("prompt", row.get("messages", row.get("question")))
    if prompt is None:
        raise TypeError(
            f"reset returned None, and the row has no prompt, messages or question: {sorted(row)!r:.200}"
        )
    return messages(prompt, "the row's prompt")
