"""The reward components by name: small functions of one graded sample.

A component is made once from its parameters in the config and then called per sample. It is
cheap (linear in the text) and runs in the dispatcher. Lengths are in tokens unless it says
otherwise, and clamped. Formulas and their sources stand with each.

Adding one: write a factory whose keyword arguments are its parameters, and register it.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..common.errors import ConfigError
from ..common.records import FinishReason, Int32Array, Verdict
from . import extraction

MAX_MATCHED = 200_000
"""Characters beyond which a text matches no format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One sample with its verdict: all that a component may look at."""

    text: str
    """The response."""
    verdict: Verdict
    """What the grader found."""
    extracted: str | None = None
    """The answer that was read."""
    prompt_text: str = ""
    """The prompt: its end tells whether the response begins inside ``<think>``."""
    tokens: Int32Array | None = None
    """``[L]`` token ids of the response, where they are known."""
    finish_reason: FinishReason = FinishReason.STOP
    """Why the response ended."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The problem's ``extra``."""

    @property
    def length(self) -> int:
        """Tokens of the response (characters where the tokens aren't known)."""
        return len(self.tokens) if self.tokens is not None else len(self.text)

    @property
    def opened(self) -> str:
        """The response with the ``<think>`` that the prompt ended on put before it."""
        match = _OPENED.search(self.prompt_text)
        return match.group() + self.text if match else self.text


_OPENED = re.compile(r"<think>\s*\Z")

Component = Callable[[Graded], float | None]
"""Value of one sample; None where there is nothing to say (it is left out of the sum)."""
Factory = Callable[..., Component]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One entry of the registry."""

    name: str
    """As the config names it."""
    make: Factory
    """Parameters to component."""
    needs_verdict: bool
    """It has no value for ``crashed`` and ``gold_unparsable``: the row then has no reward."""


COMPONENTS: dict[str, Kind] = {}


def register(name: str, *, needs_verdict: bool = False) -> Callable[[Factory], Factory]:
    """Adds a component's factory under a name."""

    def add(make: Factory) -> Factory:
        if name in COMPONENTS:
            raise ValueError(f"{name} is already the name of another component")
        COMPONENTS[name] = Kind(name=name, make=make, needs_verdict=needs_verdict)
        return make

    return add


def component(name: str, params: Mapping[str, Any]) -> tuple[Kind, Component]:
    """The component of that name with those parameters.

    Raises:
        ConfigError: an unknown name or parameter, or a value that it refuses.
    """
    kind = COMPONENTS.get(name)
    if kind is None:
        if "." in name or ":" in name:
            raise ConfigError(
                f"reward component {name!r}: a function of your own by import path isn't supported "
                f"yet; register it in tandem.reward.components, or use one of "
                f"{', '.join(sorted(COMPONENTS))}"
            )
        close = difflib.get_close_matches(name, COMPONENTS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"reward component {name!r} is none of {', '.join(sorted(COMPONENTS))}{hint}"
        )
    known = inspect.signature(kind.make).parameters
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ConfigError(
            f"reward component {name}: unknown parameter {unknown[0]!r} "
            f"(it takes {', '.join(known) or 'none'})"
        )
    try:
        return kind, kind.make(**params)
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"reward component {name}: {error}") from None


# --- accuracy --------------------------------------------------------------------------------


@register("accuracy", needs_verdict=True)
def accuracy() -> Component:
    """1 where the verdict is ``correct``, 0 where the answer isn't right, None without verdict."""

    def value(sample: Graded) -> float | None:
        if sample.verdict is Verdict.CORRECT:
            return 1.0
        return None if sample.verdict.leaves_baseline else 0.0

    return value


# --- formats ---------------------------------------------------------------------------------

Style = Callable[[Graded], bool]
STYLES: dict[str, Style] = {}


def _style(name: str) -> Callable[[Style], Style]:
    def add(style: Style) -> Style:
        STYLES[name] = style
        return style

    return add


@_style("tags")
def _tags(sample: Graded) -> bool:
    """One ``<think>...</think> <answer>...</answer>`` and nothing beside it.

    The opening ``<think>`` is the prompt's or the response's. Between the two parts and at the
    ends only white space; neither part is empty.
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
    """True where ``tag`` stands at the end of a line, from ``start`` on."""
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

    As found from the start with ``.`` and ``$`` over lines; the first middle leaves most room,
    so that no backtracking is needed, which a hostile text could make last for hours.
    """
    text = sample.opened
    middle = "\n</think>\n<answer>\n"
    at = text.find(middle, 8) if text.startswith("<think>\n") else -1
    return at >= 0 and _closes_a_line(text, "\n</answer>", at + len(middle))


@_style("tutorial")
def _tutorial(sample: Graded) -> bool:
    """``^<think>.*?</think>\\s*<answer>.*?</answer>$``, read as ``open_r1`` is."""
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
def format_(style: str | None = None, pattern: str | None = None) -> Component:
    """1 where the whole response has a format, else 0.

    Args:
        style: a name in ``STYLES``; ``tags`` where neither is given.
        pattern: a regular expression (with ``.`` matching line breaks) that the whole response
            must match. Mind its running time: it runs on what a model wrote.
    """
    if style is not None and pattern is not None:
        raise ValueError("give style or pattern, not both")
    matches: Style
    if pattern is not None:
        compiled = re.compile(pattern, re.DOTALL)
        matches = lambda sample: compiled.fullmatch(sample.text) is not None  # noqa: E731
    else:
        name = style or "tags"
        if name not in STYLES:
            raise ValueError(f"style={name!r} is none of {', '.join(sorted(STYLES))}")
        matches = STYLES[name]

    def value(sample: Graded) -> float:
        return float(len(sample.text) <= MAX_MATCHED and matches(sample))

    return value


