"""Capitals: two letters in algebra, and no difference in a word."""

from __future__ import annotations

import pytest

from tandem.reward.answers import comparison, symbolic
from tandem.reward.reading import modes


def _is_right(answer: str, gold: str) -> bool:
    found = comparison.decide(answer, gold, modes.mode("boxed"))
    return (found.verdict.value if found else symbolic.compare(answer, gold)) == "correct"


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("0", "\\ln\\frac{R}{r}", False),
        ("\\frac{v_0}{2}", "\\frac{M v_0}{M+m}", False),
        ("1", "\\frac{R!}{r!}", False),
        ("(R,r)", "(r,R)", False),
        ("\\ln R-\\ln r", "\\ln\\frac{R}{r}", True),
        ("\\frac{\\pi R^2}{2}+\\frac{\\pi r^2}{2}", "\\frac{\\pi(R^2+r^2)}{2}", True),
        ("2E", "E+E", True),
        ("X=5", "x=5", True),
        # Where no text has a letter in both cases, the case tells nothing apart.
        ("X=1, Y=2", "x=1, y=2", True),
        ("X=\\sqrt2", "x=\\sqrt2", True),
        ("\\frac{x^3}{3}+c", "\\frac{x^3}{3}+C", True),
        ("\\frac{N(N+1)}{2}", "\\frac{n(n+1)}{2}", True),
        ("R=3, r=1", "r=3, R=1", False),
        ("(X,Y)=(1,2)", "(x,y)=(1,2)", True),
        ("\\begin{pmatrix}X\\\\Y\\end{pmatrix}", "\\begin{pmatrix}x\\\\y\\end{pmatrix}", True),
        ("(C)", "(c)", True),
        ("C", "\\text{(c)}", True),
        ("(D)", "(c)", False),
        # An option, as data sets write it.
        ("c", "C", True),
        ("(c)", "C", True),
        ("(C)", "c", True),
        ("x_{1}", "x_1", True),
    ],
)
def test_a_capital_is_another_letter_than_the_small_one(
    answer: str, gold: str, right: bool
) -> None:
    assert _is_right(answer, gold) is right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("True", "true", True),
        ("\\text{TRUE}", "true", True),
        ("YES", "yes", True),
        ("even", "Even", True),
        ("No.", "no", True),
        ("false", "true", False),
        ("No", "yes", False),
        ("Red", "red", True),
        ("\\text{east}", "East", True),
        ("TOM", "Tom", True),
        ("Blue", "blue", True),
        ("Bag A", "bag A", True),
        ("Tom and Ann", "tom and ann", True),
        ("Red", "rod", False),
    ],
)
def test_capitals_make_no_other_word(answer: str, gold: str, right: bool) -> None:
    assert _is_right(answer, gold) is right
