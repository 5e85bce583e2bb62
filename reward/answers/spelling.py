"""Brings what LaTeX, Unicode and plain typing can write in many ways into one spelling.

``plain`` rewrites spellings and keeps the structure, for the parser in a grader process.
``normalise`` also removes what encloses a text, for the fast path.
"""

from __future__ import annotations

import re
import unicodedata

from ..reading.extraction import close_of

# Commands with the same meaning, or with none at all.
_COMMANDS = {
    "\\left": "",
    "\\right": "",
    **{
        f"\\{size}{side}": ""
        for size in ("big", "Big", "bigg", "Bigg")
        for side in ("", "l", "m", "r")
    },
    **{
        f"\\{size}": ""
        for size in (
            *("tiny", "scriptsize", "footnotesize", "small", "normalsize"),
            *("large", "Large", "LARGE", "huge", "Huge"),
        )
    },
    "\\displaystyle": "",
    "\\textstyle": "",
    "\\limits": "",
    "\\!": "",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\sfrac": "\\frac",
    "\\nicefrac": "\\frac",
    "\\dbinom": "\\binom",
    "\\tbinom": "\\binom",
    "\\;": " ",
    "\\:": " ",
    "\\ ": " ",
    "\\>": " ",
    "\\quad": " ",
    "\\qquad": " ",
    "\\thinspace": " ",
    "\\%": "%",
    "\\$": "$",
    "\\pounds": "£",
    "\\euro": "€",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lbrack": "[",
    "\\rbrack": "]",
    "\\langle": "(",
    "\\rangle": ")",
    "\\colon": ":",
    "\\varnothing": "\\emptyset",
    "\\O": "\\emptyset",
    "\\leqslant": "\\le ",
    "\\geqslant": "\\ge ",
    "\\leq": "\\le ",
    "\\geq": "\\ge ",
    "\\neq": "\\ne ",
    "\\lt": "<",
    "\\gt": ">",
    "\\infin": "\\infty",
    "\\dots": "\\ldots ",
    "\\dotsc": "\\ldots ",
    "\\cdots": "\\ldots ",
    "\\R": "\\mathbb{R}",
    "\\reals": "\\mathbb{R}",
    "\\lg": "\\log_{10} ",
    "\\lor": "\\text{ or }",
    "\\vee": "\\text{ or }",
}
_COMMAND = re.compile(r"\\(?:left|right)\s*\.|\\(?:[A-Za-z]+|.)", re.DOTALL)
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|\\thinspace ?|,\s?\\!\s?|\\!\s?,\s?)(?=\d{3}(?!\d))")
_LINE_SKIP = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]")
_TEXT_COMMA = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*([,;])\s*\}")
_TEXT_MINUS = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*[-\u2212\u2013]\s*\}")
_UPRIGHT = re.compile(r"\\(?:mathrm|text|mathbf|textrm)\s*\{\s*([ie])\s*\}|\\mathbf\s([ie])\b")
_ROMAN = re.compile(r"\{\s*\\rm(?![A-Za-z])\s*(?=[^\s{])|\\rm\s*\{")
"""``{\\rm cm}`` and ``\\rm{cm}``, which are ``\\mathrm{cm}``."""
_ROMAN_END = re.compile(r"\\rm\s+(?P<unit>[A-Za-z][^\\{}$]*)$")
_BRACED_UNIT = re.compile(
    r"(?<=[\d ])\{\s*(?P<unit>\\(?:mathrm|text)\s*\{[^{}]*\})\s*\}(?=(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?\.?\s*$)"
)
_SPACING = re.compile(
    r"\\[hm]?(?:space|skip|kern)\*?\s*(?:\{[^{}]*\}|-?[\d.]+\s*(?:pt|em|ex|mm|cm|mu))"
)
_FUNCTION = re.compile(
    r"\\(?:operatorname\s*\*?|mathrm|text|textrm)\s*\{\s*"
    r"(?P<name>(?:arc)?(?:sin|cos|tan)|cot|csc|(?:sin|cos|tan)h|ln|log)\s*\}(?=\s*[(\[{^_\\A-Za-z\d])"
)
"""A function's name with its argument behind it; without one, it is a word."""
_SYSTEM = re.compile(
    r"(?P<before>[\s$]*)(?:\\\{\s*)?\\begin\s*\{(?P<kind>cases|aligned|array|gathered|align\*?)\}(?:\s*\{[lcr| ]+\})?"
    r"(?P<rows>.*?)\\end\s*\{(?P=kind)\}(?P<after>[\s$.]*)",
    re.DOTALL,
)
_VALUE_OF = re.compile(r"[A-Za-z](?:_\{?\w{1,3}\}?)?")
_NO_VALUE = re.compile(r"[=<>&,;]")
_INFINITY = re.compile(r"\\(?:text|mathrm)\s*\{\s*infinity\s*\}|(?<![A-Za-z\\])infinity\b", re.I)
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_LETTER = (
    r"\\(?:pi|theta|alpha|beta|gamma|delta|lambda|mu|omega|phi|varphi|rho|sigma|tau)(?![A-Za-z])"
)
_ARGUMENT = rf"(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|{_LETTER}|[0-9A-Za-z])"
_BARE_ROOT = re.compile(rf"\\sqrt\s*({_LETTER})")
_BARE_FRACTION = re.compile(rf"\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
_SQRT = re.compile(r"(?<![A-Za-z\\])sqrt\s*(?:\(([^()]*)\)|(?=\{))")
_STARS = re.compile(r"(?<=[\w)}])\*\*(?=[\w({+-])")
_ORDINAL = re.compile(
    r"(?<=\d)\s*(?:(?:\^\s*)?(?:\{\s*)?\\(?:text|mathrm|textrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?"
    r"|\^\s*\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)(?=$|[\s.}]))"
)
_COLOUR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_BACKWARDS = re.compile(
    r"(?P<open>[\[\]])(?P<low>[^\[\](),]+),(?P<high>[^\[\](),]+)(?P<close>[\[\]])"
)
_NOT_EQUAL = re.compile(r"\\not\s*=")
_LOG_E = re.compile(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})")

