"""Reading an option's letter and a last number out of a text."""

from __future__ import annotations

import pytest

from tandem.reward.reading.parsing import last_number_of, option_of


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("The correct answer is B. There is only one known at present.", "B"),
        ("Answer: (C)", "C"),
        (r"so \boxed{D}", "D"),
        ("The answer is A? No: the answer is C.", "C"),
        ("A", "A"),
        ("The correct answer is 10000 polyomaviruses.", None),
        ("The answer is E.", None),
        ("", None),
    ],
)
def test_the_option_that_a_text_chooses(text: str, option: str | None) -> None:
    assert option_of(text) == option


def test_there_may_be_more_options() -> None:
    assert option_of("The answer is E.", options=5) == "E"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48/2 = 24 clips in May. She sold 48+24 = 72 clips altogether.", "72"),
        ("It costs $1,250.50 in all.", "1250.50"),
        ("3 pens cost $.75 altogether.", ".75"),
        ("Natalia sold seventy-two clips altogether.", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number_of(text) == number
