"""Changes of a text that must not change its verdict, and changes that must."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.common.records import Verdict
from tandem.reward.grading import GradeItem, Grader

SEED = 7
CHOSEN = 30


def _golds() -> list[str]:
    """Gold answers of every kind, those that a grader can read."""
    rows = (Path(__file__).with_name("facts") / "neighbours.jsonl").read_text("utf-8").splitlines()
    golds = sorted({json.loads(row)["gold"] for row in rows})
    return [
        g
        for g in golds
        if g.strip("$ ") and "box" not in g and "#" not in g and "\\text{}" not in g
    ]


def _chosen(count: int = CHOSEN) -> list[str]:
    return random.Random(SEED).sample(_golds(), count)


def _verdicts(grader: Grader, pairs: list[tuple[str, str]]) -> list[tuple[str, str, Verdict]]:
    grades = grader.grade_texts([GradeItem(text=text, gold=gold) for text, gold in pairs])
    return [(t, g, grade.verdict) for (t, g), grade in zip(pairs, grades, strict=True)]


def _all_right(grader: Grader, pairs: list[tuple[str, str]]) -> None:
    found = [f for f in _verdicts(grader, pairs) if f[2] is not Verdict.CORRECT]
    assert found == []


def _boxed(answer: str) -> str:
    return f"<think>so</think> It is $\\boxed{{{answer}}}$."


def test_every_gold_answer_is_its_own_right_answer(grader: Grader) -> None:
    _all_right(grader, [(_boxed(gold), gold) for gold in _golds()])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: f"  {t}\n ",
        lambda t: t.replace(",", ", ").replace(", 0", ",0"),
        lambda t: t.replace("=", " = "),
        lambda t: t.replace("(", "\\left(").replace(")", "\\right)"),
        lambda t: t.replace("\\frac", "\\dfrac"),
        lambda t: t.replace("\\frac", "\\tfrac"),
        lambda t: f"\\displaystyle {t}",
        lambda t: f"{{{t}}}",
        lambda t: f"{t}.",
    ],
    ids=["blanks", "comma", "equals", "left", "dfrac", "tfrac", "displaystyle", "braces", "stop"],
)
def test_blanks_and_display_style_change_nothing(
    grader: Grader, change: Callable[[str], str]
) -> None:
    golds = [g for g in _chosen() if "{,}" not in g and not any(c.isdigit() for c in _commas(g))]
    _all_right(grader, [(_boxed(change(gold)), gold) for gold in golds])


def _commas(gold: str) -> str:
    """The characters after the commas that may part thousands."""
    return "".join(gold[i + 1 : i + 2] for i, c in enumerate(gold) if c == "," and "(" not in gold)


@pytest.mark.parametrize(
    "frame",
    [
        "\\[\\boxed{%s}\\]",
        "\\(\\boxed{%s}\\)",
        "$$\\boxed{%s}$$",
        "\\boxed{%s}",
        "\\boxed {%s}",
        "\\fbox{%s}",
        "\\boxed{\\boxed{%s}}",
        "**\\boxed{%s}**",
        "\n\n\\begin{align*} \\boxed{%s} \\end{align*}\n",
    ],
)
def test_the_delimiters_around_a_box_change_nothing(grader: Grader, frame: str) -> None:
    _all_right(grader, [(f"so</think> {frame % gold}", gold) for gold in _chosen()])


@pytest.mark.parametrize(
    "before",
    [
        "First I had \\boxed{-991}. That is wrong. ",
        "\\boxed{-991}\n\n",
        "\\boxed{-991}, no, it is ",
        "\\boxed{-991} but then ",
        "<think>\\boxed{-991}</think> ",
        "\\boxed{\\text{nothing}} Now the real one: ",
    ],
)
def test_a_wrong_box_before_the_right_one_changes_nothing(grader: Grader, before: str) -> None:
    _all_right(grader, [(f"{before}\\boxed{{{gold}}}", gold) for gold in _chosen()])


@pytest.mark.parametrize(
    "after",
    [" Or rather \\boxed{-991}.", "\n\n\\boxed{-991}", " or \\boxed{-991}", ", \\boxed{-991}",
     "\\boxed{-991}"],
)  # fmt: skip
def test_a_wrong_box_after_the_right_one_makes_it_wrong(grader: Grader, after: str) -> None:
    pairs = [(f"so</think> \\boxed{{{gold}}}{after}", gold) for gold in _chosen()]
    assert [f for f in _verdicts(grader, pairs) if f[2] is Verdict.CORRECT] == []


def test_the_order_in_which_texts_are_graded_changes_nothing(grader: Grader) -> None:
    pairs = [(_boxed(gold), other) for gold, other in zip(_chosen(), _chosen()[1:], strict=False)]
    forth = {(t, g): v for t, g, v in _verdicts(grader, pairs)}
    back = {(t, g): v for t, g, v in _verdicts(grader, pairs[::-1])}
    assert forth == back
