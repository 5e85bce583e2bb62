"""Finds the answer in a response; doesn't judge it.

Everything here is a linear scan of untrusted text. Rules apply in this order:

1. Only the **solution** is read: what follows the last ``</think>``. A response that is still
   inside its thoughts (the prompt or the text opened ``<think>`` and nothing closed it) has none.
2. The last closed ``\\boxed{...}`` (or ``\\fbox``), with balanced braces. Boxes in a row that are
   joined only by a comma, "and", "or" or spacing are one list, so that a hedge over two boxes is
   read as the pair that it is.
3. The last ``<answer>...</answer>``.
4. If the response ended by itself (a truncated one has had its chance): what follows the last
   "answer is" or "answer:", then ``####``, then a solution that is one short formula, then the
   last formula between math delimiters, then the last number.

A solution that opens a box without closing it has no answer at all.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from .labels import option_letter

MAX_SOLUTION = 50_000
"""Characters of a solution that are read, counted from its end."""
MAX_ANSWER = 2_000
"""Longest answer that is compared; longer ones were all junk in the study."""
MAX_FALLBACK = 2_000
"""Characters from the end that the fall-backs read, since some take quadratic time."""

_TOKENS = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(?:\s{0,3}\{)?|\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z{])\s{0,3}([-+]?\w[^\s{}$\\]{0,60}?)(?=[.,;:]?(?:\s|\$|\\[)\]]|\Z))"
)
"""``\\boxed 5``, where no box has braces."""
_DENIED = re.compile(r"\b(?:not|never|instead of|rather than)(?: equal to)?[\s$(\\\[]{0,6}\Z", re.I)
"""In front of a box that isn't the answer: "\\boxed{5} (not \\boxed{6})"."""
_JOINED = re.compile(
    r"(?:\s|[,;$]|\b[A-Za-z](?:_\{?\w{1,3}\}?)?\s{0,2}=|\\[()\[\],;!: ]|\\q?quad\b|\\text\s*\{[^{}]{0,60}\}|\b[a-z]{1,12}\b){0,40}",
    re.IGNORECASE,
)
_INTRODUCED = re.compile(
    r"\\(?:text|mathrm|textbf)\s{0,2}\{[^{}\d]{1,100}(?:\bis|\bequals|[:=])\s{0,3}\}[\s:=]{0,4}(?=\S)",
    re.I,
)
"""``\\text{The answer is }`` before the value of a box."""
_LEAD = re.compile(
    r"[^\d$\\{}]{0,300}(?:\b(?:is|are|was|were|be|equals?(?: to)?|gives?|makes?|costs?|has|have|gets?|needs?|takes?|answer"
    r"|so|thus|hence|therefore)\b\s?:?|[A-Za-z]{2}\s?[:=])[\s*]*(?=\S)",
    re.I,
)
"""Words that a verb or a colon ends, directly in front of what they introduce."""
_VALUE = re.compile(r"[-+−]?\s?(?:\\?[$€£¥]\s?)?\.?\d|\\(?:[dt]?frac|sqrt)(?![A-Za-z])")
"""How a value begins that isn't between math delimiters."""
DENIALS = r"never|cannot|except|impossible"
"""Words that deny a value, beside "not". "Wrong" alone doesn't: there may be 5 wrong answers."""
_HEDGING = re.compile(
    rf"\b(?:not|or|either|neither|if|when|unless|{DENIALS}|(?:wrong|incorrect)(?!\s+\w+s\b))\b|n't",
    re.I,
)
_CORRECTING = re.compile(
    r"\b(?:no|not|but|wait|actually|instead|rather|wrong|sorry|mistake|correct(?:ed|ion)?|so|then|is"
    r"|therefore|hence|thus|should|final|answer|which|since|because|now|check(?:ing)?)\b",
    re.I,
)
_JOINING_WORD = re.compile(r"[,;]|\b(?:and|or)\b", re.IGNORECASE)
_ANCHOR = re.compile(
    r"answer(?:\s{1,5}(?:is|equals)\b|\s{0,3}(?:\*\*)?\s{0,3}[:=])\s{0,5}(?:\*\*)?:?", re.I
)
_EXPLAINING = re.compile(
    r"\s{0,3}[,;:(]?\s{0,3}\b(?:because|since|as|so|which|I (?:think|believe|guess|suppose)|in (?:total|all)|altogether)\b.*",
    re.S,
)
"""The words behind a value that tell why it is the answer."""
_BESIDE = re.compile(r"[,;]|\b(?:or|either|maybe|perhaps|possibly|and)\b", re.I)
_ONE_WORD = re.compile(
    r"\s{0,3}(?!(?:for|from|after|at|with|when|if)\b)(?:[A-Za-z]{1,12}\.?|out of)?\s{0,3}", re.I
)
"""A unit between two parts of a quantity, as in "5 feet 6 inches"."""
_CHANGING = re.compile(
    r"\s{0,3}(?:(?:hundred|thousand|million|billion|trillion)(?:th)?s?|dozens?|squared|cubed|factorial|hal(?:f|ves)"
    r"|quarters|thirds|(?:four|fif|six|seven|eigh|nin|ten)ths|(?:or )?(?:less|more|fewer)|below|above|plus|minus"
    r"|times|over|under)\b",
    re.I,
)
"""Words that make another value of the one before them."""
_QUALIFIED = re.compile(
    r"\b(?:not|negative|minus|at (?:least|most)|(?:less|more|fewer|greater|smaller|larger) than|up to"
    r"|under|over|below|above|between)\s{1,3}[\\$(]{0,3}[\d.]",
    re.I,
)
"""Words that make another value of the one behind them."""
_HASHES = re.compile(r"####[ \t]+([^\n]+)")
_MATH = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\\d])\$(?!\.?\d[\d,.]*\s+[A-Za-z]{2}[^$\n]*\s\$)((?:\\\$|[^$\n])+?)(?<!\\)\$(?!\d)",
    re.S,
)
_NUMBER = re.compile(
    r"(?<![\w.,])[-+−]?[$€£¥]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:[.,]\d+)?|\.\d+)(?:/\d+)?"
    r"(?:\s*\\?%|\s*(?:per ?cent|pct)\b)?"
)
_LABELLED = re.compile(r"[^\W\d]{2,20}\s?:\s?[^:]{1,40}")
_TWO_LETTERS = re.compile(r"[A-Za-z]{2}")
_HOPING = r"\.?\s{0,9}I hope (?:it is|it's) correct\b.*"
_CLOSING = re.compile(rf"\s{{0,9}}(?:{_HOPING}|<\|.*|</answer>.*|\*\*)$", re.I | re.S)
_HOPE = re.compile(_HOPING, re.I | re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """The answer that was read from one response."""

    answer: str | None
    """The answer as written; None if there is none."""
    how: str
    """The rule that found it: box, tag, anchor, hashes, whole, formula, number; or why there is none."""


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    final = deque(pattern.finditer(text), maxlen=1)
    return final[0] if final else None


def solution(text: str, prompt_text: str = "") -> str | None:
    """What follows the last ``</think>``; None inside thoughts that were never closed."""
    end = text.rfind("</think>")
    if end >= 0:
        return text[end + 8 :]
    if "<think>" in text or prompt_text.rstrip().endswith("<think>"):
        return None
    return text


def close_of(text: str, start: int) -> int:
    """Index of the brace that closes the one before ``start``, or -1. ``\\{`` doesn't count."""
    depth = 1
    position = start
    length = len(text)
    while position < length:
        character = text[position]
        if character == "\\":
            position += 2
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return -1


def boxes(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    """Closed outermost boxes as (start, one past the end, content), and whether the last is open.

    One pass with a stack: thousands of boxes that are never closed take only linear time.
    """
    found: list[tuple[int, int, str]] = []
    stack: list[tuple[int, int] | None] = []
    last_begun = last_closed = -1
    for match in _TOKENS.finditer(text):
        token = match.group()
        if token == "{":
            stack.append(None)
        elif token == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                start, inside = opened
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, match.end(), text[inside : match.start()]))
                last_closed = max(last_closed, start)
        elif token[1] in "bf" and len(token) > 2:
            last_begun = match.start()
            if token.endswith("{"):
                stack.append((match.start(), match.end()))
    return found, last_begun > last_closed


