"""When an answer is right: the fast path, and what it leaves to a grader process.

``decide`` settles what can be settled without sympy, in microseconds and in any process: equal
text, plain numbers, lists of them, words, option letters, and inputs that are known to hang a
grader. Where it returns None, a grader process compares the two with math-verify
(:mod:`tandem.reward.answers.symbolic`). No text of a model is ever evaluated as code.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from ...common.records import Verdict
from ..reading import extraction
from ..reading.extraction import MAX_ANSWER, last_box
from ..reading.modes import Mode
from ..reading.options import compare_options, option_letter
from . import structure
from .guard import dangerous, unevaluated
from .numbers import PlainNumber, read_number, same_number, with_letter_unit
from .quantities import same_quantity
from .spelling import WRAPPER, canonical, normalise

MAX_GOLD = 4_000
"""Longest gold answer that is compared."""

# --- golds -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """A gold answer read once; a group grades all its samples against one."""

    text: str
    """What is compared: the data set's text, its box or its formula."""
    normalised: str
    """See :func:`normalise`."""
    canonical: str
    """See :func:`canonical`."""
    number: PlainNumber | None
    """Where it is a plain number."""
    integer: int | None
    """Where it is digits and nothing else: what most answers are."""
    letter: str | None
    """Where it is one option letter."""
    words: str | None
    """Where it is plain words, lower-case."""
    collection: structure.Collection | None
    """Where it lists two parts or more."""
    dangerous: bool
    """It would trip the guard itself, so the guard doesn't judge its answers."""
    any_of: tuple[str, ...]
    """Where it is a JSON list of texts (``["1/2", "0.5"]``): each of them is right."""


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Gold:
    """Reads a gold answer as a data set states it: bare, boxed, in dollars, after ``####``, or a
    JSON list of texts of which any is right."""
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
    normalised = normalise(text)
    number = read_number(_value_of(normalised) or normalised)
    return Gold(
        text=text,
        normalised=normalised,
        canonical=canonical(normalised),
        number=number,
        integer=number.value.numerator if number is not None and normalised.isdigit() else None,
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
    """``11`` of ``x = 11``."""
    match = _ASSIGNED.fullmatch(normalised)
    return match.group("value").strip() if match else None


def _name_of(normalised: str) -> str | None:
    match = _ASSIGNED.fullmatch(normalised)
    return match.group("name") if match else None


_DIGITS = re.compile(r"-?\d+(?:\.\d+)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_LIST = re.compile(r"[,;]|\b(?:and|or)\b|\\text|\\ne|!=|<|>|\\(?:le|ge|lt|gt)")
# fmt: off
_MATH_WORDS = frozenset((
    "pi", "infinity", "inf", "infty", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "and", "or",
    "percent", "percentage", "pct", "phi", "theta", "alpha", "beta", "gamma", "delta",
))
# fmt: on


def _words(text: str, normalised: str) -> str | None:
    """Plain words, lower-case: only where they can't be a product of variables."""
    if not _WORDS.fullmatch(normalised):
        return None
    words = normalised.lower().split()
    if any(word in _MATH_WORDS for word in words):
        return None
    wrapped = WRAPPER.search(text) is not None
    letters = len(normalised) >= 4 and normalised.isupper()
    if not wrapped and not letters and not any(len(word) >= 5 for word in words):
        # "HTTH" is a row of letters; "ab" may be a product.
        return None
    return " ".join(words)


# --- deciding --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """What the dispatcher settled without a grader process."""

    verdict: Verdict
    """The verdict."""
    how: str
    """Which rule: text, number, quantity, parts, words, letter, base, time, ratio, hedge, guard, none, …"""


_CORRECT_TEXT = Decision(Verdict.CORRECT, "text")
_NUMBERS = {
    True: Decision(Verdict.CORRECT, "number"),
    False: Decision(Verdict.WRONG, "number"),
}
_GOLD_EMPTY = Decision(Verdict.GOLD_UNPARSABLE, "gold")
_UNPARSABLE = Decision(Verdict.UNPARSABLE, "none")
_GUARDED = Decision(Verdict.WRONG, "guard")


def _decision(same: bool, how: str) -> Decision:
    return Decision(Verdict.CORRECT if same else Verdict.WRONG, how)


def decide(answer: str | None, gold_text: str, by: Mode) -> Decision | None:
    """The verdict, or None where only a grader process can tell.

    An answer that is missing is ``unparsable`` only against a gold answer that is known to be
    readable; else the grader process is asked about the gold answer too.
    """
    gold = read_gold(gold_text)
    if gold.any_of:
        return _decide_any(answer, gold.any_of, by)
    if not gold.normalised.strip("$ ") or len(gold.text) > MAX_GOLD:
        return _GOLD_EMPTY
    if by.compare == "choice":
        return _decide_choice(answer, gold)
    if answer is None or not answer.strip():
        readable = gold.number or gold.letter or gold.words or by.compare == "exact"
        return _UNPARSABLE if readable else None
    if len(answer) > MAX_ANSWER:
        return _GUARDED
    normalised = normalise(answer)
    if not normalised:
        return _UNPARSABLE
    if "</answer>" in answer:
        return Decision(Verdict.WRONG, "tag")
    if by.compare == "exact":
        same = canonical(normalised).casefold() == gold.canonical.casefold()
        return _decision(same, "text")
    if canonical(normalised) == gold.canonical:
        return _CORRECT_TEXT
    if gold.integer is not None and normalised.isascii() and normalised.isdigit():
        return _NUMBERS[int(normalised) == gold.integer]
    measured = same_quantity(normalised, gold.normalised)
    if measured is not None:
        return _decision(measured, "quantity")
    number, decided = _decide_number(normalised, gold)
    if decided is not None:
        return decided
    if by.simplified and unevaluated(normalised) and not unevaluated(gold.text):
        return Decision(Verdict.WRONG, "unevaluated")
    if not by.tuple_for_set and _is_tuple_for_set(normalised, gold):
        return Decision(Verdict.WRONG, "parts")
    decided = _decide_shape(normalised, number, gold) or _decide_text(answer, normalised, gold)
    if decided is not None:
        return decided
    if gold.letter is not None:
        letter = option_letter(answer)
        if letter is not None:
            return _decision(letter == gold.letter, "letter")
        if number is not None and not normalised[-1:].isalpha():
            return Decision(Verdict.WRONG, "letter")
    if gold.words is not None:
        if " ".join(normalised.lower().split()) == gold.words:
            return Decision(Verdict.CORRECT, "words")
        if number is not None or _WORDS.fullmatch(normalised):
            return Decision(Verdict.WRONG, "words")
    if not gold.dangerous and dangerous(answer):
        return _GUARDED
    return None


def _decide_any(answer: str | None, golds: tuple[str, ...], by: Mode) -> Decision | None:
    found = [decide(answer, gold, by) for gold in golds]
    right = next((d for d in found if d is not None and d.verdict is Verdict.CORRECT), None)
    if right is not None or None in found:
        return right
    # The worst news of all: an answer is unparsable only where every gold answer says so.
    return next((d for d in found if d is not None and d.verdict is Verdict.WRONG), found[0])


def _decide_number(normalised: str, gold: Gold) -> tuple[PlainNumber | None, Decision | None]:
    """The plain number that an answer is or ends in, and the verdict where that settles it."""
    number = read_number(normalised)
    if number is None and gold.number is not None and "=" in normalised:
        last = normalised.rpartition("=")[2].strip()
        # A chain that ends in the right number; "x = 3, y = 4" is two answers, not one.
        if not _LIST.search(normalised) and "=" not in gold.normalised:
            value_at_end = read_number(last)
            if value_at_end is not None and same_number(value_at_end, gold.number):
                # "4 = 5" is no way to say 5.
                first = normalised.partition("=")[0].strip()
                other = read_number(first) if _DIGITS.fullmatch(first) else None
                right = other is None or bool(same_number(other, gold.number))
                return value_at_end, _NUMBERS[right]
    if number is None:
        value = _value_of(normalised)
        if value is not None:
            name, gold_name = _name_of(normalised), _name_of(gold.normalised)
            if gold_name is None or gold_name == name:
                number = read_number(value)
    if number is None and gold.number is not None:
        number = with_letter_unit(normalised)
    if number is not None and gold.number is not None:
        same_value = same_number(number, gold.number)
        if same_value is not None:
            return number, _NUMBERS[same_value]
    return number, None


def _decide_shape(normalised: str, number: PlainNumber | None, gold: Gold) -> Decision | None:
    """Times of day, ratios, numbers with a base, and lists of any kind."""
    for meaning in (_NOTHING, _EVERYTHING):
        if meaning.fullmatch(normalised) and meaning.fullmatch(gold.normalised):
            return _decision(True, "words")
    same = structure.same_date(normalised, gold.normalised)
    if same is not None:
        return _decision(same, "time")
    same = structure.same_clock(normalised, gold.normalised)
    if same is not None:
        return _decision(same, "time")
    if ":" in gold.normalised:
        same = structure.same_ratio(normalised, gold.normalised, number)
        if same is not None:
            return _decision(same, "ratio")
    based = _decide_base(normalised, gold)
    if based is not None:
        return based
    if structure.has_dots(normalised) != structure.has_dots(gold.normalised):
        # A list that goes on isn't the list of what it names.
        return Decision(Verdict.WRONG, "parts")
    ours = structure.collection(normalised)
    if ours is None:
        return None
    if gold.collection is not None:
        same = structure.compare_collections(ours, gold.collection)
        return None if same is None else _decision(same, "parts")
    if gold.number is not None and number is None and structure.is_plain_list(ours):
        return Decision(Verdict.WRONG, "parts")
    return None


def _is_tuple_for_set(normalised: str, gold: Gold) -> bool:
    """Whether the answer is in order, in round brackets, where the gold answer is a set in braces."""
    ours = structure.collection(_MEMBER.sub("", normalised))
    theirs = gold.collection or structure.collection(_MEMBER.sub("", gold.normalised))
    return ours is not None and theirs is not None and (ours.kind, theirs.kind) == ("()", "{")


_MEMBER = re.compile(r"^[A-Za-z] ?\\in(?![A-Za-z]) ?|^[A-Za-z] ?= ?(?=\\\{|\()")
"""``x \\in`` or ``S =`` in front of a set."""
_NOTHING = re.compile(
    r"\\emptyset ?|\\\{ ?\\\}|(?:the )?empty set|none|(?:there (?:is|are) )?no (?:real |such )?"
    r"(?:solutions?|roots?|values?)(?: exists?)?",
    re.IGNORECASE,
)
"""That nothing is an answer, in symbols and in words."""
_EVERYTHING = re.compile(
    r"(?:[a-z] ?\\in ?)?(?:\\mathbb ?(?:\{ ?R ?\}|R)|\( ?- ?\\infty ?, ?\+?\\infty ?\))"
    r"|(?:all|any|every) reals?(?: numbers?)?",
    re.IGNORECASE,
)
"""That every real number is one."""
_BASED = re.compile(
    r"[({]?(?P<digits>[0-9A-Fa-f]+)[)}]?_(?:\{\s*(?P<base>\d{1,2})\s*\}|(?P<digit>\d)"
    r"|\{?\s*\\(?:text|mathrm)\s*\{\s*(?P<word>[a-z]+)\s*\}\s*\}?)"
)
# fmt: off
_BASES = dict(zip((
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen",
), range(2, 17), strict=True))
# fmt: on


def _based(text: str) -> tuple[str, int | None] | None:
    """(digits, base) of ``204_5``, ``204_{\\text{five}}`` and ``(204)_5``."""
    if "_" not in text:
        return None
    match = _BASED.fullmatch(WRAPPER.sub("{", text, count=1) if text[0] in "\\(" else text)
    if match is None:
        return None
    word = match["word"]
    base = _BASES.get(word) if word else int(match["base"] or match["digit"])
    return match["digits"].lower().lstrip("0") or "0", base


def _decide_base(normalised: str, gold: Gold) -> Decision | None:
    """Numbers that carry their base: the same digits in the same base, nothing else.

    The value alone doesn't count: "write 5 in base two" isn't answered by 5. Base ten may be left
    out.
    """
    ours, theirs = _based(normalised), _based(gold.normalised)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        return _decision(ours == theirs, "base")
    based, plain = (ours, gold.normalised) if ours is not None else (theirs, normalised)
    # x_1 or a_3 aside (they hold letters only), a bare number beside a based one is base ten.
    if based is not None and based[0].isdigit() and read_number(plain) is not None:
        return _decision(based[1] == 10 and based[0] == plain.strip().lstrip("0"), "base")
    return None


_TEXTS = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mbox|textnormal)\s*\{([^{}]*)\}")
_JOINERS = re.compile(r"[\s,;]*(?:and|or)?[\s,;]*", re.IGNORECASE)
_HEDGES = re.compile(
    r"\b(?:or|either|maybe|perhaps|possibly|versus|vs|not|unless|otherwise)\b", re.IGNORECASE
)
_VALUE_IN_WORDS = re.compile(r"(?<![\^A-Za-z{\d])\d")
_LONE_LETTER = re.compile(r"(?<![A-Za-z\\])([A-J])(?![A-Za-z])")


def _decide_text(answer: str, normalised: str, gold: Gold) -> Decision | None:
    """Words beside the value: a second value in them, or a compound quantity, isn't its first part.

    math-verify drops ``\\text{...}`` with all that it holds, so that "2 \\text{ (or 3)}" would be
    paid as 2, and "2\\text{ hours }30\\text{ minutes}" too.
    """
    if (
        gold.letter is not None
        and len(set(_LONE_LETTER.findall(normalised))) > 1
        and option_letter(answer) is None
    ):
        return Decision(Verdict.WRONG, "hedge")
    if "\\" not in normalised:
        return None
    for match in _TEXTS.finditer(normalised):
        words = match.group(1)
        if _JOINERS.fullmatch(words):
            if not words.strip() and _between_numbers(normalised, match):
                return Decision(Verdict.WRONG, "hedge")
            continue
        if words in gold.normalised:
            continue
        if _VALUE_IN_WORDS.search(words) or _HEDGES.search(words):
            return Decision(Verdict.WRONG, "hedge")
        if _between_numbers(normalised, match):
            return Decision(Verdict.WRONG, "hedge")
    return None


def _between_numbers(text: str, match: re.Match[str]) -> bool:
    before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
    return before[-1:].isdigit() and after[:1].isdigit()


def _decide_choice(answer: str | None, gold: Gold) -> Decision:
    try:
        same = compare_options(answer, gold.text)
    except ValueError:
        return _GOLD_EMPTY
    return _UNPARSABLE if same is None else _decision(same, "letter")
