"""The registry of reward components: what a component gets to see, and how it is found by name.

A component is built once from its parameters in the config and then called per sample, or per
group if it compares samples with each other. It runs in the dispatcher, so it must be cheap
(linear in the text). A function of the user's own, named by its import path, runs in a grader
process instead (:mod:`tandem.reward.components.functions`), and code in a sandbox.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ...common.errors import ConfigError
from ...common.records import PROMPT_MESSAGES, Episode, FinishReason, Int32Array, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One sample with its verdict: everything that a component gets to see."""

    text: str
    """The response."""
    verdict: Verdict
    """What the grader found."""
    extracted: str | None = None
    """The answer that was read."""
    prompt_text: str = ""
    """The prompt; its end shows whether the response begins inside ``<think>``."""
    tokens: Int32Array | None = None
    """``[L]`` token ids of the response, if they are known."""
    finish_reason: FinishReason = FinishReason.STOP
    """Why the response ended."""
    gold: str = ""
    """The gold answer as the data set states it."""
    data_source: str = ""
    """The data set's name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The problem's ``extra``."""
    episode: Episode | None = None
    """The episode that was played; ``text`` is then that of its last turn."""

    @property
    def has_failed(self) -> bool:
        """Whether it is an episode that failed by no fault of the text: there is nothing to pay or to compare."""
        return self.episode is not None and self.episode.failure is not None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as messages: those that it was rendered from, or else one user's message."""
        known = self.extra.get(PROMPT_MESSAGES)
        # A column of the data set may have the same name.
        if isinstance(known, list) and known and all(map(_is_message, known)):
            return known
        return [{"role": "user", "content": self.prompt_text}]

    @property
    def length(self) -> int:
        """Length of the response in tokens (in characters if the tokens aren't known)."""
        return len(self.tokens) if self.tokens is not None else len(self.text)

    @property
    def opened(self) -> str:
        """The response, preceded by the ``<think>`` that the prompt may have ended with."""
        match = _OPENED.search(self.prompt_text)
        return match.group() + self.text if match else self.text


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"role", "content"} <= value.keys()
        and all(isinstance(one, str) for one in (*value, *value.values()))
    )


_OPENED = re.compile(r"<think>\s*\Z")

Component = Callable[[Graded], float | Sequence[float] | None]
"""Takes a sample and returns its value; None if there is none, which leaves it out of the sum; or ``[L]`` a value
for each token, of which the component's value is the sum."""
GroupComponent = Callable[[Sequence[Graded]], Sequence[float | None]]
"""Takes a group and returns a value for each sample, in the same order."""
Factory = Callable[..., Any]
"""Makes a :data:`Component` or, with scope ``group``, a :data:`GroupComponent`."""
Place = Literal["dispatcher", "grader", "sandbox", "remote"]
"""Which process runs it: the dispatcher itself, a grader, a sandbox, or a server that is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What a factory returns if its parameters ask for more work than the dispatcher should do."""

    path: str
    """Import path of the function that a grader process calls (:mod:`tandem.reward.components.functions`)."""
    params: Mapping[str, Any]
    """Keyword arguments in addition to the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One entry of the registry."""

    name: str
    """The name that a config gives it."""
    make: Factory
    """Makes the component from its parameters."""
    needs_verdict: bool = False
    """Whether it has no value for ``crashed`` and ``gold_unparsable``; the row then has no reward."""
    scope: Literal["sample", "group"] = "sample"
    """Whether it is called per sample, or once with the whole group when that is complete."""
    place: Place = "dispatcher"
    """Where it runs; if elsewhere, ``make`` checks the parameters and returns a request."""
    origin: str = ""
    """The source of its formula and defaults."""


COMPONENTS: dict[str, Kind] = {}


def register(
    name: str,
    *,
    needs_verdict: bool = False,
    scope: Literal["sample", "group"] = "sample",
    place: Place = "dispatcher",
    origin: str = "",
) -> Callable[[Factory], Factory]:
    """Adds a component's factory under a name."""

    def add(make: Factory) -> Factory:
        if name in COMPONENTS:
            raise ValueError(f"{name} is already the name of another component")
        COMPONENTS[name] = Kind(
            name=name,
            make=make,
            needs_verdict=needs_verdict,
            scope=scope,
            place=place,
            origin=origin,
        )
        return make

    return add


def register_variant(name: str, of: str, origin: str, **defaults: Any) -> None:
    """Adds another name for a component, with the defaults of another origin."""
    base = COMPONENTS[of]
    register(
        name,
        needs_verdict=base.needs_verdict,
        scope=base.scope,
        place=base.place,
        origin=origin,
    )(functools.partial(base.make, **defaults))


def component(name: str, params: Mapping[str, Any]) -> tuple[Kind, Any]:
    """Builds the registered component of that name with these parameters.

    Raises:
        ConfigError: an unknown name or parameter, or a value that it refuses.
    """
    kind = COMPONENTS.get(name)
    if kind is None:
        close = difflib.get_close_matches(name, COMPONENTS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"reward component {name!r} isn't one of {', '.join(sorted(COMPONENTS))}{hint}, nor the "
            f"import path of a function of your own (package.module:function)"
        )
    known = inspect.signature(kind.make).parameters
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ConfigError(
            f"reward component {name}: unknown parameter {unknown[0]!r} "
            f"(it takes {', '.join(known) or 'none'})"
        )
    if kind.place != "remote":  # Those say more of what they take, and at once.
        _check_types(kind, params)
    try:
        return kind, kind.make(**params)
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"reward component {name}: {error}") from None


def _check_types(kind: Kind, params: Mapping[str, Any]) -> None:
    """Compares parameters with the annotations of their factory.

    Raises:
        ConfigError: one is of another type, which would otherwise be found out by the first sample.
    """
    make = kind.make.func if isinstance(kind.make, functools.partial) else kind.make
    hints = typing.get_type_hints(make)
    for name, value in params.items():
        where, hint = f"reward component {kind.name}: params.{name}={value!r}", hints[name]
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        if choices and value not in choices:
            raise ConfigError(f"{where} isn't one of {', '.join(choices)}")
        # Whole numbers with a point, and 0 and 1, are what YAML and JSON of other programs write.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if hint is bool and value in (0, 1):
            continue
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where} is of the wrong type: {error}") from None