def final_box(text: str, *, truncated: bool = False) -> tuple[str | None, bool]:
    """Content of the last closed box, and whether a later one was opened and never closed.

    Boxes that are joined into a list are returned as one list. A box without braces at the end of a
    truncated text is open: more of its content may have been cut off.
    """
    start = text.find("\\boxed")
    if start < 0 and "\\fbox" not in text:
        return None, False
    if text.startswith("{", start + 6) and text.find("box", start + 7) < 0:
        end = close_of(text, start + 7)
        return (text[start + 7 : end].strip(), False) if end >= 0 else (None, True)
    closed, is_open = boxes(text)
    if not closed:
        unbraced = _UNBRACED.match(text, max(text.rfind("\\boxed"), text.rfind("\\fbox")))
        if unbraced is None or (truncated and unbraced.end() == len(text)):
            return None, is_open
        return unbraced[1], False
    while len(closed) > 1 and _DENIED.search(text, max(0, closed[-1][0] - 30), closed[-1][0]):
        closed.pop()
    contents = [closed[-1][2].strip()]
    for before, after in zip(reversed(closed[:-1]), reversed(closed[1:]), strict=True):
        between = text[before[1] : after[0]]
        if len(between) > 80 or not _JOINED.fullmatch(between):
            break
        if not _JOINING_WORD.search(between) and (between.strip() or "\n" in between):
            break
        if _CORRECTING.search(between):
            # "\boxed{3}, no, it is \boxed{4}" retracts the first box.
            break
        contents.append(before[2].strip())
    distinct = list(dict.fromkeys(reversed(contents)))
    return (distinct[0] if len(distinct) == 1 else ", ".join(distinct)), is_open


