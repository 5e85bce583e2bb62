"""How an answer is read and compared: the modes by name, the fast path and the guard.

``decide`` settles what can be settled without sympy, in microseconds and in any process: equal
text, plain numbers, words, option letters, and inputs that are known to hang a grader. Where it
returns None, a grader process compares the two with math-verify (:mod:`tandem.reward.symbolic`).
No text of a model is ever evaluated as code.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..common.errors import ConfigError
from ..common.records import Verdict
from . import extraction
from .extraction import MAX_ANSWER, Extraction, find, last_box
from .numbers import PlainNumber, read_number, same_number

GRADER_VERSION = 1
"""Raised whenever a verdict may change: stored samples can then be graded again."""
MAX_GOLD = 4_000
"""Longest gold answer that is compared."""

Read = Callable[[str, str, bool], Extraction]
"""(response, prompt, truncated) to what was extracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to read an answer and to compare it."""

    name: str
    """As ``reward.mode`` names it."""
    read: Read
    """Finds the answer in a response."""
    compare: str = "math"
    """``math`` (fast path, then math-verify), ``choice`` (option letters) or ``exact`` (text)."""
    simplified: bool = False
    """Refuse sums, products, integrals and limits that the gold answer doesn't have."""
    about: str = ""
    """One line for people."""

    @property
    def grader(self) -> str:
        """``name@version`` as samples record it."""
        return f"{self.name}@{GRADER_VERSION}"


MODES: dict[str, Mode] = {}


def register_mode(mode: Mode) -> Mode:
    """Adds a mode; a name that is taken is a ValueError."""
    if MODES.setdefault(mode.name, mode) is not mode:
        raise ValueError(f"{mode.name} is already the name of another mode")
    return mode


def mode(name: str) -> Mode:
    """The mode of that name.

    Raises:
        ConfigError: there is none.
    """
    found = MODES.get(name)
    if found is None:
        close = difflib.get_close_matches(name, MODES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"reward.mode={name!r} is none of {', '.join(sorted(MODES))}{hint}")
    return found


# --- reading ---------------------------------------------------------------------------------


def _read_boxed(text: str, prompt: str, truncated: bool) -> Extraction:
    return find(text, prompt_text=prompt, truncated=truncated)


def _read_box_only(text: str, prompt: str, truncated: bool) -> Extraction:
    found = find(text, prompt_text=prompt, truncated=True)
    return found if found.how != "tag" else Extraction(answer=None, how="none")


def _read_tag(text: str, prompt: str, truncated: bool) -> Extraction:
    tag = extraction.answer_tag(text)
    inside, is_open = extraction.final_box(tag) if tag else (None, False)
    if is_open:
        return Extraction(answer=None, how="open box")
    answer = inside or tag
    return Extraction(answer=answer or None, how="tag" if answer else "none")


def _read_hashes(text: str, prompt: str, truncated: bool) -> Extraction:
    part = extraction.solution(text, prompt) or ""
    answer = extraction.hashes(part[-300:])
    return Extraction(answer=answer, how="hashes" if answer else "none")


def _read_last_number(text: str, prompt: str, truncated: bool) -> Extraction:
    part = extraction.solution(text, prompt) or ""
    found = extraction.numbers(part[-extraction.MAX_SOLUTION :])
    return Extraction(answer=found[-1] if found else None, how="number" if found else "none")


# "I think" and "a number" hold a pronoun and an article, not options.
_OPTION_LETTER = r"([B-HJ]\b|[AI]\b(?! (?!because|since|as |and |or )[a-z]))"
_OPTION_ANCHORS = tuple(
    re.compile(
        rf"(?i:{words})[\s$*(]{{0,8}}(?:\\text\s?\{{\s?\(?)?{_OPTION_LETTER}",
    )
    for words in (r"answer\s{1,3}is\s?:?", r"answer\s?:")
)


def _read_choice(text: str, prompt: str, truncated: bool) -> Extraction:
    part = extraction.solution(text, prompt)
    if part is None:
        return Extraction(answer=None, how="thinking")
    part = part[-extraction.MAX_SOLUTION :]
    box = last_box(part)
    if box is not None:
        return Extraction(answer=box, how="box")
    last: tuple[int, str] | None = None
    for pattern in _OPTION_ANCHORS:
        for match in pattern.finditer(part):
            if last is None or match.start(1) > last[0]:
                last = (match.start(1), match.group(1))
    if last is not None:
        return Extraction(answer=last[1], how="anchor")
    whole = option_letter(part.strip())
    return Extraction(answer=whole, how="whole" if whole else "none")


