"""Labels of options: ``C`` from ``(C)``, ``Option C`` and ``C) 12 apples``."""

from __future__ import annotations

import re

_NO_OPERATOR = (
    r"(?!(?:\\[ ,;:!>]|[~\s])*(?:[=<>+*/^_≈≠≤≥·×]|-(?!\s+[A-Za-z]{2})"
    r"|\\(?:approx|cap|cdot|cong|cup|div|equiv|geq?|geqslant|gt|in|leq?|leqslant|lt|mp|neq?|not|notin|parallel"
    r"|perp|pm|propto|setminus|sim|subset|subseteq|times|to)(?![A-Za-z])))"
)
"""``\\mathbf{F} = 3i`` is a formula, and no option F."""
_OPTION = re.compile(
    r"[\s$*]*(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{\s*)?"
    r"(?:(?i:option|choice|answer)[\s:~]+)?\(?\s*([A-Z])\s*\)?\s*\}?[\s$*]*"
    rf"(?:[.):]?|[.):]\s*\}}?(?:\\[ ,;]\s*|\s+)\S.*|(?<=\}}){_NO_OPERATOR}(?:\\[ ,;]|\s)\s*\S.*"
    r"|(?<=\)\})(?:~|\\:|\\q?quad(?![A-Za-z])|(?=[-\d$\\]))\s*\S.*)[\s$*}]*",
    re.DOTALL,
)
_JOINER = r"(?:or|and|,|/|&|\\text\s*\{\s*(?:or|and)\s*\}|\bto\b|-)"
_JOINED_LETTER = re.compile(rf"(?:^|[\s({{,/&]){_JOINER}[\s($*{{]*([A-J])(?![A-Za-z])")
_JOINED_LABEL = re.compile(rf"[\s)}}$*.:]*{_JOINER}[\s($*{{]*([A-J])(?![A-Za-z])")
_NEXT_LABEL = re.compile(r"[,;]\s*([A-J])[).:]\s*\w")
_PARENTHESISED = re.compile(r"\(\s*([A-J])\s*\)")
_LISTED_LETTERS = re.compile(
    r"(?<=[\s(])[A-Z](?:(?:\s?,\s?(?:and |or )?|\s(?:and|or)\s|\s?[/&]\s?)[A-Z](?![A-Za-z)]|[.:]\s*\w))+"
)
"""Letters beside each other in the text of an option: ``Both A and B``, ``hepatitis A and B``."""


def option_letter(text: str) -> str | None:
    """``C`` from ``C``, ``(C)``, ``\\text{(C)}``, ``**C**``, ``Option C`` and ``C) 12 apples``; else None.

    None too if there is another label: in brackets, joined to the first one ("B) or C") or to a text
    ("A) 3 or B"). Letters that an option's own text lists ("D. Both A and B") are none.
    """
    if len(text) > 300:
        return None
    match = _OPTION.fullmatch(text)
    if match is None:
        return None
    letter = match.group(1)
    rest = text[match.end(1) :]
    joined = _JOINED_LABEL.match(rest)
    others = {
        *([joined[1]] if joined is not None else []),
        *_JOINED_LETTER.findall(_LISTED_LETTERS.sub(" ", rest)),
        *_NEXT_LABEL.findall(rest),
        *_PARENTHESISED.findall(rest),
    }
    return letter if others <= {letter} else None


def option_text(text: str) -> str:
    """``12 apples`` from ``C) 12 apples``; the whole text if it has no label."""
    return re.sub(r"^[\s$*(]*[A-J]\s*[).:]\s*(?=\S)", "", text.strip())
