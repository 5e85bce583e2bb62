"""Compares two answers with math-verify, inside a grader process only.

math-verify parses LaTeX through ANTLR. Its other parser, for plain expressions, ends in sympy's
``parse_expr``, which is ``eval``; it is never called here. Its own timeouts are off: the parent
process enforces the deadline, and only killing a process also stops C code.

Corrections on top of math-verify 0.9 (each has a test):

- it takes all equations without real solutions for equal: they must be proportional here; so must
  undefined values;
- it takes all numbers under 1e-15 for equal: a relative tolerance must hold too;
- it takes every capital for the small letter: here not where a text has a letter in both, as R and r;
- it takes ``i`` for an ordinary symbol: the comparison is repeated with the imaginary unit;
- it drops degrees in trigonometric functions: they are rewritten to radians first;
- an inequality, or several, may answer an interval;
- a plus-minus sign is written out as the two values wherever it occurs;
- ratios of factorials, sums of logarithms and decimal exponents are simplified.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import math_verify.parser
import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    And,
    Basic,
    Dummy,
    Eq,
    FiniteSet,
    Float,
    I,
    Integral,
    Intersection,
    Limit,
    MatrixBase,
    Ne,
    Product,
    Set,
    Sum,
    Union,
    combsimp,
    expand_log,
    simplify,
    solve,
)
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from . import rounded
from .latex import in_radians, prepare
from .spelling import plain
from .structure import as_tuples, pairs_by_name
from .tolerances import DECIMAL, FLOAT_EQUAL, PERCENT, close

# It warns that its own timeouts are off, and of each formula that it can't read.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

# It has no setting for the case of names, and takes its converter from its own module.
math_verify.parser.latex2sympy = partial(
    latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False)
)

CORRECT = "correct"
WRONG = "wrong"
UNPARSABLE = "unparsable"
GOLD_UNPARSABLE = "gold_unparsable"

# Its list of units holds single letters, which it would remove from algebra: x^{2}t isn't x^{2}.
_LATEX = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        ),
    ),
)
_FACTORIAL = re.compile(r"!|\\Gamma|\\binom")
_LOGARITHM = re.compile(r"\\(?:ln|log)(?![a-z])")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_AND = re.compile(r"\band\b|\\cap|\\land|\\wedge")
_OR = re.compile(r"\bor\b|\\cup")


_DEGREES_IN_WORDS = re.compile(r"(?<=\d)\s*(?:\\(?:text|mathrm)\s*\{\s*degrees?\s*\}|degrees?\b)")


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(
        f"${prepare(text)}$",
        extraction_config=_LATEX,
        fallback_mode="first_match",
        extraction_mode="any_match",
        parsing_timeout=None,
    )
    return parsed


@lru_cache(maxsize=256)
def _parse_gold(text: str) -> list[Any]:
    return _parse(text)


def compare(answer: str, gold: str) -> str:
    """The verdict's name. With an empty ``answer``, only checks whether the gold answer can be read.

    If the gold answer is a JSON list of texts, an answer need only be right for one of them.
    """
    if gold.startswith('["') and gold.endswith('"]'):
        verdicts = [compare(answer, one) for one in json.loads(gold)]
        return min(verdicts, key=_BEST_FIRST.index)
    by_name = _by_name(answer, gold)
    if by_name is not None:
        return by_name
    answer, gold = _in_one_angle(*as_tuples(answer, gold))
    golds = _parse_gold(gold)
    if not golds:
        return GOLD_UNPARSABLE
    if not answer:
        return UNPARSABLE
    answers = _parse(answer)
    if not answers:
        return UNPARSABLE
    golds, answers = _in_one_case(golds, answers)
    if _same_structure(golds, answers):
        return CORRECT
    try:
        curves = _same_curve(golds, answers)
    except _MEND_FAILS:
        curves = None
    if curves is not None:
        return CORRECT if curves else WRONG
    if _verify(golds, answers):
        equal = not _falsely_equal(golds, answers)
    else:
        equal = _equal_after_all(answer, gold, golds, answers)
    if equal and _wrongly_rounded(answer, gold, golds, answers):
        equal = False
    return CORRECT if equal else WRONG


def _in_one_angle(answer: str, gold: str) -> tuple[str, str]:
    """Both in radians, where one has degrees and the other multiples of pi. Thus 30 is right for 30 degrees, and not for
    pi/6, alone as well as in a list or tuple."""
    ours, theirs = (_DEGREES_IN_WORDS.sub(r"^\\circ", plain(text)) for text in (answer, gold))
    degrees, multiples = "circ" in ours, "\\pi" in ours
    if (
        "cis" in ours
        or degrees == multiples
        or ("circ" in theirs, "\\pi" in theirs) != (multiples, degrees)
    ):
        return answer, gold
    return (in_radians(ours), gold) if degrees else (answer, in_radians(theirs))


def _in_one_case(golds: list[Any], answers: list[Any]) -> tuple[list[Any], list[Any]]:
    """Both in small letters, as ``X = 1, Y = 2`` for ``x = 1, y = 2``, unless one of them has a letter in both cases."""
    sides = golds, answers
    expressions = [[one for one in side if isinstance(one, Basic | MatrixBase)] for side in sides]
    small: dict[Any, Any] = {}
    for side in expressions:
        names = {symbol.name for one in side for symbol in one.atoms(sympy.Symbol)}
        if len({name.lower() for name in names}) < len(names):
            return sides
        for symbol in set().union(*(one.atoms(sympy.Symbol) for one in side)):
            if symbol.name != symbol.name.lower():
                small[symbol] = sympy.Symbol(symbol.name.lower(), **symbol.assumptions0)
    if not small:
        return sides
    one, other = (
        [_renamed(part, small) if isinstance(part, Basic | MatrixBase) else part for part in side]
        for side in sides
    )
    return one, other


def _renamed(expression: Any, names: Mapping[Any, Any]) -> Any:
    """The expression with other names. Relations stay as they are: sympy would take a point that the parser reads as an
    interval, ``(X, Y) = (1, 2)``, for false."""
    if isinstance(expression, MatrixBase):
        return expression.applyfunc(lambda entry: _renamed(entry, names))
    if expression in names or not expression.args:
        return names.get(expression, expression)
    parts = [_renamed(part, names) for part in expression.args]
    if all(new is old for new, old in zip(parts, expression.args, strict=True)):
        return expression
    kept = {"evaluate": False} if isinstance(expression, Relational) else {}
    return expression.func(*parts, **kept)


def _by_name(answer: str, gold: str) -> str | None:
    """The verdict on values that names put beside each other (``(1, 2)`` and ``x=1, y=2``), of which
    math-verify would compare the sets; None if there are none, or one of the gold's can't be read."""
    pairs = pairs_by_name(answer, gold)
    verdicts = {compare(*pair) for pair in pairs or ()}
    if pairs is None or GOLD_UNPARSABLE in verdicts:
        return None
    return CORRECT if verdicts <= {CORRECT} else WRONG


_MEND_FAILS = (
    NotImplementedError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    LookupError,
    sympy.SympifyError,
    sympy.PolynomialError,
)
"""What sympy raises for expressions that it can't handle; the correction then doesn't apply."""
_BEST_FIRST = (CORRECT, WRONG, UNPARSABLE, GOLD_UNPARSABLE)


def _same_structure(golds: list[Any], answers: list[Any]) -> bool:
    """Whether they are equal as written, with bound variables renamed; a sum needn't be computed."""
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs or not ours[0].has(Sum, Product, Integral, Limit):
        return False
    return bool(_rebuilt(ours[0]).as_dummy() == _rebuilt(theirs[0]).as_dummy())


