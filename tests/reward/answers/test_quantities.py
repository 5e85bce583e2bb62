"""Quantities of which both sides tell the unit."""

from __future__ import annotations

import pytest

from tandem.reward.answers.quantities import read_quantity, same_quantity
from tandem.reward.answers.structure import collection, compare_collections


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
        ("x = 40 cm", "40\\text{ m}", False),
        ("x=1500 m", "1.5 km", True),
        ("\\frac{3}{2}\\text{ cm}", "\\frac32\\text{ m}", False),
        ("\\frac12 km", "500\\text{ m}", True),
        ("1\\frac{1}{2} hours", "90 minutes", True),
        ("5 1/2 feet", "66 inches", True),
        ("1.5\\times10^3\\text{ m}", "1.5\\times10^3 km", False),
        ("1.5\\times10^{3} m", "1.5 km", True),
        ("2\\pi\\text{ cm}", "2\\pi\\text{ m}", False),
        ("2\\pi\\text{ m}", "200\\pi\\text{ cm}", True),
        ("\\sqrt{2}\\text{ cm}", "\\sqrt{2}\\text{ m}", False),
        ("\\sqrt{2}\\text{ cm}", "\\sqrt{2}\\text{ hours}", False),
        ("5 L", "5 cm^3", False),
        ("1000 cm^3", "1 L", True),
        ("5 km", "5 cm^2", False),
        ("5 months", "5 years", False),
        ("24 months", "2 years", True),
        ("60 mph", "60 km/h", False),
        ("60 mph", "60 miles per hour", True),
        ("10\\text{ m/s}", "36 km per hour", True),
        ("60\\text{ km/h}", "60\\text{ km}", False),
        ("5 ounces", "5 pounds", False),
        ("16 oz", "1 lb", True),
        ("5 kg", "£5", False),
        ("5 liters", "5 L", True),
        ("5 hours", "5h", True),
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
        ("2\\pi x\\text{ cm}", "2\\pi x\\text{ m}"),
        ("2\\pi\\text{ cm}", "2\\pi\\text{ cm}^2"),
        ("£5", "5 pounds"),
        ("$18 per day", "$18"),
        ("x = 5 cm", "y = 5 m"),
    ],
)
def test_what_is_none_of_its_business_is_left_to_the_other_rules(answer: str, gold: str) -> None:
    assert same_quantity(answer, gold) is None


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("3 cm, 4 cm", "3 m, 4 m", False),
        ("3 cm, 4 cm", "3\\text{ m}, 4\\text{ m}", False),
        ("2 km, 3 km", "2000 m, 3000 m", True),
        ("3, 4\\text{ cm}", "3\\text{ cm}, 4\\text{ cm}", True),
    ],
)
def test_parts_of_a_list_are_quantities_too(answer: str, gold: str, same: bool) -> None:
    ours, theirs = collection(answer), collection(gold)
    assert ours is not None
    assert theirs is not None
    assert compare_collections(ours, theirs) is same


@pytest.mark.parametrize(
    "text",
    ["3 m 4 m", "30 minutes 2 hours", "5m", "-2 feet 3 inches", "3 apples", "", "cm", "1 " * 200],
)
def test_what_is_no_quantity(text: str) -> None:
    assert read_quantity(text) is None
