"""Reads plain numbers exactly, without sympy: the fast path of the dispatcher.

Plain numbers are integers (with thousands separators), decimals, simple fractions, mixed numbers,
powers of ten, percentages, repeating decimals, amounts of money, and all of these with a unit.
Anything else gives None: it isn't a plain number, but it may still be a right answer.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from fractions import Fraction

from ..reading.extraction import DENIALS
from .tolerances import is_rounding
from .units import DENYING, FRACTION_UNIT, LETTERS, NO_UNIT, UNIT_WORDS

MAX_CHARACTERS = 400
"""Longer texts aren't plain numbers (reading a number takes under 50 microseconds)."""


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number that was read exactly."""

    value: Fraction
    """The exact value; for a percentage, the number before the sign."""
    unit: Fraction = Fraction(0)
    """The value of one unit in its last decimal place (1/100 for ``3.14``); 0 if it is exact or not a
    single decimal."""
    percent: bool = False
    """Whether a percent sign follows."""
    doubtful: bool = False
    """Whether it holds a comma that might separate two numbers; then equality counts, difference doesn't."""


_UNSIGNED = (
    r"(?:(?P<grouped>[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|[1-9]\d{0,2}(?:\.\d{3}){2,}(?!\d))|(?P<whole>\d+))?"
    r"(?:(?P<point>[.,])(?P<places>\d*))?"
)
_DECIMAL = re.compile(
    rf"(?P<sign>[+-]?) ?{_UNSIGNED}"
    r"(?:[eE](?P<e>[+-]?\d{1,3})|(?: ?(?:\\times|\\cdot|\*|×|·|x) ?10\^(?:\{ ?(?P<ten>[+-]?\d{1,3}) ?\}"
    r"|(?P<ten1>\d{1,3})|(?P<ten2>-\d))))?"
)
_POWER = re.compile(
    r"(?P<sign>[+-]?) ?(?P<base>\d{1,4})\^(?:\{ ?(?P<exponent>-?\d{1,2}) ?\}|(?P<digit>\d))"
)
_FRACTION = re.compile(
    r"(?P<sign>[+-]?) ?(?:\\frac ?(?:\{ ?(?P<a>[+-]?[\d.,]+) ?\} ?\{ ?(?P<b>[+-]?[\d.,]+) ?\}"
    r"|(?P<a1>\d) ?(?P<b1>\d)(?!\d)|(?P<a2>\d) ?\{ ?(?P<b2>[\d.,]+) ?\}|\{ ?(?P<a3>[\d.,]+) ?\} ?(?P<b3>\d)(?!\d))"
    r"|(?P<a4>[\d.,]+) ?/ ?(?P<b4>[\d.,]+))"
)
_REPEATING = re.compile(
    r"(?P<sign>[+-]?) ?(?P<whole>\d*)\.(?P<places>\d*)"
    r"(?:\\(?:overline|bar|dot) ?\{ ?(?P<block>\d+) ?\}|\\(?:overline|bar|dot) (?P<digit>\d)"
    r"|\((?P<round>\d+)\))"
)
_POINTS_AND_COMMA = re.compile(r"(?P<whole>[+-]?[1-9]\d{0,2}(?:\.\d{3})+),(?P<places>\d{1,2})")
_DOTS = re.compile(r"(?P<number>[+-]?\d*\.\d+) ?(?:\.\.\.|…|\\l?dots|\\cdots)")
_MIXED = re.compile(
    r"(?P<sign>[+-]?) ?(?P<whole>\d{1,9})(?: ?\\frac ?(?:\{ ?(?P<a>\d+) ?\} ?\{ ?(?P<b>\d+) ?\}"
    r"|(?P<a1>\d) ?(?P<b1>\d)(?!\d)|(?P<a2>\d) ?\{ ?(?P<b2>\d+) ?\}|\{ ?(?P<a3>\d+) ?\} ?(?P<b3>\d)(?!\d))"
    r"| (?P<a4>\d{1,4}) ?/ ?(?P<b4>\d{1,4}))"
)
_PERCENT = re.compile(
    r"\s*(?:\\?%|(?:\\(?:text|mathrm|textbf)\s*\{\s*)?(?:percentage points|percentage|per ?cent|pct|prozent)\s*\}?)$",
    re.IGNORECASE,
)
_TEXT_UNIT = re.compile(
    r"\s*\\(?:text|mathrm|mbox|textbf|textnormal|textit|textrm|operatorname)\s*\{(?P<words>(?:[^{}]|\^\s*\{\s*-?\d\s*\})*)\}"
    r"(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?$"
)
_EXPONENT = re.compile(r"\^\s*(?:\{\s*-?\d\s*\}|\d)")
_MORE_THAN_UNITS = re.compile(
    r"\b[ap]\.?m\b|\b(?:or|and|not|than|maybe|perhaps|possibly|but|if|least|most|otherwise)\b", re.I
)
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?|°)\s*[CF]?$")
_WORD_UNITS = re.compile(rf"\s*(?<![A-Za-z]){UNIT_WORDS}", re.IGNORECASE)
_LETTER_UNIT = re.compile(rf"(?<![A-Za-z]) ?[{LETTERS}](?: ?\^ ?(?:\{{ ?[23] ?\}}|[23]))?$")
_RATE = re.compile(
    r"\s*\bper (?!cent\b)[A-Za-z]{1,12}\.?$|\s*\\text ?\{ ?per (?!cent\b)[A-Za-z]{1,12} ?\}$"
    r"|\s*/ ?\\(?:text|mathrm) ?\{ ?[A-Za-z]{1,12} ?\}(?: ?\^ ?(?:\{ ?\d ?\}|\d))?$"
    rf"|(?<=[A-Za-z}}]) ?/ ?{UNIT_WORDS}",
    re.IGNORECASE,
)
_NOUNS = re.compile(
    r" (?P<words>[A-Za-z\u00c0-\u024f]{3,}(?: (?:[a-z\u00c0-\u024f]{3,}|of|per|in)){0,3})\.?$"
)
_HAN = re.compile(
    r"(?P<number>[^\u4e00-\u9fff]*)(?P<scale>[百千万亿](?![分米克瓦]))?(?P<unit>[\u4e00-\u9fff]{0,4})"
)
"""A number with a Chinese scale, unit or measure word: 5厘米, 5个, 3万元."""
_HAN_SCALES = {None: 1, "百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8}
_HAN_CHANGING = re.compile("[百十万亿半成倍折以或至到余多不非没无约近超少上下错假是]")
"""Of these characters, a scale, a half, a comparison or a denial makes another value of the number."""
# fmt: off
NUMBER_WORDS = {word: value for value, word in enumerate((
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
))}
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on
NUMBER_WORDS |= {tens: 10 * place for place, tens in enumerate(_TENS, 2)}
NUMBER_WORDS |= {
    f"{tens}{mark}{one}": NUMBER_WORDS[tens] + NUMBER_WORDS[one]
    for tens in _TENS
    for one in list(NUMBER_WORDS)[1:10]
    for mark in "- "
}
"""``zero`` to ``ninety-nine``, with a hyphen or a blank between tens and ones."""
_NUMBER_WORD = "|".join(
    # "12 students in one class" are 12.
    "(?<!in )one" if word == "one" else word
    for word in NUMBER_WORDS
    if word.isalpha()
)
_NO_NOUNS = re.compile(
    rf"\b(?:{_NUMBER_WORD}|or|and|nor|not|than|maybe|perhaps|possibly|but|if|when|where|plus|minus|mod|modulo"
    r"|squared|cubed|factorial|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tens|tenths?"
    r"|(?:hundred|thousand|million|billion|trillion)(?:th)?s?|dozens?|base|least|most|more|less|fewer|pi|sqrt|sin"
    r"|hundert|tausend|million(?:en|es)|milliarden?|billionen|mill?e|mil|milliards?|dutzend|halbe|drittel|viertel|hoch"
    r"|cos|tan|log|exp|alpha|beta|theta|over|divided|doubled|tripled|choose|percent|otherwise"
    rf"|{DENIALS}|unless|either|instead)\b",
    re.IGNORECASE,
)
_COMPARING = re.compile(r"\b(?:more|less|fewer|over)\b", re.IGNORECASE)
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALE = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?P<scale>hundred|thousand|million|billion|trillion|dozen)s?(?![A-Za-z-])"
    r"(?P<rest>[^{}]*?)\s*\}?$",
    re.IGNORECASE,
)
_CURRENCY = "$€£¥₹"
_CURRENCY_WORDS = re.compile(
    r"^(?:\\(?:text|mathrm)\s*\{\s*(?:Rs\.?|USD|US\$|EUR|GBP|INR|CNY|\\?\$|[€£¥₹])\s*\}\s*"
    r"|(?:Rs\.?|USD|US\$|EUR|GBP|INR|CNY)\s*)(?=[-\d.])"
)


