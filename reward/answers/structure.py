"""Lists, sets, tuples, intervals, ratios and times of day, compared part by part without sympy.

What is decided here is decided exactly; None leaves it to a grader process. The conventions are
math-verify's: a bare list is a set (its order doesn't count), a tuple may be written without its
brackets or in braces but must be in order, an interval must have exactly the same ends.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from fractions import Fraction

from .numbers import PlainNumber, read_number, same_number
from .quantities import same_quantity
from .spelling import canonical, normalise

MAX_PARTS = 200
"""Longest collection that is compared here."""

_OPENING = "([{"
_CLOSING = ")]}"
_SEPARATOR = re.compile(
    r"[,;]?\s*\\(?:text|mathrm|mbox|textrm)\s*\{\s*,?\s*(?:and|or)\s*\}\s*,?"
    r"|[,;]?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;]"
)
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_ZERO_GROUP = re.compile(r",0\d\d(?!\d)")
_NAMED = re.compile(r"(?P<name>\(?[A-Za-z][\w,{}' ]{0,12}\)?)\s*=\s*(?P<value>[^=]+)")
_TOGETHER = re.compile(r"\((?P<names>[^()=]+)\)\s*=\s*(?P<values>\(.+\))")
"""``(x,y) = (1,2)``"""
_COORDINATES = (["x", "y"], ["x", "y", "z"])
"""Names of which everybody knows the order in a tuple."""
_DOTS = re.compile(r"\s*(?:\\(?:l|c|v|d)?dots(?![A-Za-z])|\.\.\.)")
_DECIMAL_DOTS = re.compile(rf"(?:(?<!\d)\d*\.\d+|^-?\d+,\d+){_DOTS.pattern}")
"""Dots behind a decimal say that its digits go on."""
_LABEL = re.compile(r"[A-Z]'? ?(?=\()")
_INFINITIES = {"\\infty": 1, "+\\infty": 1, "-\\infty": -1}


def join_thousands(text: str) -> str:
    """Removes the commas in numbers like ``1,000``, which nobody means as "1 and 000"."""
    if "," not in text:
        return text

    def joined(match: re.Match[str]) -> str:
        number = match.group()
        return number.replace(",", "") if _ZERO_GROUP.search(number) else number

    return _THOUSANDS.sub(joined, text)


def has_dots(text: str) -> bool:
    """Whether a text goes on without end, or leaves something out."""
    return _DOTS.search(_DECIMAL_DOTS.sub("", text)) is not None


@dataclass(frozen=True, slots=True)
class Collection:
    """Parts between brackets; ``kind`` is ``{``, the two brackets, or empty for a bare list."""

    kind: str
    parts: tuple[str, ...]


def split(text: str) -> list[str] | None:
    """Splits at commas (semicolons, "and", "or") outside all brackets; None if brackets don't pair up.
    A single part means that it isn't a list."""
    depth = 0
    parts: list[str] = []
    begin = position = 0
    length = len(text)
    while position < length:
        character = text[position]
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0:
            separator = _SEPARATOR.match(text, position)
            if separator is not None and separator.end() > position:
                parts.append(text[begin:position].strip())
                begin = position = separator.end()
                continue
        if character == "\\" and text[position + 1 : position + 2] not in ("{", "}"):
            position += 1
        position += 1
    if depth:
        return None
    parts.append(text[begin:].strip())
    return [p for p in parts if p] if len(parts) > 1 else parts


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last character (of any bracket)."""
    depth = 0
    for position, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if depth == 0:
                return position == len(text) - 1
    return False


def collection(text: str) -> Collection | None:
    """The parts that a normalised text lists; None if it isn't a collection of two or more parts."""
    text = _LABEL.sub("", join_thousands(text.strip()), count=1) if text[-1:] == ")" else text
    text = join_thousands(text.strip())
    if "\\begin" in text or len(text) < 3:
        return None
    together = _TOGETHER.fullmatch(text)
    named = _named_each(together["names"], together["values"]) if together else None
    if named is not None:
        return named
    kind, inside = "", text
    if text.startswith("\\{") and text.endswith("\\}"):
        if not _encloses(text[1:-2] + "}"):
            parts = split(text)
            return Collection("", tuple(parts)) if parts and len(parts) > 1 else None
        kind, inside = "{", text[2:-2]
    elif text[0] in "([" and text[-1] in ")]" and _encloses(text):
        kind, inside = text[0] + text[-1], text[1:-1]
    parts = split(inside)
    if parts is None or len(parts) > MAX_PARTS or not all(parts):
        return None
    if len(parts) < 2 and kind != "{":
        return None
    if not parts or parts == [""]:
        return None
    if kind in ("", "{"):
        parts = _rows(parts) or parts
    return Collection(kind, tuple(parts))


def _rows(parts: list[str]) -> list[str] | None:
    """``(x=2,y=3)`` and ``(x=3,y=2)`` for ``x=2, y=3, x=3, y=2``; None for anything else."""
    names, _ = _unnamed(tuple(parts))
    each = len(set(names))
    if "" in names or each < 2 or each == len(names) or len(names) % each:
        return None
    places = range(0, len(names), each)
    if any(set(names[place : place + each]) != set(names) for place in places):
        return None
    return [f"({','.join(parts[place : place + each])})" for place in places]


def _named_each(names: str, values: str) -> Collection | None:
    """``x=1`` and ``y=2`` for ``(x,y) = (1,2)``."""
    called, listed = split(names), collection(values)
    if called is None or listed is None or listed.kind != "()":
        return None
    if len(called) != len(listed.parts):
        return None
    parts = (f"{name}={value}" for name, value in zip(called, listed.parts, strict=True))
    return Collection("()", tuple(parts))


def _unnamed(parts: tuple[str, ...]) -> tuple[list[str], list[str]]:
    names, values = [], []
    for part in parts:
        match = _NAMED.fullmatch(part)
        names.append(match.group("name").strip() if match else "")
        values.append(match.group("value").strip() if match else part)
    return names, values


def _same_part(a: str, b: str) -> bool | None:
    a, b = normalise(a), normalise(b)
    if canonical(a) == canonical(b):
        return True
    measured = same_quantity(a, b)
    if measured is not None:
        return measured
    ours, theirs = read_number(a), read_number(b)
    if ours is not None and theirs is not None:
        # Splitting has used up the separating commas, so a comma isn't part of a number here.
        return bool(same_number(_certain(ours), _certain(theirs)))
    left, right = _INFINITIES.get(a.strip()), _INFINITIES.get(b.strip())
    if left is not None and right is not None:
        return left == right
    if (left is not None and theirs is not None) or (right is not None and ours is not None):
        return False
    one, other = collection(a), collection(b)
    if one is not None and other is not None:
        return compare_collections(one, other)
    if (one is None) != (other is None) and (ours is not None or theirs is not None):
        return False
    return None


def _certain(number: PlainNumber) -> PlainNumber:
    return dataclasses.replace(number, doubtful=False)


def _ordered(a: list[str], b: list[str]) -> bool | None:
    if len(a) != len(b):
        return False
    equal = [_same_part(x, y) for x, y in zip(a, b, strict=True)]
    if False in equal:
        return False
    return None if None in equal else True


def _unordered(a: list[str], b: list[str]) -> bool | None:
    known = [[_same_part(x, y) for y in b] for x in a]
    ours = [True in row for row in known]
    theirs = [any(row[j] is True for row in known) for j in range(len(b))]
    if all(ours) and all(theirs):
        return True
    # A part that differs from every part of the other side decides it.
    for row, met in zip(known, ours, strict=True):
        if not met and None not in row:
            return False
    for j, met in enumerate(theirs):
        if not met and all(row[j] is not None for row in known):
            return False
    return None


def _by_name(answer: Collection, gold: Collection) -> list[tuple[str, str]] | None:
    """The values of the answer beside those of the gold answer, where names say which belong together:
    those of both, or those of one if the other states its values in the same order."""
    our_names, ours = _unnamed(answer.parts)
    their_names, theirs = _unnamed(gold.parts)
    if len(ours) != len(theirs):
        return None
    if _names_several(our_names) and any(their_names):
        if len(set(our_names)) < len(our_names) or sorted(our_names) != sorted(their_names):
            return None
        ours = [ours[our_names.index(name)] for name in their_names]
    elif _names_several(our_names):
        # The answer's names, in the order of the coordinates.
        if gold.kind != "()" or sorted(our_names) not in _COORDINATES:
            return None
        ours = [ours[our_names.index(name)] for name in sorted(our_names)]
    elif not _names_several(their_names) or any(our_names):
        return None
    return list(zip(ours, theirs, strict=True))


def _names_several(names: list[str]) -> bool:
    """Whether values of several names are stated: ``x=1, 2`` are two values of one."""
    return len({name for name in names if name}) > 1


def pairs_by_name(answer: str, gold: str) -> list[tuple[str, str]] | None:
    """Parts of two answers that must be equal, pair by pair, if names say which belong together, without
    the pairs that are known to be equal; else None.

    >>> pairs_by_name("(2, \\\\sqrt{8})", "x=2, y=2\\\\sqrt{2}")
    [('\\\\sqrt{8}', '2\\\\sqrt{2}')]
    """
    ours, theirs = collection(normalise(answer)), collection(normalise(gold))
    if ours is None or theirs is None:
        return None
    pairs = _by_name(ours, theirs)
    return None if pairs is None else [(a, b) for a, b in pairs if not _same_part(a, b)]


def as_tuples(answer: str, gold: str) -> tuple[str, str]:
    """Both texts, with ``(2, 3), (3, 2)`` for ``x=2, y=3 or x=3, y=2``, in one order of the names."""
    listed = [collection(normalise(text)) for text in (answer, gold)]
    rows = [[_row(part) for part in one.parts] if one is not None else [] for one in listed]
    named = [row for of_one in rows for row in of_one if all(of_one)]
    if not named or any(set(row) != set(named[-1]) for row in named):
        return answer, gold
    order = list(named[-1])
    texts = []
    for text, of_one in zip((answer, gold), rows, strict=True):
        if of_one and all(of_one):
            text = ", ".join(f"({', '.join(row[name] for name in order)})" for row in of_one)
        texts.append(text)
    return texts[0], texts[1]


def _row(part: str) -> dict[str, str]:
    """The values of ``(x=2,y=3)`` by name; empty for anything else."""
    listed = collection(part)
    names, values = _unnamed(listed.parts) if listed is not None else ([], [])
    return dict(zip(names, values, strict=True)) if all(names) else {}


def compare_collections(answer: Collection, gold: Collection) -> bool | None:
    """Whether two collections are the same answer; None if a part needs more than reading."""
    pairs = _by_name(answer, gold)
    if pairs is not None:
        return _ordered([a for a, _ in pairs], [b for _, b in pairs])
    our_names, ours = _unnamed(answer.parts)
    their_names, theirs = _unnamed(gold.parts)
    if any(our_names) and any(their_names):
        if sorted(our_names) != sorted(their_names):
            return None
    elif _names_several(their_names):
        return None
    elif _names_several(our_names) and not answer.kind and gold.kind in ("", "()", "{"):
        return _ordered(ours, theirs) or None
    if answer.kind == gold.kind and len(answer.kind) == 2:
        return _ordered(ours, theirs)
    if len(answer.kind) == 2 and len(gold.kind) == 2:
        # The interval has other ends, or the tuple other brackets.
        pair = len(ours) == 2 and len(theirs) == 2
        return False if pair else None
    if len(answer.kind) == 2 or len(gold.kind) == 2:
        if "()" not in (answer.kind, gold.kind):
            return None
        same = _ordered(ours, theirs)
        return same if same is not False or _all_plain(ours + theirs) else None
    return _unordered(ours, theirs)


def _all_plain(parts: list[str]) -> bool:
    return all(read_number(normalise(p)) is not None for p in parts)


def is_plain_list(listed: Collection) -> bool:
    """Whether it is two or more different plain numbers, which never equal a single number."""
    values = {n.value for n in map(read_number, map(normalise, listed.parts)) if n is not None}
    return len(values) > 1


# --- ratios and times of day -------------------------------------------------------------------

_TO = re.compile(r"(?<=\d)\s*(?:\\(?:text|mathrm)\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)")
_CLOCK = re.compile(
    r"(?P<hours>\d{1,2})(?:\s?:\s?(?P<minutes>\d\d))?\s*"
    r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{\s*)?(?P<half>[ap]\.?\s?m\.?)?\s*\}?",
    re.IGNORECASE,
)


