"""The grader's end of a user's own reward function: imports it, calls it, checks what it returns.

It imports little on purpose: the graders' parent imports it, and every grader holds what that holds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

from ...common import import_path
from ...common.errors import ConfigError
from .call_forms import Form, form_of

Function = Callable[..., Any]
Messages = Sequence[Mapping[str, str]]

NOT_GIVEN = {
    "trainer_state": "no trainer runs beside a grader; take what it needs from params",
    "environments": "responses come from no environment",
    "environment": "responses come from no environment",
}
"""Arguments of TRL's trainers that don't exist here, and what to do."""
LOGS = ("log_extra", "log_metric")
"""Arguments for which a function is given one that does nothing."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load(path: str) -> Function:
    """Imports a function.

    Raises:
        ConfigError: there is no such function, or its module can't be imported; says why.
    """
    function: Any = import_path.load(path, key="reward.components.name")
    if not callable(function):
        raise ConfigError(f"reward component {path} isn't a function: {function!r:.200}")
    return function


def needed(function: Function) -> list[str]:
    """The arguments without which a function can't be called, save those that no column is given as."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        one.name
        for one in parameters
        if one.kind in _NAMED
        and one.default is one.empty
        and one.name not in NOT_GIVEN
        and one.name not in LOGS
    ]


def source_file(function: Function) -> str | None:
    """The file that a function is from, if it is known."""
    try:
        return inspect.getfile(inspect.unwrap(function))
    except (TypeError, OSError):
        return None


def call(
    function: Function,
    given: Mapping[str, Any],
    form: Literal["auto", "text", "conversation"] = "text",
    prompts: Sequence[Messages] = (),
) -> list[float | list[float] | None]:
    """Calls a function with those columns that it accepts.

    Args:
        function: the function.
        given: its keyword arguments, with texts as ``prompts`` and ``completions``.
        form: what it gets in their place; ``auto`` = what it is written for.
        prompts: ``[G]`` the prompts as messages, for a function that gets conversations.

    Raises:
        TypeError, ValueError: it needs something that it can't be given, or returns something other
            than a number, a list of a number for each token, or None for each completion.
    """
    used = _form(function) if form == "auto" else form
    columns = dict(given)
    if used == "conversation":
        columns["completions"] = [
            [{"role": "assistant", "content": text}] for text in given["completions"]
        ]
        columns["prompts"] = [[dict(message) for message in prompt] for prompt in prompts]
    arguments = _accepted(function, columns)
    try:
        values = function(**arguments)
        if inspect.isawaitable(values):
            import asyncio

            values = asyncio.run(_awaited(values))
    except KeyError as error:
        if (name := str(error.args[0]) if error.args else "") in NOT_GIVEN:
            raise TypeError(_refusal(name)) from error
        raise
    except (TypeError, AttributeError) as error:
        if form == "auto":
            # Most often a text was indexed like a list of messages, or the other way round.
            other = "text" if used == "conversation" else "conversation"
            note = f"(its completions were given as {used}: if that is wrong, set form: {other})"
            raise TypeError(f"{error} {note}") from error
        raise
    return _numbers(values, len(given["completions"]), given.get("completion_ids"))


_FORMS: dict[int, tuple[Function, Form]] = {}
"""Functions and their forms by ``id``, since not every object that can be called can be hashed."""


def _form(function: Function) -> Form:
    if id(function) not in _FORMS:
        _FORMS[id(function)] = function, form_of(function)
    return _FORMS[id(function)][1]


async def _awaited(found: Any) -> Any:
    return await found


def _not_kept(*_: Any, **__: Any) -> None:
    """Stands in for TRL's ``log_extra`` and ``log_metric``: what a function logs isn't kept."""


def _accepted(function: Function, given: dict[str, Any]) -> dict[str, Any]:
    """The columns that a function takes.

    Raises:
        TypeError: it needs something that it can't be given.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return given
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in _NAMED]
    given = dict(given)
    for parameter in named:
        if parameter.name in given or parameter.default is not parameter.empty:
            continue
        if parameter.name in LOGS:
            given[parameter.name] = _not_kept
        elif parameter.name in NOT_GIVEN:
            raise TypeError(_refusal(parameter.name))
        else:
            raise TypeError(
                f"it needs the column {parameter.name!r}, and the rows have "
                f"{', '.join(sorted(given))}"
            )
    return given if takes_all else {p.name: given[p.name] for p in named if p.name in given}


def _refusal(name: str) -> str:
    return f"it asks for {name!r}, which can't be given: {NOT_GIVEN[name]}"


def _numbers(
    returned: Any, count: int, tokens: Sequence[Sequence[int]] | None
) -> list[float | list[float] | None]:
    """What a function returned as numbers; recognises a tensor or an array without importing its library."""
    as_list = getattr(returned, "tolist", None)
    is_array = callable(as_list)
    try:
        values = as_list() if callable(as_list) else list(returned)
        # The keys of a mapping aren't rewards, and a set's elements have no order.
        if not isinstance(values, list) or isinstance(returned, Mapping | Set):
            raise TypeError
    except TypeError:
        raise TypeError(f"it returned {returned!r:.80}, not a list of {count} numbers") from None
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} values for {count} completions")
    numbers: list[float | list[float] | None] = []
    for place, value in enumerate(values):
        if isinstance(value, str):
            raise TypeError(f"it returned {value!r:.80} for completion {place}, not a number")
        one = value.tolist() if callable(getattr(value, "tolist", None)) else value
        if one is None or (is_array and isinstance(one, float) and math.isnan(one)):
            # An array has no None: there, and in TRL, NaN says that there is no value.
            numbers.append(None)
        elif isinstance(one, list):
            length = len(tokens[place]) if tokens is not None else None
            if len(one) != length:
                known = "aren't known" if length is None else f"are {length}"
                raise ValueError(
                    f"it returned {len(one)} rewards for the tokens of completion {place}, which {known}"
                )
            numbers.append([_finite(token, place) for token in one])
            _finite(sum(map(float, one)), place)
        else:
            numbers.append(_finite(one, place))
    return numbers


def _finite(value: Any, place: int) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number} for completion {place}; return None instead")
    return number
