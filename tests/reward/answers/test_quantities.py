"""Quantities of which both sides tell the unit."""

from __future__ import annotations

import pytest

from tandem.reward.answers.quantities import read_quantity, same_quantity


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("1500\\text{ m}", "1.5\\text{ km}", True),
        ("40\\text{ cm}", "40\\text{ m}", False),
        ("2\\text{ hours and }30\\text{ minutes}", "2.5 hours", True),
        ("5 feet 6 inches", "66\\text{ inches}", True),
        ("10000\\text{ cm}^2", "1\\text{ square meter}", True),
        ("100\\text{ cm}^2", "1\\text{ m}^2", False),
        ("50 cents", "$0.50", True),
        ("45^\\circ 30'", "45.5^\\circ", True),
        ("180^\\circ", "3.14159265 radians", True),
        ("2m", "200\\text{ cm}", True),
        ("5 km", "5 hours", False),
        ("$20", "20 euros", False),
        ("€20", "£20", False),
        ("25^\\circ C", "25^\\circ F", False),
        ("25\\text{ degrees Celsius}", "25^{\\circ}\\text{F}", False),
    ],
)
def test_quantities_are_compared_by_what_they_measure(answer: str, gold: str, same: bool) -> None:
    assert same_quantity(answer, gold) is same
    assert same_quantity(gold, answer) in (same, None)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("40 cm", "40 centimeters"),
        ("40", "40\\text{ cm}"),
        ("40 cm", "40"),
        ("12\\text{ cm}", "12\\text{ cm}^2"),
        ("5\\text{ ml}", "5\\text{ cm}^3"),
        ("5m", "5 minutes"),
        ("€20", "20 euros"),
        ("20€", "€20"),
        ("25^\\circ", "25^\\circ F"),
        ("25 degrees", "25^\\circ C"),
        ("5m", "5m"),
        ("x\\text{ cm}", "2\\text{ m}"),
    ],
)
def test_what_is_none_of_its_business_is_left_to_the_other_rules(answer: str, gold: str) -> None:
    assert same_quantity(answer, gold) is None


@pytest.mark.parametrize(
    "text",
    ["3 m 4 m", "30 minutes 2 hours", "5m", "-2 feet 3 inches", "3 apples", "", "cm", "1 " * 200],
)
def test_what_is_no_quantity(text: str) -> None:
    assert read_quantity(text) is None
