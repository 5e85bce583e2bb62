"""Requests to the endpoint in OpenAI's and vLLM's forms, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...common.errors import DataError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
REFUSED = (
    "logit_bias",
    "best_of",
    "suffix",
    "guided_json",
    "structured_outputs",
    "functions",
    "function_call",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
)
"""Fields that would have an effect which the endpoint doesn't have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What all requests have in common."""

    max_tokens: int | None
    """Greatest number of tokens; None = as many as there is room for."""
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    """Special tokens that end an answer besides the model's own end tokens."""
    sampling: Mapping[str, float]
    """The parameters of :data:`SAMPLING` that were given."""
    logprobs: bool
    top: bool
    """Whether the answer also lists each token's only known alternative, which is the token itself."""
    token_ids: bool
    """``return_token_ids``."""
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
    echo: bool


def wanted(body: Mapping[str, Any]) -> Wanted:
    """Reads the fields that the forms share.

    Raises:
        DataError: one has a value that can't be served; the message names it.
    """
    for name in REFUSED:
        if body.get(name):
            raise DataError(f"{name} isn't supported: leave it out")
    if body.get("n") not in (None, 1):
        raise DataError(f"n={body['n']!r}: ask once for each answer")
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        raise DataError(f"response_format {form.get('type')!r} isn't supported: leave it out")
    most = next(
        (body[k] for k in ("max_completion_tokens", "max_tokens") if body.get(k) is not None), None
    )
    if most is not None and (type(most) is not int or most < 0):
        raise DataError(f"max_tokens={most!r} should be a whole number")
    stop = body.get("stop") or []
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or not all(isinstance(one, str) and one for one in stops):
        raise DataError("stop should be a text, or a list of texts")
    sampling = {}
    for name in SAMPLING:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{name}={value!r} should be a number")
        sampling[name] = float(value)
    options = body.get("stream_options")
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    for name, value in (("logprobs", logprobs), ("top_logprobs", top)):
        if value not in (None, False, True, 0, 1):
            raise DataError(
                f"{name}={value!r}: only a token's own log-prob is known, ask for 1 at most"
            )
    return Wanted(
        max_tokens=most,
        stop=stops,
        stop_tokens=tuple(ids_of(body["stop_token_ids"], "stop_token_ids"))
        if body.get("stop_token_ids")
        else (),
        sampling=sampling,
        logprobs=logprobs is not None and logprobs is not False,
        top=bool(top),
        token_ids=body.get("return_token_ids") is True,
        stream=body.get("stream") is True,
        usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        echo=body.get("echo") is True,
    )


def messages_of(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages of a chat request.

    Raises:
        DataError: they aren't a list of messages with roles.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise DataError("messages should be a list of messages")
    for message in given:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError("each message should be an object with a role and a content")
        calls = message.get("tool_calls")
        if calls is not None and not (
            isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)
        ):
            raise DataError("a message's tool_calls should be a list of calls")
    return given


def may_call(body: Mapping[str, Any]) -> bool:
    """Whether calls are to be read in the answer. Without it the tools stay in the prompt, which is thus extended."""
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def tools_of(body: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The tools that the prompt describes; None without any.

    Raises:
        DataError: they aren't functions, or the choice among them is forced.
    """
    given, choice = body.get("tools"), body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise DataError(f"tool_choice={choice!r} isn't supported: set auto or none")
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise DataError("tools should be a list")
    for tool in given:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError('each tool should be {"type": "function", "function": {"name": …}}')
    return given


def ids_of(value: Any, what: str) -> list[int]:
    """Token ids.

    Raises:
        DataError: they aren't a list of whole numbers.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} should be a list of token ids")
    if not all(type(one) is int and 0 <= one < 1 << 31 for one in value):
        raise DataError(f"{what} should hold whole numbers from 0")
    return value
