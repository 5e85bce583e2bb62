"""Splits an assertion into its expected value and its expression; only the latter enters a sandbox.

``assert f(2) == 4`` is the expression ``f(2)`` and the value 4. Nothing is evaluated here: the value must
be a literal.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

MAX_CHARACTERS = 20_000
"""Longer assertions are run as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One assertion in two parts."""

    kind: Literal["value", "truth"]
    """Whether the expression's value is compared, or only whether it counts as true."""
    expression: str
    """Python source."""
    value: Any
    """The expected value as plain data; for ``truth``, True or False."""
    identity: bool = False
    """Whether the two are compared with ``is``, not ``==``."""


def expected(test: str) -> Expected | None:
    """The parts of a single assertion; None for any other test.

    >>> expected("assert f(2) == 4"), expected("assert not f(3)").value, expected("x = 1")
    (Expected(kind='value', expression='f(2)', value=4, identity=False), False, None)
    """
    if len(test) > MAX_CHARACTERS:
        return None
    try:
        match ast.parse(test.strip()).body:
            case [ast.Assert(test=asked)]:
                return _parts(asked)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None


def _parts(asked: ast.expr) -> Expected:
    match asked:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is() as operator], comparators=[right]):
            identity = isinstance(operator, ast.Is)
            for looked_at, wanted in ((left, right), (right, left)):
                try:
                    value = ast.literal_eval(wanted)
                except (ValueError, TypeError, RecursionError, MemoryError):
                    continue
                if not identity or value is None or isinstance(value, bool):
                    return Expected(
                        kind="value",
                        expression=ast.unparse(looked_at),
                        value=value,
                        identity=identity,
                    )
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Expected(kind="truth", expression=ast.unparse(operand), value=False)
    return Expected(kind="truth", expression=ast.unparse(asked), value=True)


def decoded(said: Any) -> Any:
    """Decodes a value of the harness: JSON, with lists whose first element names their kind.

    Raises:
        ValueError, TypeError, LookupError, ArithmeticError, RecursionError: it isn't such a value.
    """
    if said is None or isinstance(said, bool | int | str):
        return said
    if not isinstance(said, list) or not said or said[0] not in _KINDS:
        raise ValueError("no encoded value")
    return _KINDS[said[0]](said[1:])


_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "float": lambda parts: float(parts[0]),
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "bytes": lambda parts: bytes.fromhex(parts[0]),
    "fraction": lambda parts: Fraction(int(parts[0]), int(parts[1])),
    "list": lambda parts: [decoded(part) for part in parts],
    "tuple": lambda parts: tuple(decoded(part) for part in parts),
    "set": lambda parts: frozenset(decoded(part) for part in parts),
    "dict": lambda parts: {decoded(key): decoded(value) for key, value in parts},
}