def clock(text: str) -> tuple[int, int, str] | None:
    """(hours, minutes, "a", "p" or "") for a time of day, or minutes and seconds; else None."""
    match = _CLOCK.fullmatch(text)
    if match is None or (match["minutes"] is None and match["half"] is None):
        return None
    hours, minutes = int(match["hours"]), int(match["minutes"] or 0)
    if minutes > 59:
        return None
    return hours, minutes, (match["half"] or "")[:1].lower()


def same_clock(answer: str, gold: str) -> bool | None:
    """Whether two times are the same, part by part; None if a text isn't one.

    ``10:30`` may also be a ratio, but 5:15 isn't a way to write it: two texts in a clock's form are times.
    """
    ours, theirs = clock(answer), clock(gold)
    if theirs is None or ours is None:
        return None
    if ours[2] and theirs[2] and ours[2] != theirs[2]:
        return False
    if bool(ours[2]) != bool(theirs[2]):
        ours, theirs = _in_halves(ours), _in_halves(theirs)
        if ours[2] and theirs[2]:
            return ours == theirs
    return ours[:2] == theirs[:2]


def _in_halves(time: tuple[int, int, str]) -> tuple[int, int, str]:
    """``15:45`` as ``3:45`` p.m.; up to noon, a time without a.m. or p.m. may be either."""
    hours, minutes, half = time
    return (hours - 12, minutes, "p") if not half and 12 < hours < 24 else time