register_mode(
    Mode(
        name="boxed",
        read=_read_boxed,
        about="last closed box after the thoughts, then <answer>, then the fall-backs",
    )
)
register_mode(Mode(name="boxed_only", read=_read_box_only, about="last closed box or nothing"))
register_mode(
    Mode(
        name="boxed_simplified",
        read=_read_boxed,
        simplified=True,
        about="as boxed; an unevaluated sum, product, integral or limit isn't an answer",
    )
)
register_mode(Mode(name="answer_tag", read=_read_tag, about="last <answer>...</answer>"))
register_mode(Mode(name="gsm8k", read=_read_hashes, about="what follows the last ####"))
register_mode(Mode(name="last_number", read=_read_last_number, about="last number of the text"))
register_mode(
    Mode(name="choice", read=_read_choice, compare="choice", about="one option letter, A to J")
)
register_mode(Mode(name="exact", read=_read_boxed, compare="exact", about="equal text"))


# --- normalising -----------------------------------------------------------------------------

_SIMPLE = (
    ("\\left", ""),
    ("\\right", ""),
    ("\\displaystyle", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("{,}", ","),
    (",\\!", ","),
    ("\\!", ""),
    ("\\;", " "),
    ("\\:", " "),
    ("\\ ", " "),
    ("~", " "),
    ("\u00a0", " "),
    ("\u202f", " "),
    ("\u2212", "-"),
    ("\uff0c", ","),
    ("\\qquad", " "),
    ("\\quad", " "),
    ("\\%", "%"),
    ("\\$", "$"),
)
_ARROWS = re.compile(r"\\(left|right)(?=(?:left|right)?(?:harpoon|arrow))")
_THIN_GROUP = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")
_DOLLARS_THEN_UNIT = re.compile(r"^\$([^$]+)\$\s*(%|[A-Za-z]+)$")
_BLANKS = re.compile(r"\s+")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|textnormal|mbox|boxed|fbox)\s*\{"
)
_SPACES = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")
_ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z](?:_\{?\w{1,3}\}?)?)\s*(?:=|\\approx)\s*(?P<value>[^=<>]+)"
)


def _unwrap(text: str) -> str:
    """Takes off what encloses the whole text: math delimiters, braces, a text command."""
    for _ in range(6):
        before = text
        text = text.strip()
        for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**")):
            if (
                len(text) > len(start) + len(end)
                and text.startswith(start)
                and text.endswith(end)
                and start not in text[len(start) : -len(end)]
            ):
                text = text[len(start) : -len(end)].strip()
                break
        if text.startswith("{") and extraction.close_of(text, 1) == len(text) - 1:
            text = text[1:-1].strip()
        wrapped = _WRAPPER.match(text)
        if wrapped and extraction.close_of(text, wrapped.end()) == len(text) - 1:
            text = text[wrapped.end() : -1].strip()
        while text and text[-1] in ".,;:" and not text.endswith(("...", "\\,", "\\;", "\\:")):
            text = text[:-1].rstrip()
        if text == before:
            return text
    return text


def normalise(text: str) -> str:
    """One spelling of what LaTeX can write in many: delimiters, sizes, spaces and fractions."""
    if text.isdigit():
        return text
    if "\\" in text or not text.isascii() or "{,}" in text or "~" in text:
        text = _ARROWS.sub(r"\\ \1", text) if "arrow" in text or "harpoon" in text else text
        if "\\," in text:
            text = _THIN_GROUP.sub("", text).replace("\\,", " ")
        for old, new in _SIMPLE:
            if old in text:
                text = text.replace(old, new)
    text = _unwrap(text)
    if text.startswith("$"):
        text = _DOLLARS_THEN_UNIT.sub(r"\1 \2", text)
    return _BLANKS.sub(" ", text)


def canonical(normalised: str) -> str:
    """Without the spaces that carry no meaning: those that don't part letters or digits."""
    if " " not in normalised:
        return normalised
    # "1 2" is not "12", but "( 1 , 2 )" is "(1,2)".
    return _SPACES.sub("", normalised)


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
    dangerous: bool
    """It would trip the guard itself, so the guard doesn't judge its answers."""


