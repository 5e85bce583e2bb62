"""The ways to read an answer, by name: ``reward.mode``.

``boxed`` is the project's own. The others follow the rules of the projects that they are named
after, reimplemented: *where* an answer is and what form the text must have. *Whether* it is
right is always decided by the same comparison, so that these projects' known wrong verdicts aren't
rewarded, and no text of a model is ever evaluated (docs/grading.md).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...common.errors import ConfigError
from . import extraction, options
from .extraction import Extraction, find

GRADER_VERSION = 14
"""Increased whenever a verdict may change, so that stored samples can be graded again.
tests/reward/answers/test_version.py notices changed verdicts and says what to do."""

Read = Callable[[str, str, bool], Extraction]
"""Takes (response, prompt, truncated) and returns what was extracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to read an answer and to compare it."""

    name: str
    """Name of the mode, a value of ``reward.mode``."""
    read: Read
    """Finds the answer in a response."""
    compare: str = "math"
    """``math`` (fast path, then math-verify), ``choice`` (option letters) or ``exact`` (text)."""
    tuple_for_set: bool = True
    """Whether ``(1,2)`` is accepted for ``\\{1,2\\}``."""
    simplified: bool = False
    """Whether sums, products, integrals and limits that the gold answer doesn't have are refused."""
    about: str = ""
    """One line for people."""

    @property
    def grader(self) -> str:
        """``name@version``, as samples record it."""
        return f"{self.name}@{GRADER_VERSION}"


MODES: dict[str, Mode] = {}


def register_mode(mode: Mode) -> Mode:
    """Adds a mode; raises ``ValueError`` if its name is taken."""
    if MODES.setdefault(mode.name, mode) is not mode:
        raise ValueError(f"{mode.name} is already the name of another mode")
    return mode


def mode(name: str, *, tuple_for_set: bool = True, key: str = "reward.mode") -> Mode:
    """The mode of that name.

    Args:
        name: a value of ``reward.mode``.
        tuple_for_set: see :class:`~tandem.common.config.RewardConfig`.
        key: the setting that names it, for the message.

    Raises:
        ConfigError: there is no such mode.
    """
    known = MODES.get(name)
    if known is None:
        close = difflib.get_close_matches(name, MODES, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"{key}={name!r} isn't one of {', '.join(sorted(MODES))}{hint}")
    return known if tuple_for_set else replace(known, tuple_for_set=False)


_NONE = Extraction(answer=None, how="none")


# --- our own ---------------------------------------------------------------------------------


def _read_boxed(text: str, prompt: str, truncated: bool) -> Extraction:
    return find(text, prompt_text=prompt, truncated=truncated)


def _read_exact(text: str, prompt: str, truncated: bool) -> Extraction:
    return find(text, prompt_text=prompt, truncated=truncated, refined=False)


def _read_box_only(text: str, prompt: str, truncated: bool) -> Extraction:
    found = find(text, prompt_text=prompt, truncated=truncated)
    return found if found.how == "box" or found.answer is None else _NONE


def _of_tag(tag: str | None) -> Extraction:
    inside, is_open = extraction.final_box(tag) if tag else (None, False)
    if is_open:
        return Extraction(answer=None, how="open box")
    answer = inside or tag
    return Extraction(answer=answer or None, how="tag" if answer else "none")


def _read_tag(text: str, prompt: str, truncated: bool) -> Extraction:
    return _of_tag(extraction.answer_tag(text))


# --- upstream's ------------------------------------------------------------------------------


def _read_r1_zero(text: str, prompt: str, truncated: bool) -> Extraction:
    """Dr. GRPO and CS336: the literal ``</think> <answer>`` and ``</answer>``, else nothing.

    The answer is what follows the last ``<answer>``, to the end of the text; if that holds ``\\boxed``,
    it is the last balanced box. ``</answer>`` is left out if only punctuation follows it. Words that
    follow belong to what these projects compare, so that the answer isn't right; the tag then stays in
    it, so that the words aren't taken for the unit of what is before them.
    """
    if not r1_zero_form(text):
        return Extraction(answer=None, how="form")
    tag = text.rpartition("<answer>")[2].strip()
    after = tag.partition("</answer>")[2].replace("</answer>", "")
    if not _WORD.search(after):
        tag = tag.replace("</answer>", "").strip()
    if "\\boxed" not in tag:
        return Extraction(answer=tag or None, how="tag" if tag else "none")
    found, _ = extraction.boxes(tag[-extraction.MAX_SOLUTION :])
    return Extraction(answer=found[-1][2].strip(), how="box") if found else _NONE


_WORD = re.compile(r"\w")


def r1_zero_form(text: str) -> bool:
    """Whether the literal ``</think> <answer>`` (one space) and ``</answer>`` occur."""
    return "</think> <answer>" in text and "</answer>" in text


def _read_question_only(text: str, prompt: str, truncated: bool) -> Extraction:
    """Dr. GRPO without a template: the last balanced box of the whole text."""
    found, _ = extraction.boxes(text[-extraction.MAX_SOLUTION :])
    return Extraction(answer=found[-1][2].strip() or None, how="box") if found else _NONE


def _read_four_class(text: str, prompt: str, truncated: bool) -> Extraction:
    """Judges answer and form separately: the answer is read even if the form is wrong, so that all of
    11, 10, 01 and 00 occur."""
    if r1_zero_form(text):
        return _read_r1_zero(text, prompt, truncated)
    return find(text, prompt_text=prompt, truncated=truncated)


_HOPE = re.compile(r"final answer is:?\s{0,3}(.{1,400}?)\.?\s{1,3}I hope", re.I | re.S)
_ANCHORS = (
    re.compile(r"final answer\b.{0,100}?\bis\b:?\s{0,3}", re.I | re.S),
    re.compile(r"\banswer\s{0,3}:\s{0,3}", re.I),
    re.compile(r"\banswer\b\s{0,3}", re.I),
)


