"""Labels of options: ``C`` from ``(C)``, ``Option C`` and ``C) 12 apples``."""

from __future__ import annotations

import re

_OPTION = re.compile(
    r"[\s$*]*(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{\s*)?"
    r"(?:(?i:option|choice|answer)[\s:~]+)?\(?\s*([A-Z])\s*\)?\s*\}?[\s$*]*"
    r"(?:[.):]?|[.):]\s*\}?(?:\\[ ,;]\s*|\s+)\S.*|(?<=\})(?:\\[ ,;]|\s)\s*\S.*)[\s$*}]*",
    re.DOTALL,
)
_JOINED_LETTER = re.compile(
    r"(?:^|[\s({,/&])(?:or|and|,|/|&|\\text\s*\{\s*(?:or|and)\s*\}|\bto\b|-)[\s($*{]*([A-J])(?![A-Za-z])"
)
_PARENTHESISED = re.compile(r"\(\s*([A-J])\s*\)")


def option_letter(text: str) -> str | None:
    """``C`` from ``C``, ``(C)``, ``\\text{(C)}``, ``**C**``, ``Option C`` and ``C) 12 apples``; else None."""
    if len(text) > 300:
        return None
    match = _OPTION.fullmatch(text)
    if match is None:
        return None
    letter = match.group(1)
    rest = text[match.end(1) :]
    others = {*_JOINED_LETTER.findall(rest), *_PARENTHESISED.findall(rest)}
    return letter if others <= {letter} else None


def option_text(text: str) -> str:
    """``12 apples`` from ``C) 12 apples``; the whole text if it has no label."""
    return re.sub(r"^[\s$*(]*[A-J]\s*[).:]\s*(?=\S)", "", text.strip())