# fmt: off
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)
# fmt: on
_MONTH = r"(?P<month>[A-Za-z]{3,9})\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_DATES = (
    re.compile(rf"{_MONTH} {_DAY}(?:,? (?P<year>\d{{4}}))?"),
    re.compile(rf"(?:the )?{_DAY} (?:of )?{_MONTH}(?:,? (?P<year>\d{{4}}))?"),
)
_ISO_DATE = re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)")


def date(text: str) -> tuple[int, int, int | None] | None:
    """(month, day, year) for ``July 4, 1776``, ``4 July 1776`` and ``1776-07-04``, with None for a missing year; else None."""
    iso = _ISO_DATE.fullmatch(text)
    if iso is not None:
        month, day = int(iso["month"]), int(iso["day"])
        return (month, day, int(iso["year"])) if 1 <= month <= 12 and 1 <= day <= 31 else None
    for pattern in _DATES:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        written = match["month"].lower()
        for number, name in enumerate(_MONTHS, 1):
            if written in (name, name[:3], name[:4]) and 1 <= int(match["day"]) <= 31:
                return number, int(match["day"]), int(match["year"]) if match["year"] else None
    return None


def same_date(answer: str, gold: str) -> bool | None:
    """Whether two dates are the same; None if a text isn't a date, or only one has a year."""
    ours, theirs = date(answer), date(gold)
    if ours is None or theirs is None:
        return None
    if ours[:2] == theirs[:2] and (ours[2] is None) != (theirs[2] is None):
        return None
    return ours == theirs


def ratio(text: str) -> tuple[Fraction, ...] | None:
    """``(3, 2)`` for ``3:2`` and ``3 to 2``; None for what isn't a ratio of plain numbers."""
    text = _TO.sub(":", text)
    if ":" not in text:
        return None
    numbers = [read_number(part.strip()) for part in text.split(":")]
    values = tuple(n.value for n in numbers if n is not None)
    if len(values) != len(numbers) or any(v <= 0 for v in values):
        return None
    return values


def same_ratio(answer: str, gold: str, number: PlainNumber | None) -> bool | None:
    """Whether an answer is the gold answer's ratio, or that ratio's value if it has two parts."""
    theirs = ratio(gold)
    if theirs is None:
        return None
    ours = ratio(answer)
    if ours is None:
        if number is None or len(theirs) != 2:
            return None
        ours = (number.value, Fraction(1))
    if len(ours) != len(theirs):
        return False
    return all(a * theirs[0] == b * ours[0] for a, b in zip(ours, theirs, strict=True))