_CHARACTERS = {
    "\u2212": "-",
    "\u2010": "-",
    "\u2011": "-",
    "\u2044": "/",
    "\u2215": "/",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    "\u3000": " ",
    "×": "\\times ",
    "÷": "\\div ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "∙": "\\cdot ",
    "±": "\\pm ",
    "∓": "\\mp ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "⩽": "\\le ",
    "⩾": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "≡": "\\equiv ",
    "∞": "\\infty ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "∖": "\\setminus ",
    "°": "^\\circ ",
    "º": "^\\circ ",
    "…": "\\ldots ",
    "⟨": "(",
    "⟩": ")",
    "，": ",",
    "、": ",",
    "；": ";",
    "：": ":",
    "（": "(",
    "）": ")",
    "［": "[",
    "］": "]",
    "％": "%",
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}",
    "ℚ": "\\mathbb{Q}",
    "ℂ": "\\mathbb{C}",
    "∛": "\\sqrt[3]",
    "π": "\\pi ",
    "ϕ": "\\phi ",
}
# fmt: off
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
)
# fmt: on
_CHARACTERS |= {
    unicodedata.lookup(f"GREEK SMALL LETTER {name.replace('lambda', 'lamda')}"): f"\\{name} "
    for name in _GREEK
}
_TRANSLATION = str.maketrans(_CHARACTERS)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_DIGIT = re.compile("[０-９]")
_ROOT = re.compile(r"√\s*(?:\((?P<group>[^()]*)\)|\{(?P<braced>[^{}]*)\}|(?P<one>\d+|[A-Za-z]))")
_LONG_DASH = re.compile(r"(?:(?<=^)|(?<=[(\[{,;=<>]))\s*[\u2013\u2014](?=\s*[\d.\\A-Za-z(])")
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f"