def last_box(text: str) -> str | None:
    """Content of the last closed box."""
    return final_box(text)[0]


def answer_tag(text: str) -> str | None:
    """Content of the last ``<answer>``, which must be closed."""
    start = text.rfind("<answer>")
    if start < 0:
        return None
    end = text.find("</answer>", start)
    if end < 0:
        return None
    return text[start + 8 : end].strip()


def formulas(text: str) -> list[str]:
    """Contents of all math delimiters, in order."""
    return [_inside(m) for m in _MATH.finditer(text)]


def numbers(text: str) -> list[str]:
    """Every plain number in a text, in order."""
    return [m.group() for m in _NUMBER.finditer(text)]


def hashes(text: str) -> str | None:
    """What follows the last ``####`` on its line (GSM8K)."""
    matches = _HASHES.findall(text)
    return matches[-1].strip() if matches else None


def anchored(text: str) -> str | None:
    """What follows the last "answer is" or "answer:" in its sentence.

    A sentence that begins with a value gives that value, with the words behind it ("5 feet 6 inches") up
    to those that explain it ("18 because …"); one that begins with words gives its last value. A hedge
    or a list of several values, and a value of which a word makes another one ("at most 5"), stays whole.
    """
    match = _last(_ANCHOR, text)
    if match is None:
        return None
    rest = _CLOSING.sub("", text[match.end() : match.end() + MAX_ANSWER].strip()).rstrip()
    formula = _MATH.search(rest)
    if formula is not None and formula.start() <= 3:
        behind = _EXPLAINING.sub("", _sentence(rest[formula.end() :]))
        more = _goes_on(behind) or _CHANGING.match(behind)
        return _inside(formula) + (_without_delimiters(behind) if more else "")
    sentence = _sentence(rest).strip(" *\t")
    if sentence.startswith("}"):
        # The words were inside \text{...}.
        sentence = sentence[1:].strip()
    head = _EXPLAINING.sub("", sentence) or sentence
    number = _NUMBER.match(head)
    if _words(_MATH.sub(" ", head)) <= 1 or option_letter(head) is not None:
        return _without_delimiters(head) or None
    if number is not None:
        behind = head[number.end() :]
        second = _first_value_in(behind)
        if second is None and _words(behind) > 4 and not _CHANGING.search(behind):
            # "12 apples left in the basket": longer than any unit.
            return number[0]
        if second is None or _goes_on(behind):
            return _without_delimiters(head)
        return number[0] + behind[: second.start()].rstrip()
    value = last_value(sentence)
    if value is None or _QUALIFIED.search(sentence) or _is_list(sentence):
        return _without_delimiters(sentence)
    behind = sentence.rpartition(value)[2].lstrip("$)\\ ")
    return f"{value} {behind}" if _CHANGING.match(behind) else value


def _sentence(text: str) -> str:
    return re.split(r"\.(?:\s|$)", text.split("\n", 1)[0], maxsplit=1)[0]


def _first_value_in(text: str) -> re.Match[str] | None:
    found = [m for m in (_MATH.search(text), _NUMBER.search(text)) if m is not None]
    return min(found, key=re.Match.start, default=None)


def _goes_on(behind: str) -> bool:
    """Whether what follows a value adds another one to it: a list, a hedge, or a second unit."""
    second = _first_value_in(behind)
    between = behind[: second.start()] if second is not None else ""
    return second is not None and bool(_BESIDE.search(between) or _ONE_WORD.fullmatch(between))


def _is_list(sentence: str) -> bool:
    plain = _MATH.sub(" 0 ", sentence)
    return len(numbers(plain)) > 1 and _BESIDE.search(_NUMBER.sub(" ", plain)) is not None


def _inside(formula: re.Match[str]) -> str:
    return next(g for g in formula.groups() if g is not None).strip()


