"""Compares simple answers by their values, without sympy: a second fast path, after the text.

It handles formulas (:mod:`tandem.reward.answers.formula`), matrices of them, unions of intervals, and
prose that can't be a value. What is close but not equal, or where math-verify's conventions differ
from plain algebra, is left to a grader process.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from .formula import (
    MAX_CHARACTERS,
    Formula,
    Unknown,
    floating,
    read_formula,
    same_value,
)
from .spelling import normalise
from .structure import collection
from .tolerances import FLOAT_APART, FLOAT_EQUAL

_PROSE = re.compile(r"(?:\\text\s?\{)?[A-Za-z][A-Za-z ,.;:'-]*\}?")
_LONG_WORD = re.compile(r"[A-Za-z]{3,}")
_NUMBER_WORDS = re.compile(
    r"\b(?:infin|inf\b|pi\b|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twel"
    r"|thir|hundred|thousand|million|half|third|quarter|none|empty|undefined|all\b|real|root|sqrt)",
    re.IGNORECASE,
)
_SIZES = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])")
_INTERVAL = re.compile(r"(?P<open>[(\[])(?P<low>[^,]+),(?P<high>[^,]+)(?P<close>[)\]])")
_SET = re.compile(r"\\\{(?P<parts>[^{}\\]+)\\\}")
_MATRIX = re.compile(r"\\begin ?\{(?P<kind>[pbB]?matrix)\}(?P<body>.*)\\end ?\{(?P=kind)\}")


@lru_cache(maxsize=8_192)
def read_matrix(text: str) -> tuple[tuple[Formula, ...], ...] | None:
    """The entries of a matrix with round or square brackets, by row; None for anything else."""
    match = _MATRIX.fullmatch(text)
    if match is None or len(text) > 4 * MAX_CHARACTERS or "\\begin" in match.group("body"):
        return None
    rows = []
    for line in re.split(r"\\\\(?:\[[^\]]*\])?", match.group("body").strip()):
        if not line.strip():
            continue
        row = tuple(read_formula(entry.strip()) for entry in line.split("&"))
        if any(entry is None for entry in row):
            return None
        rows.append(row)
    if not rows or len({len(row) for row in rows}) != 1:
        return None
    return tuple(rows)  # type: ignore[arg-type]


def _same_matrix(
    a: tuple[tuple[Formula, ...], ...], b: tuple[tuple[Formula, ...], ...]
) -> bool | None:
    if (len(a), len(a[0])) != (len(b), len(b[0])):
        # Whether a row matches a column is a question of conventions.
        return None if (len(a), len(a[0])) == (len(b[0]), len(b)) else False
    equal = [same_value(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return False if False in equal else None if None in equal else True


# --- sets of numbers --------------------------------------------------------------------------

Span = tuple[float, bool, float, bool]
"""Lower end and whether it is included, upper end and whether it is included."""


def _end(text: str) -> float:
    """A real number or an infinity; raises :class:`Unknown` for anything else."""
    text = text.strip()
    infinity = text.lstrip("+-") == "\\infty"
    if infinity:
        return -math.inf if text.startswith("-") else math.inf
    formula = read_formula(text)
    if formula is None or formula.names or formula.decimal or formula.transcendental:
        raise Unknown
    value = floating(formula.tree, {})
    if abs(value.imag) > FLOAT_EQUAL * abs(value):
        raise Unknown
    return value.real


@lru_cache(maxsize=8_192)
def read_spans(text: str) -> tuple[Span, ...] | None:
    """Intervals of a union, in order and not touching each other; None for anything else."""
    if len(text) > MAX_CHARACTERS:
        return None
    spans: list[Span] = []
    try:
        for piece in text.split("\\cup"):
            match = _INTERVAL.fullmatch(piece.strip())
            if match is None:
                return None
            low, high = _end(match.group("low")), _end(match.group("high"))
            if not low < high:
                return None
            spans.append((low, match.group("open") == "[", high, match.group("close") == "]"))
    except (Unknown, OverflowError, ZeroDivisionError, ValueError):
        return None
    spans.sort()
    merged = [spans[0]]
    for low, low_in, high, high_in in spans[1:]:
        _, _, end, end_in = merged[-1]
        if low < end or (low == end and (low_in or end_in)):
            return None  # Overlapping intervals are one interval, which sympy should simplify.
        merged.append((low, low_in, high, high_in))
    return tuple(merged)


def _same_spans(a: tuple[Span, ...], b: tuple[Span, ...]) -> bool | None:
    if len(a) != len(b):
        return False
    for one, other in zip(a, b, strict=True):
        if one[1] != other[1] or one[3] != other[3]:
            return False
        for x, y in ((one[0], other[0]), (one[2], other[2])):
            if x != y and abs(x - y) > FLOAT_APART * max(1.0, min(abs(x), abs(y))):
                return False
            if x != y and not abs(x - y) <= FLOAT_EQUAL * max(abs(x), abs(y)):
                return None
    return True


@lru_cache(maxsize=8_192)
def is_many(text: str) -> bool:
    """Whether it is a set, in braces, of two or more numbers."""
    match = _SET.fullmatch(text)
    parts = match.group("parts").split(",") if match else []
    try:
        return len({_end(part) for part in parts}) > 1
    except (Unknown, OverflowError, ZeroDivisionError, ValueError):
        return False


def _bare(text: str) -> str:
    """A matrix as it was written, without what surrounds it; normalising it would lose its rows."""
    text = text.strip().strip("$").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _SIZES.sub("", text).strip()


def same(answer: str, gold: str) -> bool | None:
    """Whether two answers, as they were read, are equal; None if that can't be decided here."""
    if "matrix" in gold:
        matrix = read_matrix(_bare(gold))
        if matrix is None:
            return None
        given = read_matrix(_bare(answer))
        if given is not None:
            return _same_matrix(given, matrix)
        return False if is_prose(normalise(answer)) else None
    answer, gold = normalise(answer), normalise(gold)
    right = read_formula(gold)
    if right is not None:
        ours = read_formula(answer)
        if ours is not None:
            return same_value(ours, right)
        return False if is_prose(answer) else None
    if is_many(gold):
        # A single number doesn't equal a set of several.
        single = read_formula(answer)
        return False if single is not None and not single.names else None
    if "\\cup" in gold:
        spans, given_spans = read_spans(gold), read_spans(answer)
        if spans is not None and given_spans is not None:
            return _same_spans(given_spans, spans)
        listed = collection(answer)
        if spans is not None and listed is not None and not listed.kind:
            # Intervals joined by "or" or a comma; joined by "and" too, as many write.
            given_spans = read_spans("\\cup".join(listed.parts))
            return (given_spans is not None and _same_spans(given_spans, spans)) or None
    return None


def is_prose(text: str) -> bool:
    """Whether a text is only words, none of them a number, so that it has no value whatever a parser makes of it.

    >>> [is_prose(text) for text in ("I could not tell", "twenty one", "abc", "x + why")]
    [True, False, False, False]
    """
    if len(text) > MAX_CHARACTERS or not _PROSE.fullmatch(text) or _NUMBER_WORDS.search(text):
        return False
    return len(_LONG_WORD.findall(text.replace("\\text", ""))) >= 2
