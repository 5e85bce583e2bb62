"""A gold answer and an answer, each read once, as the engines of a comparison see them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from ..reading import extraction
from ..reading.extraction import last_box
from ..reading.labels import option_letter
from ..reading.modes import Mode
from . import structure
from .guard import dangerous
from .numbers import PlainNumber, read_number, with_letter_unit, with_rate
from .spelling import WRAPPER, canonical, normalise

MAX_GOLD = 4_000
"""Longest gold answer that is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """A gold answer read once; a group grades all its samples against one."""

    stated: str
    """What the data set states: its text, its box or its formula."""
    stated_canonical: str
    """The same as ``canonical`` has it."""
    text: str
    """The text to compare: the same without the words around its value, as they are left out of an answer."""
    normalised: str
    """The text without what encloses it, in one spelling (:func:`~tandem.reward.answers.spelling.normalise`)."""
    canonical: str
    """The normalised text without blanks that carry no meaning."""
    number: PlainNumber | None
    """The value, if the text is a plain number."""
    letter: str | None
    """The letter, if the text is an option letter."""
    words: str | None
    """The words in lower case, without an article, if the text is words and not a formula."""
    collection: structure.Collection | None
    """The parts, if the text lists two or more."""
    dangerous: bool
    """Whether it would trip the guard itself; then its answers aren't guarded."""
    any_of: tuple[str, ...]
    """The texts of a JSON list (``["1/2", "0.5"]``), each of which is right; else empty."""


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Gold:
    """Reads a gold answer as a data set states it: bare, boxed, in dollars, after ``####``, or a
    JSON list of texts, each of which is right."""
    text = gold.strip()
    any_of = _alternatives(text)
    if len(text) > MAX_GOLD and "box" not in text:
        text = ""
    box = last_box(text) if "box" in text and not any_of else None
    if box is not None:
        text = box
    elif "\n####" in text or text.startswith("####"):
        text = extraction.hashes(text) or text
    elif len(text) > 60 and extraction.anchored(text) and " " in text and "$" in text:
        text = extraction.anchored(text) or text
    stated = text
    text = extraction.refine(text)
    normalised = normalise(text)
    text_canonical = canonical(normalised)
    number = read_number(_value_of(normalised) or normalised)
    return Gold(
        stated=stated,
        stated_canonical=text_canonical if stated == text else canonical(normalise(stated)),
        text=text,
        normalised=normalised,
        canonical=text_canonical,
        number=number,
        letter=option_letter(text),
        words=_words(text, normalised),
        collection=structure.collection(normalised),
        dangerous=dangerous(text),
        any_of=any_of,
    )


def _alternatives(text: str) -> tuple[str, ...]:
    if not (text.startswith('["') and text.endswith('"]')) or len(text) > MAX_GOLD:
        return ()
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(texts) if all(isinstance(t, str) for t in texts) else ()


_ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z](?:_\{?\w{1,3}\}?)?)\s*(?:=|\\approx)\s*(?P<value>[^=<>]+)"
)


def _value_of(normalised: str) -> str | None:
    """``11`` for ``x = 11``."""
    match = _ASSIGNED.fullmatch(normalised)
    return match.group("value").strip() if match else None


def _name_of(normalised: str) -> str | None:
    match = _ASSIGNED.fullmatch(normalised)
    return match.group("name") if match else None


_PER = re.compile(r"\bper\b|/ ?(?:\\|[A-Za-z])|mph")
WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
"""A text that consists only of words."""
# fmt: off
_MATH_WORDS = frozenset((
    "pi", "infinity", "inf", "infty", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "and", "or",
    "percent", "percentage", "pct", "phi", "theta", "alpha", "beta", "gamma", "delta",
))
_ANSWER_WORDS = frozenset((
    "yes", "no", "true", "false", "even", "odd", "both", "all", "some", "none",
))
"""Short words that are an answer, and no product of their letters."""
# fmt: on


def _words(text: str, normalised: str) -> str | None:
    """The words in lower case, unless they could be a product of variables."""
    if not WORDS.fullmatch(normalised):
        return None
    words = normalised.lower().split()
    if any(word in _MATH_WORDS for word in words):
        return None
    wrapped = WRAPPER.search(text) is not None
    letters = normalised.isupper() and sum(map(str.isalpha, normalised)) >= 3
    known = " ".join(words) in _ANSWER_WORDS or any(len(word) >= 5 for word in words)
    if not (wrapped or letters or known):
        # "HTH" is a sequence of letters, and not HHT; "ab" and "A-B" may be formulas.
        return None
    return spelled(normalised)


_SPACED = re.compile("[A-Z](?:[ -][A-Z])+")


def spelled(normalised: str) -> str:
    """Words in lower case without an article in front: ``ellipse`` for ``an ellipse``, ``sas`` for ``S-A-S``."""
    if _SPACED.fullmatch(normalised):
        return re.sub("[ -]", "", normalised).lower()
    words = normalised.lower().split()
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("a", "an", "the") else words)


_PHRASE = re.compile(r"[A-Za-z][\w ,'()-]*")
_WORD = re.compile("[A-Z]?[a-z]{2,}|[A-Z]{3,}")


def same_words(one: str, other: str) -> bool:
    """Whether two texts are words that differ in their case alone.

    >>> same_words("Blue", "blue"), same_words("Bag A", "bag A"), same_words("bag a", "bag A")
    (True, True, False)
    """
    if one.lower() != other.lower() or not _PHRASE.fullmatch(one):
        return False
    pairs = zip(re.findall(r"\w+", one), re.findall(r"\w+", other), strict=True)
    return all(a == b or (_WORD.fullmatch(a) and _WORD.fullmatch(b)) for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, read in comparison with one gold answer."""

    text: str
    """The text as it was extracted from the response."""
    normalised: str
    """The text without what encloses it, in one spelling."""
    number: PlainNumber | None
    """The text's value, if it is a plain number or assigns one to a name that the gold answer doesn't contradict."""
    mode: Mode
    """The mode that read it, with its restrictions."""


def read_answer(text: str, normalised: str, gold: Gold, mode: Mode) -> Answer:
    number = read_number(normalised)
    if number is None:
        value = _value_of(normalised)
        name, asked = _name_of(normalised), _name_of(gold.normalised)
        if value is not None and name is not None:
            # X = 5 answers x = 5: such a name only labels the value.
            same = asked is None or asked.lower() == name.lower()
            number = read_number(value) if same else None
    if number is None and gold.number is not None:
        number = with_letter_unit(normalised)
        if number is None and not _PER.search(gold.normalised):
            number = with_rate(normalised)
    return Answer(text, normalised, number, mode)
