"""Detects answers that are known to hang a grader, and answers that only repeat the question.

The guard must never fire on a gold answer that people write; if a gold answer does trip it, the
answers to it aren't guarded (:func:`tandem.reward.answers.comparison.decide`).
"""

from __future__ import annotations

import re

from ..reading.extraction import MAX_ANSWER

MAX_DEPTH = 40
"""Nesting of braces or brackets; the deepest gold answer in the study has 9."""

_LONG_DIGITS = re.compile(r"\d{401}")
_HUGE_POWER = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?\d{5,}")
_TOWER = re.compile(r"\^\s*[{(]*\s*(\d+)\s*(!?)\s*[)}]*\s*\^\s*[{(]*\s*(\d+)\s*(!|[})]*\s*\^)?")
_BIG_FACTORIAL = re.compile(
    r"\d{5,}\s*[})]*\s*!|(?<!\d)[3-9]\d{3}\s*[})]*\s*!|\^\s*[{(]*\s*\d{4,}\s*!|!\s*!|!\s*\)\s*!|\)\s*!\s*\)\s*!"
)
"""Those up to 2999, as contests have them in quotients, cost a grader no more than smaller ones do."""
_BIG_BINOMIAL = re.compile(r"\\binom\s*\{\s*\d{5,}|\d{5,}\s*\\choose")
_POLY_POWER = re.compile(r"[)\]]\s*\^\s*[{(]?\s*\d{3,}")
_RATIONAL_BASE = re.compile(
    r"(?:\\left\s*)?[(\[]\s*[-+]?\s*(?:\d{1,9}(?:\.\d{1,9})?(?:\s*/\s*\d{1,9})?"
    r"|\\[dt]?frac\s*(?:\{\s*[-+]?\d{1,9}\s*\}\s*\{\s*\d{1,9}\s*\}|\d\s*\d))\s*(?:\\right\s*)?[)\]]\s*\^"
)
"""A bracket around one number, of which any power that isn't huge is cheap, in front of its exponent."""
_UNEVALUATED = re.compile(
    r"\\(?:sum|prod|int|iint|iiint|oint|lim|limsup|liminf|bigcup|bigcap)(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(?:Sum|Product|Integral|Limit|sum|prod|integrate|limit)\s*\("
)


def _is_high(base: str, factorial: str, exponent: str, more: str | None) -> bool:
    """Whether the exponent ``base^exponent`` of a tower is itself over a few thousand."""
    if factorial or more or len(base) > 4 or len(exponent) > 2:
        return True
    return int(base) ** int(exponent) > 5_000


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "})]":
            depth -= 1
    return deepest


def dangerous(text: str) -> bool:
    """Whether a text has a form that is known to hang or blow up a parser or sympy."""
    if len(text) > MAX_ANSWER:
        return True
    if text.count("{") > 200 or text.count("(") > 100 or text.count("[") > 100:
        return True
    if text.count("$") > 40 or text.count("\\frac") > 25:
        return True
    if len(text) > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        return True
    return bool(
        _LONG_DIGITS.search(text)
        or _HUGE_POWER.search(text)
        or any(_is_high(*match.groups()) for match in _TOWER.finditer(text))
        or _BIG_FACTORIAL.search(text)
        or _BIG_BINOMIAL.search(text)
        or _POLY_POWER.search(_RATIONAL_BASE.sub(" ", text))
    )


def unevaluated(text: str) -> bool:
    """Whether a text holds a sum, product, integral or limit without its result."""
    return _UNEVALUATED.search(text) is not None
