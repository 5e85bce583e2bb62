"""What a component that asks a server is made of: its questions, and how an answer is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ...common.records import FinishReason
from ..exchange import Address, ExchangeError, shown
from ..reading import extraction
from .registry import Graded

Question = Any
"""Plain data that JSON can hold; equal questions have equal answers."""
Truncated = float | Literal["ask"] | None
"""Value of a response that was cut: a number, none, or whatever the server says of it."""


class Api(Protocol):
    """How one kind of server is asked."""

    @property
    def path(self) -> str:
        """Path of its requests."""

    def question(self, sample: Graded) -> Question:
        """What is asked about a sample."""

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """The request for these questions."""

    def scores(self, answer: Any, count: int) -> list[float]:
        """A score for each of ``count`` questions.

        Raises:
            ValueError: the answer, which is any JSON, doesn't have them; says why.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A component that asks a server."""

    api: Api
    address: Address
    """The url of the config."""
    seconds: float
    """Deadline of one attempt."""
    retries: int
    """Attempts after the first."""
    parallel: int
    """Requests at a time."""
    batch: int
    """Most questions of one request."""
    truncated: Truncated
    """What a response that was cut gets."""

    def known(self, sample: Graded) -> tuple[bool, float | None]:
        """(whether nothing has to be asked, the value then)."""
        if sample.finish_reason is FinishReason.STOP or self.truncated == "ask":
            return False, None
        return True, self.truncated

    def request(self, questions: Sequence[Question]) -> bytes:
        """The request's body."""
        return json.dumps(self.api.body(questions), allow_nan=False).encode()

    def read(self, answer: bytes, count: int) -> list[float]:
        """Reads the scores of an answer.

        Raises:
            ExchangeError: it doesn't have a finite number for each question.
        """
        try:
            try:
                content = json.loads(answer)
            except (ValueError, RecursionError):
                raise ValueError("it isn't JSON") from None
            scores = self.api.scores(content, count)
            if len(scores) != count or not all(map(math.isfinite, scores)):
                raise ValueError(f"it should have {count} finite scores, and has {scores!r:.80}")
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            why = str(error) if type(error) is ValueError else "it lacks what such a server sends"
            raise ExchangeError(f"its answer can't be used: {why}: {shown(answer)}") from None
        return scores


def asking(
    api: Api,
    *,
    url: object,
    api_key_env: object,
    seconds: object,
    retries: object,
    parallel: object,
    batch: object,
    truncated: object,
) -> Asking:
    """Checks the parameters that all such components share.

    Raises:
        ValueError: one can't be used; says which, and why.
    """
    if not isinstance(url, str):
        raise ValueError("url is missing: give the server's address, as in http://127.0.0.1:8000")
    if api_key_env is not None and not (isinstance(api_key_env, str) and api_key_env):
        raise ValueError(f"api_key_env={api_key_env!r} isn't the name of an environment variable")
    if truncated not in ("ask", None) and not _is_number(truncated):
        raise ValueError(f"truncated={truncated!r} should be a number, null or ask")
    return Asking(
        api=api,
        address=Address.of(url, api_key_env),
        seconds=number("seconds", seconds, 0.01, 3600.0),
        retries=whole("retries", retries, 0, 20),
        parallel=whole("parallel", parallel, 1, 256),
        batch=whole("batch", batch, 1, 1024),
        truncated=truncated,  # type: ignore[arg-type]
    )


def number(name: str, value: object, low: float, high: float) -> float:
    """A parameter that is a number between two others.

    Raises:
        ValueError: it is anything else.
    """
    if not _is_number(value) or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise ValueError(f"{name}={value!r} should be a number from {low:g} to {high:g}")
    return float(value)  # type: ignore[arg-type]


def whole(name: str, value: object, low: int, high: int) -> int:
    """A parameter that is a whole number between two others.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} should be a whole number from {low} to {high}")
    return value


def flag(name: str, value: object) -> bool:
    """A parameter that is true or false.

    Raises:
        ValueError: it is anything else, such as the text "no".
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} should be true or false")
    return value


def text(name: str, value: object) -> str:
    """A parameter that is a text.

    Raises:
        ValueError: it is anything else, or empty.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={value!r} should be a text")
    return value


def options_of(value: object, own: Sequence[str]) -> dict[str, Any]:
    """Further keys of a request's body.

    Raises:
        ValueError: it isn't a mapping that JSON can hold, or sets a key that is set here.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"options={value!r} should be a mapping, as in {{top_p: 0.9}}")
    taken = sorted(set(value) & set(own))
    if taken:
        raise ValueError(f"options.{taken[0]} is a key that every request has: leave it out")
    try:
        return dict(json.loads(json.dumps(_plain(value), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"options={value!r} can't be sent as JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def clean(value: str) -> str:
    """A text that UTF-8 can hold: half a surrogate pair becomes a question mark."""
    return value.encode("utf-8", "replace").decode()


def problem_of(sample: Graded) -> str:
    """The question as text: one message's content, or a conversation line by line.

    The system's messages are left out. Where only the rendered prompt is known, it is that.
    """
    turns = [message for message in sample.messages if message["role"] != "system"]
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def response_of(sample: Graded, thoughts: bool) -> str:
    """The response, or what it says after its thoughts (nothing if they were never closed)."""
    if thoughts:
        return sample.text
    return (extraction.solution(sample.text, sample.prompt_text) or "").strip()