def _without_delimiters(text: str) -> str:
    return _MATH.sub(_inside, text)


def last_value(text: str) -> str | None:
    """The last formula or plain number of a prose text, whichever comes later."""
    formula = _last(_MATH, text)
    number = _last(_NUMBER, text)
    if formula is not None and (number is None or number.end() <= formula.end()):
        return _inside(formula)
    return number.group() if number is not None else None


def first_value(text: str) -> str | None:
    """The formula, box or plain number that a text begins with."""
    if text.startswith(("\\boxed", "\\fbox")):
        closed, _ = boxes(text)
        return closed[0][2].strip() if closed and closed[0][0] == 0 else None
    formula = _MATH.match(text)
    if formula is not None:
        inside = _inside(formula)
        return last_box(inside) or inside
    number = _NUMBER.match(text)
    return number.group() if number is not None else None


def refine(content: str) -> str:
    """The value of a box, a tag or a gold answer that is prose: ``The sum is $x+1$`` gives ``x+1``.

    Only words in front of a value that a verb or a colon introduces are dropped, since others may make
    another value of it ("at most 5"). What follows it stays: it may be its unit or its scale ("3 million").
    With more than one value the text is returned unchanged, so that nobody picks the right one out of a hedge.
    """
    if len(content) > MAX_ANSWER or _TWO_LETTERS.search(content) is None or _words(content) == 0:
        return content
    if option_letter(content) is not None:
        return content
    introduced = _INTRODUCED.match(content)
    if introduced is not None and not _HEDGING.search(introduced.group()):
        content = content[introduced.end() :]
    inside = formulas(content)
    if len(inside) > 1:
        return content
    lead = _LEAD.match(content)
    if lead is not None and not _HEDGING.search(lead[0]) and not _JOINING_WORD.search(lead[0]):
        rest = _HOPE.sub("", content[lead.end() :])
        begins = _MATH.match(rest) or _VALUE.match(rest)
        if _words(rest) == 0 or (begins and not _JOINING_WORD.search(_NUMBER.sub(" ", rest))):
            content = rest
    formula = _MATH.match(content)
    if formula is not None:
        return f"{inside[0]}{content[formula.end() :]}"
    if inside or "\\" in content or numbers(content) or _JOINING_WORD.search(content):
        return content
    return anchored(content) or content


def _words(text: str) -> int:
    """Number of plain words of two or more letters, LaTeX commands left out."""
    return len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text)))


def find(
    text: str, *, prompt_text: str = "", truncated: bool = False, refined: bool = True
) -> Extraction:
    """Finds the answer by the rules at the top of this file.

    Args:
        text: the response.
        prompt_text: the prompt, which may open the thoughts.
        truncated: whether the response was cut; then rule 4 is left out, as is a box without braces at the end.
        refined: whether words around the value of a box or tag are left out (:func:`refine`).
    """
    part = solution(text, prompt_text)
    if part is None:
        return Extraction(answer=None, how="thinking")
    part = part[-MAX_SOLUTION:]
    box, is_open = final_box(part, truncated=truncated)
    if is_open:
        return Extraction(answer=None, how="open box")
    if box is not None:
        return Extraction(
            answer=(refine(box) if refined else box) or None, how="box" if box else "empty"
        )
    tag = answer_tag(part)
    if tag:
        return Extraction(answer=refine(tag) if refined else tag, how="tag")
    if truncated:
        return Extraction(answer=None, how="truncated")
    return fallback(part[-MAX_FALLBACK:])


def fallback(part: str) -> Extraction:
    """Rule 4: a response that ended by itself, without box or tag."""
    anchor = anchored(part)
    if anchor:
        return Extraction(answer=anchor, how="anchor")
    hashed = hashes(part)
    if hashed:
        return Extraction(answer=hashed, how="hashes")
    stripped = part.strip()
    inside = formulas(part)
    plain = numbers(part)
    if 0 < len(stripped) <= 200 and "\n" not in stripped and _words(stripped) <= 1:
        if _LABELLED.fullmatch(stripped) and len(plain) == 1:
            return Extraction(answer=plain[0], how="number")
        return Extraction(answer=refine(stripped), how="whole")
    if inside and not (plain and part.rfind(plain[-1]) > part.rfind(inside[-1]) + len(inside[-1])):
        return Extraction(answer=inside[-1], how="formula")
    if plain:
        return Extraction(answer=plain[-1], how="number")
    if 0 < len(stripped) <= 200:
        return Extraction(answer=stripped, how="whole")
    return Extraction(answer=None, how="none")
