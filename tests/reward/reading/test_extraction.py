"""Where the answer of a response stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.reward.answers import comparison
from tandem.reward.reading import modes
from tandem.reward.reading.extraction import boxes, find


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("thoughts</think> \\boxed{7}", "7"),
        ("a \\boxed{1} then</think> \\boxed{2} or rather. It is \\boxed{3}", "3"),
        ("</think> \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("</think> \\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("</think> \\fbox{x}", "x"),
        ("</think> \\boxed {5}", "5"),
        ("</think> \\boxed{\\boxed{5}}", "\\boxed{5}"),
        ("no tags, \\boxed{9} at the end", "9"),
        ("<think>a</think><think>b</think> \\boxed{4}", "4"),
    ],
)
def test_the_last_closed_box_after_the_thoughts_is_the_answer(text: str, answer: str) -> None:
    found = find(text)
    assert (found.answer, found.how) == (answer, "box")


@pytest.mark.parametrize(
    "text",
    [
        "<think> it is \\boxed{42} and I am not done",
        "<think> it is \\boxed{42} </think> Some other text without a number.",
    ],
)
def test_a_box_in_the_thoughts_is_no_answer(text: str) -> None:
    assert find(text, truncated=True).answer is None


def test_a_response_inside_the_prompts_thoughts_has_no_answer_before_they_end() -> None:
    assert find("\\boxed{42}", prompt_text="1+1?<think>\n").answer is None
    assert find("</think>\\boxed{42}", prompt_text="1+1?<think>\n").answer == "42"


def test_a_box_that_is_begun_and_not_closed_leaves_no_answer() -> None:
    assert find("</think> <answer> \\boxed{42 </answer>").answer is None
    assert find("</think> \\boxed{41} no, \\boxed{42").answer is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("</think> \\boxed{1} and \\boxed{2}", "1, 2"),
        ("</think> $\\boxed{1}, \\boxed{2} \\text{ or } \\boxed{3}$", "1, 2, 3"),
        ("</think> \\boxed{5} and again \\boxed{5}", "5"),
        ("</think> First \\boxed{1}. Now for the second part, it follows: \\boxed{2}", "2"),
    ],
)
def test_boxes_joined_by_a_comma_or_a_word_are_one_list(text: str, answer: str) -> None:
    assert find(text).answer == answer


@pytest.mark.parametrize(
    ("text", "answer", "how"),
    [
        ("</think> <answer> 12 </answer>", "12", "tag"),
        ("</think> <answer>1</answer> <answer>2</answer>", "2", "tag"),
        (
            "</think> So the final answer is $\\frac{1}{2}$. I hope it is correct.",
            "\\frac{1}{2}",
            "anchor",
        ),
        ("</think> Answer: 17", "17", "anchor"),
        ("</think> 5 + 7 is twelve.\n#### 12", "12", "hashes"),
        ("3x + 2", "3x + 2", "whole"),
        ("</think> We add both and find $x = 4$ in the end", "x = 4", "formula"),
        ("</think> There are then 3 apples and so 12 pears left", "12", "number"),
    ],
)
def test_without_a_box_the_fall_backs_are_taken_in_order(text: str, answer: str, how: str) -> None:
    found = find(text)
    assert (found.answer, found.how) == (answer, how)


def test_a_truncated_response_is_read_for_a_box_or_a_tag_only() -> None:
    assert find("</think> Answer: 17 and", truncated=True).answer is None
    assert find("</think> \\boxed{17} and", truncated=True).answer == "17"


def test_a_box_without_braces_may_be_the_end_of_a_response_that_was_not_cut() -> None:
    text = "</think> So it is \\boxed 5"
    for found in (find(text), modes.mode("boxed_only").read(text, "", False)):
        assert (found.answer, found.how) == ("5", "box")
    assert find(f"{text}.").answer == "5"
    # It may have been the beginning of 57.
    assert find(text, truncated=True).answer is None
    assert modes.mode("choice").read("\\boxed B", "", False).answer == "B"
    assert modes.mode("choice").read("\\boxed B", "", True).answer is None


def test_prose_in_a_box_gives_its_one_value_and_a_hedge_stays_whole() -> None:
    assert find("</think> \\boxed{The answer is 4}").answer == "4"
    assert find("</think> \\boxed{The sum is $x+1$}").answer == "x+1"
    assert find("</think> \\boxed{The sum is x+1}").answer == "x+1"
    assert find("</think> \\boxed{it is 3 or maybe 4}").answer == "it is 3 or maybe 4"


def test_a_hostile_text_costs_no_more_than_its_length() -> None:
    # Each of these takes minutes where a scan begins anew at every opening.
    for text in (
        "\\boxed{" * 30_000,
        "\\boxed{" + "{" * 200_000,
        "\\(" * 100_000,
        "answer" + " " * 200_000,
        "\\boxed{1}, " * 20_000,
        "</think>\n<answer>\n" * 10_000,
    ):
        for mode in modes.MODES.values():
            mode.read(text, "", False)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["\\boxed{", "\\fbox{", "{", "}", "\\{", "\\}", "\\", "</think>", "<answer>", "1", " and ",
             "$", "\\(", "\\)", "answer is ", "#### ", "\n", "x^2", "²", "\ud83d", "%", "٣", ","]
        ),
        max_size=30,
    )
)  # fmt: skip
def test_no_text_breaks_reading_or_deciding(parts: list[str]) -> None:
    text = "".join(parts)
    for mode in modes.MODES.values():
        found = mode.read(text, "", False)
        comparison.decide(found.answer, "3", mode)
        comparison.decide(found.answer, text, mode)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="a{}\\", max_size=20))
def test_every_box_found_is_balanced(inside: str) -> None:
    for start, end, content in boxes(f"\\boxed{{{inside}}} \\boxed{{b}}")[0]:
        plain = content.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
        assert plain.count("{") == plain.count("}")
        assert start < end
