r"""Regular expressions of a config, matched against what a model wrote in time linear in the text.

Python's ``re`` backtracks: ``(?:a|aa)+b`` takes exponential time on a run of a's, and even
``.*?</think>.*?<answer>.*?</answer>`` takes cubic time on a text with thousands of tags. RE2 (Cox, "Regular
Expression Matching Can Be Simple And Fast", 2007) runs automata instead. A pattern is parsed by
Python's own parser, so that it means what it means there, and is rewritten in RE2's syntax.

RE2 has no lookarounds. Those at the beginning that come after a fixed number of characters
(``^(?!.*<think>.*<think>)…``, ``^<think>(?!.*<think>)…``) are matched as separate patterns. The rest
(back references, lookarounds further in, ``(?:(?!</think>).)*``, more than 1,000 repetitions) has no
linear form here; :func:`matches` runs it in a grader process, which has a deadline.
"""

from __future__ import annotations

import re
import re._constants as re_names  # type: ignore[import-not-found]
import re._parser as re_parser  # type: ignore[import-not-found]
from collections.abc import Callable
from functools import lru_cache
from typing import Any

MAX_MATCHED = 200_000
"""A longer text, in characters, matches no pattern."""
FLAGS = re.DOTALL
"""Flags of every pattern; others can be written in the pattern, as ``(?m)``."""

_DIGIT, _WORD = r"\p{Nd}", r"\p{L}\p{N}_"
_SPACE = (
    r"\x{9}-\x{d}\x{1c}-\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}"
    r"\x{205f}\x{3000}"
)
_CLASSES = {"DIGIT": (_DIGIT, "0-9"), "WORD": (_WORD, "0-9A-Za-z_"), "SPACE": (_SPACE, r"\t-\r ")}
"""Members of ``\\d``, ``\\w`` and ``\\s``: of all scripts, and with ``(?a)``."""
_TYPES = re.ASCII | re.LOCALE | re.UNICODE


class _Beyond(Exception):
    """Something that RE2 doesn't have."""


def matches(completions: list[str], pattern: str, **_: Any) -> list[float]:
    """1 for each text that matches as a whole, else 0; by Python's ``re``, for a grader process."""
    compiled = re.compile(pattern, FLAGS)
    return [
        float(len(text) <= MAX_MATCHED and compiled.fullmatch(text) is not None)
        for text in completions
    ]


@lru_cache(maxsize=64)
def linear(pattern: str) -> Callable[[str], bool] | None:
    """A function that says whether the whole of a text matches, in linear time; None if RE2 can't do it.

    Args:
        pattern: in the syntax of Python's ``re``, with ``.`` also matching line breaks.

    Raises:
        re.error: it isn't a regular expression.
    """
    re.compile(pattern, FLAGS)  # Raises for errors that the parser alone misses.
    parsed = re_parser.parse(pattern, FLAGS)
    try:
        import re2
    except ImportError:
        return None
    options = re2.Options()
    options.log_errors = False
    try:
        body, conditions = _split(parsed)
        whole = re2.compile(body, options)
        conditioned = [(wanted, re2.compile(begin, options)) for wanted, begin in conditions]
    except (_Beyond, re2.error):
        return None

    def fits(text: str) -> bool:
        if len(text) > MAX_MATCHED:
            return False
        # Half a surrogate pair has no UTF-8, and isn't a character of any tag.
        encoded = text.encode("utf-8", "replace")
        return whole.fullmatch(encoded) is not None and all(
            (begin.match(encoded) is not None) is wanted for wanted, begin in conditioned
        )

    return fits


def _split(parsed: Any) -> tuple[str, list[tuple[bool, str]]]:
    """The pattern without the lookaheads at its beginning, and these as (wanted, pattern to begin with).

    What comes before such a lookahead has a fixed length, so that it ends at the same place however it
    is matched.
    """
    flags = parsed.state.flags
    rest: list[Any] = []
    conditions: list[tuple[bool, str]] = []
    fixed = True
    for item in parsed.data:
        name = str(item[0])
        if fixed and name in ("ASSERT", "ASSERT_NOT") and item[1][0] == 1:
            inside = list(item[1][1].data)
            conditions.append((name == "ASSERT", _sequence(rest + inside, flags, None)))
            continue
        rest.append(item)
        least, most = re_parser.SubPattern(parsed.state, rest).getwidth()
        fixed = least == most
    return _sequence(rest, flags, r"\z"), conditions


