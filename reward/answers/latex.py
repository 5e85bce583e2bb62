"""Rewrites an answer's LaTeX for math-verify's parser, around the parser's known traps."""

from __future__ import annotations

import re

from .spelling import plain
from .structure import collection, join_thousands, split
from .units import FRACTION_UNIT, UNIT_WORDS

_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|\\degree)")
_E_NOTATION = re.compile(r"(?<![A-Za-z\\{])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\d.])")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])|\\mp(?![A-Za-z])")
_CONJUGATE = re.compile(r"\\overline\s*\{([^{}A-Za-hj-z]*)\}")
_I = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_CIS = re.compile(
    r"(?:\\(?:operatorname|text|mathrm)\s*\{\s*cis\s*\}|\\cis|(?<![A-Za-z\\])cis)(?![A-Za-z])\s*"
    r"(?:\((?P<round>[^()]*)\)|\{(?P<braced>[^{}]*)\}|(?P<bare>(?:\d+(?:\.\d+)?)?"
    r"(?:\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}|\\pi|\\theta|(?<=\d))(?:\s*\^\s*\{?\s*\\circ\s*\}?)?))"
)
_BUILDER = re.compile(
    r"\\\{\s*(?P<name>[a-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?"
    r"(?:\\mid|\\vert|\\,?\||\||:)\s*(?P<condition>.+?)\s*\\\}"
)
_ODD_ROOT = re.compile(r"\\sqrt\s*\[\s*([3579])\s*\]\s*\{\s*-\s*(\d+)\s*\}")
_TEXT_UNIT = re.compile(
    r"(?<=[\d})\]A-Za-z\s])\s*\\(?:text|mbox|mathrm|textrm|textbf|textit|textnormal|operatorname)\s*\{\s*"
    r"[A-Za-z][^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?\.?\s*$"
)
_WORD_UNIT = re.compile(rf"(?:(?<=[\d}})\]])|\s){UNIT_WORDS}", re.IGNORECASE)
_JOINING = re.compile(r"\b(?:and|or|if|where|for|not|mod)\b|\\(?:frac|sqrt)")
_LONE_D = re.compile(r"(?<![A-Za-z\\{])d(?![A-Za-z}])")
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*(?=[(\[\\])")
_SUFFIXES = (
    (re.compile(r"(\d)\s*\\text\s*\{\s*to\s*\}\s*(?=\d)"), r"\1:"),
    (re.compile(r"\\begin\{smallmatrix\}"), r"\\begin{pmatrix}"),
    (re.compile(r"\\end\{smallmatrix\}"), r"\\end{pmatrix}"),
)


def prepare(text: str) -> str:
    """LaTeX that fits math-verify's delimiters: no dollars, no line breaks, known traps rewritten."""
    text = text.replace("\\$", "").replace("$", " ")
    for delimiter in ("\\(", "\\)", "\\[", "\\]"):
        # "\\\\[2pt]" is a line break in a matrix, not a delimiter.
        text = re.sub(rf"(?<!\\){re.escape(delimiter)}", " ", text)
    text = re.sub(r"\s*\n\s*", " ", text).strip()
    text = join_thousands(plain(text))
    if "\\" in text:
        for pattern, by in _SUFFIXES:
            text = pattern.sub(by, text)
    if "matrix}" in text:
        # The parser takes a lone "d" for the beginning of a differential.
        text = _LONE_D.sub(r"\\delta_{d}", text)
    if "," in text and re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+", text):
        text = text.replace(",", "")
    if "cis" in text:
        text = _CIS.sub(_cis, text)
    if "\\overline" in text:
        text = _CONJUGATE.sub(_conjugate, text)
    if "\\sqrt" in text:
        # sympy takes the root of a negative number that isn't real.
        text = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", text)
    text = _E_NOTATION.sub(r"\1 \\cdot 10^{\2}", text)
    if _TRIGONOMETRIC.search(text):
        text = in_radians(text)
    text = _MEMBER.sub("", without_units(text))
    builder = _BUILDER.fullmatch(text)
    if builder is not None:
        text = builder["condition"]
    if _PLUS_MINUS.search(text):
        text = _both_signs(text)
    return text.rstrip(".")


def _conjugate(match: re.Match[str]) -> str:
    """The conjugate for ``\\overline{3+4i}``; repeating decimals hold no ``i``."""
    return f"({_I.sub('(-i)', match[1])})" if "i" in match[1] else match.group()


def _cis(match: re.Match[str]) -> str:
    angle = match["round"] or match["braced"] or match["bare"] or ""
    return f"(\\cos({angle})+i\\sin({angle}))"


def without_units(text: str) -> str:
    """Removes the unit after a value: ``\\text{...}`` with its power, or a word for a known unit."""
    for _ in range(3):
        for unit in (FRACTION_UNIT, _TEXT_UNIT, _WORD_UNIT):
            match = unit.search(text)
            if match is not None and match.start() > 0 and not _JOINING.search(match.group()):
                text = text[: match.start()].rstrip()
                break
        else:
            return text
    return text


def in_radians(text: str) -> str:
    """Rewrites degrees as fractions of pi."""
    return _DEGREES.sub(r"{(\\frac{\1 \\pi}{180})}", text)


def _both_signs(text: str) -> str:
    """Rewrites ``a \\pm b`` as ``a + b, a - b``, in each part of a list or set; tuples keep their parts."""
    listed = collection(text)
    if listed is not None and listed.kind not in ("", "{"):
        parts: list[str] | None = [text]
    else:
        parts = list(listed.parts) if listed is not None else split(text)
    if parts is None or len(parts) > 20:
        return text
    values = []
    for part in parts:
        if not _PLUS_MINUS.search(part):
            values.append(part)
            continue
        upper = part.replace("\\pm", "+").replace("\\mp", "-")
        lower = part.replace("\\pm", "-").replace("\\mp", "+")
        values += [_LEADING_PLUS.sub(r"\1", upper), lower]
    return f"\\{{{', '.join(values)}\\}}" if len(values) > 1 else values[0]


_LEADING_PLUS = re.compile(r"((?:^|[=,({\[])\s*)\+\s*")
