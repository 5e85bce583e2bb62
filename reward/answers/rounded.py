"""Whether two formulas with decimals differ by more than the rounding of these decimals.

This is the rule of :func:`tandem.reward.answers.tolerances.is_rounding` for decimals anywhere in a
formula: half of a decimal's last place must be able to move its side all the way to the other side.
"""

from __future__ import annotations

import math
import re
from typing import Any

import sympy
from sympy import Eq, FiniteSet, Float, MatrixBase

from .spelling import plain
from .tolerances import DECIMAL, FLOAT_EQUAL, FLOAT_ROUNDED, PERCENT

_DECIMAL = re.compile(r"\d*\.\d+")
_POINTS = (sympy.Rational(13, 10), sympy.Rational(-29, 10), sympy.Rational(47, 10))
"""Points at which formulas with names are evaluated: apart from each other, with both signs."""


def apart(answer: str, gold: str, ours: Any, theirs: Any) -> bool:
    """Whether two expressions that are approximately equal are different values.

    Args:
        answer: the text of ``ours``, which has its decimals as they are written.
        gold: the text of ``theirs``.
        ours: what sympy made of the answer.
        theirs: what sympy made of the gold answer.
    """
    in_answer, in_gold = _decimals(answer), _decimals(gold)
    return any(_is_apart(a, b, in_answer, in_gold) for a, b in _numbers_of(ours, theirs))


_Decimals = dict[float, tuple[Any, Any]]
"""Floating-point value of a text's decimals to their exact value and the value of their last place."""


def _decimals(text: str) -> _Decimals:
    return {
        float(sign + decimal): (
            sympy.Rational(sign + decimal),
            sympy.Rational(1, 10 ** len(decimal.partition(".")[2])),
        )
        for decimal in _DECIMAL.findall(plain(text))
        for sign in ("", "-")  # The parser may take a minus for the number's own.
    }


def _numbers_of(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """Corresponding parts of two expressions that are known to be approximately equal."""
    if isinstance(a, MatrixBase) and isinstance(b, MatrixBase):
        return [pair for x, y in zip(a, b, strict=False) for pair in _numbers_of(x, y)]
    if isinstance(a, FiniteSet) and isinstance(b, FiniteSet):
        left = list(b.args)
        pairs = []
        for part in a.args:
            nearest = min(left, key=lambda other: _distance(part, other), default=None)
            if nearest is not None:
                left.remove(nearest)
                pairs += _numbers_of(part, nearest)
        return pairs
    if isinstance(a, Eq) and isinstance(b, Eq):
        return [(a.lhs, b.lhs), (a.rhs, b.rhs)] if _distance(a.lhs, b.lhs) < FLOAT_ROUNDED else []
    if a.args and not isinstance(a, sympy.Expr) and len(a.args) == len(b.args):
        return [pair for x, y in zip(a.args, b.args, strict=True) for pair in _numbers_of(x, y)]
    return [(a, b)] if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) else []


def _distance(a: Any, b: Any) -> float:
    difference = abs(_at(a, _POINTS[0]) - _at(b, _POINTS[0])).evalf()
    return float(difference) if difference.is_finite else math.inf


def _at(expression: Any, point: Any) -> Any:
    names = sorted(expression.free_symbols, key=str)
    return expression.subs({name: point + index for index, name in enumerate(names)})


def _is_apart(answer: Any, gold: Any, in_answer: _Decimals, in_gold: _Decimals) -> bool:
    """Whether two scalars differ by more than their decimals' rounding can explain."""
    if not (answer.has(Float) or gold.has(Float)):
        return False
    fine = {value: pair for value, pair in in_gold.items() if pair[1] <= DECIMAL}
    for point in _POINTS if answer.free_symbols or gold.free_symbols else _POINTS[:1]:
        x, our_reach = _reach(answer, in_answer, in_answer, point)
        y, their_reach = _reach(gold, in_gold, fine, point)
        if not any(
            abs(x * s - y) <= (our_reach * s + their_reach) * _SLACK + _NOISE * abs(y)
            for s in PERCENT
        ):
            return True
    return False


_SLACK = 1 + DECIMAL
_NOISE = 1e-25
"""Relative error of a value that is computed with 30 digits."""


def _reach(expression: Any, decimals: _Decimals, rounded: _Decimals, point: Any) -> tuple[Any, Any]:
    """The exact value at a point, and how far half of each rounded decimal's last place moves it."""
    exact, last_place = {}, {}
    for number in expression.atoms(Float):
        written = decimals.get(float(number))
        if written is None:
            # The parser has computed it (e^{0.5}) in floating point.
            value = sympy.Rational(str(number))
            exact[number], last_place[number] = value, abs(value) * sympy.Rational(FLOAT_EQUAL)
        else:
            exact[number] = written[0]
            last_place[number] = written[1] if float(number) in rounded else sympy.S.Zero
    value = _at(expression.xreplace(exact), point).evalf(30)
    reach = sympy.S.Zero
    for number, place in last_place.items():
        if place:
            moved = exact | {number: exact[number] + place / 2}
            reach += abs(_at(expression.xreplace(moved), point).evalf(30) - value)
    return value, reach
