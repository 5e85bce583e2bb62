"""The JSON schema of a tool, from a method's signature, type hints and docstring.

Hints that have a JSON form: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Any``, ``list``, ``tuple``,
``dict``, ``Literal`` and unions of these. Descriptions of parameters are read from a section ``Args:``, as
Google's style has it, or from lines ``:param name: …``.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PLAIN = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", dict: "object",
}  # fmt: skip
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):?\s*$")
_ARGUMENT = re.compile(r"^(?P<name>\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)$")
_PARAM = re.compile(r"^:param\s+(?:[\w\[\], |]+\s+)?(?P<name>\w+)\s*:\s*(?P<text>.*)$")


def schema_of(method: Callable[..., Any], name: str) -> dict[str, Any]:
    """A tool in OpenAI's form.

    >>> def add(self, a: int, b: int = 1) -> int:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         a: the first.
    ...     '''
    >>> schema_of(add, "add")["function"]["parameters"]["properties"]["a"]
    {'type': 'integer', 'description': 'the first.'}

    Raises:
        TypeError: a parameter's hint has no JSON form.
    """
    about, described = read_docstring(inspect.getdoc(method) or "")
    hints = _hints_of(method)
    properties, required, more = {}, [], False
    for place, parameter in enumerate(inspect.signature(method).parameters.values()):
        if place == 0 and parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            more = True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"tool {name}: {parameter.name} can't be given by name, as a model gives arguments"
            )
        of_value = _of_hint(hints.get(parameter.name, Any), f"tool {name}: {parameter.name}")
        if parameter.name in described:
            of_value["description"] = described[parameter.name]
        properties[parameter.name] = of_value
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if more:
        parameters["additionalProperties"] = True
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def takes_names(method: Callable[..., Any]) -> bool:
    """Whether a bound method takes arguments by name; so does one without a signature, as far as is known."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:
        return True
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return any(parameter.kind not in by_place for parameter in parameters)


def _hints_of(method: Callable[..., Any]) -> dict[str, Any]:
    """Hints by parameter, without those that name what only a type checker imports."""
    found: dict[str, Any] = {}
    globals_ = getattr(inspect.unwrap(method), "__globals__", {})
    # Functions of C have none.
    for name, hint in (getattr(method, "__annotations__", None) or {}).items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with contextlib.suppress(NameError):
            found |= typing.get_type_hints(alone, globals_)
    return found


def _of_hint(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    if origin is typing.Annotated:
        return _of_hint(inner[0], where)
    if origin is typing.Literal:
        kinds = {_PLAIN.get(type(value)) for value in inner}
        kind = kinds.pop() if len(kinds) == 1 else None
        return {**({"type": kind} if kind else {}), "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return _of_union(inner, where)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin in (list, Sequence, set) and inner:
        return {"type": "array", "items": _of_hint(inner[0], where)}
    if origin is tuple and inner:
        ends = inner[:-1] if inner[-1] is Ellipsis else inner
        if len(set(ends)) == 1:
            return {"type": "array", "items": _of_hint(ends[0], where)}
        return {"type": "array", "prefixItems": [_of_hint(one, where) for one in ends]}
    if origin in (dict, Mapping):
        values = _of_hint(inner[1], where) if len(inner) == 2 else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    raise TypeError(
        f"{where} has the hint {hint!r:.80}, which has no JSON form: use str, int, float, bool, list, "
        f"dict, Literal or a union of them"
    )


def _of_union(inner: Sequence[Any], where: str) -> dict[str, Any]:
    parts = [_of_hint(one, where) for one in inner]
    if all(set(part) == {"type"} for part in parts):
        return {"type": [part["type"] for part in parts]}
    return {"anyOf": parts}


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and that of each parameter."""
    about: list[str] = []
    described: dict[str, str] = {}
    section, current, depth = "", "", -1
    for line in text.splitlines():
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if (found := _SECTION.match(bare)) and indent == 0:
            section, current, depth = found[1], "", -1
        elif param := _PARAM.match(bare):
            section, current = "Args", param["name"]
            described[current] = param["text"]
            depth = indent
        elif bare.startswith((":return", ":raise", ":rtype")):
            section = "Returns"
        elif not section:
            about.append(bare)
        elif section in ("Args", "Arguments", "Parameters") and bare:
            argument = _ARGUMENT.match(bare)
            if argument and (depth < 0 or indent <= depth):
                current, depth = argument["name"].lstrip("*"), indent
                described[current] = argument["text"]
            elif current:
                described[current] = f"{described[current]} {bare}".strip()
    return "\n".join(about).strip(), described