def _sequence(items: list[Any], flags: int, end: str | None) -> str:
    """Items one after another; ``end`` is what a ``$`` means as the last item."""
    parts = []
    for place, item in enumerate(items):
        last = place == len(items) - 1
        parts.append(_item(item, flags, end if last else ""))
    return "".join(parts)


def _item(item: Any, flags: int, end: str | None) -> str:
    """One item of Python's parse tree in RE2's syntax.

    Args:
        item: (operator, argument).
        flags: the flags in force there.
        end: what a ``$`` means here: ``\\z`` at the end of a text that is to match as a whole; None at
            the end of a lookahead; empty if something follows, which RE2 can't express.
    """
    name, argument = str(item[0]), item[1]
    if name == "LITERAL":
        return _cased(_character(argument), flags)
    if name == "NOT_LITERAL":
        return _cased(f"[^{_character(argument)}]", flags)
    if name == "ANY":
        return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
    if name == "IN":
        return _cased(_set(argument, flags), flags)
    if name == "AT":
        return _place(str(argument), flags, end)
    if name == "BRANCH":
        return "(?:" + "|".join(_sequence(list(b.data), flags, end) for b in argument[1]) + ")"
    if name == "SUBPATTERN":
        _, added, taken, body = argument
        within = (flags & ~_TYPES if added & _TYPES else flags) | added
        return f"(?:{_sequence(list(body.data), within & ~taken, end)})"
    if name in ("MAX_REPEAT", "MIN_REPEAT"):
        # It doesn't matter which of several matches is taken, only whether there is one.
        least, most, body = argument
        inside = _sequence(list(body.data), flags, "")
        upper = "" if most == re_names.MAXREPEAT else str(int(most))
        if (least, upper) in ((0, ""), (1, ""), (0, "1")):
            return f"(?:{inside}){'?' if upper else '*+'[least]}"
        return f"(?:{inside}){{{int(least)},{upper}}}"
    raise _Beyond(name)


def _place(name: str, flags: int, end: str | None) -> str:
    if name == "AT_BEGINNING_STRING" or (name == "AT_BEGINNING" and not flags & re.MULTILINE):
        return r"\A"
    if name == "AT_BEGINNING":
        return "(?m:^)"
    if name == "AT_END_STRING":
        return r"\z"
    if name == "AT_END" and flags & re.MULTILINE:
        return "(?m:$)"
    if name == "AT_END" and end != "":
        # Python's $ also matches before a line break at the end of the text.
        return r"\n?\z" if end is None else end
    if name in ("AT_BOUNDARY", "AT_NON_BOUNDARY") and flags & re.ASCII:
        return r"\b" if name == "AT_BOUNDARY" else r"\B"
    raise _Beyond(name)


def _character(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        raise _Beyond("half a surrogate pair")
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


def _cased(text: str, flags: int) -> str:
    return f"(?i:{text})" if flags & re.IGNORECASE else text


def _set(items: list[Any], flags: int) -> str:
    """``[...]``; the complement of a class within it becomes an alternative of its own."""
    members, complements = "", []
    negated = False
    for operator, argument in items:
        name = str(operator)
        if name == "NEGATE":
            negated = True
        elif name == "LITERAL":
            members += _character(argument)
        elif name == "RANGE":
            members += f"{_character(argument[0])}-{_character(argument[1])}"
        elif name == "CATEGORY":
            kind = str(argument).removeprefix("CATEGORY_")
            of_class = _CLASSES[kind.removeprefix("NOT_")][bool(flags & re.ASCII)]
            if kind.startswith("NOT_"):
                complements.append(of_class)
            else:
                members += of_class
        else:
            raise _Beyond(name)
    if not negated:
        parts = [f"[{members}]"] if members else []
        return "(?:" + "|".join(parts + [f"[^{c}]" for c in complements]) + ")"
    if not complements:
        return f"[^{members}]"
    if members or len(complements) > 1:
        raise _Beyond("a set without a class's complement")
    return f"[{complements[0]}]"
