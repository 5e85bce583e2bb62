"""What counts as the same answer: the fast path, the guard, the modes, and math-verify behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.common.errors import ConfigError
from tandem.common.records import Verdict
from tandem.reward.answers import comparison, guard, spelling, symbolic
from tandem.reward.answers.numbers import read_number, same_number
from tandem.reward.grading import Grade, Grader
from tandem.reward.reading import modes

BOXED = modes.mode("boxed")
Grading = Callable[[str, str], Grade]


def decided(answer: str | None, gold: str, mode: str = "boxed") -> str | None:
    found = comparison.decide(answer, gold, modes.mode(mode))
    return found.verdict.value if found is not None else None


# --- plain numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("-07", -7),
        ("+3", 3),
        ("1,234,567", 1234567),
        ("1 234 567", 1234567),
        ("0.25", Fraction(1, 4)),
        (".5", Fraction(1, 2)),
        ("3.", 3),
        ("0,5", Fraction(1, 2)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\frac34", Fraction(-3, 4)),
        ("3/4", Fraction(3, 4)),
        ("\\frac{-1}{2}", Fraction(-1, 2)),
        ("1.5e3", 1500),
        ("2 \\times 10^{-3}", Fraction(1, 500)),
        ("10^6", 10**6),
        ("2^{10}", 1024),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("0.333...", Fraction(1, 3)),
        ("$1,200.50", Fraction(2401, 2)),
        ("90^\\circ", 90),
        ("12\\text{ cm}^2", 12),
        ("15 miles", 15),
        ("3 million", 3 * 10**6),
    ],
)
def test_plain_numbers_are_read_exactly(text: str, value: Fraction | int) -> None:
    number = read_number(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "3x", "5m", "1 2", "1/0", "1,23,4", "2^{1000}", "1e9999", "5 \\text{ or } 6",
     "3-4", "2\\frac{3}{2}", "9" * 401, "5 \\text{ pm}"],
)  # fmt: skip
def test_what_is_no_plain_number_is_left_to_others(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("07", "7", "correct"),
        ("7.0", "7", "correct"),
        ("0.5", "\\frac{1}{2}", "correct"),
        ("0.333333", "1/3", "correct"),
        ("0.3333", "1/3", "wrong"),
        # Its correct rounding to five places, and closer than one in a million.
        ("3.14159", "3.1415907", "correct"),
        ("3.14160", "3.1415907", "wrong"),
        ("5millimetres", "5", "correct"),
        ("1.5rad", "1.5", "correct"),
        # Three inches, or a product: not the dispatcher's to tell.
        ("3in", "3", None),
        ("32\\,349", "32349", "correct"),
        ("11,\\!111", "11111", "correct"),
        ("28\\%", "28", "correct"),
        ("28\\%", "0.28", "correct"),
        ("28 \\text{ percent}", "28\\%", "correct"),
        ("50 Prozent", "0.5", "correct"),
        ("5 Prozent", "5", "correct"),
        ("29\\%", "28\\%", "wrong"),
        ("x = 5", "5", "correct"),
        ("x = 2 + 3 = 5", "5", "correct"),
        ("\\$18", "18", "correct"),
        ("1e-9", "2e-9", "wrong"),
        ("0.0000001", "0", "wrong"),
        ("9007199254740993", "9007199254740992", "wrong"),
        ("12345678.1", "12345678.2", "wrong"),
        ("204_5", "204_5", "correct"),
        ("101_2", "101_3", "wrong"),
        ("101", "101_2", "wrong"),
        ("5", "101_2", "wrong"),
        ("\\text{(C)}", "C", "correct"),
        ("C) 12 apples", "C", "correct"),
        ("B", "C", "wrong"),
        ("even", "\\text{Even}", "correct"),
        ("odd", "\\text{Even}", "wrong"),
        ("veEn", "\\text{Even}", "wrong"),
        ("( 1 , 2 )", "(1,2)", "correct"),
        ("1 2", "12", "wrong"),
        ("x = 3, y = 5", "5", None),
        ("", "5", "unparsable"),
        ("5", "", "gold_unparsable"),
        ("5", "  $$ ", "gold_unparsable"),
    ],
)
def test_the_fast_path_decides_what_is_plain(answer: str, gold: str, verdict: str | None) -> None:
    assert decided(answer, gold) == verdict


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("(1,2)", "\\{1,2\\}", False),
        ("\\left(1,\\sqrt2\\right)", "x \\in \\{1,\\sqrt2\\}", False),
        ("(1,2,3)", "\\left\\{1,2,3\\right\\}", False),
        ("2,1", "\\{1,2\\}", True),
        ("\\{2,1\\}", "\\{1,2\\}", True),
        ("(1,2),(3,4)", "\\{(1,2),(3,4)\\}", True),
        ("(1,2)", "(1,2)", True),
    ],
)
def test_whether_a_tuple_answers_a_set_is_a_setting(answer: str, gold: str, right: bool) -> None:
    strict = modes.mode("boxed", tuple_for_set=False)
    found = comparison.decide(answer, gold, strict)
    assert found is not None
    assert (found.verdict is Verdict.CORRECT) is right


def test_by_default_a_tuple_answers_a_set_in_its_order() -> None:
    assert decided("(1,2)", "\\{1,2\\}") == "correct"
    assert decided("(2,1)", "\\{1,2\\}") == "wrong"


plain_numbers = st.one_of(
    st.integers(-9999, 9999).map(str),
    st.integers(1000, 9_999_999).map(lambda n: f"{n:,}"),
    st.decimals(-999, 999, allow_nan=False, places=3).map(str),
    st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(
        lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}"
    ),
    st.tuples(st.integers(0, 99), st.integers(1, 99)).map(lambda p: f"{p[0]}/{p[1]}"),
    st.integers(1, 99).map(lambda n: f"{n}\\%"),
)


@settings(max_examples=150, deadline=None)
@given(plain_numbers, plain_numbers)
def test_the_fast_path_agrees_with_math_verify(answer: str, gold: str) -> None:
    a, b = read_number(spelling.normalise(answer)), read_number(spelling.normalise(gold))
    assert a is not None
    assert b is not None
    same = same_number(a, b)
    assume(same is not None)
    # Under 10 both tolerances meet; above, six places are asked of both.
    assert (symbolic.compare(answer, gold) == "correct") is same


@settings(max_examples=60, deadline=None)
@given(plain_numbers)
def test_every_number_is_its_own_right_answer(text: str) -> None:
    assert decided(text, text) == "correct"
    assert decided(f"$ {text} $", text) == "correct"
    assert symbolic.compare(text, text) == "correct"


# --- the guard --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^9}}", "7^{123456}", "12345!", "3000!", "2^{2024!}", "3!!", "{" * 300,
     "(" * 200, "1" * 500, "(x+1)^{1000}", "(1+2)^{1000}", "(2x)^{1000}", "(-2)^{100000}", "x" * 3000, "\\binom{99999}{5}"],
)  # fmt: skip
def test_the_guard_refuses_what_hangs_graders(answer: str) -> None:
    assert decided(answer, "x^2 + 1") == "wrong"


@pytest.mark.parametrize(
    "gold",
    ["x^2 + y^2 = 1", "2^{10}", "10^{12}", "\\binom{10}{3}", "5!", "e^{x^2}", "2^{2^{n}}",
     "(-2)^{2003}", "\\left(\\dfrac{1}{2}\\right)^{100}", "(0.5)^{100}", "2024!",
     "\\frac{\\sqrt{\\sqrt{11}+\\sqrt{194}}}{15+2\\sqrt{33}}"],
)  # fmt: skip
def test_the_guard_lets_ordinary_answers_pass(gold: str) -> None:
    assert not guard.dangerous(gold)


def test_an_answer_is_never_guarded_for_what_its_gold_answer_does_too() -> None:
    assert decided("2^{100000} + 1", "2^{100000} - 1") is None


# --- modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "text", "gold", "verdict"),
    [
        ("boxed_only", "</think> <answer>5</answer>", "5", "unparsable"),
        ("boxed_only", "</think> \\boxed{5}", "5", "correct"),
        ("answer_tag", "</think> <answer> \\boxed{5} </answer>", "5", "correct"),
        ("answer_tag", "</think> <answer> \\boxed{5 </answer>", "5", "unparsable"),
        ("answer_tag", "</think> \\boxed{5}", "5", "unparsable"),
        ("answer_tag", "<answer>The answer is 5</answer>", "The answer is 5", "correct"),
        ("gsm8k", "it is 4\n#### $1,234", "1234", "correct"),
        ("gsm8k", "The answer is 12", "12", "unparsable"),
        ("last_number", "first 3 then 12.", "12", "correct"),
        ("boxed", "</think> \\boxed{\\sum_{k=1}^{4} k}", "10", "wrong"),
        ("boxed_unevaluated", "</think> \\boxed{\\sum_{k=1}^{4} k}", "10", None),
        ("choice", "</think> The answer is (B).", "B", "correct"),
        ("choice", "</think> \\boxed{\\text{B}}", "B", "correct"),
        ("choice", "</think> The answer is a number that I don't know", "A", "unparsable"),
        ("choice", "</think> Answer: I think it is F", "F", "unparsable"),
        ("choice", "</think> answer is C, no: Answer: D", "D", "correct"),
        ("choice", "</think> Answer: D", "12", "gold_unparsable"),
        ("exact", "</think> \\boxed{ Foo  bar }", "foo bar", "correct"),
        ("exact", "</think> \\boxed{0.5}", "1/2", "wrong"),
        ("exact", "\\boxed{Apollo 11 mission}", "Apollo 11 mission", "correct"),
        ("exact", "<answer>The answer is 4</answer>", "The answer is 4", "correct"),
    ],
)
def test_each_mode_reads_its_own_way(mode: str, text: str, gold: str, verdict: str | None) -> None:
    by = modes.mode(mode)
    assert decided(by.read(text, "", False).answer, gold, mode) == verdict


def test_an_unknown_mode_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean boxed\?"):
        modes.mode("boxd")


# --- math-verify behind it, through real processes ----------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold", "correct"),
    [
        ("x + 1", "1 + x", True),
        ("2(x+1)", "2x+2", True),
        ("\\{3, 1, 2\\}", "\\{1, 2, 3\\}", True),
        ("(2, 1)", "(1, 2)", False),
        ("x \\geq 5", "[5, \\infty)", True),
        ("[5, \\infty)", "x \\geq 5", True),
        ("5, 3", "3, 5", True),
        ("3 \\text{ or } 4", "3", False),
        ("\\frac{1 + i}{2}", "\\frac12 + \\frac12 i", True),
        # What math-verify alone gets wrong:
        ("x^2 + 1 = 0", "x^2 + 2 = 0", False),
        ("2x^2 + 2 = 0", "x^2 + 1 = 0", True),
        ("\\pi \\cdot 10^{-18}", "2 \\pi \\cdot 10^{-18}", False),
        ("i^2", "-1", True),
        ("(1+i)^2", "2i", True),
        ("\\sin 30^\\circ", "\\frac{1}{2}", True),
        ("\\frac{n!}{(n-1)!}", "n", True),
        ("1.5e3 + x", "1500 + x", True),
    ],
)
def test_symbolic_answers_are_compared_by_value(
    grade: Grading, answer: str, gold: str, correct: bool
) -> None:
    assert (grade(answer, gold).verdict is Verdict.CORRECT) is correct


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("40\\text{ cm}", Verdict.WRONG),
        ("40\\text{ m}", Verdict.CORRECT),
        ("1+x", Verdict.CORRECT),
        ("2(x+1)-1-x", Verdict.CORRECT),
        ("2\\text{ hours }30\\text{ minutes}", Verdict.WRONG),
    ],
)
def test_what_is_refused_of_a_list_of_golds_is_not_asked_again(
    grade: Grading, answer: str, verdict: Verdict
) -> None:
    # The second one can only be compared in a grader process, which takes centimetres for metres.
    assert (
        grade(answer, json.dumps(["40\\text{ m}", "|x+1|^2/(x+1)", "2", "x+1"])).verdict is verdict
    )


def test_a_gold_answer_that_can_not_be_read_leaves_the_verdict_on_the_others(
    grader: Grader,
) -> None:
    golds = json.dumps(["3", "..."])
    assert grader.unreadable_golds([golds]) == set()


def test_an_answer_that_is_missing_tells_of_an_unreadable_gold_answer(grade: Grading) -> None:
    from tandem.reward.answers import symbolic

    assert symbolic.compare("", "\\frac{1}{x}") == "unparsable"


@pytest.mark.parametrize(
    "gold", ["\\frac{x}{2}", "x^2 + 1 = 0", "(-\\infty, 3]", "\\sqrt{2}", "a:b"]
)
def test_every_gold_answer_is_its_own_right_answer_in_any_spelling(
    grade: Grading, gold: str
) -> None:
    assert grade(f"  {gold} ", gold).verdict is Verdict.CORRECT
    assert (
        grade(f"\\left. {gold} \\right.".replace("\\left. ", ""), gold).verdict is Verdict.CORRECT
    )
    assert grade(gold, f"$\\boxed{{{gold}}}$").verdict is Verdict.CORRECT


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("\\frac\\pi2", "\\frac{\\pi}{2}"),
        ("\\frac{\\pi}{4}", "\\frac\\pi4"),
        ("0.78539816", "\\frac\\pi4"),
        ("\\frac1\\pi", "\\frac{1}{\\pi}"),
        ("\\frac{1}\\pi", "\\frac{1}{\\pi}"),
        ("\\sqrt\\pi", "\\sqrt{\\pi}"),
        ("x=\\frac\\pi3", "\\frac{\\pi}{3}"),
        ("(-\\frac\\pi2,\\frac\\pi2)", "(-\\frac{\\pi}{2},\\frac{\\pi}{2})"),
    ],
)
def test_an_argument_that_is_a_command_needs_no_braces(answer: str, gold: str) -> None:
    assert (decided(answer, gold) or symbolic.compare(answer, gold)) == "correct"


@pytest.mark.parametrize("answer", ["(4,3)", "4,3", "x=4, y=3", "(4, 3)"])
def test_values_that_the_gold_names_are_not_right_when_they_are_swapped(answer: str) -> None:
    assert decided(answer, "x=3, y=4") == "wrong"
    assert decided("(3,4)", "x=3, y=4") == "correct"


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("(1,\\sqrt2)", "x=1, y=\\sqrt{2}", True),
        ("(\\sqrt2,1)", "x=1, y=\\sqrt{2}", False),
        ("2\\sqrt2, 1", "x=1, y=\\sqrt{8}", False),
        ("y=2\\sqrt2, x=1", "x=1, y=\\sqrt{8}", True),
        ("(1,\\pm\\sqrt2)", "x=1, y=\\pm\\sqrt{2}", True),
        ("(2\\ln 2, \\frac12)", "a=\\frac{1}{2}, b=\\ln 4", False),
        ("(5, 2\\sqrt2)", "x=5\\text{ cm}, y=\\sqrt{8}\\text{ cm}", True),
        ("(x,y)=(1,2\\sqrt2)", "x=1, y=\\sqrt{8}", True),
        ("(x,y)=(2\\sqrt2,1)", "x=1, y=\\sqrt{8}", False),
        ("(x,y)=(2,1)", "x=1, y=2", False),
        ("(y,x)=(2,1)", "x=1, y=2", True),
        ("(\\frac{\\pi}{3},1)", "(a,b)=(\\pi/3,1)", True),
        ("(1,\\frac{\\pi}{3})", "(a,b)=(\\pi/3,1)", False),
        ("y=2\\sqrt2, x=1", "(1,\\sqrt{8})", True),
        ("y=1, x=2\\sqrt2", "(1,\\sqrt{8})", False),
        ("m=2, b=3", "(2,3)", True),
        ("x=2\\sqrt2, y=1", "1, \\sqrt{8}", True),
        ("x=2, 1", "x=1, 2", True),
    ],
)
def test_values_with_names_are_compared_in_the_places_of_the_names(
    answer: str, gold: str, right: bool
) -> None:
    assert ((decided(answer, gold) or symbolic.compare(answer, gold)) == "correct") is right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("(2,3),(3,2)", "x=2,y=3 \\text{ or } x=3,y=2", True),
        ("(3,2),(2,3)", "x=2,y=3; x=3,y=2", True),
        ("x=2,y=3 \\text{ or } x=3,y=2", "(2,3),(3,2)", True),
        ("y=3,x=2 \\text{ or } y=2,x=3", "x=2,y=3 \\text{ or } x=3,y=2", True),
        ("x=2,y=2 \\text{ or } x=3,y=3", "x=2,y=3 \\text{ or } x=3,y=2", False),
        ("x=2,y=2 \\text{ or } x=3,y=3", "(2,3),(3,2)", False),
        ("x=2,y=3", "x=2,y=3 \\text{ or } x=3,y=2", False),
        ("x=1,y=2\\sqrt2 \\text{ or } x=3,y=4", "(1,\\sqrt{8}),(3,4)", True),
        ("(1,2\\sqrt2),(3,4)", "x=1,y=\\sqrt{8} \\text{ or } x=3,y=4", True),
        ("y=2\\sqrt2,x=1;y=4,x=3", "x=1,y=\\sqrt{8} \\text{ or } x=3,y=4", True),
        ("x=1,y=4 \\text{ or } x=3,y=2\\sqrt2", "x=1,y=\\sqrt{8} \\text{ or } x=3,y=4", False),
    ],
)
def test_solutions_of_several_unknowns_are_compared_one_by_one(
    answer: str, gold: str, right: bool
) -> None:
    assert ((decided(answer, gold) or symbolic.compare(answer, gold)) == "correct") is right


@pytest.mark.parametrize(
    "answer",
    ["8\\text{ squared}", "8\\text{ halves}", "8 halves", "8 eighths", "8\\text{ tenths}", "8 tens",
     "8\\text{ at most}", "8\\text{ at least}"],
)  # fmt: skip
def test_words_that_make_another_value_of_a_number_are_no_unit(answer: str) -> None:
    assert (decided(answer, "8") or symbolic.compare(answer, "8")) == "wrong"
    assert decided("8\\text{ units squared}", "8") == "correct"
    assert decided("8 s", "8") == "correct"


@pytest.mark.parametrize("answer", ["Option B", "\\text{Option B}", "Choice (B)", "answer: B"])
def test_an_option_may_be_called_one(answer: str) -> None:
    assert decided(answer, "B") == "correct"
    assert decided(answer, "C") == "wrong"
    assert decided(answer, "Option B") == "correct"
    for name in ("choice", "mmlu_pro"):
        found = modes.mode(name).read(f"So it is \\boxed{{{answer}}}.", "", False)
        assert found.answer == "B"


@pytest.mark.parametrize("answer", ["Option B or C", "Options B and C", "Options B", "option Big"])
def test_what_is_called_an_option_is_one_letter(answer: str) -> None:
    assert (decided(answer, "B") or symbolic.compare(answer, "B")) != "correct"


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("60 miles per hour", "60", True),
        ("\\$18 per day", "18", True),
        ("18 dollars per day", "\\$18", True),
        ("8\\% per year", "8", True),
        ("60\\text{ km}/\\text{h}", "60", True),
        ("9.8\\text{ m}/\\text{s}^2", "9.8", True),
        ("60 km/hr", "60", True),
        ("60 miles per hour", "60 km per hour", False),
        ("61 miles per hour", "60", False),
        ("5x per day", "5", False),
        ("60/\\text{h} or 70/\\text{h}", "70", False),
        ("\\$18 per 2 days", "18", False),
        ("12/x", "12", False),
    ],
)
def test_a_rate_is_a_unit_that_only_the_answer_may_have(
    answer: str, gold: str, right: bool
) -> None:
    assert ((decided(answer, gold) or symbolic.compare(answer, gold)) == "correct") is right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("an ellipse", "\\text{ellipse}", True),
        ("\\text{parabola}", "the parabola", True),
        ("a hyperbola", "\\text{ellipse}", False),
        ("1,2,\\dots,10", "1,2,\\ldots,10", True),
        ("1, 2, ..., 10", "1,2,\\cdots,10", True),
        ("1,2,\\dots,11", "1,2,\\ldots,10", False),
        ("1,2,10", "1,2,\\ldots,10", False),
        ("0.333...", "\\frac{1}{3}", True),
        ("3 x 10^8", "3\\times 10^8", True),
        ("3x10^{-8}", "0.00000003", True),
        ("3 x 10^8", "3\\times 10^7", False),
    ],
)
def test_articles_dots_and_powers_of_ten_in_other_spellings(
    answer: str, gold: str, right: bool
) -> None:
    assert ((decided(answer, gold) or symbolic.compare(answer, gold)) == "correct") is right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("\\bigg(1,2\\bigg)", "(1,2)", True),
        ("\\Biggl(\\frac12,x\\Biggr)", "(\\frac{1}{2},x)", True),
        ("\\operatorname{arctan}(x)", "\\arctan(x)", True),
        ("\\mathrm{sin}(x)", "\\sin(x)", True),
        ("\\text{arctan}(x)", "\\arctan x", True),
        ("\\operatorname{sin}(x)", "\\cos(x)", False),
        ("5\\text{ tan}", "5\\tan(x)", False),
    ],
)
def test_brackets_of_any_size_and_functions_in_upright_letters(
    answer: str, gold: str, right: bool
) -> None:
    assert ((decided(answer, gold) or symbolic.compare(answer, gold)) == "correct") is right


SYSTEMS = [
    "\\begin{cases}x=1\\\\y=2\\end{cases}",
    "\\begin{cases} x = 1, \\\\ y = 2. \\end{cases}",
    "\\begin{aligned}x&=1\\\\y&=2\\end{aligned}",
    "\\left\\{\\begin{array}{l}x=1\\\\y=2\\end{array}\\right.",
]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_solution_may_be_written_in_rows(system: str) -> None:
    assert decided(system, "x=1, y=2") == "correct"
    assert decided("y=2, x=1", system) == "correct"
    assert decided(system, "x=2, y=1") == "wrong"
    assert decided("(2,1)", system) == "wrong"


def test_rows_that_are_no_solution_stay_a_system() -> None:
    pieces = "\\begin{cases}x & x>0\\\\-x & x<0\\end{cases}"
    twice = "\\begin{cases}x=1\\\\x=2\\end{cases}"
    assert spelling.plain(pieces) == pieces
    assert spelling.plain(twice) == twice


def _is_right(answer: str, gold: str) -> bool:
    """The verdict on a boxed answer."""
    read = BOXED.read(f"so</think> It is \\boxed{{{answer}}}.", "", False).answer
    assert read is not None
    found = decided(read, gold)
    return (found or symbolic.compare(read, spelled_gold(gold))) == "correct"


def spelled_gold(gold: str) -> str:
    return comparison.question("", gold, BOXED).gold


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("The answer cannot be 5", "5", False),
        ("It is impossible that x is 5", "5", False),
        ("The wrong answer is 5", "5", False),
        ("\\text{The incorrect result is }5", "5", False),
        ("5\\text{ is wrong}", "5", False),
        ("5\\text{ is impossible}", "5", False),
        ("5\\text{ (incorrect)}", "5", False),
        ("5\\text{? no}", "5", False),
        ("5 never", "5", False),
        ("\\text{It cannot be } 5", "5", False),
        ("The answer is never 5", "5", False),
        ("Everything except 5", "5", False),
        ("5 is wrong", "5", False),
        # Words that answers have, too.
        ("The number of wrong answers is 5", "5", True),
        ("5\\text{ wrong answers}", "5", True),
        ("5 incorrect answers", "5", True),
        ("5 apples left", "5", True),
        ("The least value is 5", "5", True),
        ("Half of it is 5", "5", True),
    ],
)
def test_a_value_that_is_denied_is_not_given(answer: str, gold: str, right: bool) -> None:
    assert _is_right(answer, gold) is right


@pytest.mark.parametrize(
    "gold", ["5", "5\\text{ cm}", "5\\,{\\rm cm}", "5\\ \\rm{cm}", "{\\rm 5\\,cm}"]
)
def test_units_in_roman_letters_are_units(gold: str) -> None:
    forms = (
        "5\\,{\\rm cm}",
        "5\\ \\rm{cm}",
        "{\\rm 5\\,cm}",
        "5\\ \\rm cm",
        "5\\,{\\mathrm{cm}}",
        "5\\hspace{2pt}\\text{cm}",
    )
    for form in (*forms, "5\\text{ cm}", "5"):
        assert _is_right(form, gold)
        assert not _is_right(form.replace("5", "6"), gold)
    assert not _is_right("5x\\,{\\rm cm}", gold)
    if "cm" in gold and "{\\rm 5" not in gold:
        assert not _is_right("5\\,{\\rm m}", gold)
        assert _is_right("50\\,{\\rm mm}", gold)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("(2,\\frac{\\pi}{6})", "(2,30^\\circ)", True),
        ("(2,30^\\circ)", "(2,\\frac{\\pi}{6})", True),
        ("(2,\\pi/6)", "(r,\\theta)=(2,30^\\circ)", True),
        ("(\\sqrt{12},30^\\circ)", "(2\\sqrt3,\\frac{\\pi}{6})", True),
        ("(2,60^\\circ)", "(2,\\frac{\\pi}{6})", False),
        ("\\frac{\\pi}{6},\\frac{5\\pi}{6}", "30^\\circ,150^\\circ", True),
        ("30\\text{ degrees}, 150\\text{ degrees}", "\\frac{\\pi}{6},\\frac{5\\pi}{6}", True),
        ("\\frac{\\pi}{6}", "30^\\circ,150^\\circ", False),
        ("90\\text{ degrees}", "\\frac{\\pi}{2}", True),
        ("60\\text{ degrees}", "\\frac{\\pi}{2}", False),
        # A plain number, alone and in a tuple.
        ("30", "30^\\circ", True),
        ("(2,30)", "(2,30^\\circ)", True),
        ("30", "\\frac{\\pi}{6}", False),
        ("(2,30)", "(2,\\frac{\\pi}{6})", False),
    ],
)
def test_angles_are_compared_in_lists_as_they_are_alone(
    answer: str, gold: str, right: bool
) -> None:
    assert _is_right(answer, gold) is right


@pytest.mark.parametrize(
    ("gold", "value"),
    [
        ("The answer is 5", "5"),
        ("The answer is: 5.", "5"),
        ("Answer: 5", "5"),
        ("**Answer:** 5", "5"),
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5"),
        ("She has 5 apples left.", "5"),
        ("x = 5 apples", "5"),
        ("2+3=<<2+3=5>>5\n#### The answer is 5", "5"),
        ("Hence the area is $2\\sqrt{2}$ cm", "\\sqrt{8}"),
        ("The function is $f(x)=x+1$", "1+x"),
        ("The answer is (B)", "B"),
        ("The answer is blue", "Blue"),
        ("The function is even", "The function is even"),
        ("At most 5", "At most 5"),
        ('["The answer is 4", "Answer: 5"]', "5"),
    ],
)
def test_words_around_the_value_of_a_gold_answer_are_left_out_as_in_a_box(
    gold: str, value: str
) -> None:
    assert _is_right(value, gold)
    assert not _is_right("6", gold)
    if "#" not in gold and not gold.startswith("["):
        assert _is_right(gold, gold)


def test_a_gold_answer_keeps_its_words_where_answers_keep_theirs() -> None:
    gold = "The answer is 5"
    assert decided("The answer is 5", gold, "answer_tag") == "correct"
    assert decided("5", gold, "answer_tag") == "correct"
    assert decided("the answer is 5", gold, "exact") == "correct"
    assert decided("5", gold, "exact") == "wrong"
    assert decided("The mass is 5", "B) The mass is 5", "choice") == "correct"
    assert decided("The mass is 5", "The mass is 5", "choice") == "correct"


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        # math-verify adds numbers in a row.
        ("4 2", "6", False),
        ("4\\quad 2", "6", False),
        ("x = 4 2", "6", False),
        ("10 000", "10000", True),
        ("4 2/3", "\\frac{14}{3}", True),
        ("5...", "5", False),
        ("1,2,3\\ldots", "\\{1,2,3\\}", False),
        ("0.333\\ldots", "\\frac13", True),
        ("\\text{ellipse}\\text{ but }\\text{circle}", "ellipse", False),
        ("\\text{right}\\ \\text{triangle}", "\\text{right triangle}", True),
        ("y=5, x=6", "[5,6]", False),
        ("y=6, x=5", "(5,6)", True),
        ("\\$1234.56", "€1.234,56", False),
        ("1.234,56 €", "€1.234,56", True),
        ("1.234.567", "1234567", True),
        ("1 234,5", "1234.5", True),
        ("1.234.567.8", "1234567.8", False),
        ("1\\text{, }2\\text{, and }3", "\\{1,2,3\\}", True),
        ("(-\\infty,0)\\text{ or }(2,\\infty)", "(-\\infty,0)\\cup(2,\\infty)", True),
        ("(-\\infty,0),(2,\\infty)", "(-\\infty,0)\\cup(2,\\infty)", True),
        ("(-\\infty,0),(3,\\infty)", "(-\\infty,0)\\cup(2,\\infty)", False),
        ("1776-07-04", "July 4, 1776", True),
        ("1776-04-07", "July 4, 1776", False),
        ("the 4th of July 1776", "July 4, 1776", True),
        ("\\bm{42}", "42", True),
        ("\\ensuremath{42}", "42", True),
    ],
)
def test_what_a_careful_teacher_would_say(answer: str, gold: str, right: bool) -> None:
    assert _is_right(answer, gold) is right


@pytest.mark.parametrize(
    ("answer", "value"),
    [("5个", 5), ("5厘米", 5), ("5千克", 5), ("3.5米", Fraction(7, 2)), ("1千", 1000), ("3万元", 30_000), ("1.5亿", 150_000_000),
     ("5 Äpfel", 5), ("5 Stück", 5)],
)  # fmt: skip
def test_numbers_have_units_and_scales_in_other_languages(
    answer: str, value: Fraction | int
) -> None:
    number = read_number(answer)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text", ["5不对", "5个半", "5以上", "5百分", "5或6", "5 Millionen", "5 tausend"]
)
def test_words_of_other_languages_that_change_a_number_are_no_units(text: str) -> None:
    assert read_number(text) is None
