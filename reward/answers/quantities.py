"""Quantities with known units, compared by what they measure: 1.5 km is 1500 m, and 40 cm isn't 40 m.

Only if both sides have units that are known, and not the same one. A unit of another dimension or
currency makes another answer, unless data sets mix the two up. A unit that only one side has is
ignored elsewhere (:mod:`tandem.reward.answers.numbers`), as data sets do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from .numbers import read_number
from .tolerances import is_rounding
from .units import LETTERS, measure

MAX_CHARACTERS = 120
"""Longer texts aren't quantities."""

_NUMBER = r"(?P<number>-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)|-?\\frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\})"
_UNIT = (
    r"\s*(?:\\(?:text|mathrm|mbox|textrm|rm)\s*\{\s*(?:(?P<kind>square|cubic|sq\.?)\s+)?"
    r"(?P<text>[A-Za-z]+)\.?\s*(?:,|and)?\s*\}"
    rf"|(?:(?P<kind2>square|cubic)\s+)?(?P<word>[A-Za-z]{{2,}}|[{LETTERS}](?![A-Za-z]))\.?"
    r"|(?P<circle>\^\s*\{?\s*\\circ\s*\}?)|(?P<minutes>'(?!')|\^\s*\{?\s*\\prime\s*\}?))"
    r"(?:\s*\^\s*(?:\{\s*(?P<braced>[23])\s*\}|(?P<power>[23])))?"
)
_PART = re.compile(rf"\s*(?:,|and|\\text\s*\{{\s*and\s*\}})?\s*{_NUMBER}{_UNIT}\s*")
_MONEY = re.compile(r"(?P<before>[$€£¥₹])?\s*(?P<number>\d[\d,]*(?:\.\d+)?)\s*(?P<behind>[€£¥₹])?")
_CURRENCIES = {"$": "money1", "€": "euros1", "£": "pounds1", "¥": "yuan1", "₹": "rupees1"}
_DEGREES = r"(?:(?:\^\s*\{?\s*\\circ\s*\}?|degrees?)\s*)?"
_TEMPERATURE = re.compile(
    rf"{_NUMBER}\s*{_DEGREES}(?:\\(?:text|mathrm|mbox|textrm|rm)\s*\{{\s*{_DEGREES})?"
    r"(?P<scale>C|F|[Cc]elsius|[Ff]ahrenheit)\s*\}?"
)
_M = re.compile(r"(?<![A-Za-z])m(?![A-Za-z])")
_MIXED_UP = (
    {"length1", "length2", "length3", "volume1"},
    {"angle1", "celsius1"},
    {"angle1", "fahrenheit1"},
)
"""Dimensions of which data sets write one for another: an area in cm, a temperature in degrees."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and what it measures."""

    dimension: str
    """Name of the dimension; ``length2`` is an area."""
    units: tuple[Fraction, ...]
    """The size of each part's unit, in the dimension's base unit."""
    value: Fraction
    """The whole quantity in the dimension's base unit."""
    last_place: Fraction
    """The value of one unit in its last decimal place, in the same unit; 0 without decimals."""


