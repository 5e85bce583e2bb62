"""The one table of units: what a unit measures, and which words may stand beside a number.

Two quantities are compared by what they measure (:mod:`tandem.reward.answers.quantities`). A unit
that only one side has is ignored, as data sets do (:mod:`tandem.reward.answers.numbers` in the
dispatcher, :mod:`tandem.reward.answers.latex` in front of math-verify).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from ..reading.extraction import DENIALS

# fmt: off
_MEASURES = {
    "length": {
        "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100",
        "dm decimeter decimetre": "1/10", "m meter metre": "1", "km kilometer kilometre": "1000",
        "inch inches in": "254/10000", "foot feet ft": "3048/10000", "yard yd": "9144/10000",
        "mile mi": "1609344/1000",
    },
    "time": {
        "second sec s": "1", "minute min": "60", "hour hr hrs h": "3600", "day": "86400",
        "week": "604800",
    },
    # How many days these have isn't the same for all of them.
    "calendar": {"month": "1", "year": "12"},
    "speed": {"mph": "44704/100000", "kph kmh": "10/36"},
    "mass": {
        "mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000", "pound lb lbs": "45359237/100000",
        "ounce oz": "45359237/1600000",
    },
    "volume": {
        "ml mL milliliter millilitre": "1/1000", "l L liter litre": "1", "gallon": "3785411784/1000000000",
    },
    "money": {"cent": "1/100", "dollar usd": "1"},
    "euros": {"euro": "1"},
    "yuan": {"yuan": "1"},
    "rupees": {"rupee": "1"},
    "angle": {"degree": "1"},
    "radians": {"radian rad": "1"},
}
"""By dimension: the spellings of each unit, and its size in the dimension's base unit."""
_UNMEASURED = (
    "unit", "people", "person", "student", "men", "women", "children", "way", "times", "point", "piece",
    "km/h", "m/s",
)
"""Words that occur beside a number like a unit, and are never converted."""
POUND = Fraction(45359237, 100000)
"""The size of a pound, which is a currency, too."""
_OR_ALGEBRA = frozenset(("in", "mi", "yd"))
"""Outside ``\\text{}`` these are as likely a product of two letters: a number keeps them."""
# fmt: on
LETTERS = "mgsh"
"""One-letter units that may occur outside ``\\text{}`` if the gold answer has a unit too."""


def _spellings(names: Iterable[str]) -> list[str]:
    """Each name and its plural; abbreviations of two letters have none."""
    return [s for name in names for s in ((name, f"{name}s") if len(name) > 2 else (name,))]


_MEASURED = {
    spelling: (dimension, Fraction(worth))
    for dimension, units in _MEASURES.items()
    for names, worth in units.items()
    for spelling in _spellings(names.split())
}
_WORDS = {*_MEASURED, *_spellings(_UNMEASURED)} - _OR_ALGEBRA

UNIT_WORDS = (
    rf"(?:(?:square|cubic|sq\.?|cu\.?)\s+)?(?:{'|'.join(sorted(w for w in _WORDS if len(w) > 1))})"
    r"(?:\s*\^\s*(?:\{\s*\d\s*\}|\d)|[²³])?\.?$"
)
"""The end of a text in a unit of two letters or more, spelled out or short. One letter may be algebra."""
_UPRIGHT = r"\s*\\(?:text|mathrm)\s*\{\s*[A-Za-z]{1,6}\s*\}(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?\s*"
NO_UNIT = re.compile(
    r"\s*(?:squared|cubed|factorial|doubled|tripled|halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths"
    r"|tenths|(?:hundred|thousand|million|billion|trillion)(?:th)?s?|dozens?)\b",
    re.IGNORECASE,
)
"""Words that begin like a unit and make another value of the number before them."""
DENYING = re.compile(
    rf"\b(?:{DENIALS})\b|n't|\?|(?:\b(?:is|are|was|were) |\()(?:wrong|incorrect|false)\b",
    re.IGNORECASE,
)
"""Words behind a value that deny it."""
FRACTION_UNIT = re.compile(rf"\s*\\frac\s*\{{{_UPRIGHT}\}}\s*\{{{_UPRIGHT}\}}$")
"""``\\frac{\\text{m}}{\\text{s}^2}`` at the end of a text."""


_RATE = re.compile(r"(?P<unit>[A-Za-z]+)\s*(?:/|\bper\b)\s*(?P<each>[A-Za-z]+)")


def measure(name: str) -> tuple[str, Fraction] | None:
    """What the unit with that name measures, and its size in the base unit; None if it is unknown.

    >>> measure("km"), measure("km per hour")
    (('length', Fraction(1000, 1)), ('speed', Fraction(5, 18)))
    """
    rate = _RATE.fullmatch(name)
    if rate is None:
        return _MEASURED.get(name) or _MEASURED.get(name.lower())
    unit, each = _MEASURED.get(rate["unit"].lower()), _MEASURED.get(rate["each"].lower())
    if unit is None or each is None or (unit[0], each[0]) != ("length", "time"):
        return None
    return "speed", unit[1] / each[1]
