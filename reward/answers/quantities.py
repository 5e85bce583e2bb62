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

from .formula import Unknown, floating, read_formula
from .numbers import read_number
from .tolerances import FLOAT_APART, FLOAT_EQUAL, is_rounding
from .units import LETTERS, POUND, measure

MAX_CHARACTERS = 120
"""Longer texts aren't quantities."""

_FRACTION = r"\\frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d(?!\d))"
_NUMBER = (
    rf"(?P<number>-?(?:(?:\d+\s*)?{_FRACTION}|(?:\d+ )?\d+ ?/ ?\d+|(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
    r"(?: ?(?:\\times|\\cdot|\*|x) ?10\^(?:\{ ?-?\d{1,3} ?\}|\d))?))"
)
_LETTERS = f"{LETTERS}L"
"""One-letter units; a litre only here, since 42L without another unit beside it is as likely algebra."""
_BY = r"(?:\s*/\s*|\s+per\s+)[A-Za-z]+"
_UNIT = (
    r"\s*(?:\\(?:text|mathrm|mbox|textrm|rm)\s*\{\s*(?:(?P<kind>square|cubic|sq\.?)\s+)?"
    rf"(?P<text>[A-Za-z]+(?:{_BY})?)\.?\s*(?:,|and)?\s*\}}"
    rf"|(?:(?P<kind2>square|cubic)\s+)?(?P<word>(?:[A-Za-z]{{2,}}|[{_LETTERS}]){_BY}|[A-Za-z]{{2,}}"
    rf"|[{_LETTERS}](?![A-Za-z]))\.?"
    r"|(?P<circle>\^\s*\{?\s*\\circ\s*\}?)|(?P<minutes>'(?!')|\^\s*\{?\s*\\prime\s*\}?))"
    r"(?:\s*\^\s*(?:\{\s*(?P<braced>[23])\s*\}|(?P<power>[23])))?"
)
_NAME = re.compile(r"(?P<name>[A-Za-z](?:_\{?\w{1,3}\}?)?) ?(?:=|\\approx) ?(?=[^=<>]+$)")
_FACTOR = re.compile(rf"(?P<rest>.*(?:\\pi|\\sqrt|\\frac).*?){_UNIT}\s*")
_PART = re.compile(rf"\s*(?:,|and|\\text\s*\{{\s*and\s*\}})?\s*{_NUMBER}{_UNIT}\s*")
_MONEY = re.compile(r"(?P<before>[$€£¥₹])?\s*(?P<number>\d(?:[\d.,]*\d)?)\s*(?P<behind>[€£¥₹])?")
_CURRENCIES = {"$": "money1", "€": "euros1", "£": "pounds1", "¥": "yuan1", "₹": "rupees1"}
_DEGREES = r"(?:(?:\^\s*\{?\s*\\circ\s*\}?|degrees?)\s*)?"
_TEMPERATURE = re.compile(
    rf"{_NUMBER}\s*{_DEGREES}(?:\\(?:text|mathrm|mbox|textrm|rm)\s*\{{\s*{_DEGREES})?"
    r"(?P<scale>C|F|[Cc]elsius|[Ff]ahrenheit)\s*\}?"
)
_M = re.compile(r"(?<![A-Za-z])m(?![A-Za-z])")
_MIXED_UP = ({"angle1", "celsius1"}, {"angle1", "fahrenheit1"})
"""Dimensions of which data sets write one for another: a temperature in degrees."""


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
    length: Fraction | None
    """The size of the unit of length that the first part's unit is, or is a power of; else None."""


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
    parts: list[tuple[_Unit, Fraction, Fraction]] = []
    while position < len(text):
        match = _PART.match(text, position)
        part = _read_part(match) if match is not None else None
        if match is None or part is None or len(parts) == 4:
            return None
        if len(match["word"] or "no") == 1 and not letters:
            return None
        parts.append(part)
        position = match.end()
    if not parts or len({unit.dimension for unit, _, _ in parts}) != 1:
        return None
    units = tuple(unit.size for unit, _, _ in parts)
    if any(later >= earlier for earlier, later in itertools.pairwise(units)):
        # Neither "3 m 4 m" nor "30 minutes 2 hours" is a quantity.
        return None
    if len(parts) > 1 and any(value < 0 for _, value, _ in parts):
        return None
    total = sum((unit.size * value for unit, value, _ in parts), Fraction(0))
    last_place = max(unit.size * place for unit, _, place in parts)
    first = parts[0][0]
    return Quantity(first.dimension, units, total, last_place, first.length)


def _in_base_unit(text: str, dimension: str) -> Quantity | None:
    number = read_number(text)
    if number is None:
        return None
    return Quantity(dimension, (Fraction(1),), number.value, number.unit, None)


@dataclass(frozen=True, slots=True)
class _Unit:
    dimension: str
    size: Fraction
    length: Fraction | None


def _read_part(match: re.Match[str]) -> tuple[_Unit, Fraction, Fraction] | None:
    number, unit = read_number(match["number"]), _read_unit(match)
    return (unit, number.value, number.unit) if number is not None and unit is not None else None


