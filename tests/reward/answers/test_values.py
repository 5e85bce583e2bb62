"""Formulas compared by their values: what is settled without sympy, and what is left to it."""

from __future__ import annotations

import pytest

from tandem.reward.answers.symbolic import compare
from tandem.reward.answers.values import is_prose, same

EQUAL = [
    ("c+2x", "2x + c"),
    ("x(2x+5)", "2x^2+5x"),
    ("\\frac{x^2-1}{x-1}", "x+1"),
    ("(a+b)^2", "a^2 + 2ab + b^2"),
    ("\\dfrac{1}{1+\\frac{1}{2}}", "\\frac{2}{3}"),
    ("\\sqrt{12}", "2\\sqrt{3}"),
    ("\\sqrt[3]{16}", "2\\sqrt[3]{2}"),
    ("\\sqrt[3]{-8}", "-2"),
    ("-3\\sqrt[3]{4}", "\\sqrt[3]{-108}"),
    ("\\frac{\\pi}{4}", "\\pi/4"),
    ("1/\\sqrt{2}", "\\frac{\\sqrt{2}}{2}"),
    ("\\frac{x}{\\sqrt{x^2+1}}", "\\frac{x\\sqrt{x^2+1}}{x^2+1}"),
    ("-x^2", "0 - x^2"),
    ("x^{-2}", "\\frac{1}{x^2}"),
    (
        "\\begin{bmatrix} 1 & x \\\\ 2 & 4/2 \\end{bmatrix}",
        "\\begin{pmatrix}1&x\\\\2&2\\end{pmatrix}",
    ),
    ("\\begin{pmatrix}1\\\\[2pt]2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("[3, \\infty) \\cup (0, \\frac{4}{2}]", "(0, 2] \\cup [3, \\infty)"),
    ("(-\\infty, \\sqrt{8}) \\cup (5, 6)", "(5,6) \\cup (-\\infty, 2\\sqrt{2})"),
]


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal_values_are_equal(answer: str, gold: str) -> None:
    assert same(answer, gold) is True


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("\\sqrt{\\frac{a}{b}}", "\\frac{\\sqrt{a}}{\\sqrt{b}}"),
        ("\\frac{\\sqrt{1-x^2}}{1-x}", "\\sqrt{\\frac{1+x}{1-x}}"),
        ("\\sqrt{x^3}", "x\\sqrt{x}"),
        ("\\sqrt{8x^3}", "2x\\sqrt{2x}"),
        ("\\sqrt[3]{x^3}", "x"),
    ],
)
def test_roots_are_equal_that_are_so_wherever_they_are_real(answer: str, gold: str) -> None:
    # sympy wouldn't say so of any complex numbers.
    assert same(answer, gold) is True


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("\\ln(x^3)", "3\\ln(x)", "correct"),
        ("\\ln(xy)", "\\ln(x)+\\ln(y)", "correct"),
        ("\\ln(x)+\\ln(x-1)", "\\ln(x(x-1))", "correct"),
        ("\\sqrt{x^3}", "x^{3/2}", "correct"),
        ("\\sqrt[3]{x^2}", "x^{2/3}", "correct"),
        ("\\sqrt{x}", "\\sqrt{-x}", "wrong"),
        ("\\sqrt{x-5}\\sqrt{(x-9)^2}", "\\sqrt{x-5}(x-9)", "wrong"),
        ("\\ln(1-x)", "\\ln(x-1)", "wrong"),
    ],
)
def test_where_logarithms_and_powers_are_not_real_nothing_is_refused(
    answer: str, gold: str, verdict: str
) -> None:
    assert same(answer, gold) is None
    assert compare(answer, gold) == verdict


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("\\sqrt{x^2-4}", "\\sqrt{x-2}\\sqrt{x+2}"),
        ("\\sqrt{x-5}\\sqrt{x+5}", "\\sqrt{x^2-25}"),
        ("(x-4)\\sqrt{x-4}", "\\sqrt{(x-4)^3}"),
    ],
)
def test_roots_that_are_real_only_far_from_0_are_compared_there(answer: str, gold: str) -> None:
    assert same(answer, gold) is True


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [("|x|", "wrong"), ("x^{2/2}", "correct"), ("\\sqrt{x^2}", "wrong"), ("2|x|", "wrong")],
)
def test_an_odd_root_has_a_value_where_its_radicand_is_negative(answer: str, verdict: str) -> None:
    assert compare(answer, "\\sqrt[3]{x^3}") == verdict


