"""Countdown's reward: exact arithmetic on what a model wrote, and nothing else."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from tandem.common.records import Verdict
from tandem.reward.components.builtin import Graded, component
from tandem.reward.components.equation import evaluate


def paid(text: str, **extra: Any) -> float | None:
    row = {"nums": [25, 3, 4], "target": 100, **extra}
    sample = Graded(text=text, verdict=Verdict.WRONG, extra=row)
    value: float | None = component("equation", {})[1](sample)
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>25 * 4 * (4 - 3)</answer>", 0.0),  # 4 twice
        ("<answer>25 * 4</answer>", 0.0),  # without 3
        ("<answer> (25*4) + 3 - 3 </answer>", 0.0),
        ("25 * 4 is 100. <answer>25 * 4 + 3</answer>", 0.0),
        ("<answer>100</answer>", 0.0),
        ("no answer", 0.0),
        ("25 * 4 + 3 - 3", 0.0),
        ("<answer>\\boxed{25 * 4}</answer>", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_what_is_not_the_task_is_paid_nothing(text: str, value: float) -> None:
    assert paid(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "<answer>(3 + 1) * 25</answer>",
        "<answer> (1+3)*25 = 100 </answer>",
        "<answer>0</answer> no: <answer>25 × (3 + 1)</answer>",
        "so \\boxed{(3 - -1) * 25}",
        "<answer>[3+1]*25</answer>",
        "\\boxed{25 \\times (3 + 1)}",
        "\\boxed{\\left(3+1\\right)\\cdot25 = 100}",
        "<answer>$(3 + 1) \\times 25$</answer>",
        "<answer>\\boxed{(3+1)*25}</answer>",
        "<answer>\\((3+1)\\times 25\\)</answer>",
        "so <answer>\\[\\left[3+1\\right] \\cdot 25 = 100\\]</answer>",
        "<answer>25 \u22c5 (3 + 1)</answer>",
        "<answer>25 \u2217 (3 + 1)</answer>",
    ],
)
def test_an_expression_of_the_numbers_with_the_value_is_paid(text: str) -> None:
    assert paid(text, nums=[1, 3, 25]) == 1.0


def test_fractions_are_exact() -> None:
    assert paid("<answer>8 / (3 - 8 / 3)</answer>", nums=[8, 8, 3, 3], target=24) == 1.0
    assert paid("\\boxed{\\dfrac{8}{3-\\frac{8}{3}}}", nums=[8, 8, 3, 3], target=24) == 1.0
    assert evaluate("1/3 + 1/3 + 1/3") == (Fraction(1), [1, 1, 1, 3, 3, 3])


def test_a_row_without_numbers_has_no_value() -> None:
    assert paid("<answer>1</answer>", nums=None) is None
    assert paid("<answer>1</answer>", target="100") is None


@pytest.mark.parametrize(
    "expression",
    [
        "2 ** 3",
        "9 // 2",
        "1.5 + 2",
        "1e3",
        "__import__('os').system('true')",
        "(" * 299 + "1",
        "-" * 299 + "1" * 2,
        "1 +" * 90,
        "9999999999 + 1",
        "1 / 0",
        "()",
        "1 2",
        "2 \\times",
        "\\frac{1}",
        "\\frac{}{2}",
        "\\sqrt{4}",
        "\\frac{1}{0}",
        "1" + "+1" * 400,
        "²",
        "١ + 1",
    ],
)
def test_anything_else_is_no_expression(expression: str) -> None:
    assert evaluate(expression) is None