def _read_unit(match: re.Match[str]) -> _Unit | None:
    if match["circle"] or match["minutes"]:
        return _Unit("angle1", Fraction(1) if match["circle"] else Fraction(1, 60), None)
    measured = measure(match["text"] or match["word"])
    if measured is None:
        return None
    dimension, size = measured
    kind = match["kind"] or match["kind2"] or ""
    power = 3 if kind == "cubic" else 2 if kind else int(match["braced"] or match["power"] or 1)
    if power > 1 and (dimension != "length" or (kind and (match["braced"] or match["power"]))):
        return None
    if dimension == "volume":
        # A litre is a thousandth of a cubic metre.
        return _Unit("length3", size / 1000, None)
    return _Unit(f"{dimension}{power}", size**power, size if dimension == "length" else None)


def same_quantity(answer: str, gold: str) -> bool | None:
    """Whether two normalised texts measure the same; None where that isn't theirs to tell.

    >>> same_quantity("1500\\\\text{ m}", "1.5\\\\text{ km}"), same_quantity("40 cm", "40 mm")
    (True, False)
    >>> (
    ...     same_quantity("x = 40 cm", "40 m"),
    ...     same_quantity("2\\\\pi\\\\text{ m}", "200\\\\pi\\\\text{ cm}"),
    ... )
    (False, True)
    >>> same_quantity("40 cm", "40 centimeters"), same_quantity("40 cm", "40")
    (None, None)
    >>> same_quantity("5 km", "5 hours"), same_quantity("5 cm", "5\\\\text{ cm}^2")
    (False, None)
    """
    our_name, answer = _without_name(answer)
    their_name, gold = _without_name(gold)
    if our_name and their_name and our_name.lower() != their_name.lower():
        return None
    ours, theirs = read_quantity(answer), read_quantity(gold)
    certain = ours is not None and theirs is not None
    # If one of them has a unit, a single letter in the other is one too.
    if theirs is not None and ours is None:
        ours = read_quantity(answer, letters=True)
    elif ours is not None and theirs is None:
        theirs = read_quantity(gold, letters=True)
    if ours is None or theirs is None:
        return _same_multiple(answer, gold)
    turns = {ours.dimension, theirs.dimension} == {"angle1", "radians1"}
    if turns:
        # One is rational and the other isn't, so one of them is rounded.
        a, b = (_in_radians(quantity) for quantity in (ours, theirs))
        return is_rounding(a.value, b.value, answer_unit=a.last_place, gold_unit=b.last_place)
    if ours.dimension != theirs.dimension:
        # A single letter may be another unit; "90\\text{ m}" are minutes, too.
        minutes = {ours.dimension, theirs.dimension} == {"length1", "time1"} and _M.search(answer)
        return None if not certain or minutes or _is_mixed_up(ours, theirs) else False
    if ours.units == theirs.units:
        # Numbers are compared elsewhere, where neither a speed nor a single letter is a unit of a gold answer's.
        unread = ours.dimension == "speed1" or not certain
        return True if unread and ours.value == theirs.value else None
    if ours.value == theirs.value:
        return True
    return is_rounding(
        ours.value, theirs.value, answer_unit=ours.last_place, gold_unit=theirs.last_place
    )


def _without_name(text: str) -> tuple[str, str]:
    """``x`` and ``40 cm`` for ``x = 40 cm``."""
    match = _NAME.match(text)
    return (match["name"], text[match.end() :]) if match is not None else ("", text)


def _is_mixed_up(a: Quantity, b: Quantity) -> bool:
    """Whether data sets write one for the other: an area in cm, pounds without saying of what."""
    if any({a.dimension, b.dimension} <= near for near in _MIXED_UP):
        return True
    if {a.dimension, b.dimension} == {"mass1", "pounds1"}:
        return POUND in (a.units + b.units)
    return a.length is not None and a.length == b.length


def _same_multiple(answer: str, gold: str) -> bool | None:
    """The same for multiples of pi and of roots (``2\\pi\\text{ cm}``), by their values."""
    ours, theirs = _multiple(answer), _multiple(gold)
    if ours is None or theirs is None or ours[0] == theirs[0]:
        return None
    unit, their_unit = ours[0], theirs[0]
    if unit.dimension != their_unit.dimension:
        same_length = unit.length is not None and unit.length == their_unit.length
        return None if same_length or "angle1" in (unit.dimension, their_unit.dimension) else False
    a, b = ours[1] * float(unit.size), theirs[1] * float(their_unit.size)
    apart = abs(a - b) / max(abs(a), abs(b), 1e-300)
    return True if apart <= FLOAT_EQUAL else False if apart > FLOAT_APART else None


def _multiple(text: str) -> tuple[_Unit, float] | None:
    """A unit and the value before it, if that is a formula without names or decimals."""
    match = _FACTOR.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None or len(match["word"] or "no") == 1:
        return None
    unit, formula = _read_unit(match), read_formula(match["rest"].strip())
    if (
        unit is None
        or formula is None
        or formula.names
        or formula.decimal
        or formula.transcendental
    ):
        return None
    try:
        value = floating(formula.tree, {})
    except (Unknown, OverflowError, ZeroDivisionError, ValueError):
        return None
    return (unit, value.real) if not value.imag else None


_RADIANS = Fraction(math.pi) / 180


def _in_radians(quantity: Quantity) -> Quantity:
    if quantity.dimension == "radians1":
        return quantity
    return dataclasses.replace(
        quantity, value=quantity.value * _RADIANS, last_place=quantity.last_place * _RADIANS
    )