def math_verify_answer(text: str) -> str | None:
    """The answer that math-verify 0.9 would find first, in any part of the text, thoughts included.

    "final answer is X. I hope", then the later of "final answer ... is X" and the last box (boxes
    in a row are one list), then "answer: X", then "answer X", then the last formula or number.
    X is a formula or a number directly after these words.
    """
    text = text[-extraction.MAX_SOLUTION :]
    hoped = None
    for hoped in _HOPE.finditer(text):  # noqa: B007 - the last one
        pass
    if hoped is not None:
        value = _value_at(hoped.group(1), 0)
        if value is not None:
            return value
    box, _ = extraction.final_box(text)
    box_at = text.rfind("\\boxed")
    final = _last_anchored(_ANCHORS[0], text)
    if box and (final is None or box_at > final[0]):
        return box
    if final is not None:
        return final[1]
    for pattern in _ANCHORS[1:]:
        anchored = _last_anchored(pattern, text)
        if anchored is not None:
            return anchored[1]
    return extraction.last_value(text[-extraction.MAX_FALLBACK :])


def _last_anchored(pattern: re.Pattern[str], text: str) -> tuple[int, str] | None:
    best = None
    for match in pattern.finditer(text):
        value = _value_at(text, match.end())
        if value is not None:
            best = (match.start(), value)
    return best


def _value_at(text: str, position: int) -> str | None:
    return extraction.first_value(text[position : position + extraction.MAX_ANSWER].lstrip(" *:"))


def _read_math_verify(text: str, prompt: str, truncated: bool) -> Extraction:
    answer = math_verify_answer(text)
    return Extraction(answer=answer, how="math_verify") if answer else _NONE


def _read_luffy(text: str, prompt: str, truncated: bool) -> Extraction:
    """LUFFY v3: ``<think>\\n`` is put before the text; both tags must be there; what follows the
    first ``</think>`` (up to a second one) is searched as math-verify does."""
    parts = text.split("</think>", 2)
    if len(parts) < 2:
        return Extraction(answer=None, how="form")
    answer = math_verify_answer(parts[1])
    return Extraction(answer=answer, how="math_verify") if answer else _NONE


_GSM8K = re.compile(r"#### {1,3}\$?(-?\$?[0-9.,]+)")


def _read_gsm8k(text: str, prompt: str, truncated: bool) -> Extraction:
    """verl's strict rule: the last ``#### number`` in the last 300 characters, without its commas; a
    dollar sign may come before it (which verl doesn't accept)."""
    part = extraction.solution(text, prompt) or ""
    matches = _GSM8K.findall(part[-300:])
    number = matches[-1].replace(",", "").replace("$", "").rstrip(".") if matches else ""
    return Extraction(answer=number, how="hashes") if number else _NONE


def _read_last_number(text: str, prompt: str, truncated: bool) -> Extraction:
    if truncated:
        return Extraction(answer=None, how="truncated")
    part = extraction.solution(text, prompt) or ""
    numbers = extraction.numbers(part[-extraction.MAX_SOLUTION :])
    return Extraction(answer=numbers[-1], how="number") if numbers else _NONE


for _mode in (
    Mode(
        name="boxed",
        read=_read_boxed,
        simplified=True,
        about="last closed box after the thoughts, then <answer>, then the fall-backs",
    ),
    Mode(
        name="boxed_only",
        read=_read_box_only,
        simplified=True,
        about="last closed box after the thoughts or nothing",
    ),
    Mode(
        name="boxed_unevaluated",
        read=_read_boxed,
        about="as boxed; a sum, product, integral or limit that equals the gold answer is paid",
    ),
    Mode(name="answer_tag", read=_read_tag, about="last <answer>...</answer>"),
    Mode(
        name="four_class",
        read=_read_four_class,
        simplified=True,
        about="the answer, whether or not the form is right: for the classes 11, 10, 01, 00",
    ),
    Mode(
        name="math_verify",
        read=_read_math_verify,
        about="math-verify's order over the whole text, thoughts included",
    ),
    Mode(
        name="luffy",
        read=_read_luffy,
        about="LUFFY v3: both tags, then math-verify's order after the first </think>",
    ),
    Mode(
        name="r1_zero",
        read=_read_r1_zero,
        about="Dr. GRPO and CS336: '</think> <answer>' with one space, else nothing",
    ),
    Mode(name="drgrpo", read=_read_r1_zero, about="another name of r1_zero"),
    Mode(
        name="question_only",
        read=_read_question_only,
        about="Dr. GRPO without a template: the last closed box of the whole text",
    ),
    Mode(name="gsm8k", read=_read_gsm8k, about="the number after the last ####"),
    Mode(name="last_number", read=_read_last_number, about="last number of the text"),
    Mode(name="gsm8k_last_number", read=_read_last_number, about="another name of last_number"),
    Mode(
        name="choice", read=options.read_option, compare="choice", about="one option letter, A to J"
    ),
    Mode(name="mmlu", read=options.read_mmlu, compare="choice", about="one option letter, A to D"),
    Mode(
        name="mmlu_pro",
        read=options.read_mmlu_pro,
        compare="choice",
        about="one option letter, A to J",
    ),
    Mode(
        name="gpqa",
        read=options.read_gpqa,
        compare="choice",
        about="one option letter, A to D, after the last 'Answer:'",
    ),
    Mode(
        name="arc",
        read=options.read_arc,
        compare="choice",
        about="one option, A to E or 1 to 5",
    ),
    Mode(name="exact", read=_read_exact, compare="exact", about="equal text"),
):
    register_mode(_mode)