def read_number(text: str) -> PlainNumber | None:
    """The number that a normalised text is, or None."""
    if not text or len(text) > MAX_CHARACTERS:
        return None
    bare = _bare(text)
    if bare is not None:
        return bare
    if not any(character.isdigit() for character in text):
        word = NUMBER_WORDS.get(text.lower())
        return PlainNumber(Fraction(word)) if word is not None else None
    return _dressed(text)


def _dressed(text: str) -> PlainNumber | None:
    """A number with a currency, a percent sign or a unit."""
    body = _CURRENCY_WORDS.sub("", text)
    for mark in ("\\$", *_CURRENCY):
        if body.startswith(mark):
            body = body[len(mark) :].lstrip()
        elif body.startswith(f"-{mark}"):
            body = "-" + body[1 + len(mark) :].lstrip()
        if body.endswith(mark):
            body = body[: -len(mark)].rstrip()
    percent = _PERCENT.search(body)
    if percent is not None:
        number = _bare(body[: percent.start()].rstrip())
        if number is None:
            return None
        return dataclasses.replace(number, percent=True)
    scale = _SCALE.search(body)
    if scale is not None:
        number = _bare(body[: scale.start()].rstrip())
        if number is not None:
            rest = scale.group("rest")
            if _NO_NOUNS.search(_COMPARING.sub("", rest)) or any(c.isdigit() for c in rest):
                # "5 thousand two hundred" isn't read, and isn't 5000; "3 million more" are 3 million.
                return None
            factor = _SCALES[scale.group("scale").lower()]
            return dataclasses.replace(
                number, value=number.value * factor, unit=number.unit * factor
            )
    if "\u4e00" <= body[-1:] <= "\u9fff":
        return _with_han(body)
    for _ in range(3):
        for unit in (FRACTION_UNIT, _TEXT_UNIT, _DEGREES, _WORD_UNITS):
            match = unit.search(body)
            if match is not None and match.start() > 0:
                words = _EXPONENT.sub("", match.groupdict().get("words") or "")
                if (
                    any(c.isdigit() for c in words)
                    or _MORE_THAN_UNITS.search(words)
                    or DENYING.search(words)
                    or NO_UNIT.match(words)
                ):
                    # "5 \text{ or } 6", "5\text{ squared}" and times of day are more than a number with its unit.
                    return None
                body = body[: match.start()].rstrip()
                break
        else:
            break
    if body == text:
        nouns = _NOUNS.search(body)
        if nouns is None or _NO_NOUNS.search(nouns["words"]):
            return None
        body = body[: nouns.start()]
    return _bare(body)