def _same_curve(golds: list[Any], answers: list[Any]) -> bool | None:
    """Whether two polynomial equations in the same unknowns are equivalent: proportional, powers of a
    factor aside.

    Not for an equation that is solved for a name, such as ``y = 2x + 3``: there the other rules apply.
    """
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs:
        return None
    a, b = ours[0], theirs[0]
    if not (isinstance(a, Eq) and isinstance(b, Eq)):
        return None
    names = a.free_symbols
    if not names or names != b.free_symbols or a.lhs.is_Symbol or b.lhs.is_Symbol:
        return None
    p, q = a.lhs - a.rhs, b.lhs - b.rhs
    if not (p.is_polynomial(*names) and q.is_polynomial(*names)) or a.has(Float) or b.has(Float):
        return None
    p, q = sympy.Poly(p, *names), sympy.Poly(q, *names)
    if p.is_zero or q.is_zero or p.total_degree() > 8 or q.total_degree() > 8:
        return None
    p, q = p.sqf_part(), q.sqf_part()
    return bool((p * q.LC() - q * p.LC()).is_zero)


def _rebuilt(expression: Any) -> Any:
    """The expression as sympy would sort it; the parser keeps factors in the order they were written in."""
    if not expression.args:
        return expression
    return expression.func(*(_rebuilt(part) for part in expression.args))


def _verify(golds: list[Any], answers: list[Any]) -> bool:
    return bool(
        verify(golds, answers, strict=True, allow_set_relation_comp=True, timeout_seconds=None)
    )


def _expressions(parsed: list[Any]) -> list[Any]:
    return [p for p in parsed if isinstance(p, Basic | MatrixBase)]