@lru_cache(maxsize=4096)
def read_gold(gold: str) -> Gold:
    """Reads a gold answer as a data set states it: bare, boxed, in dollars or after ``####``."""
    text = gold.strip()
    if len(text) > MAX_GOLD and "box" not in text:
        text = ""
    box = last_box(text) if "box" in text else None
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
        dangerous=dangerous(text),
    )


def _value_of(normalised: str) -> str | None:
    """``11`` of ``x = 11``."""
    match = _ASSIGNED.fullmatch(normalised)
    return match.group("value").strip() if match else None


def _name_of(normalised: str) -> str | None:
    match = _ASSIGNED.fullmatch(normalised)
    return match.group("name") if match else None


_OPTION = re.compile(
    r"[\s$*]*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\(?\s*([A-Z])\s*\)?\s*\}?[\s$*]*"
    r"(?:[.):]?|[.):]\s+\S.*)[\s$*}]*",
    re.DOTALL,
)


def option_letter(text: str) -> str | None:
    """``C`` of ``C``, ``(C)``, ``\\text{(C)}``, ``**C**`` and ``C) 12 apples``; else None."""
    if len(text) > 300:
        return None
    match = _OPTION.fullmatch(text)
    return match.group(1) if match else None


_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_LIST = re.compile(r"[,;]|\b(?:and|or)\b|\\text|\\ne|!=|<|>|\\(?:le|ge|lt|gt)")
_MATH_WORDS = frozenset(
    [
        "pi",
        "infinity",
        "inf",
        "infty",
        "sqrt",
        "sin",
        "cos",
        "tan",
        "log",
        "ln",
        "exp",
        "and",
        "or",
        "percent",
        "percentage",
        "pct",
        "phi",
        "theta",
    ]
)


def _words(text: str, normalised: str) -> str | None:
    """Plain words, lower-case: only where they can't be a product of variables."""
    if not _WORDS.fullmatch(normalised):
        return None
    words = normalised.lower().split()
    if any(word in _MATH_WORDS for word in words):
        return None
    wrapped = _WRAPPER.search(text) is not None
    if not wrapped and not any(len(word) >= 5 for word in words):
        return None
    return " ".join(words)


# --- the guard -------------------------------------------------------------------------------

_BASED = re.compile(r"(?P<digits>[0-9A-Fa-f]+)_(?:\{\s*(?P<base>\d{1,2})\s*\}|(?P<digit>\d))")
_LONG_DIGITS = re.compile(r"\d{401}")
_HUGE_POWER = re.compile(r"\^\s*\{?\s*[-+]?\d{5,}")
_TOWER = re.compile(r"\^\s*[{(]?\s*(\d+)(!?)\s*\^\s*[{(]?\s*(\d+)\s*(!|[})]*\s*\^)?")
_BIG_FACTORIAL = re.compile(r"\d{4,}\s*!|!\s*!|!\s*\)\s*!|\)\s*!\s*\)\s*!")
_BIG_BINOMIAL = re.compile(r"\\binom\s*\{\s*\d{5,}")
_POLY_POWER = re.compile(r"\)\s*\^\s*\{?\s*\d{3,}")
_UNEVALUATED = re.compile(r"\\(?:sum|prod|int|iint|iiint|oint|lim)(?![A-Za-z])")


def _is_high(base: str, factorial: str, exponent: str, more: str | None) -> bool:
    """Whether the exponent ``base^exponent`` of a tower is itself over a few thousand."""
    if factorial or more or len(base) > 4 or len(exponent) > 2:
        return True
    return int(base) ** int(exponent) > 5_000


def dangerous(text: str) -> bool:
    """True for shapes that are known to hang or blow up a parser or sympy."""
    if len(text) > MAX_ANSWER:
        return True
    if text.count("{") > 200 or text.count("(") > 100 or text.count("[") > 100:
        return True
    if text.count("$") > 40 or text.count("\\frac") > 25:
        return True
    return bool(
        _LONG_DIGITS.search(text)
        or _HUGE_POWER.search(text)
        or any(_is_high(*match.groups()) for match in _TOWER.finditer(text))
        or _BIG_FACTORIAL.search(text)
        or _BIG_BINOMIAL.search(text)
        or _POLY_POWER.search(text)
    )


