"""Reward components for programs in Python: whether they can be parsed, and which words they have.

Nothing is run: a program is parsed by a grader process, since a hostile one may take a parser's time and memory.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from .code import MAX_PROGRAM, last_block
from .registry import Component, Elsewhere, Graded, register


def program(text: str) -> str:
    """The program of a response: the first ``<code>…</code>``, else the last fenced block, else all of it."""
    _, opened, rest = text.partition("<code>")
    tagged, closed, _ = rest.partition("</code>")
    if opened and closed:
        return tagged.strip()
    block = last_block(text, ("python", "py", "python3"))
    return (text if block is None else block).strip()


def parses(completions: list[str], **_: Any) -> list[float]:
    """1 for each text whose program isn't empty and is Python, else 0; for a grader process."""
    return [float(_is_python(program(text))) for text in completions]


def _is_python(code: str) -> bool:
    if not 0 < len(code) <= MAX_PROGRAM:
        return False
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@register("python_syntax", place="grader", origin="fatu/finetune's AppWorld")
def python_syntax() -> Elsewhere:
    """1 if the response's program (:func:`program`) can be parsed as Python, else 0; it isn't run."""
    return Elsewhere(path="tandem.reward.components.programs:parses", params={})


@register("mentions", origin="fatu/finetune's AppWorld")
def mentions(words: Sequence[str], each: float = 0.3) -> Component:
    """``min(1, each · n)`` with n of the words in the response, each counted once.

    Args:
        words: texts that are looked for as they are.
        each: what one of them is worth, above 0.
    """
    if isinstance(words, str) or not words or not all(isinstance(w, str) and w for w in words):
        raise ValueError(f"words={words!r} should be a list of texts")
    if each <= 0:
        raise ValueError(f"each={each} should be above 0")

    def value(sample: Graded) -> float:
        return min(1.0, each * sum(word in sample.text for word in words))

    return value
