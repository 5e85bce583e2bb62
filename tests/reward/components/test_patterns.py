"""Patterns of the ``format`` component: they mean what Python's ``re`` says, and no text holds one up."""

from __future__ import annotations

import random
import re

import pytest

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.records import Verdict
from tandem.reward.components import patterns
from tandem.reward.components.scoring import Scorer
from tandem.reward.grading import GradeItem, Grader

OPEN_R1 = r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$"
ONCE = r"^(?!.*<think>.*<think>)(?!.*</think>.*</think>)<think>.*</think>\s*<answer>.*</answer>$"
TRL = r"^<think>(?!.*<think>)(.*?)</think>.*$"
LINEAR = (
    r"(?:a|aa)+b",
    r"(a+)+b",
    r"(?s:.|\n)*</think>",
    r".*x.*x.*x.*y",
    r".*?</think>.*?<answer>.*?</answer>",
    OPEN_R1,
    rf"(?m){OPEN_R1}",
    ONCE,
    TRL,
    r"(?=.*b$).*",
    r"(?=<)(?!<a)(?P<tag><[a-z]>)(?=t).*",
    r"[\s\S]*\d{1,3}\Z",
    r"(?i)step \w+[^0-9_]*",
    r"(?a)\bfoo\b.*",
    r"(?x) a  b # c",
    r"[^\s]+\s?",
    r"a{2,3}?b{0,}c{0,4}",
    r"(?-s:.*)\n(?s:.*)",
    r"^a|^b$",
    r"(?m)a$.^b",
    r"\W*",
    r"",
    r"[]]",
    r"[^]\-a-f]+",
    r"(?i:É)+",
    r"\u2028\s*",
)
BEYOND = (
    r"(?:(?!</think>).)*</think>.*",
    r"(a|b)\1",
    r"\bfoo\b.*",
    r"a$\n",
    r".*(?<=a)b",
    r"(?>a*)b",
    r"a++b",
    r"x{2000}",
    r"[^\S\n]*",
    r".*(?=b)b",
)
PIECES = (
    *("<think>", "</think>", "<answer>", "</answer>", "<a>", "<b>t", "\n", " ", "a", "b", "c", "x", "y"),
    *("foo", "step ", "1", "42", "_", "-", "]", "é", "É", "٣", "\x0b", "\u2028", "\n</think>\n<answer>\n"),
)  # fmt: skip


def texts() -> list[str]:
    rolls = random.Random(1)
    return [
        "".join(rolls.choice(PIECES) for _ in range(rolls.randrange(9))) for _ in range(1_000)
    ] + [
        "<think>\na\n</think>\n<answer>\nb\n</answer>",
        "<think>\na\n</think>\n<answer>\nb\n</answer>\n",
        "<think>a</think> <answer>b</answer>",
        "<think>a<think>b</think> <answer>c</answer>",
        "<think>a</think></think> <answer>b</answer>",
        "aaab",
        "xxxy",
        "a\nb",
    ]


@pytest.mark.parametrize("pattern", LINEAR)
def test_a_linear_pattern_means_what_it_means_in_python(pattern: str) -> None:
    fits = patterns.linear(pattern)
    assert fits is not None
    compiled = re.compile(pattern, re.DOTALL)
    for text in texts():
        assert fits(text) is (compiled.fullmatch(text) is not None), text


@pytest.mark.parametrize("pattern", LINEAR)
def test_no_text_holds_a_linear_pattern_up(pattern: str) -> None:
    fits = patterns.linear(pattern)
    assert fits is not None
    # Python's re takes years for the first of these by the first pattern, hours for the last but one by
    # .*?</think>.*?<answer>.*?</answer>.
    for piece in ("a", "x", "<think>", "</think>", "</think><answer>", "<think>\na\n"):
        assert fits(piece * (patterns.MAX_MATCHED // len(piece))) in (True, False)


@pytest.mark.parametrize("pattern", BEYOND)
def test_what_has_no_linear_form_is_left_to_a_grader_process(pattern: str) -> None:
    assert patterns.linear(pattern) is None
    config = RewardConfig(components=(ComponentConfig(name="format", params={"pattern": pattern}),))
    assert [part.kind.place for part in Scorer(config).parts] == ["grader"]


def test_half_a_surrogate_pair_is_only_a_character() -> None:
    fits = patterns.linear("a.b")
    assert fits is not None
    assert fits("a\ud800b")
    assert not fits("a\ud800")


def test_a_pattern_with_lookarounds_further_in_is_matched_in_a_grader_process() -> None:
    once = ComponentConfig(
        name="format", params={"pattern": r"(?:(?!</think>).)*</think> <answer>.*</answer>"}
    )
    texts = ["a</think> <answer>b</answer>", "a</think> </think> <answer>b</answer>", "no"]
    with Grader(RewardConfig(components=(once,), deadline_seconds=10.0), processes=1) as grader:
        grades = grader.grade_texts([GradeItem(text=t, gold="b", group="g") for t in texts])
    assert [grade.reward for grade in grades] == [1.0, 0.0, 0.0]


def test_a_text_that_hangs_such_a_pattern_costs_its_own_sample_alone() -> None:
    hangs = ComponentConfig(name="format", params={"pattern": r"(?:a|aa)+(?<=a)b"})
    items = [GradeItem(text=t, gold="1", group="g") for t in ("a" * 99 + "c", "aab")]
    with Grader(RewardConfig(components=(hangs,), deadline_seconds=1.0), processes=1) as grader:
        grades = grader.grade_texts(items)
    assert [grade.verdict for grade in grades] == [Verdict.TIMEOUT, Verdict.WRONG]
    assert [grade.reward for grade in grades] == [0.0, 1.0]
