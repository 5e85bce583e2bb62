"""Requests to the endpoint in OpenAI's and vLLM's forms, read and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.errors import DataError

if TYPE_CHECKING:
    from aiohttp import web

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
REFUSED = (
    "logit_bias",
    "best_of",
    "suffix",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "bad_words",
    "allowed_token_ids",
    "use_beam_search",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "ignore_eos",
    "min_tokens",
    "structured_outputs",
    "functions",
    "function_call",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "reasoning_effort",
    "add_special_tokens",
)
"""Fields that would have an effect which the endpoint doesn't have, unless they are 0, false or empty."""
NEUTRAL = {
    "repetition_penalty": 1,
    "length_penalty": 1,
    "add_generation_prompt": True,
    "skip_special_tokens": True,
}
"""Such fields with the value that has no effect."""
MOST_ALTERNATIVES = 20
"""Log-probs of other tokens at each place; vLLM gives no more."""
MOST_ANSWERS = 1024
"""Answers of one request: its prompts times ``n``."""
SEEDS = 1 << 63
"""Seeds are taken modulo this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What all requests have in common."""

    max_tokens: int | None
    """Greatest number of tokens; None = as many as there is room for."""
    stop: tuple[str, ...]
    """Texts that end an answer, and aren't part of what is answered."""
    keeps_stop: bool
    """``include_stop_str_in_output``: whether such a text is part of it."""
    stop_tokens: tuple[int, ...]
    """Special tokens that end an answer besides the model's own end tokens."""
    sampling: Mapping[str, float]
    """The parameters of :data:`SAMPLING` that were given."""
    logprobs: bool
    top: int
    """Number of most likely tokens that are told at each place; where it is 1, a sampled token may stand for it."""
    token_ids: bool
    """``return_token_ids``."""
    ids_as_texts: bool
    """``return_tokens_as_token_ids``: log-probs name tokens ``token_id:N``, since several may have one text."""
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
    echo: bool
    count: int
    """``n``: answers to each prompt."""
    seed: int | None
    """Equal seeds give equal answers to equal prompts."""

    single_call: bool
    """Whether an answer has one tool call at most."""

    def check_session(self, prompts: int = 1) -> None:
        """Refuses what a session can't record.

        Raises:
            DataError: several answers, an echo or other tokens' log-probs are asked for.
        """
        if self.echo:
            raise DataError("echo isn't supported within a session: leave it out")
        if self.count > 1 or prompts > 1:
            raise DataError(
                f"n={self.count} with {prompts} prompts: within a session ask once for each answer"
            )
        if self.top > 1:
            raise DataError(
                f"{self.top} log-probs at each place: within a session only a token's own one is known, ask for "
                f"1 at most"
            )

    def check_tokens(self) -> None:
        """Refuses a request in whose answer nothing would be sampled.

        Raises:
            DataError: ``max_tokens`` is 0.
        """
        if self.max_tokens == 0:
            raise DataError("max_tokens=0 leaves nothing to sample: set 1 or more")

    def said(self, text: str, ended: bool) -> str:
        """What is answered of a sampled text: nothing from the first text of ``stop`` on, if the policy has ended it."""
        if self.keeps_stop or not ended:
            return text
        places = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text


def wanted(body: Mapping[str, Any]) -> Wanted:
    """Reads the fields that the forms share.

    Raises:
        DataError: one has a value that can't be served; the message names it.
    """
    for name in REFUSED:
        if body.get(name):
            raise DataError(f"{name} isn't supported: leave it out")
    for name, neutral in NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            raise DataError(f"{name}={body[name]!r} isn't supported: leave it out")
    count = 1 if body.get("n") is None else body["n"]
    if type(count) is not int or not 1 <= count <= MOST_ANSWERS:
        raise DataError(f"n={count!r} should be a whole number from 1 to {MOST_ANSWERS}")
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise DataError(f"seed={seed!r} should be a whole number")
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
    if any("\ud800" <= letter <= "\udfff" for one in stops for letter in one):
        raise DataError("stop has half of a surrogate pair, which no token can write")
    sampling = {}
    for name in SAMPLING:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{name}={value!r} should be a number")
        try:
            sampling[name] = float(value)
        except OverflowError:
            sampling[name] = math.inf
        if not math.isfinite(sampling[name]):
            raise DataError(f"{name}={sampling[name]} should be a finite number")
    options = body.get("stream_options")
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    for name, value in (("logprobs", logprobs), ("top_logprobs", top)):
        if value is not None and not (isinstance(value, int) and 0 <= value <= MOST_ALTERNATIVES):
            raise DataError(f"{name}={value!r} should be a number from 0 to {MOST_ALTERNATIVES}")
    return Wanted(
        max_tokens=most,
        stop=stops,
        keeps_stop=body.get("include_stop_str_in_output") is True,
        stop_tokens=tuple(ids_of(body["stop_token_ids"], "stop_token_ids"))
        if body.get("stop_token_ids")
        else (),
        sampling=sampling,
        logprobs=logprobs is not None and logprobs is not False,
        # OpenAI's two forms: a number, or true and another field's number.
        top=int(logprobs if top is None and type(logprobs) is int else top or 0),
        token_ids=body.get("return_token_ids") is True,
        ids_as_texts=body.get("return_tokens_as_token_ids") is True,
        stream=body.get("stream") is True,
        usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        echo=body.get("echo") is True,
        count=count,
        seed=None if seed is None else seed % SEEDS,
        single_call=body.get("parallel_tool_calls") is False,
    )


def prompts_of(body: Mapping[str, Any], count: int) -> Sequence[str | list[int]]:
    """The prompts of a completion: one or several, each as text or token ids.

    Args:
        body: the request.
        count: answers to each.

    Raises:
        DataError: they are neither, or too many.
    """
    given = body.get("prompt")
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    prompts: list[Any] = given if isinstance(given, list) and several else [given]
    if len(prompts) * count > MOST_ANSWERS:
        raise DataError(
            f"{len(prompts)} prompts with n={count}: ask for {MOST_ANSWERS} answers at most"
        )
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            ids_of(prompt, f"prompt {number}" if several else "prompt")
    return prompts


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


async def body_of(request: web.Request) -> Mapping[str, Any]:
    """The request's JSON object.

    Raises:
        DataError: it isn't one.
    """
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise DataError("the request's body isn't JSON") from None
    if not isinstance(body, dict):
        raise DataError("the request's body should be a JSON object")
    return body


def key_of(request: web.Request) -> str:
    """The key in a request's path, else in its header; empty without one."""
    key = request.match_info.get("key")
    if key is not None:
        return key
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
