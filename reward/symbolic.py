"""Compares two answers with math-verify, inside a grader process only.

math-verify parses LaTeX through ANTLR. Its other parser, for plain expressions, ends in sympy's
``parse_expr``, which is ``eval``; it is never called here. Its own timeouts are off: the parent
process owns the time, and a killed process is the only bound that also holds in C code.

Corrections on top of math-verify 0.9 (each has a test):

- equations without real solutions are all equal to it: they must be proportional here;
- numbers under 1e-15 are all equal to it: a relative tolerance must hold too;
- ``i`` is an ordinary symbol to it: tried again as the imaginary unit;
- degrees are dropped in trigonometric functions: rewritten to radians first;
- an inequality may answer an interval;
- ratios of factorials are simplified.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Float, I, MatrixBase, combsimp, simplify, solve

# It warns that its own timeouts are off and of each formula that it can't read.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

CORRECT = "correct"
WRONG = "wrong"
UNPARSABLE = "unparsable"
GOLD_UNPARSABLE = "gold_unparsable"

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|\\degree|°)")
_FACTORIAL = re.compile(r"!|\\Gamma|\\binom")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])|\\(?:mathrm|text)\s*\{\s*i\s*\}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|\{,\}|,\\!)(?=\d{3}(?!\d))")
_PLAIN_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_E_NOTATION = re.compile(r"(?<![A-Za-z\\{])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\d.])")


def prepare(text: str) -> str:
    """LaTeX that math-verify's delimiters hold: no dollars, no line breaks, known traps rewritten."""
    text = text.replace("\\$", "").replace("$", " ")
    for delimiter in ("\\(", "\\)", "\\[", "\\]"):
        # "\\\\[2pt]" is a line break of a matrix, not a delimiter.
        text = re.sub(rf"(?<!\\){re.escape(delimiter)}", " ", text)
    text = re.sub(r"\s*\n\s*", " ", text).strip()
    if "\\" in text or "," in text:
        text = _THOUSANDS.sub("", text)
        if _PLAIN_THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
    text = _E_NOTATION.sub(r"\1 \\cdot 10^{\2}", text)
    if _TRIGONOMETRIC.search(text):
        text = _DEGREES.sub(r"{(\\frac{\1 \\pi}{180})}", text)
    return text.replace("\\mathbf i", "i").rstrip(".")


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
    """The verdict's name. An empty ``answer`` asks only whether the gold answer can be read."""
    golds = _parse_gold(gold)
    if not golds:
        return GOLD_UNPARSABLE
    if not answer:
        return UNPARSABLE
    answers = _parse(answer)
    if not answers:
        return UNPARSABLE
    if _verify(golds, answers):
        return CORRECT if not _falsely_equal(golds, answers) else WRONG
    if _equal_after_all(answer, gold, golds, answers):
        return CORRECT
    return WRONG


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
    return _different_numbers(a, b)


def _different_equations(a: Any, b: Any) -> bool:
    if a == b:
        return False
    try:
        ratio = simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
        if ratio.is_number and ratio != 0:
            return False
        solutions = solve(b, *sorted(b.free_symbols, key=str), dict=True)
        # Two equations without a solution have nothing in common but that.
        return not solutions
    except (NotImplementedError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return False


def _different_numbers(a: Any, b: Any) -> bool:
    try:
        pairs = list(zip(a.args, b.args, strict=True)) if _is_collection(a, b) else [(a, b)]
    except ValueError:
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
    except (ValueError, TypeError, AttributeError):
        return False


def _equal_after_all(answer: str, gold: str, golds: list[Any], answers: list[Any]) -> bool:
    """Tries again what math-verify is known to miss."""
    ours, theirs = _expressions(answers), _expressions(golds)
    if not ours or not theirs:
        return False
    a, b = ours[0], theirs[0]
    try:
        if _IMAGINARY.search(answer) or _IMAGINARY.search(gold):
            a2, b2 = _with_unit(a), _with_unit(b)
            if (a2, b2) != (a, b) and _verify([b2], [a2]):
                return not _falsely_equal([b2], [a2])
        if (_FACTORIAL.search(answer) or _FACTORIAL.search(gold)) and _plain(a) and _plain(b):
            return bool(simplify(combsimp(a.doit() - b.doit())) == 0)
    except (NotImplementedError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return False
    return False


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