def _unicode(text: str) -> str:
    """Rewrites mathematical characters as LaTeX. Invisible characters are removed only at the ends:
    inside a number they may hide a second one."""
    text = text.strip().strip(_INVISIBLE)
    text = _LONG_DASH.sub("-", text)
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{_ascii(m.group())}}}", text)
    text = _SUBSCRIPTS.sub(lambda m: f"_{{{_ascii(m.group())}}}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = _DIGIT.sub(lambda m: _ascii(m.group()), text)
    for _ in range(3):
        text = _ROOT.sub(lambda m: f"\\sqrt{{{m['group'] or m['braced'] or m['one'] or ''}}}", text)
    return text.translate(_TRANSLATION)


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match.group()).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _command(match: re.Match[str]) -> str:
    command = match.group()
    if command in _COMMANDS:
        return _COMMANDS[command]
    return "" if command[-1] == "." and command != "\\." else command


def plain(text: str) -> str:
    """A text with one spelling for each command and character; its structure is kept."""
    if not text.isascii():
        text = _unicode(text)
    if "\\" in text:
        if "{\\,}" in text:
            text = text.replace("{\\,}", "\\,")
        if "\\," in text or "\\!" in text or "\\thinspace" in text:
            text = _THIN_SPACE.sub("", text).replace("\\,", " ")
        if "\\\\" in text:
            text = _LINE_SKIP.sub(r"\\\\ ", text)
            text = text.removesuffix("\\\\")
        elif text.endswith("\\"):
            # A trailing "\\ " that has lost its blank.
            text = text[:-1]
        if "\\rm" in text:
            text = _ROMAN_END.sub(r"\\mathrm{\g<unit>}", _ROMAN.sub(r"\\mathrm{", text))
        if "\\hs" in text or "\\ms" in text or "kern" in text:
            text = _SPACING.sub(" ", text)
        if "\\text" in text or "\\math" in text or "\\mbox" in text:
            text = _TEXT_COMMA.sub(r"\1 ", _TEXT_MINUS.sub("-", text))
            text = _UPRIGHT.sub(r" \1\2 ", text)
            text = _BRACED_UNIT.sub(r"\g<unit>", text)
        if "{" in text:
            text = _FUNCTION.sub(r"\\\g<name> ", text)
        if "\\not" in text:
            text = _NOT_EQUAL.sub(r"\\ne ", text)
        if "color" in text:
            text = _COLOUR.sub("", text)
        text = _COMMAND.sub(_command, text)
        if "\\begin" in text:
            system = _SYSTEM.fullmatch(text)
            text = _listed(system) if system is not None else text
        if "\\log" in text:
            text = _LOG_E.sub(r"\\ln ", text)
    if "{" in text:
        text = text.replace(",{ }", ",").replace("{,}", ",").replace("{:}", ":").replace("{-}", "-")
    if "nfinity" in text or "NFINITY" in text:
        text = _INFINITY.sub(r"\\infty ", text)
    if "..." in text:
        text = text.replace("...", "\\ldots ")
    if "**" in text:
        text = _STARS.sub("^", text)
    if "pi" in text:
        text = _PI.sub(r"\\pi ", text)
    if "sqrt" in text:
        text = _SQRT.sub(lambda m: f"\\sqrt{{{m[1]}}}" if m[1] else "\\sqrt", text)
        text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    if "\\frac" in text:
        text = _BARE_FRACTION.sub(_braced, text)
    if "th" in text or "st" in text or "nd" in text or "rd" in text:
        text = _ORDINAL.sub("", text)
    if "]" in text[:1] or "[" in text[-1:]:
        text = _BACKWARDS.sub(_round, text)
    return text.replace("~", " ") if "~" in text else text


