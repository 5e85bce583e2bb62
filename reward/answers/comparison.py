"""Decides when an answer is right: one comparison, by engines that are asked in order.

An engine returns True (right), False (wrong), or None (it can't tell). If no engine of this file
can tell, a grader process compares with math-verify (:mod:`tandem.reward.answers.symbolic`). All of
them use one table of tolerances (:mod:`tandem.reward.answers.tolerances`) and one of units
(:mod:`tandem.reward.answers.units`). ``tests/benchmarks/grading.py --engines`` shows what each
engine contributes: the verdicts and the time that change without it. No text of a model is ever
evaluated as code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from ...common.records import Verdict
from ..reading.extraction import MAX_ANSWER
from ..reading.labels import option_letter
from ..reading.modes import Mode
from ..reading.options import compare_options
from . import structure, values
from .guard import dangerous, unevaluated
from .numbers import NUMBER_WORDS, read_number, same_number
from .quantities import same_quantity
from .spelling import WRAPPER, canonical, normalise
from .texts import MAX_GOLD, WORDS, Answer, Gold, read_answer, read_gold, same_words, spelled
from .units import DENYING, NO_UNIT

Engine = Callable[[Answer, Gold], bool | None]
"""Whether an answer is right; None if the engine can't tell."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict that the dispatcher reached without a grader process."""

    verdict: Verdict
    how: str
    """The engine that decided, or ``gold``, ``none``, ``tag`` if there was nothing to compare."""


_GOLD_EMPTY = Decision(Verdict.GOLD_UNPARSABLE, "gold")
_UNPARSABLE = Decision(Verdict.UNPARSABLE, "none")


def _decision(same: bool, how: str) -> Decision:
    return Decision(Verdict.CORRECT if same else Verdict.WRONG, how)


def decide(answer: str | None, gold_text: str, by: Mode) -> Decision | None:
    """The verdict, or None if only a grader process can tell.

    A missing answer is ``unparsable`` only if the gold answer is known to be readable; else the grader
    process is asked about the gold answer too.
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
        return _decision(False, "guard")
    normalised = normalise(answer)
    if not normalised:
        return _UNPARSABLE
    if "</answer>" in answer:
        return _decision(False, "tag")
    if by.compare == "exact":
        same = canonical(normalised).casefold() == gold.stated_canonical.casefold()
        return _decision(same, "text")
    # Some modes leave the words around an answer's value in.
    if canonical(normalised) in (gold.canonical, gold.stated_canonical):
        return _decision(True, "text")
    ours = read_answer(answer, normalised, gold, by)
    for how, engine in ENGINES:
        right = engine(ours, gold)
        if right is not None:
            return _decision(right, how)
    return None


def _decide_any(answer: str | None, golds: tuple[str, ...], by: Mode) -> Decision | None:
    decisions = [decide(answer, gold, by) for gold in golds]
    right = next((d for d in decisions if d is not None and d.verdict is Verdict.CORRECT), None)
    if right is not None or None in decisions:
        return right
    # An answer is unparsable only if every gold answer says so.
    return next(
        (d for d in decisions if d is not None and d.verdict is Verdict.WRONG), decisions[0]
    )


@dataclass(frozen=True, slots=True)
class Question:
    """What a grader process is asked where :func:`decide` can't tell."""

    gold: str
    """The gold answer to compare with; of a JSON list, those that weren't refused here."""
    refused: Verdict | None
    """The best verdict of the list's others."""

    def settle(self, found: Verdict) -> Verdict:
        """The verdict on all of the list, from what the process found."""
        if self.refused is None or found not in _BEST_FIRST:
            return found
        return min(found, self.refused, key=_BEST_FIRST.index)


_BEST_FIRST = (Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSABLE, Verdict.GOLD_UNPARSABLE)


def question(answer: str | None, gold_text: str, by: Mode) -> Question:
    """What to ask a grader process about an answer on which :func:`decide` gives None."""
    gold = read_gold(gold_text)
    if not gold.any_of:
        return Question(gold.text, None)
    decisions = [(one, decide(answer, one, by)) for one in gold.any_of]
    texts = [read_gold(one).text for one, decision in decisions if decision is None]
    refused = [decision.verdict for _, decision in decisions if decision is not None]
    return Question(json.dumps(texts), min(refused, key=_BEST_FIRST.index, default=None))