FAR_APART = [
    ("\\sqrt{(x-3)^2}", "3-x"),  # not where x is more than 3
    ("\\sqrt{x^2-6x+9}", "3-x"),
    ("\\sqrt{(x+20)^2}", "x+20"),
]
APART = [
    ("2x+1", "2x-1"),
    ("\\sqrt{x^2}", "x"),  # not where x is negative
    ("\\sqrt{a^2b}", "a\\sqrt{b}"),
    ("\\sqrt{(a-b)^2}\\sqrt{a}", "(a-b)\\sqrt{a}"),  # not where b is more than a
    ("\\sqrt{y(y-1)^2}", "(y-1)\\sqrt{y}"),  # not where y is less than 1
    ("\\ln(x^3)", "2\\ln(x)"),
    ("x^{1/2}", "x^{1/3}"),
    ("(x^2)^{1/2}", "x"),
    ("\\sqrt[3]{-8}", "2"),
    ("\\sqrt[4]{-16}", "-2"),
    ("x^{10}", "x^{11}"),
    ("2\\sqrt{5}", "2\\sqrt{3}"),
    ("\\frac{\\pi}{3}", "\\frac{\\pi}{4}"),
    ("3\\pi", "9"),
    ("123456789012345678901234567890x", "123456789012345678901234567891x"),
    ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 3 \\end{pmatrix}"),
    ("\\begin{pmatrix} 1 & 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 & 3 \\end{pmatrix}"),
    ("I could not finish this", "x+1"),
    ("\\text{no solution was found}", "\\frac{1}{2}x"),
    ("(0, 2] \\cup (3, \\infty)", "(0, 2] \\cup [3, \\infty)"),
    ("(0, 2]", "(0, 2] \\cup [3, \\infty)"),
    ("(0, 2] \\cup [3, 9)", "(0, 2] \\cup [3, \\infty)"),
    ("3", "\\{1, 2, 3\\}"),
    ("2\\ln 3", "3\\ln 2"),
    ("x\\sin(x)", "x\\cos(x)"),
    ("e^{2x}", "e^{3x}"),
]


@pytest.mark.parametrize(("answer", "gold"), APART)
def test_other_values_are_not(answer: str, gold: str) -> None:
    assert same(answer, gold) is False


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *FAR_APART,  # far from 0 doubles may have too few digits
        ("5m", "5"),  # metres
        ("2x \\text{ cm}", "2x"),
        ("f(x)", "x^2"),
        ("x=2y", "2y"),
        ("x2", "2x"),
        ("1/2x", "\\frac{x}{2}"),
        ("2\\frac{1}{2}", "\\frac{5}{2}"),  # a mixed number
        ("x^12", "x^{12}"),
        ("\\sin x^2", "\\sin(x)"),
        ("\\sin 2x", "2\\sin x"),
        ("\\ln 4", "2\\ln 2"),
        ("\\sin^2 x + \\cos^2 x", "x"),
        ("\\log 100", "2"),
        ("3!", "6"),
        ("i^2", "-1"),
        ("0.333", "\\frac{1}{3}"),  # rounded
        ("\\frac{355}{113}", "\\pi"),  # close
        ("e^{\\pi\\sqrt{163}}", "262537412640768744"),  # closer than floating point tells
        ("2^{x+1}", "2 \\cdot 2^x"),
        ("\\frac{1}{0}", "x"),
        ("x^{9^{9^{9}}}", "x"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
        (
            "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}",
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        ),
        ("(0, 1] \\cup (1, 2)", "(0, 2) \\cup (3, 4)"),
        ("(0, 2) \\cup \\{3\\}", "(0, 2) \\cup (3, 4)"),
        ("(2, 1) \\cup (3, 4)", "(0, 2) \\cup (3, 4)"),
        ("5", "\\{5\\}"),
        ("x", "\\{1, 2\\}"),
        ("twenty one", "21"),
        ("\\text{all real numbers}", "x"),
        ("x" + "+1" * 400, "x+400"),
        ("(" * 60 + "x" + ")" * 60, "x"),
    ],
)
def test_what_conventions_decide_is_left_to_a_grader_process(answer: str, gold: str) -> None:
    assert same(answer, gold) is None


def test_prose_is_words_that_are_no_number() -> None:
    assert is_prose("see the table above")
    assert not is_prose("x + y")
    assert not is_prose("one half")
    assert not is_prose("abc")


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    # A line break of its own height is beyond math-verify.
    [(*pair, True) for pair in EQUAL if "[2pt]" not in pair[0]]
    + [(*pair, False) for pair in (*APART, *FAR_APART)],
)
def test_a_grader_process_would_say_the_same(answer: str, gold: str, equal: bool) -> None:
    assert (compare(answer, gold) == "correct") is equal
