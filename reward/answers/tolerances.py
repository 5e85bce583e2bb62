"""How far two values may differ and still be one answer: the one table of tolerances.

The rule for decimals (:func:`is_rounding`) is the same wherever a number occurs: alone, with a unit,
in a list, or inside a formula that a grader process compares. The other rows bound what floating
point can decide, and never accept an answer that the rule refuses.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

DECIMAL = Fraction(1, 10**6)
"""Largest difference between a decimal and what it rounds, absolutely and relatively. Both must hold,
since an absolute tolerance alone makes all tiny numbers equal. A gold answer written to this place may
itself be rounded; one with fewer places is taken to be exact."""
PERCENT = (Fraction(1), Fraction(100), Fraction(1, 100))
"""Factors between two spellings of one number: 28, 28% and 0.28 are equal, as data sets write each."""

FLOAT_EQUAL = 1e-11
"""Relative difference up to which two floating-point results are equal."""
FLOAT_APART = 1e-5
"""Relative difference from which on they are different; in between, nothing is decided."""
FLOAT_TINY = 1e-4
"""Smaller values are left to math-verify, which has its own convention for them."""
FLOAT_ROUNDED = 1e-2
"""Difference up to which two formulas with decimals may be the same one, once exact and once rounded."""


def close(a: Any, b: Any) -> bool:
    """Whether two values are equal within the tolerance of decimals.

    Args:
        a: a :class:`~fractions.Fraction`, or a number of sympy in a grader process.
        b: a value of the same type.
    """
    return bool(abs(a - b) <= DECIMAL * min(1, max(abs(a), abs(b))))


def is_rounding(
    answer: Fraction, gold: Fraction, *, answer_unit: Fraction, gold_unit: Fraction
) -> bool:
    """Whether one of two values is the other one rounded, as its decimals say.

    An exact gold answer is only matched by its correct rounding to the places that the answer is
    written with: 0.3333333 for 1/3, but neither 0.3333334 for it nor 3.0000004 for 3. A gold answer
    whose decimals reach down to the tolerance may itself be rounded (0.333333 for 1/3), so that an
    answer may be half its last place away from it. One with fewer (2.5) is taken to be exact, since
    answers within the tolerance agree with zeros that it doesn't have.

    Args:
        answer: value of the answer.
        gold: value of the gold answer.
        answer_unit: value of one unit in the answer's last decimal place; 0 if it is exact.
        gold_unit: the same for the gold answer.
    """
    unit = max(answer_unit, gold_unit if gold_unit <= DECIMAL else Fraction(0))
    if not unit:
        return answer == gold
    return 2 * abs(answer - gold) <= unit and close(answer, gold)
