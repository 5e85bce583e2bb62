"""Compares two answers with math-verify, inside a grader process only.

math-verify parses LaTeX through ANTLR. Its other parser, for plain expressions, ends in sympy's
``parse_expr``, which is ``eval``; it is never called here. Its own timeouts are off: the parent
process owns the time, and a killed process is the only bound that also holds in C code.

Corrections on top of math-verify 0.9 (each has a test):

- equations without real solutions are all equal to it: they must be proportional here; so are
  undefined values;
- numbers under 1e-15 are all equal to it: a relative tolerance must hold too;
- ``i`` is an ordinary symbol to it: tried again as the imaginary unit;
- degrees are dropped in trigonometric functions: rewritten to radians first;
- an inequality, or several, may answer an interval;
- a sign of plus or minus is written out as the two values wherever it stands;
- ratios of factorials, sums of logarithms and decimal exponents are simplified.
"""

from __future__ import annotations

import json
import logging
import re
from functools import lru_cache
from typing import Any

import sympy
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
    nsimplify,
    simplify,
    solve,
)
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from .latex import prepare
from .spelling import plain

# It warns that its own timeouts are off and of each formula that it can't read.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

CORRECT = "correct"
WRONG = "wrong"
UNPARSABLE = "unparsable"
GOLD_UNPARSABLE = "gold_unparsable"

# Its list of units holds single letters, which it would strip from algebra: x^{2}t isn't x^{2}.
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
    """The verdict's name. An empty ``answer`` asks only whether the gold answer can be read.

    A gold answer that is a JSON list of texts is met by an answer that is right for one of them.
    """
    if gold.startswith('["') and gold.endswith('"]'):
        found = [compare(answer, one) for one in json.loads(gold)]
        return min(found, key=_BEST_FIRST.index)
    golds = _parse_gold(gold)
    if not golds:
        return GOLD_UNPARSABLE
    if not answer:
        return UNPARSABLE
    answers = _parse(answer)
    if not answers:
        return UNPARSABLE
    if _same_structure(golds, answers):
        return CORRECT
    try:
        curves = _same_curve(golds, answers)
    except _MEND_FAILS:
        curves = None
    if curves is not None:
        return CORRECT if curves else WRONG
    if _verify(golds, answers):
        return CORRECT if not _falsely_equal(golds, answers) else WRONG
    if _equal_after_all(answer, gold, golds, answers):
        return CORRECT
    return WRONG


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
"""What sympy raises about expressions that it can't treat: the correction then doesn't apply."""
_BEST_FIRST = (CORRECT, WRONG, UNPARSABLE, GOLD_UNPARSABLE)


def _same_structure(golds: list[Any], answers: list[Any]) -> bool:
    """Equal as they stand, bound variables renamed: no need to work out a sum to see it."""
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs or not ours[0].has(Sum, Product, Integral, Limit):
        return False
    return bool(_rebuilt(ours[0]).as_dummy() == _rebuilt(theirs[0]).as_dummy())


def _same_curve(golds: list[Any], answers: list[Any]) -> bool | None:
    """Whether two polynomial equations in the same unknowns say the same: they are proportional,
    powers of a factor aside.

    Only where neither is solved for a name, as ``y = 2x + 3`` is: there the other rules hold.
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
    """The parser leaves factors in the order in which they were written; sympy sorts them."""
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
    """True where math-verify's equality is one of its known false ones."""
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
            # Both say something about numbers alone, like x = x + 1.
            return bool(simplify(a) != sympy.true)
        ratio = simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
        if ratio.is_number and ratio != 0:
            return False
        solutions = solve(b, *sorted(b.free_symbols, key=str), dict=True)
        # Two equations without a solution have nothing in common but that.
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
    """True for two numbers whose relative difference is more than rounding."""
    if not (isinstance(a, Basic) and isinstance(b, Basic)):
        return False
    if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
        return False
    tolerance = 1e-6 if a.has(Float) or b.has(Float) else 1e-12
    try:
        x, y = a.evalf(40), b.evalf(40)
        if not (x.is_real and y.is_real):
            return False
        # As both data-set habits are paid, 28 and 28% and 0.28 are one number.
        return not any(
            abs(x * s - y) <= tolerance * max(abs(x * s), abs(y))
            for s in (1, 100, sympy.Rational(1, 100))
        )
    except _MEND_FAILS:
        return False


def _equal_after_all(answer: str, gold: str, golds: list[Any], answers: list[Any]) -> bool:
    """Tries again what math-verify is known to miss."""
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs:
        return False
    a, b = ours[0], theirs[0]
    try:
        if _IMAGINARY.search(plain(answer)) or _IMAGINARY.search(plain(gold)):
            a2, b2 = _with_unit(a), _with_unit(b)
            if (a2, b2) != (a, b) and _verify([b2], [a2]):
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
        if roots and simplify(_rebuilt(a) - _rebuilt(b)) == 0:
            return True
        if _LOGARITHM.search(answer) or _LOGARITHM.search(gold):
            return bool(simplify(expand_log(a - b, force=True)) == 0)
        if a.has(Float) != b.has(Float) and a.is_number and b.is_number:
            return _close(a, b)
        if ("circ" in plain(answer)) != ("circ" in plain(gold)):
            one, other = _angle(answer, a), _angle(gold, b)
            return bool((simplify(a).has(sympy.pi) or simplify(b).has(sympy.pi)) and one == other)
    except _MEND_FAILS:
        return False
    return False


def _close(a: Any, b: Any) -> bool:
    """Numbers within 1e-6 of each other, absolutely and relatively."""
    x, y = a.evalf(30), b.evalf(30)
    if not (x.is_finite and y.is_finite):
        return False
    return bool(abs(x - y) <= 1e-6 * min(1, max(abs(x), abs(y))))


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
        # "x <= -2, x >= 3" names no number if it means both.
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
    """What sympy solves at once: polynomials up to the second degree, also inside ``|...|``."""
    bare = expression.replace(lambda e: isinstance(e, sympy.Abs), lambda e: e.args[0])
    return bool(bare.is_polynomial(symbol) and sympy.degree(bare, symbol) <= 2)


def _exact(expression: Any) -> Any:
    """Decimals as fractions."""
    return nsimplify(expression, rational=True) if expression.has(Float) else expression


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
    """Loads what math-verify and sympy load lazily."""
    for answer, gold in WARM_UP:
        compare(answer, gold)
    _parse_gold.cache_clear()
