"""The reward of Countdown: an expression of given numbers that has a given value.

The expression is parsed here, with exact fractions; nothing is evaluated as code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from ..reading import extraction
from .registry import Component, Graded, register

MAX_CHARACTERS = 300
"""Longest expression that is read."""
_TOKEN = re.compile(r"\s*(?:([0-9]{1,9})|([-+*/()]))")
_LATEX = {
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
    **dict.fromkeys(("\\left", "\\right", "$", "\\(", "\\)", "\\[", "\\]"), " "),
}
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SPELLINGS = str.maketrans(
    {"×": "*", "·": "*", "\u22c5": "*", "\u2217": "*", "÷": "/", "−": "-", "[": "(", "]": ")"}
)


@register("equation", origin="TinyZero's Countdown")
def equation() -> Component:
    """1 if the answer uses each of the row's ``nums`` once and has the value ``target``, else 0; no value
    for rows without them. The answer is in the last ``<answer>``, or in the last box of it, else in the
    last box; what follows an equals sign is left out."""

    def value(sample: Graded) -> float | None:
        numbers, target = sample.extra.get("nums"), sample.extra.get("target")
        if not isinstance(numbers, list) or not isinstance(target, int):
            return None
        tag = extraction.answer_tag(sample.text)
        answer = extraction.last_box(tag or sample.text) or tag or ""
        found = evaluate(answer.partition("=")[0])
        return float(found is not None and found[0] == target and found[1] == sorted(numbers))

    return value


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Value and sorted numbers of an expression of whole numbers, ``+ - * /`` and brackets, also in LaTeX.

    Returns:
        None if it is anything else, divides by zero or is over :data:`MAX_CHARACTERS` long.

    >>> evaluate("(1 + 2) / 6 * 4")
    (Fraction(2, 1), [1, 2, 4, 6])
    >>> evaluate("2 ** 3"), evaluate("__import__('os')"), evaluate("1 / (2 - 2)")
    (None, None, None)
    """
    if len(expression) > MAX_CHARACTERS:
        return None
    try:
        parser = _Parser(_from_latex(expression).translate(_SPELLINGS))
        result = parser.sum()
        if parser.next is not None:
            return None
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
    return result, sorted(parser.numbers)


def _from_latex(expression: str) -> str:
    """``(3+1)*25`` for ``\\left(3+1\\right) \\times 25``, as people write it in a box."""
    for command, by in _LATEX.items():
        expression = expression.replace(command, by)
    inner = 1
    while inner:
        expression, inner = _FRACTION.subn(r"((\1)/(\2))", expression)
    return expression


class _Parser:
    """Recursive descent: a sum of products of factors."""

    def __init__(self, expression: str) -> None:
        self.numbers: list[int] = []
        self._tokens = _tokens(expression)
        self.next = next(self._tokens, None)

    def _take(self) -> str:
        token, self.next = self.next, next(self._tokens, None)
        if token is None:
            raise ValueError("it ends too soon")
        return token

    def sum(self) -> Fraction:
        value = self._product()
        while self.next in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.next in ("*", "/"):
            value = value * self._factor() if self._take() == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        token = self._take()
        if token == "(":
            value = self.sum()
            if self._take() != ")":
                raise ValueError("a bracket isn't closed")
            return value
        if token == "-":
            return -self._factor()
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])


def _tokens(expression: str) -> Iterator[str]:
    place, end = 0, len(expression.rstrip())
    while place < end:
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"{expression[place]!r} isn't part of an expression")
        place = match.end()
        yield match[1] or match[2]