def _falsely_equal(golds: list[Any], answers: list[Any]) -> bool:
    """Whether math-verify's equality is one of its known false ones."""
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs:
        return False
    a, b = ours[0], theirs[0]
    if isinstance(a, Eq) and isinstance(b, Eq):
        return _different_equations(a, b)
    if a.has(*_UNDEFINED) or b.has(*_UNDEFINED):
        # 12/0 and 1/0 aren't the same answer.
        return answers[-1] != golds[-1]
    return _different_numbers(a, b)


_UNDEFINED = (sympy.zoo, sympy.nan)


def _different_equations(a: Any, b: Any) -> bool:
    if a == b:
        return False
    try:
        if not (a.lhs - a.rhs).simplify().free_symbols:
            # Both are statements about numbers alone, like x = x + 1.
            return bool(simplify(a) != sympy.true)
        ratio = simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
        if ratio.is_number and ratio != 0:
            return False
        solutions = solve(b, *sorted(b.free_symbols, key=str), dict=True)
        # Two equations without a solution have only that in common.
        return not solutions
    except _MEND_FAILS:
        return False


def _different_numbers(a: Any, b: Any) -> bool:
    try:
        pairs = list(zip(a.args, b.args, strict=True)) if _is_collection(a, b) else [(a, b)]
    except _MEND_FAILS:
        return False
    return any(_apart(x, y) for x, y in pairs)


def _is_collection(a: Any, b: Any) -> bool:
    return isinstance(a, sympy.Tuple) and isinstance(b, sympy.Tuple)


def _apart(a: Any, b: Any) -> bool:
    """Whether two numbers differ, relatively, by more than rounding."""
    if not (isinstance(a, Basic) and isinstance(b, Basic)):
        return False
    if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
        return False
    tolerance = DECIMAL if a.has(Float) or b.has(Float) else FLOAT_EQUAL
    try:
        # The parser computes nothing, so that sin(pi) is a function still, of which numbers give 1e-40.
        if (a == 0 or b == 0) and _rebuilt(a) == _rebuilt(b):
            return False
        x, y = a.evalf(40), b.evalf(40)
        if not (x.is_real and y.is_real):
            return False
        return not any(abs(x * s - y) <= tolerance * max(abs(x * s), abs(y)) for s in PERCENT)
    except _MEND_FAILS:
        return False


def _equal_after_all(answer: str, gold: str, golds: list[Any], answers: list[Any]) -> bool:
    """Retries what math-verify is known to miss."""
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs:
        return False
    a, b = ours[0], theirs[0]
    try:
        if _IMAGINARY.search(plain(answer)) or _IMAGINARY.search(plain(gold)):
            if isinstance(a, Eq) and isinstance(b, Eq) and str(a.lhs) == str(b.lhs):
                a, b = a.rhs, b.rhs
            a2, b2 = _with_unit(a), _with_unit(b)
            # With a name that is real, x = 3i and y = 5i both become false.
            known = sympy.false not in (a2, b2)
            if known and (a2, b2) != (a, b) and _verify([b2], [a2]):
                return not _falsely_equal([b2], [a2])
        if (_is_condition(a) or _is_condition(b)) and _same_region(answer, gold, a, b):
            return True
        if isinstance(a, Set) and isinstance(b, Set) and not isinstance(a, FiniteSet):
            return bool(_exact(a.doit()) == _exact(b.doit()))
        if not (_plain(a) and _plain(b)):
            return False
        if _FACTORIAL.search(answer) or _FACTORIAL.search(gold):
            return bool(simplify(combsimp(a.doit() - b.doit())) == 0)
        roots = any(p.exp.is_Rational and not p.exp.is_Integer for p in (a + b).atoms(sympy.Pow))
        if roots and (simplify(_rebuilt(a) - _rebuilt(b)) == 0 or _equal_where_real(a, b)):
            return True
        if _LOGARITHM.search(answer) or _LOGARITHM.search(gold):
            return bool(simplify(expand_log(a - b, force=True)) == 0)
        if a.has(Float) != b.has(Float) and a.is_number and b.is_number:
            x, y = a.evalf(30), b.evalf(30)
            return bool(x.is_finite and y.is_finite) and close(x, y)
        if ("circ" in plain(answer)) != ("circ" in plain(gold)):
            one, other = _angle(answer, a), _angle(gold, b)
            return bool((simplify(a).has(sympy.pi) or simplify(b).has(sympy.pi)) and one == other)
    except _MEND_FAILS:
        return False
    return False


