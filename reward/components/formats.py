"""Reward components for a response's form: formats, tags, marks of steps.

Each has its formula and source. All take time linear in the text, even for hostile texts with
thousands of tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..reading import extraction
from .patterns import MAX_MATCHED, linear
from .registry import Component, Elsewhere, Graded, register, register_variant

Style = Callable[[Graded], bool]
STYLES: dict[str, Style] = {}


def _style(name: str) -> Callable[[Style], Style]:
    def add(style: Style) -> Style:
        STYLES[name] = style
        return style

    return add


@_style("tags")
def _tags(sample: Graded) -> bool:
    """One ``<think>...</think> <answer>...</answer>`` and nothing besides.

    The opening ``<think>`` is in the prompt or in the response. Only white space may be between the
    two parts and at the ends, and neither part is empty.
    """
    text = sample.opened.strip()
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return False
    if any(text.count(t) != 1 for t in ("<think>", "</think>", "<answer>", "</answer>")):
        return False
    thoughts, _, rest = text[7:].partition("</think>")
    rest = rest.strip()
    return bool(thoughts.strip() and rest.startswith("<answer>") and rest[8:-9].strip())


@_style("r1_zero")
def _r1_zero(sample: Graded) -> bool:
    """The literal ``</think> <answer>`` (one space) and ``</answer>`` (Dr. GRPO, 2503.20783)."""
    return "</think> <answer>" in sample.text and "</answer>" in sample.text


_AFTER_THOUGHTS = re.compile(r"</think>\s*<answer>")


def _closes_a_line(text: str, tag: str, start: int) -> bool:
    """Whether ``tag`` is at the end of a line, from ``start`` on."""
    at = text.find(tag, start)
    while at >= 0:
        end = at + len(tag)
        if end == len(text) or text[end] == "\n":
            return True
        at = text.find(tag, at + 1)
    return False


@_style("open_r1")
def _open_r1(sample: Graded) -> bool:
    """``^<think>\\n.*?\\n</think>\\n<answer>\\n.*?\\n</answer>$`` (huggingface/open-r1).

    The tags are searched from the start, with ``.`` and ``$`` matching across lines. The first possible
    middle leaves the most room, so no backtracking is needed, which a hostile text could prolong for hours.
    """
    text = sample.opened
    middle = "\n</think>\n<answer>\n"
    at = text.find(middle, 8) if text.startswith("<think>\n") else -1
    return at >= 0 and _closes_a_line(text, "\n</answer>", at + len(middle))


@_style("tutorial")
def _tutorial(sample: Graded) -> bool:
    """``^<think>.*?</think>\\s*<answer>.*?</answer>$``, matched in the same way as ``open_r1``."""
    text = sample.opened
    middle = _AFTER_THOUGHTS.search(text, 7) if text.startswith("<think>") else None
    return middle is not None and _closes_a_line(text, "</answer>", middle.end())


@_style("think_only")
def _think_only(sample: Graded) -> bool:
    """Begins with ``<think>``, has it once, and closes it (TRL ``think_format_reward``)."""
    text = sample.opened
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text


@_style("boxed")
def _boxed(sample: Graded) -> bool:
    """A closed box after the thoughts."""
    part = extraction.solution(sample.text, sample.prompt_text)
    return part is not None and extraction.last_box(part) is not None


@register("format")
def format_(style: str | None = None, pattern: str | None = None) -> Component | Elsewhere:
    """1 if the whole response has a format, else 0.

    Args:
        style: a name in ``STYLES``; ``tags`` if neither argument is given.
        pattern: a regular expression (with ``.`` matching line breaks) that the whole response
            must match, in the syntax of Python's ``re``. RE2 runs what it can, in time linear
            in the text; the rest goes to a grader process with a deadline.
    """
    if style is not None and pattern is not None:
        raise ValueError("give style or pattern, not both")
    matches: Style
    if pattern is not None:
        fits = linear(pattern)
        if fits is None:
            return Elsewhere(
                path="tandem.reward.components.patterns:matches", params={"pattern": pattern}
            )
        matches = lambda sample: fits(sample.text)  # noqa: E731
    else:
        name = style or "tags"
        if name not in STYLES:
            raise ValueError(f"style={name!r} isn't one of {', '.join(sorted(STYLES))}")
        matches = STYLES[name]

    def value(sample: Graded) -> float:
        return float(len(sample.text) <= MAX_MATCHED and matches(sample))

    return value


for _name, _of, _origin in (
    ("format_open_r1", "open_r1", "open-r1"),
    ("format_tutorial", "tutorial", "TRL's R1-Zero tutorial"),
    ("format_r1_zero", "r1_zero", "Dr. GRPO"),
    ("think_format", "think_only", "TRL"),
):
    register_variant(_name, "format", _origin, style=_of)


@register("tag_count", origin="open-r1")
def tag_count() -> Component:
    """A quarter for each of open-r1's four tags that occurs exactly once, in its proper place on a line."""

    def value(sample: Graded) -> float:
        text = sample.opened
        tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
        return 0.25 * sum(text.count(tag) == 1 for tag in tags)

    return value


_STEPS = r"(Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,)"


@register("reasoning_steps", origin="open-r1")
def reasoning_steps(multiline: bool = False, full: int = 3) -> Component:
    """``min(1, n / full)`` for n marks of a step ("Step 1:", "1.", bullets, "First,", …; open-r1).

    Args:
        multiline: count "1." at the start of every line, not only of the text.
        full: number of steps that earn the full value.
    """
    if full < 1:
        raise ValueError(f"full={full} should be at least 1")
    compiled = re.compile(_STEPS, re.MULTILINE if multiline else 0)

    def value(sample: Graded) -> float:
        return min(1.0, len(compiled.findall(sample.text)) / full)

    return value


register_variant("reasoning_steps_tutorial", "reasoning_steps", "TRL's tutorial", multiline=True)