def _with_han(text: str) -> PlainNumber | None:
    match = _HAN.fullmatch(text)
    number = _bare(match["number"].rstrip()) if match is not None else None
    if match is None or number is None or _HAN_CHANGING.search(match["unit"]):
        return None
    factor = _HAN_SCALES[match["scale"]]
    return dataclasses.replace(number, value=number.value * factor, unit=number.unit * factor)


def with_letter_unit(text: str) -> PlainNumber | None:
    """The number in an answer like ``5m`` or ``5 m^2``.

    Only for an answer whose gold answer is a number: a gold answer ``5m`` may be algebra.
    """
    match = _LETTER_UNIT.search(text)
    return read_number(text[: match.start()]) if match is not None else None


def with_rate(text: str) -> PlainNumber | None:
    """The number in an answer like ``60 miles per hour`` or ``9.8\\text{ m}/\\text{s}^2``.

    Only for an answer whose gold answer is a number without such a unit: 60 km per hour is another speed.
    """
    match = _RATE.search(text)
    return read_number(text[: match.start()]) if match is not None else None


def _bare(text: str) -> PlainNumber | None:
    """A number with nothing around it."""
    if text.isascii() and text.isdigit():
        return PlainNumber(Fraction(int(text)))
    match = _DECIMAL.fullmatch(text)
    if match is not None:
        number = _decimal(match)
        if number is not None:
            return number
    match = _FRACTION.fullmatch(text)
    if match is not None:
        return _fraction(match)
    match = _MIXED.fullmatch(text)
    if match is not None:
        return _mixed(match)
    match = _POWER.fullmatch(text)
    if match is not None:
        exponent = int(match.group("exponent") or match.group("digit"))
        base = Fraction(int(match.group("base")))
        if base == 0 and exponent <= 0:
            return None
        return PlainNumber(_signed(match.group("sign"), base**exponent))
    match = _REPEATING.fullmatch(text)
    if match is not None:
        # "0.1(6)" also repeats, but may be a product.
        block = match.group("block") or match.group("digit") or match.group("round")
        places = match.group("places")
        value = Fraction(int((match.group("whole") or "0") + places), 10 ** len(places))
        value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(places))
        doubtful = match.group("round") is not None
        return PlainNumber(_signed(match.group("sign"), value), doubtful=doubtful)
    match = _POINTS_AND_COMMA.fullmatch(text)
    if match is not None:
        # "1.234,56" is a European amount, or two numbers.
        digits, places = match.group("whole").replace(".", ""), match.group("places")
        unit = Fraction(1, 10 ** len(places))
        return PlainNumber(int(digits + places) * unit, unit=unit, doubtful=True)
    match = _DOTS.fullmatch(text)
    if match is not None:
        return _dotted(match.group("number"))
    return None


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _decimal(match: re.Match[str]) -> PlainNumber | None:
    grouped, whole, places = match.group("grouped"), match.group("whole"), match.group("places")
    if grouped is None and whole is None and not places:
        return None
    comma = match.group("point") == ","
    if comma and (not (grouped or whole) or not places):
        return None  # "1,"
    if grouped is not None and match.group("point") is not None and match.group("point") in grouped:
        return None  # Neither "1,234,5" nor "1.234.567.8" is a number.
    digits = re.sub("[., ]", "", grouped or whole or "0")
    places = places or ""
    unit = Fraction(1, 10 ** len(places))
    exponent = match.group("e") or match.group("ten") or match.group("ten1") or match.group("ten2")
    if exponent is not None:
        unit *= Fraction(10) ** int(exponent)
    return PlainNumber(
        _signed(match.group("sign"), int(digits + places) * unit),
        unit=unit if places else Fraction(0),
        doubtful=comma or (grouped is not None and "," in grouped),
    )