# --- deciding --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """What the dispatcher settled without a grader process."""

    verdict: Verdict
    """The verdict."""
    how: str
    """Which rule: text, number, words, letter, base, guard, none, gold."""


_CORRECT_TEXT = Decision(Verdict.CORRECT, "text")
_NUMBERS = {
    True: Decision(Verdict.CORRECT, "number"),
    False: Decision(Verdict.WRONG, "number"),
}
_GOLD_EMPTY = Decision(Verdict.GOLD_UNPARSABLE, "gold")
_UNPARSABLE = Decision(Verdict.UNPARSABLE, "none")
_GUARDED = Decision(Verdict.WRONG, "guard")


def decide(answer: str | None, gold_text: str, by: Mode) -> Decision | None:
    """The verdict, or None where only a grader process can tell.

    An answer that is missing is ``unparsable`` only against a gold answer that is known to be
    readable; else the grader process is asked about the gold answer too.
    """
    gold = read_gold(gold_text)
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
    if by.compare == "exact":
        same = canonical(normalised).casefold() == gold.canonical.casefold()
        return Decision(Verdict.CORRECT if same else Verdict.WRONG, "text")
    if by.simplified and _UNEVALUATED.search(answer) and not _UNEVALUATED.search(gold.text):
        return Decision(Verdict.WRONG, "unevaluated")
    if canonical(normalised) == gold.canonical:
        return _CORRECT_TEXT
    if gold.integer is not None and normalised.isascii() and normalised.isdigit():
        return _NUMBERS[int(normalised) == gold.integer]
    number = read_number(normalised)
    if number is None and gold.number is not None and "=" in normalised:
        last = normalised.rpartition("=")[2].strip()
        # A chain that ends in the right number; "x = 3, y = 4" is two answers, not one.
        if not _LIST.search(normalised) and "=" not in gold.normalised:
            value_at_end = read_number(last)
            if value_at_end is not None and same_number(value_at_end, gold.number):
                return _NUMBERS[True]
    if number is None:
        value = _value_of(normalised)
        if value is not None:
            name, gold_name = _name_of(normalised), _name_of(gold.normalised)
            if gold_name is None or gold_name == name:
                number = read_number(value)
    if number is not None and gold.number is not None:
        same_value = same_number(number, gold.number)
        if same_value is not None:
            return _NUMBERS[same_value]
    based = _decide_base(normalised, gold)
    if based is not None:
        return based
    if gold.letter is not None:
        letter = option_letter(answer)
        if letter is not None:
            return Decision(
                Verdict.CORRECT if letter == gold.letter else Verdict.WRONG,
                "letter",
            )
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


def _decide_base(normalised: str, gold: Gold) -> Decision | None:
    """Numbers that carry their base: the same digits in the same base, nothing else.

    The value alone doesn't count: "write 5 in base two" isn't answered by 5.
    """
    ours = _BASED.fullmatch(normalised)
    theirs = _BASED.fullmatch(gold.normalised)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        same = ours.group("digits").lower() == theirs.group("digits").lower() and int(
            ours.group("base") or ours.group("digit")
        ) == int(theirs.group("base") or theirs.group("digit"))
        return Decision(Verdict.CORRECT if same else Verdict.WRONG, "base")
    based, plain = (ours, gold.normalised) if ours is not None else (theirs, normalised)
    # x_1 or a_3 aside (they hold letters only), a bare number beside a based one is base ten.
    if based is not None and based.group("digits").isdigit() and read_number(plain) is not None:
        return Decision(Verdict.WRONG, "base")
    return None


def _decide_choice(answer: str | None, gold: Gold) -> Decision:
    gold_letter = gold.letter or (
        gold.text.strip().upper() if len(gold.text.strip()) == 1 else None
    )
    if gold_letter is None or not gold_letter.isalpha():
        return _GOLD_EMPTY
    letter = option_letter(answer) if answer else None
    if letter is None and answer and len(answer.strip()) == 1 and answer.strip().isalpha():
        letter = answer.strip().upper()
    if letter is None:
        return _UNPARSABLE
    return Decision(Verdict.CORRECT if letter == gold_letter else Verdict.WRONG, "letter")
