"""The grader's end of a user's own reward function: imports it, calls it, checks what it returns.

It imports little on purpose: the graders' parent imports it, and every grader holds what that holds.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from ...common import import_path
from ...common.errors import ConfigError

Function = Callable[..., Any]


def load(path: str) -> Function:
    """Imports a function.

    Raises:
        ConfigError: there is no such function, or its module can't be imported; says why.
    """
    # Appended at the end, so that nothing there hides an installed module.
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    function: Any = import_path.load(
        path,
        key="reward.components.name",
        process="Tandem, or start Tandem in that folder",
    )
    if not callable(function):
        raise ConfigError(f"reward component {path} is no function: {function!r:.200}")
    return function


def source_file(function: Function) -> str | None:
    """The file that a function is from, if it is known."""
    try:
        return inspect.getfile(inspect.unwrap(function))
    except (TypeError, OSError):
        return None


def call(function: Function, given: dict[str, Any]) -> list[float | None]:
    """Calls a function with those columns that it accepts.

    Raises:
        TypeError, ValueError: it needs a column that the data doesn't have, or returns something
            other than a number or None for each completion.
    """
    values = function(**_accepted(function, given))
    if inspect.isawaitable(values):
        import asyncio

        values = asyncio.run(_awaited(values))
    return _numbers(values, len(given["completions"]))


async def _awaited(found: Any) -> Any:
    return await found


def _accepted(function: Function, given: dict[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return given
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in named:
        if parameter.name not in given and parameter.default is parameter.empty:
            raise TypeError(
                f"it needs the column {parameter.name!r}, and the rows have "
                f"{', '.join(sorted(given))}"
            )
    return given if takes_all else {p.name: given[p.name] for p in named if p.name in given}


def _numbers(returned: Any, count: int) -> list[float | None]:
    try:
        values = list(returned)
    except TypeError:
        raise TypeError(f"it returned {returned!r:.80}, not a list of {count} numbers") from None
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} values for {count} completions")
    numbers: list[float | None] = []
    for place, value in enumerate(values):
        if value is None:
            numbers.append(None)
            continue
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"it returned {number} for completion {place}; say None instead")
        numbers.append(number)
    return numbers
