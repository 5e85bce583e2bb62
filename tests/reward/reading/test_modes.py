"""How each mode finds an answer, and which form it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.reward.answers import comparison
from tandem.reward.reading import modes, options

THOUGHTS = "<think>a</think>"


def read(mode: str, text: str) -> str | None:
    return modes.mode(mode).read(text, "", False).answer


def verdict(mode: str, text: str, gold: str) -> str | None:
    by = modes.mode(mode)
    found = comparison.decide(by.read(text, "", False).answer, gold, by)
    return found.verdict.value if found is not None else None


# --- Dr. GRPO, CS336 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "form", "right"),
    [
        (f"{THOUGHTS} <answer>42</answer>", True, True),
        (f"{THOUGHTS} <answer>41</answer>", True, False),
        (f"{THOUGHTS}<answer>42</answer>", False, False),
        (f"{THOUGHTS}  <answer>42</answer>", False, False),
        (f"{THOUGHTS}\n<answer>42</answer>", False, False),
        (f"{THOUGHTS} <answer>42", False, False),
        ("42", False, False),
        (f"{THOUGHTS} <answer>\\boxed{{42}}</answer>", True, True),
        (f"{THOUGHTS} <answer>\\boxed{{41}} \\boxed{{42}}</answer>", True, True),
        (f"{THOUGHTS} <answer>\\boxed{{42</answer>", True, False),
        (f"{THOUGHTS} <answer>41</answer> <answer>42</answer>", True, True),
        (f"{THOUGHTS} <answer>42</answer> trailing words", True, False),
        (f"{THOUGHTS} <answer>42</answer> apples</answer>", True, False),
        (f"{THOUGHTS} <answer>42</answer> 43", True, False),
        (f"{THOUGHTS} <answer>42 apples</answer>", True, True),
        (f"{THOUGHTS} <answer>42</answer>.\n", True, True),
        (f"{THOUGHTS} <answer>41</answer> or rather \\boxed{{42}}", True, True),
    ],
)
def test_r1_zero_pays_the_answer_only_in_its_literal_form(
    text: str, form: bool, right: bool
) -> None:
    assert modes.r1_zero_form(text) is form
    for name in ("r1_zero", "drgrpo"):
        assert (verdict(name, text, "42") == "correct") is right


def test_question_only_takes_the_last_closed_box_of_the_whole_text() -> None:
    assert read("question_only", "\\boxed{1} and so \\boxed{2}") == "2"
    assert read("question_only", "<think>\\boxed{3}</think> nothing") == "3"
    assert read("question_only", "the answer is 4") is None
    assert read("question_only", "\\boxed{5} then \\boxed{6") == "5"


def test_four_class_reads_the_answer_in_any_form() -> None:
    assert read("four_class", f"{THOUGHTS} <answer>42</answer>") == "42"
    assert read("four_class", f"{THOUGHTS} It is \\boxed{{42}}.") == "42"


# --- LUFFY and math-verify ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so</think> \\boxed{42}", "42"),
        ("\\boxed{42}", None),
        ("\\boxed{42}</think> no more", None),
        ("so</think> it is $42$ in the end", "42"),
        ("so</think> \\boxed{41} or \\boxed{42}", "41, 42"),
        ("so</think> first \\boxed{41}</think> \\boxed{42}", "41"),
    ],
)
def test_luffy_reads_between_the_first_and_a_second_end_of_thoughts(
    text: str, answer: str | None
) -> None:
    assert read("luffy", text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{255}. The final answer is $10,455$. I hope it is correct.", "10,455"),
        ("\\boxed{3} and then the final answer for all of it is $4$", "4"),
        ("The final answer is $4$, so \\boxed{3}", "3"),
        ("Answer: 7, since $x = 8$", "7"),
        ("the answer 7 comes before 8", "7"),
        ("first $x$, then 12", "12"),
        ("<think>\\boxed{9}</think> nothing", "9"),
        ("no value at all", None),
    ],
)
def test_math_verify_looks_in_its_own_order_in_the_whole_text(
    text: str, answer: str | None
) -> None:
    assert read("math_verify", text) == answer


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5 + 7 = 12.\n#### 12", "12"),
        ("#### 1,234", "1234"),
        ("#### $18", "18"),
        ("#### -3", "-3"),
        ("#### 3.50", "3.50"),
        ("The answer is 12", None),
        ("#### 5\n#### 7", "7"),
        ("####7", None),
        ("#### 7" + " " * 300, None),
    ],
)
def test_gsm8k_takes_the_number_after_the_last_hashes(text: str, answer: str | None) -> None:
    assert read("gsm8k", text) == answer


def test_the_last_number_is_one_in_digits() -> None:
    assert read("gsm8k_last_number", "48/2 = 24 in May, so 48+24 = 72 altogether.") == "72"
    assert read("gsm8k_last_number", "twenty-four and then seventy-two") is None
    assert read("last_number", "3 pens cost $.75 altogether.") == "$.75"
    assert read("last_number", "It is -.5 or 1.5.") == "1.5"
    assert read("last_number", "It is x.5 or ...5") is None


@pytest.mark.parametrize("mode", ["boxed", "exact", "last_number", "gsm8k_last_number"])
def test_the_number_at_which_a_response_was_cut_is_no_answer(mode: str) -> None:
    found = modes.mode(mode).read("She has 3 pens and 1", "", True)
    assert (found.answer, found.how) == (None, "truncated")


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("gsm8k", "#### 12"),
        ("math_verify", "the answer is 12"),
        ("luffy", "so</think> the answer is 12"),
    ],
)
def test_modes_of_projects_that_grade_cut_responses_do_so_too(mode: str, text: str) -> None:
    assert modes.mode(mode).read(text, "", True).answer == "12"


# --- choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "text", "letter"),
    [
        ("mmlu", "The correct answer is B. There is only one.", "B"),
        ("mmlu", "The correct answer is 10000 viruses.", None),
        ("mmlu", "The answer is E", None),
        ("mmlu", "The correct answer is (D).", "D"),
        ("mmlu_pro", "The answer is (J).", "J"),
        ("mmlu_pro", "answer is H", "H"),
        ("mmlu_pro", "Answer: I think it is F", None),
        ("mmlu_pro", "Answer: I", "I"),
        ("mmlu_pro", "The answer is K", None),
        ("mmlu_pro", "Answer: G", "G"),
        ("mmlu_pro", "\\boxed{I}", "I"),
        ("mmlu_pro", "I cannot decide.", None),
        ("gpqa", "Answer: $C$", "C"),
        ("gpqa", "ANSWER: B", "B"),
        ("gpqa", "Answer: A\nAnswer: D", "D"),
        ("arc", "The answer is 3", "3"),
        ("arc", "The answer is 3.5", None),
        ("arc", "answer is 42", None),
        ("choice", "The answer is B or C.", None),
        ("choice", "The answer is B, I think.", "B"),
        ("mmlu_pro", "The answer is B, I believe.", "B"),
        ("choice", "The answer is C, A good fit.", "C"),
        ("choice", "The answer is B, A or C.", None),
        ("mmlu_pro", "The answer is B or I.", None),
        ("choice", "The answer is B, since A is wrong.", "B"),
        ("choice", "The answer is (A) or (C)", None),
        ("choice", "the answer is either A or B", None),
        ("choice", "The answer is A-D", None),
        ("choice", "Answer: B/C", None),
        ("choice", "\\boxed{A} and \\boxed{B}", None),
        ("choice", "\\boxed{A, B}", None),
        ("choice", "\\boxed{A \\text{ or } B}", None),
        ("choice", "A better way is to count.", None),
        ("choice", "the answer is A good one", None),
        ("choice", "The answer is A because it fits", "A"),
        ("choice", "**Answer:** B", "B"),
        ("choice", "The answer is $\\mathbf{D}$", "D"),
        ("choice", "\\boxed{\\textbf{(B)}}", "B"),
        ("choice", "\\boxed{B. 12}", "B"),
        ("choice", "\\boxed{D. Both A and B}", "D"),
        ("choice", "\\boxed{D. A, B and C}", "D"),
        ("choice", "\\boxed{C. Hepatitis A and B}", "C"),
        ("mmlu", "\\boxed{C. Hepatitis A and B}", "C"),
        ("gpqa", "\\boxed{D. Both A and B}", "D"),
        ("choice", "\\boxed{A) 3 or B) 4}", None),
        ("choice", "\\boxed{A. 3 or B. 4}", None),
        ("choice", "\\boxed{A) 3 or B}", None),
        ("choice", "\\boxed{A) 3, B) 4}", None),
        ("choice", "\\boxed{B) or C}", None),
        ("choice", "\\boxed{A) or B or C}", None),
        ("choice", "\\boxed{D. Both A and B) 4}", None),
        ("choice", "\\boxed{\\textbf{(B)}~12}", "B"),
        ("choice", "\\boxed{\\textbf{(B)}12}", "B"),
        ("mmlu_pro", "\\boxed{\\textbf{(B)}\\quad 12}", "B"),
        ("mmlu", "\\boxed{\\textbf{(B)}\\: 12}", "B"),
        ("choice", "\\boxed{\\textbf{(B)}\\frac{1}{2}}", "B"),
        ("choice", "\\boxed{\\textbf{(B)}~\\textbf{(C)}}", None),
        ("choice", "\\boxed{\\textbf{(B)}, \\textbf{(C)}}", None),
        ("choice", "<think>The answer is B</think> The answer is C", "C"),
        ("choice", "<think>The answer is B", None),
        ("choice", "We look at A and at B.\n\n(C)", "C"),
        ("choice", "<answer>B</answer>", "B"),
        ("choice", "The answer is not B", None),
        ("choice", "The answer is A? No: the answer is C.", "C"),
        ("choice", "A", "A"),
        # What the option says is no other option.
        ("choice", "The answer is B, 4.", "B"),
        ("mmlu", "The answer is (D), 7 apples", "D"),
        ("arc", "The answer is B, 4.", "B"),
        ("arc", "The answer is 2, 4.", None),
    ],
)
def test_an_option_is_one_letter_and_never_a_pronoun_an_article_or_a_hedge(
    mode: str, text: str, letter: str | None
) -> None:
    found = {
        gold for gold in "ABCDEFGHIJ12345" if verdict(mode, text, gold) == "correct"
    }  # numbers and letters of an option are one
    same = {letter, "ABCDE"[int(letter) - 1]} if letter and letter.isdigit() else {letter}
    if letter is not None and letter in "ABCDE":
        same.add(str("ABCDE".index(letter) + 1))
    assert found == same - {None}


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("B", "B", True),
        ("B", "(B)", True),
        ("B", "B) 12 apples", True),
        ("C", "B) 12 apples", False),
        ("12 Apples", "12 apples", True),
        ("B) 12 apples", "B) 12 apples", True),
        ("pears", "12 apples", None),
        (None, "B", None),
        ("B", "2", True),
        ("2", "2", True),
        # It is what an option says: only a reader of numbered options takes it for a label.
        ("2", "B", None),
        ("2", "B) 2", True),
    ],
)
def test_options_are_compared_by_label_or_by_text(
    answer: str | None, gold: str, same: bool | None
) -> None:
    assert options.compare_options(answer, gold) is same


@pytest.mark.parametrize("mode", ["choice", "mmlu", "mmlu_pro", "gpqa"])
def test_a_number_is_the_label_of_an_option_only_where_options_are_numbered(mode: str) -> None:
    for text in ("\\boxed{2}", "<answer>2</answer>"):
        assert verdict(mode, text, "B") == "unparsable"
        assert verdict(mode, text, "C) 2") == "correct"
        assert verdict("arc", text, "B") == "correct"
        assert verdict("arc", text, "2") == "correct"
        assert verdict("arc", text, "3") == "wrong"


# --- golds --------------------------------------------------------------------------------------


def test_any_gold_answer_of_a_list_is_right() -> None:
    gold = json.dumps(["7", "\\frac{1}{2}"])
    assert verdict("boxed", "\\boxed{0.5}", gold) == "correct"
    assert verdict("boxed", "\\boxed{7}", gold) == "correct"
    assert verdict("boxed", "\\boxed{8}", gold) == "wrong"
    assert verdict("boxed", "", gold) == "unparsable"
    # An interval isn't a list of texts.
    assert verdict("boxed", "\\boxed{[1, 2]}", "[1, 2]") == "correct"


def test_an_echo_of_the_question_is_paid_only_where_that_is_asked_for() -> None:
    text = "\\boxed{\\sum_{k=1}^{4} k}"
    assert verdict("boxed", text, "10") == "wrong"
    assert verdict("boxed", text, "\\sum_{j=1}^{4} j") is None
    assert verdict("boxed_unevaluated", text, "10") is None
    # Worked out to the end, it counts.
    assert verdict("boxed", "\\boxed{\\sum_{k=1}^{4} k = 10}", "10") == "correct"


def test_every_mode_says_what_it_is_and_stands_on_the_page_about_grading() -> None:
    page = (Path(__file__).parents[3] / "docs" / "grading.md").read_text("utf-8")
    for mode in modes.MODES.values():
        assert mode.about
        assert f"`{mode.name}`" in page
        assert mode.grader == f"{mode.name}@{modes.GRADER_VERSION}"