@lru_cache(maxsize=4_096)
def read_quantity(text: str, *, letters: bool = False) -> Quantity | None:
    """A normalised text as a quantity with one part or several (``2 hours 30 minutes``); else None.

    One-letter units count only inside ``\\text{}``, since elsewhere they may be algebra, unless
    ``letters`` is true.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    money = _MONEY.fullmatch(text)
    if money is not None:
        currency = _CURRENCIES.get(money["before"] or money["behind"])
        return _in_base_unit(money["number"], currency) if currency is not None else None
    temperature = _TEMPERATURE.fullmatch(text)
    if temperature is not None:
        scale = "celsius1" if temperature["scale"] in ("C", "Celsius", "celsius") else "fahrenheit1"
        return _in_base_unit(temperature["number"], scale)
    position = 0
    parts: list[tuple[str, Fraction, Fraction, Fraction]] = []
    while position < len(text):
        match = _PART.match(text, position)
        part = _read_part(match) if match is not None else None
        if match is None or part is None or len(parts) == 4:
            return None
        if len(match["word"] or "no") == 1 and not letters:
            return None
        parts.append(part)
        position = match.end()
    if not parts or len({dimension for dimension, _, _, _ in parts}) != 1:
        return None
    units = tuple(unit for _, unit, _, _ in parts)
    if any(later >= earlier for earlier, later in itertools.pairwise(units)):
        # Neither "3 m 4 m" nor "30 minutes 2 hours" is a quantity.
        return None
    if len(parts) > 1 and any(value < 0 for _, _, value, _ in parts):
        return None
    total = sum((unit * value for _, unit, value, _ in parts), Fraction(0))
    last_place = max(unit * place for _, unit, _, place in parts)
    return Quantity(parts[0][0], units, total, last_place)


def _in_base_unit(text: str, dimension: str) -> Quantity | None:
    number = read_number(text)
    if number is None:
        return None
    return Quantity(dimension, (Fraction(1),), number.value, number.unit)


def _read_part(match: re.Match[str]) -> tuple[str, Fraction, Fraction, Fraction] | None:
    number = read_number(match["number"])
    if number is None:
        return None
    if match["circle"] or match["minutes"]:
        unit = ("angle", Fraction(1) if match["circle"] else Fraction(1, 60))
    else:
        measured = measure(match["text"] or match["word"])
        if measured is None:
            return None
        unit = measured
    kind = match["kind"] or match["kind2"] or ""
    power = 3 if kind == "cubic" else 2 if kind else int(match["braced"] or match["power"] or 1)
    if power > 1 and (unit[0] != "length" or (kind and (match["braced"] or match["power"]))):
        return None
    return f"{unit[0]}{power}", unit[1] ** power, number.value, number.unit


def same_quantity(answer: str, gold: str) -> bool | None:
    """Whether two normalised texts measure the same; None where that isn't theirs to tell.

    >>> same_quantity("1500\\\\text{ m}", "1.5\\\\text{ km}"), same_quantity("40 cm", "40 mm")
    (True, False)
    >>> same_quantity("40 cm", "40 centimeters"), same_quantity("40 cm", "40")
    (None, None)
    >>> same_quantity("5 km", "5 hours"), same_quantity("5 cm", "5\\\\text{ cm}^2")
    (False, None)
    """
    theirs = read_quantity(gold)
    # If the gold answer has a unit, a single letter is one too.
    ours = read_quantity(answer, letters=True) if theirs is not None else None
    if ours is None or theirs is None:
        return None
    turns = {ours.dimension, theirs.dimension} == {"angle1", "radians1"}
    if turns:
        # One is rational and the other isn't, so one of them is rounded.
        a, b = (_in_radians(quantity) for quantity in (ours, theirs))
        return is_rounding(a.value, b.value, answer_unit=a.last_place, gold_unit=b.last_place)
    if ours.dimension != theirs.dimension:
        mixed_up = any({ours.dimension, theirs.dimension} <= near for near in _MIXED_UP)
        # A single letter may be another unit; "90\\text{ m}" are minutes, too.
        minutes = {ours.dimension, theirs.dimension} == {"length1", "time1"} and _M.search(answer)
        return None if mixed_up or minutes or read_quantity(answer) is None else False
    if ours.units == theirs.units:
        return None
    if ours.value == theirs.value:
        return True
    return is_rounding(
        ours.value, theirs.value, answer_unit=ours.last_place, gold_unit=theirs.last_place
    )


_RADIANS = Fraction(math.pi) / 180


def _in_radians(quantity: Quantity) -> Quantity:
    if quantity.dimension == "radians1":
        return quantity
    return dataclasses.replace(
        quantity, value=quantity.value * _RADIANS, last_place=quantity.last_place * _RADIANS
    )