@register("tag_count")
def tag_count() -> Component:
    """A quarter for each of open-r1's four tags that occurs exactly once, on its line."""

    def value(sample: Graded) -> float:
        text = sample.opened
        tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
        return 0.25 * sum(text.count(tag) == 1 for tag in tags)

    return value


_STEPS = r"(Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,)"


@register("reasoning_steps")
def reasoning_steps(multiline: bool = False, full: int = 3) -> Component:
    """``min(1, n / full)``, n marks of a step ("Step 1:", "1.", bullets, "First,", …; open-r1).

    Args:
        multiline: "1." counts at the start of every line, not of the text alone.
        full: steps that pay in full.
    """
    if full < 1:
        raise ValueError(f"full={full} should be at least 1")
    compiled = re.compile(_STEPS, re.MULTILINE if multiline else 0)

    def value(sample: Graded) -> float:
        return min(1.0, len(compiled.findall(sample.text)) / full)

    return value


# --- lengths ---------------------------------------------------------------------------------

Unit = Literal["tokens", "characters"]


def _check_unit(unit: str, allowed: Sequence[str]) -> None:
    if unit not in allowed:
        raise ValueError(f"unit={unit!r} is none of {', '.join(allowed)}")


@register("cosine_length", needs_verdict=True)
def cosine_length(
    max_length: int,
    min_wrong: float = -1.0,
    max_wrong: float = -0.5,
    min_correct: float = 0.5,
    max_correct: float = 1.0,
    unit: Unit = "tokens",
    clamp: bool = True,
) -> Component:
    """Short right answers and long wrong ones pay more (arXiv 2502.03373, open-r1, TRL).

    ``lo + (hi - lo) (1 + cos(pi L / max_length)) / 2``; for a right answer from ``max_correct``
    (L = 0) to ``min_correct``; for a wrong one from ``min_wrong`` to ``max_wrong``.

    Args:
        max_length: length at which the other end is reached.
        unit: ``tokens`` or ``characters`` (open-r1).
        clamp: longer texts count as ``max_length``; open-r1 lets the cosine rise again.
    """
    _check_unit(unit, ("tokens", "characters"))
    if max_length < 1:
        raise ValueError(f"max_length={max_length} should be at least 1")

    def value(sample: Graded) -> float | None:
        if sample.verdict.leaves_baseline:
            return None
        length = sample.length if unit == "tokens" else len(sample.text)
        share = length / max_length
        if clamp:
            share = min(share, 1.0)
        if sample.verdict is Verdict.CORRECT:
            low, high = min_correct, max_correct
        else:
            low, high = max_wrong, min_wrong
        return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * share))

    return value


@register("repetition")
def repetition(
    ngram: int = 3, max_penalty: float = -1.0, unit: Literal["tokens", "words"] = "tokens"
) -> Component:
    """``(1 - distinct / all) max_penalty`` over n-grams (arXiv 2502.03373, open-r1, TRL).

    Args:
        ngram: length of an n-gram; shorter texts have no penalty.
        max_penalty: at most 0.
        unit: ``tokens`` or ``words`` (lower-case, split at white space).
    """
    _check_unit(unit, ("tokens", "words"))
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} should not be positive")
    if ngram < 1:
        raise ValueError(f"ngram={ngram} should be at least 1")

    def value(sample: Graded) -> float:
        items: Sequence[Hashable]
        if unit == "tokens" and sample.tokens is not None:
            items = sample.tokens.tolist()
        else:
            items = sample.text.lower().split()
        count = len(items) - ngram + 1
        if count < 1:
            return 0.0
        distinct = len(set(zip(*(items[i:] for i in range(ngram)), strict=False)))
        return (1.0 - distinct / count) * max_penalty

    return value


@register("soft_overlong")
def soft_overlong(max_length: int, cache: int) -> Component:
    """0 up to ``max_length - cache`` tokens, then linear to -1 at ``max_length``, then -1.

    DAPO, arXiv 2503.14476, eq. 13, as TRL clamps it.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache={cache} should be from 1 to max_length={max_length}")

    def value(sample: Graded) -> float:
        over = sample.length - (max_length - cache)
        if over <= 0:
            return 0.0
        return -over / cache if sample.length <= max_length else -1.0

    return value


@register("dapo_overlong")
def dapo_overlong(max_length: int, buffer: int, factor: float = 1.0) -> Component:
    """``min(-(L - (max_length - buffer)) / buffer * factor, 0)``: without a floor (verl's DAPO)."""
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} should be from 1 to max_length={max_length}")

    def value(sample: Graded) -> float:
        return min(-(sample.length - (max_length - buffer)) / buffer * factor, 0.0)

    return value