def _fraction(match: re.Match[str]) -> PlainNumber | None:
    groups = match.groupdict()
    top = next((groups[k] for k in ("a", "a1", "a2", "a3", "a4") if groups[k] is not None), "")
    bottom = next((groups[k] for k in ("b", "b1", "b2", "b3", "b4") if groups[k] is not None), "")
    above, below = _DECIMAL.fullmatch(top), _DECIMAL.fullmatch(bottom)
    if above is None or below is None:
        return None
    a, b = _decimal(above), _decimal(below)
    if a is None or b is None or b.value == 0:
        return None
    return PlainNumber(
        _signed(match.group("sign"), a.value / b.value),
        doubtful=a.doubtful or b.doubtful,
    )


def _mixed(match: re.Match[str]) -> PlainNumber | None:
    groups = match.groupdict()
    top = next(groups[k] for k in ("a", "a1", "a2", "a3", "a4") if groups[k] is not None)
    bottom = next(groups[k] for k in ("b", "b1", "b2", "b3", "b4") if groups[k] is not None)
    if int(top) >= int(bottom):
        # Not a proper fraction: "2\\frac{3}{2}" may as well be a product.
        return None
    value = int(match.group("whole")) + Fraction(int(top), int(bottom))
    return PlainNumber(_signed(match.group("sign"), value))


def _dotted(text: str) -> PlainNumber | None:
    """``0.1666...``: the shortest block that fills the end at least twice repeats forever."""
    sign = "-" if text.startswith("-") else ""
    whole, _, places = text.lstrip("+-").partition(".")
    for size in range(1, len(places) // 2 + 1):
        block = places[-size:]
        if places[-2 * size : -size] == block:
            head = places[: -2 * size]
            value = Fraction(int((whole or "0") + head), 10 ** len(head))
            value += Fraction(int(block), (10**size - 1) * 10 ** len(head))
            return PlainNumber(_signed(sign, value))
    return None


def same_number(answer: PlainNumber, gold: PlainNumber) -> bool | None:
    """Whether two plain numbers are the same answer; None if a comma leaves it open.

    Numbers are equal exactly, or one is the other's rounding (:func:`is_rounding`). A percentage
    equals the number before its sign and a hundredth of that number, as data sets write both.
    """
    pairs = [(answer, gold)]
    if answer.percent != gold.percent:
        a, b = (_hundredth(n) if n.percent else n for n in (answer, gold))
        pairs.append((a, b))
    for a, b in pairs:
        if a.value == b.value or is_rounding(
            a.value, b.value, answer_unit=a.unit, gold_unit=b.unit
        ):
            return True
    if answer.doubtful or gold.doubtful:
        return None
    return False


def _hundredth(number: PlainNumber) -> PlainNumber:
    return dataclasses.replace(number, value=number.value / 100, unit=number.unit / 100)
