"""Prompt templates: how a question becomes the text that a model continues.

``own`` is the model's own chat template, and ``none`` joins the messages' contents by line breaks. Any other
template is a text in which one ``{question}`` is replaced, and nothing else is interpreted: a published one
by name (``templates.yaml``), or a file of the user's, which may hold examples (few-shot).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

OWN, NONE = "own", "none"
QUESTION = "{question}"
MAX_CHARACTERS = 1 << 20
"""Longest template that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One template."""

    name: str
    """Name of the template, or the path of its file."""
    text: str | None
    """The text with one ``{question}``; None for ``own`` and ``none``."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they are kept at its end."""

    def fill(self, question: str) -> str:
        """The prompt for a question.

        >>> named("question_only").fill("2+2 {?}")
        '2+2 {?}'
        """
        assert self.text is not None
        return self.text.replace(QUESTION, question)

    @property
    def opener(self) -> str:
        """What follows the question: the beginning of the response, as far as the prompt has it."""
        return self.text.rpartition(QUESTION)[2] if self.text is not None else ""


def names() -> list[str]:
    """All names.

    >>> names()
    ['own', 'none', 'qwen', 'simplerl', 'prime', 'r1_zero', 'alpaca', 'question_only']
    """
    return [OWN, NONE, *_published()]


@cache
def _published() -> dict[str, dict[str, Any]]:
    text = (Path(__file__).parent / "templates.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return found


@cache
def named(name: str, *, key: str = "data.template") -> Template:
    """The template with this name, or the one in the file of this path, which is read once.

    Args:
        name: a template's name, or a path.
        key: the setting that names it, for the messages.

    Raises:
        ConfigError: there is no such template or file, or its text hasn't exactly one ``{question}``.
    """
    if name in (OWN, NONE):
        return Template(name=name, text=None)
    if (known := _published().get(name)) is not None:
        return Template(name=name, text=known["text"], stop=tuple(known.get("stop", ())))
    path = Path(name).expanduser()
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it isn't UTF-8"
        raise ConfigError(
            f"{key}={name} is neither one of {', '.join(names())} nor a file that can be "
            f"read: {why}"
        ) from None
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{key}={name} has more than {MAX_CHARACTERS:,} characters")
    count = text.count(QUESTION)
    if count != 1:
        raise ConfigError(
            f"{key}={name} has {QUESTION} {count} times: it must stand there once, where the "
            f"question goes"
        )
    return Template(name=name, text=text)