def _decide_choice(answer: str | None, gold: Gold) -> Decision:
    try:
        same = compare_options(answer, gold.stated)
    except ValueError:
        return _GOLD_EMPTY
    return _UNPARSABLE if same is None else _decision(same, "letter")


# --- numbers ---------------------------------------------------------------------------------


def _quantity(answer: Answer, gold: Gold) -> bool | None:
    return same_quantity(answer.normalised, gold.normalised)


_DIGITS = re.compile(r"-?\d+(?:\.\d+)?")
_LIST = re.compile(r"[,;]|\b(?:and|or)\b|\\text|\\ne|!=|<|>|\\(?:le|ge|lt|gt)")


def _chain(answer: Answer, gold: Gold) -> bool | None:
    """A chain of equations that ends in the right number; "x = 3, y = 4" is two answers, not one."""
    if gold.number is None or "=" not in answer.normalised or "=" in gold.normalised:
        return None
    if _LIST.search(answer.normalised):
        return None
    first, *_, last = answer.normalised.split("=")
    end = read_number(last.strip())
    if end is None or not same_number(end, gold.number):
        return None
    # "4 = 5" isn't a way to say 5.
    begin = read_number(first.strip()) if _DIGITS.fullmatch(first.strip()) else None
    return begin is None or bool(same_number(begin, gold.number))


def _number(answer: Answer, gold: Gold) -> bool | None:
    if answer.number is None or gold.number is None:
        return None
    return same_number(answer.number, gold.number)


_BASED = re.compile(
    r"[({]?(?P<digits>[0-9A-Fa-f]+)[)}]?_(?:\{\s*(?P<base>\d{1,2})\s*\}|(?P<digit>\d)"
    r"|\{?\s*\\(?:text|mathrm)\s*\{\s*(?P<word>[a-z]+)\s*\}\s*\}?)"
)
_BASES = {word: value for word, value in NUMBER_WORDS.items() if 2 <= value <= 16}


def _based(text: str) -> tuple[str, int | str] | None:
    """(digits, base) of ``204_5``, ``204_{\\text{five}}`` and ``(204)_5``."""
    if "_" not in text:
        return None
    match = _BASED.fullmatch(WRAPPER.sub("{", text, count=1) if text[0] in "\\(" else text)
    if match is None:
        return None
    word = match["word"]
    base = _BASES.get(word, word) if word else int(match["base"] or match["digit"])
    return match["digits"].lower().lstrip("0") or "0", base


def _base(answer: Answer, gold: Gold) -> bool | None:
    """Numbers that carry their base: they need the same digits in the same base.

    The value alone doesn't count: 5 doesn't answer "write 5 in base two". Base ten may be left out.
    """
    ours, theirs = _based(answer.normalised), _based(gold.normalised)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        return ours == theirs
    based, plain = (ours, gold.normalised) if ours is not None else (theirs, answer.normalised)
    # A bare number compared with a based one is in base ten (x_1 or a_3 hold letters and don't get here).
    if based is not None and based[0].isdigit() and read_number(plain) is not None:
        return based[1] == 10 and based[0] == plain.strip().lstrip("0")
    return None


_WRITTEN_MOD = re.compile(r"\\(?:text|mathrm|textrm|operatorname)\s*\{\s*(\(?)\s*mod(?:ulo)?\s*\}")
_MODULUS = re.compile(
    r"(?P<rest>.*?)[\s,]*\(?\s*\\?[pb]?mod(?:ulo)?(?![A-Za-z])\s*\(?\s*\{?\s*(?P<modulus>[0-9A-Za-z]+)\s*\}?\s*\)?",
    re.DOTALL,
)
_CONGRUENT = re.compile(r"^\s*[A-Za-z]\s*\\equiv(?![A-Za-z])\s*")


