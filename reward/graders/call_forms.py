"""Texts or conversations: the form in which a user's reward function expects its completions.

TRL's trainers give a function texts if the data set's prompts are texts, and lists of messages if they
are conversations. Here the prompt doesn't decide, since a prompt can be handed over in either form:
unless the config says it, what the function is written for does.

1. The annotation of its parameter ``completions``: ``list[str]``, or something with ``dict`` in it.
2. If there is none, its code: a function that reads ``completion[0]["content"]`` has the constant
   ``"content"`` in it, or calls one of its own package that has. Everything else gets texts.

Nothing is run to find out, and no completion is looked at. If the guess is wrong, a function that
expects messages fails at its first text with an error, which says what to set.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

Form = Literal["text", "conversation"]
KEY = "content"
"""The key of a message's text."""
MOST_FUNCTIONS = 200
"""Functions whose code is looked at."""
_DICT = re.compile(r"dict\[[^\[\]]*\]")


def form_of(function: Callable[..., Any]) -> Form:
    """What a function is written for.

    >>> def shorter(completions, **columns):
    ...     return [-len(text) for text in completions]
    >>> def tagged(completions, **columns):
    ...     return [float("<b>" in completion[0]["content"]) for completion in completions]
    >>> def annotated(completions: "list[list[dict[str, str]]]"):
    ...     return [0.0 for _ in completions]
    >>> form_of(shorter), form_of(tagged), form_of(annotated)
    ('text', 'conversation', 'conversation')
    """
    annotated = _annotation(function)
    conversation = "dict" in annotated or "message" in annotated
    text = "str" in _DICT.sub("", annotated)
    if conversation != text:
        return "conversation" if conversation else "text"
    reads = any(KEY in _constants(one.__code__) for one in _functions(function))
    return "conversation" if reads else "text"


def _annotation(function: Callable[..., Any]) -> str:
    """The annotation of ``completions``, in lower case; empty if there is none."""
    try:
        parameter = inspect.signature(function).parameters.get("completions")
    except (TypeError, ValueError):
        return ""
    if parameter is None or parameter.annotation is parameter.empty:
        return ""
    annotation = parameter.annotation
    return (annotation if isinstance(annotation, str) else str(annotation)).lower()


def _plain(value: Any) -> types.FunctionType | None:
    """The Python function behind a partial, a method, a decorated function or an object with a call."""
    for _ in range(20):
        if isinstance(value, functools.partial | functools.partialmethod):
            value = value.func
        elif isinstance(value, types.MethodType):
            value = value.__func__
        elif isinstance(value, types.FunctionType):
            inner = getattr(value, "__wrapped__", None)
            if inner is None:
                return value
            value = inner
        elif not isinstance(value, type) and isinstance(
            vars(type(value)).get("__call__"), types.FunctionType
        ):
            value = type(value).__call__
        else:
            return None
    return None


def _functions(function: Callable[..., Any]) -> Iterator[types.FunctionType]:
    """The function, and those of the same package that its code names, one after another."""
    first = _plain(function)
    if first is None:
        return
    package = str(first.__module__).partition(".")[0]
    waiting, seen = [first], {first}
    while waiting and len(seen) < MOST_FUNCTIONS:
        current = waiting.pop()
        yield current
        for name in _names(current.__code__):
            found = _plain(current.__globals__.get(name))
            same = found is not None and str(found.__module__).partition(".")[0] == package
            if found is not None and same and found not in seen:
                seen.add(found)
                waiting.append(found)


def _constants(code: types.CodeType) -> set[str]:
    """All texts among a code's constants, those of its inner functions and comprehensions included."""
    found = set()
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, types.CodeType):
            found |= _constants(constant)
    return found


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found