def _equal_where_real(a: Any, b: Any) -> bool:
    """Whether two formulas are equal for positive names, and wherever else both are real: the root of x^3 is
    x times the root of x, but the root of x^2 isn't x."""
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    if not names or len(names) > 4 or a.has(Float) or b.has(Float):
        return False
    near = [sympy.Rational(2 + place, 3) for place in range(len(names))]
    every_sign = itertools.product((1, -1), repeat=len(names))
    for signs, values, scale in itertools.product(every_sign, (near, near[::-1]), (1, 100)):
        point = {n: s * v * scale for n, s, v in zip(names, signs, values, strict=True)}
        x, y = (_odd_roots(one, point).evalf(30) for one in (a, b))
        if x.is_real and y.is_real and abs(x - y) > FLOAT_EQUAL * max(abs(x), abs(y)):
            return False
    positive = {name: Dummy(name.name, positive=True) for name in names}
    return bool(simplify(_rebuilt(a).xreplace(positive) - _rebuilt(b).xreplace(positive)) == 0)


def _odd_roots(expression: Any, point: Mapping[Any, Any]) -> Any:
    """The expression at a point, where an odd root of a negative number is real."""
    if not expression.args:
        return point.get(expression, expression)
    parts = [_odd_roots(part, point) for part in expression.args]
    if isinstance(expression, sympy.Pow):
        base, exponent = parts
        if exponent.is_Rational and exponent.q % 2 and exponent.q > 1 and base.is_negative:
            return (-1) ** exponent.p * (-base) ** exponent
    return expression.func(*parts)


def _wrongly_rounded(answer: str, gold: str, golds: list[Any], answers: list[Any]) -> bool:
    """Whether equality holds only approximately: a decimal is another value, and not its rounding."""
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs or not (ours[0].has(Float) or theirs[0].has(Float)):
        return False
    try:
        return rounded.apart(answer, gold, ours[0], theirs[0])
    except _MEND_FAILS:
        return False


def _angle(text: str, value: Any) -> Any:
    return simplify(value * sympy.pi / 180) if "circ" in plain(text) else simplify(value)


def _is_condition(expression: Any) -> bool:
    if isinstance(expression, FiniteSet):
        return all(_is_condition(part) for part in expression)
    return isinstance(expression, Relational | And | sympy.Or) and not isinstance(expression, Eq)


def _same_region(answer: str, gold: str, a: Any, b: Any) -> bool:
    """Whether two conditions on one variable, or a condition and a set, hold for the same reals."""
    names = {str(s) for e in (a, b) for s in e.free_symbols if _is_condition(e)}
    if len(names) != 1:
        return False
    one, other = _region(answer, a), _region(gold, b)
    return one is not None and other is not None and bool(_exact(one) == _exact(other))


def _region(text: str, expression: Any) -> Any:
    if isinstance(expression, FiniteSet) and _is_condition(expression):
        parts = [_region(text, part) for part in expression]
        if None in parts:
            return None
        either = _OR.search(text) and not any(isinstance(p, Ne) for p in expression)
        both = Intersection(*parts)
        # "x <= -2, x >= 3" has no solution if it means both.
        either = either or (both is sympy.S.EmptySet and not _AND.search(text))
        return Union(*parts) if either else both
    if isinstance(expression, Boolean):
        (symbol,) = expression.free_symbols
        real = Dummy("x", real=True)
        if any(not _low_degree(r.lhs - r.rhs, symbol) for r in expression.atoms(Relational)):
            return None
        return expression.subs(symbol, real).as_set()
    return expression if isinstance(expression, Set) else None


def _low_degree(expression: Any, symbol: Any) -> bool:
    """Whether sympy can solve it at once: polynomials up to the second degree, also inside ``|...|``."""
    bare = expression.replace(lambda e: isinstance(e, sympy.Abs), lambda e: e.args[0])
    return bool(bare.is_polynomial(symbol) and sympy.degree(bare, symbol) <= 2)


def _exact(expression: Any) -> Any:
    """Rewrites decimals as fractions, to the 15 digits that they print with."""
    return expression.xreplace({f: sympy.Rational(str(f)) for f in expression.atoms(Float)})


def _plain(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr)


def _with_unit(expression: Any) -> Any:
    symbols = [s for s in getattr(expression, "free_symbols", ()) if s.name == "i"]
    return expression.subs(dict.fromkeys(symbols, I)) if symbols else expression


WARM_UP = (
    ("\\frac{1}{2}x + 3", "3 + \\frac{x}{2}"),
    ("\\{1, 2, 3\\}", "\\{3, 2, 1\\}"),
    ("(-\\infty, 1) \\cup (2, 3]", "(2, 3] \\cup (-\\infty, 1)"),
    ("x \\geq 2", "[2, \\infty)"),
    ("\\sin^2 x + \\cos^2 x", "1"),
    ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 3 \\end{pmatrix}"),
)
"""Compared once in the zygote, so that forked graders share the parser's warm tables."""


def warm_up() -> None:
    """Loads what math-verify and sympy import lazily."""
    for answer, gold in WARM_UP:
        compare(answer, gold)
    _parse_gold.cache_clear()