def _residue(answer: Answer, gold: Gold) -> bool | None:
    """Residues: a modulus that only one side states is left out, like a unit; two must be the same."""
    if "mod" not in answer.normalised and "mod" not in gold.normalised:
        return None
    ours, theirs = (_without_modulus(text) for text in (answer.normalised, gold.normalised))
    if ours[1] is not None and theirs[1] is not None and ours[1] != theirs[1]:
        return False
    found = decide(ours[0], theirs[0], answer.mode) if any((ours[1], theirs[1])) else None
    # Otherwise the engines after this one see both as they are.
    return True if found is not None and found.verdict is Verdict.CORRECT else None


def _without_modulus(text: str) -> tuple[str, str | None]:
    """What is congruent, and modulo what: ``x \\equiv 17 \\pmod{20}`` is 17 and 20."""
    match = _MODULUS.fullmatch(_WRITTEN_MOD.sub(r"\1 mod ", text))
    if match is None:
        return _CONGRUENT.sub("", text), None
    return _CONGRUENT.sub("", match["rest"]), match["modulus"]


# --- forms that a mode refuses ---------------------------------------------------------------


def _unevaluated(answer: Answer, gold: Gold) -> bool | None:
    if not answer.mode.simplified or unevaluated(gold.text):
        return None
    return False if unevaluated(answer.normalised) else None


_MEMBER = re.compile(r"^[A-Za-z] ?\\in(?![A-Za-z]) ?|^[A-Za-z] ?= ?(?=\\\{|\()")
"""``x \\in`` or ``S =`` in front of a set."""


def _tuple_for_set(answer: Answer, gold: Gold) -> bool | None:
    """Accepts a tuple, in order and in round brackets, if the gold answer is a set in braces."""
    if answer.mode.tuple_for_set:
        return None
    ours = structure.collection(_MEMBER.sub("", answer.normalised))
    theirs = gold.collection or structure.collection(_MEMBER.sub("", gold.normalised))
    refused = ours is not None and theirs is not None and (ours.kind, theirs.kind) == ("()", "{")
    return False if refused else None


# --- times of day, ratios, lists of any kind --------------------------------------------------

_NOTHING = re.compile(
    r"\\emptyset ?|\\\{ ?\\\}|(?:the )?empty set|none|(?:there (?:is|are) )?no (?:real |such )?"
    r"(?:solutions?|roots?|values?)(?: exists?)?",
    re.IGNORECASE,
)
"""Ways to say that there is no answer, in symbols and in words."""
_EVERYTHING = re.compile(
    r"(?:[a-z] ?\\in ?)?(?:\\mathbb ?(?:\{ ?R ?\}|R)|\( ?- ?\\infty ?, ?\+?\\infty ?\))"
    r"|(?:all|any|every) reals?(?: numbers?)?",
    re.IGNORECASE,
)
"""Ways to say that every real number is an answer."""


def _meaning(answer: Answer, gold: Gold) -> bool | None:
    for meaning in (_NOTHING, _EVERYTHING):
        if meaning.fullmatch(answer.normalised) and meaning.fullmatch(gold.normalised):
            return True
    return None


def _time(answer: Answer, gold: Gold) -> bool | None:
    same = structure.same_date(answer.normalised, gold.normalised)
    return structure.same_clock(answer.normalised, gold.normalised) if same is None else same


def _ratio(answer: Answer, gold: Gold) -> bool | None:
    if ":" not in gold.normalised:
        return None
    return structure.same_ratio(answer.normalised, gold.normalised, answer.number)


def _parts(answer: Answer, gold: Gold) -> bool | None:
    if structure.has_dots(answer.normalised) != structure.has_dots(gold.normalised):
        # A list that goes on isn't the list of its named members.
        return False
    ours = structure.collection(answer.normalised)
    if ours is None:
        return None
    if gold.collection is not None:
        return structure.compare_collections(ours, gold.collection)
    one_number = gold.number is not None and answer.number is None
    return False if one_number and structure.is_plain_list(ours) else None


_IN_A_ROW = re.compile(r"(?:[A-Za-z] ?= ?)?-?\d[\d.]*(?: \d[\d.]*)+")


def _row(answer: Answer, gold: Gold) -> bool | None:
    """Refuses numbers with nothing but blanks between them, which math-verify would add: "4 2" isn't 6."""
    in_a_row = answer.number is None and _IN_A_ROW.fullmatch(answer.normalised) is not None
    return False if in_a_row and not _IN_A_ROW.fullmatch(gold.normalised) else None


