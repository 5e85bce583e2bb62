"""Option letters: how multiple-choice benchmarks read an answer, and how two answers are compared.

Two different letters are no answer, so that nobody picks the right one out of a hedge. Neither the
article "A" nor the pronoun "I" is an option. Rules: MMLU and CS336 ("The correct answer is B"),
MMLU-Pro ("answer is (J)", then "Answer: J"; without its third stage, which reads the pronoun), GPQA
as in OpenAI's simple-evals ("Answer: C", the last one), ARC (letters, or the numbers that some of
its rows have).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from . import extraction
from .extraction import Extraction
from .labels import option_letter, option_text

# "I think" and "a number" have a pronoun and an article, not options.
_PROSE_AFTER = r"(?! (?!because|since|as |and |or )[a-z])"
_DRESS = r"[\s$*(\"'\u201c]{0,8}(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s?\{\s?\(?)?"
_HEDGE = re.compile(
    r"[\s)}*$.]{0,6}(?:,|/|&|-|–|\\text\s?\{\s?(?:or|and)\s?\}|\bor\b|\band\b|\bto\b|\bor maybe\b)"
    r"\s{0,3}(?:maybe|perhaps|possibly|else|also|option)?[\s$*({]{0,6}(?:\\text\s?\{)?\(?([A-J1-9])(?![A-Za-z\d'])"
    rf"(?! (?:is|are|was|can|does|would|has|cannot)\b)(?:(?<![AI])|{_PROSE_AFTER})"
)


def _pattern(words: str, letters: str) -> re.Pattern[str]:
    plain = "".join(c for c in letters if c not in "AI")
    careful = "".join(c for c in letters if c in "AI")
    option = f"[{plain}](?![A-Za-z0-9_']|\\.\\d)"
    if careful:
        option += f"|[{careful}](?![A-Za-z0-9_']|\\.\\d){_PROSE_AFTER}"
    return re.compile(rf"(?i:{words}){_DRESS}({option})")


_IS = r"answer(?:\s{1,3}(?:choice|option))?\s{1,3}is\s?:?(?:\s{1,3}(?:option|choice|letter)\b)?"
_COLON = r"answer(?:\s{1,3}(?:choice|option))?\*{0,2}\s?:(?:\s{0,3}(?:option|choice|letter)\b)?"


def reader(letters: str, *words: str) -> Callable[[str, str, bool], Extraction]:
    """Makes a reader of one option: the last box, then the last anchor, then a last line that is one."""
    patterns = [_pattern(w, letters) for w in words]

    def read(text: str, prompt: str, truncated: bool) -> Extraction:
        part = extraction.solution(text, prompt)
        if part is None:
            return Extraction(answer=None, how="thinking")
        part = part[-extraction.MAX_SOLUTION :]
        box, _ = extraction.final_box(part, truncated=truncated)
        if box is not None:
            return _checked(box, "box", letters)
        tag = extraction.answer_tag(part)
        if tag:
            return _checked(tag, "tag", letters)
        last: re.Match[str] | None = None
        for pattern in patterns:
            for match in pattern.finditer(part):
                if last is None or match.start(1) > last.start(1):
                    last = match
        if last is not None:
            hedge = _HEDGE.match(part, last.end(1))
            if hedge is not None and _is_another(hedge.group(1), last.group(1), letters):
                return Extraction(answer=None, how="hedge")
            return Extraction(answer=last.group(1), how="anchor")
        if truncated:
            return Extraction(answer=None, how="truncated")
        line = part.strip().rpartition("\n")[2]
        letter = option_letter(line) if len(line) <= 40 else None
        if letter is None and line.strip(" ().*$") in tuple(c for c in letters if c.isdigit()):
            letter = line.strip(" ().*$")
        if letter is None or letter not in letters:
            return Extraction(answer=None, how="none")
        return Extraction(answer=letter, how="whole")

    return read


def _is_another(option: str, chosen: str, letters: str) -> bool:
    """Whether what stands behind an option is another one, and not what the option says ("B, 4")."""
    alike = option.isdigit() == chosen.isdigit()
    return alike and option in letters and option != chosen


def _checked(content: str, how: str, letters: str) -> Extraction:
    letter = option_letter(content)
    if letter is not None:
        return Extraction(answer=letter if letter in letters else None, how=how)
    if len(content.strip()) == 1 and content.strip().upper() in letters:
        return Extraction(answer=content.strip().upper(), how=how)
    # It may be an option's text, which is compared as text if the gold answer is one too.
    return Extraction(answer=content or None, how=how)


read_option = reader("ABCDEFGHIJ", _IS, _COLON)
read_mmlu = reader("ABCD", _IS, _COLON)
read_mmlu_pro = reader("ABCDEFGHIJ", _IS, _COLON)
read_gpqa = reader("ABCD", _COLON, _IS)
_read_arc = reader("ABCDE12345", _IS, _COLON)
_NUMBERED = dict(zip("123456789", "ABCDEFGHI", strict=True))


def read_arc(text: str, prompt: str, truncated: bool) -> Extraction:
    """Reads a letter or a number, since some rows of ARC number their options; 2 is read as B."""
    found = _read_arc(text, prompt, truncated)
    letter = _NUMBERED.get(found.answer or "")
    return replace(found, answer=letter) if letter is not None and letter in "ABCDE" else found


def compare_options(answer: str | None, gold: str) -> bool | None:
    """Whether an answer is the gold option; None if there is no answer to compare.

    Args:
        answer: a letter as a label, or an option's text. A number is a text: the option may say it.
        gold: a label (``B``, ``(B)``, ``2``), a labelled option (``B) 12 apples``) or the option's
            text alone, which only an equal text matches.

    Raises:
        ValueError: the answer is a label, and the gold answer has none.
    """
    if answer is None or not answer.strip():
        return None
    if answer.strip() == gold.strip():
        return True
    ours, theirs = _label(answer), _label(_NUMBERED.get(gold.strip(), gold))
    if ours is not None and theirs is not None:
        return ours == theirs
    if ours is not None:
        raise ValueError(f"the gold answer {gold!r} isn't an option label")
    if theirs is not None and option_text(gold) == gold.strip():
        return None
    same = option_text(answer).casefold().split() == option_text(gold).casefold().split()
    return True if same else None


def _label(text: str) -> str | None:
    stripped = text.strip()
    if len(stripped) == 1 and stripped.isalpha() and stripped.isascii():
        return stripped.upper()
    return option_letter(text)