def _listed(match: re.Match[str]) -> str:
    """``x=1, y=2`` for rows that each give the value of another name; other rows stay as they are."""
    rows = [row.strip() for row in match["rows"].split("\\\\") if row.strip()]
    values = {}
    for row in rows:
        name, _, value = row.partition("=")
        name = name.rstrip().removesuffix("&").rstrip()
        value = value.lstrip().removeprefix("&").strip().rstrip(",;. ")
        if not value or _NO_VALUE.search(value) or not _VALUE_OF.fullmatch(name):
            return match[0]
        values[name] = value
    if len(values) < max(len(rows), 2):
        return match[0]
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{match['before']}{listed}{match['after']}"


def _braced(match: re.Match[str]) -> str:
    """A fraction with an argument that is a command without braces, as "\\frac\\pi2", with braces."""
    arguments = match.groups()
    if not any(one.startswith("\\") for one in arguments):
        return match[0]
    return "\\frac" + "".join(one if one[0] == "{" else f"{{{one}}}" for one in arguments)


def _round(match: re.Match[str]) -> str:
    """``(1,3]`` for ``]1,3]``: an open end as French books write it."""
    opening, closing = "[(", ")]"
    return (
        f"{opening[match['open'] == ']']}{match['low']},{match['high']}"
        f"{closing[match['close'] == ']']}"
    )


_DOLLARS_THEN_UNIT = re.compile(r"^\$([^$]+)\$\s*(%|[A-Za-z]+)$")
_BLANKS = re.compile(r"\s+")
WRAPPER = re.compile(
    r"\\(?:text|textbf|textrm|textit|textsf|mathrm|mathbf|mathsf|textnormal|mbox|boxed|fbox|boldsymbol|bm|bf|rm"
    r"|emph|ensuremath|underline|displaystyle)\s*\{"
)
"""A command that only styles what its braces hold."""
_SWITCH = re.compile(r"\\(?:bf|it|rm|sf|tt|bfseries|itshape)(?![A-Za-z]|\s*\{)\s*")
"""A command that changes the style of all that follows it."""
_LEADING = re.compile(r"^(?:\\(?:approx|therefore|implies|Rightarrow)(?![A-Za-z])|=(?!=))\s*")
_SPACES = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))


def unwrap(text: str) -> str:
    """Removes what encloses the whole text: math delimiters, braces, a text command."""
    for _ in range(6):
        before = text
        text = text.strip()
        for start, end in _DELIMITERS:
            if (
                len(text) > len(start) + len(end)
                and text.startswith(start)
                and text.endswith(end)
                and start not in text[len(start) : -len(end)]
            ):
                text = text[len(start) : -len(end)].strip()
                break
        if text.startswith("{") and close_of(text, 1) == len(text) - 1:
            text = text[1:-1].strip()
        wrapped = WRAPPER.match(text)
        if wrapped and close_of(text, wrapped.end()) == len(text) - 1:
            text = text[wrapped.end() : -1].strip()
        if switched := _SWITCH.match(text):
            text = text[switched.end() :]
        while text and text[-1] in ".,;:" and not text.endswith(("...", "\\,", "\\;", "\\:")):
            text = text[:-1].rstrip()
        if text == before:
            return text
    return text


def normalise(text: str) -> str:
    """A text in one spelling, without what encloses it, and with single blanks."""
    if text.isascii() and text.isdigit():
        return text
    text = unwrap(plain(text))
    if text.startswith("$"):
        text = _DOLLARS_THEN_UNIT.sub(r"\1 \2", text)
    if text.startswith(("\\", "=")):
        text = _LEADING.sub("", text)
    return _BLANKS.sub(" ", text)


def canonical(normalised: str) -> str:
    """Removes spaces that carry no meaning: those that don't separate letters or digits."""
    if " " not in normalised:
        return normalised
    # "1 2" is not "12", but "( 1 , 2 )" is "(1,2)".
    return _SPACES.sub("", normalised)