# --- words and letters -----------------------------------------------------------------------

_TEXTS = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mbox|textnormal)\s*\{([^{}]*)\}")
_ONLY_TEXTS = re.compile(rf"(?:{_TEXTS.pattern}\s*){{2,9}}")
_JOINERS = re.compile(r"[\s,;]*(?:and|or)?[\s,;]*", re.IGNORECASE)
_HEDGES = re.compile(
    r"\b(?:or|either|maybe|perhaps|possibly|versus|vs|not|unless|otherwise|at (?:least|most))\b",
    re.IGNORECASE,
)
_VALUE_IN_WORDS = re.compile(r"(?<![\^A-Za-z{\d])\d")
_SMALL_LETTER = re.compile(r"\(?([a-j])\)?")
"""An option's letter as some write it, unless the gold answer is a small letter itself."""
_LONE_LETTER = re.compile(r"(?<![A-Za-z\\])([A-J])(?![A-Za-z])")


def _hedge(answer: Answer, gold: Gold) -> bool | None:
    """Words beside the value: an answer with a second value, or a compound quantity, isn't its first part.

    math-verify drops ``\\text{...}`` with all that it holds, so that it would accept
    "2 \\text{ (or 3)}" as 2, and "2\\text{ hours }30\\text{ minutes}" too.
    """
    letters = set(_LONE_LETTER.findall(answer.normalised)) if gold.letter is not None else ()
    if len(letters) > 1 and option_letter(answer.text) is None:
        return False
    if "\\" not in answer.normalised:
        return None
    for match in _TEXTS.finditer(answer.normalised):
        words = match.group(1)
        if _JOINERS.fullmatch(words):
            if not words.strip() and _between_numbers(answer.normalised, match):
                return False
            continue
        if words in gold.normalised:
            continue
        if _VALUE_IN_WORDS.search(words) or NO_UNIT.match(words):
            return False
        if _HEDGES.search(words) or DENYING.search(words):
            return False
        if _between_numbers(answer.normalised, match):
            return False
    return None


def _between_numbers(text: str, match: re.Match[str]) -> bool:
    before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
    return before[-1:].isdigit() and after[:1].isdigit()


def _letter(answer: Answer, gold: Gold) -> bool | None:
    if gold.letter is None:
        return None
    letter = option_letter(answer.text)
    if letter is not None:
        return letter == gold.letter
    small = _SMALL_LETTER.fullmatch(answer.normalised)
    if small is not None and small[1].upper() == gold.letter:
        return True
    return False if answer.number is not None and not answer.normalised[-1:].isalpha() else None


def _words(answer: Answer, gold: Gold) -> bool | None:
    if gold.words is None:
        return True if same_words(answer.normalised, gold.normalised) else None
    if _ONLY_TEXTS.fullmatch(answer.normalised):
        # math-verify would drop all but the first.
        return spelled(_TEXTS.sub(r"\1", answer.normalised).strip(" .,;:")) == gold.words
    if spelled(answer.normalised) == gold.words:
        return True
    return False if answer.number is not None or WORDS.fullmatch(answer.normalised) else None


# --- guards against expensive texts, and values that are cheap here ---------------------------


def _guard(answer: Answer, gold: Gold) -> bool | None:
    return False if not gold.dangerous and dangerous(answer.text) else None


def _value(answer: Answer, gold: Gold) -> bool | None:
    return values.same(answer.text, gold.text)


ENGINES: tuple[tuple[str, Engine], ...] = (
    ("residue", _residue),
    ("quantity", _quantity),
    ("number", _chain),
    ("number", _number),
    ("unevaluated", _unevaluated),
    ("parts", _tuple_for_set),
    ("words", _meaning),
    ("time", _time),
    ("ratio", _ratio),
    ("base", _base),
    ("parts", _parts),
    ("row", _row),
    ("hedge", _hedge),
    ("letter", _letter),
    ("words", _words),
    ("guard", _guard),
    ("value", _value),
)
"""In the order in which they are asked, after equal text: those that decide most come first, and
those that refuse a text come before those that would read a part of it."""
