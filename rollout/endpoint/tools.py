"""Tool calls in what a policy has written, by the format of its family.

=========  ====================================================  =================================
format     a call                                                families
=========  ====================================================  =================================
hermes     ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``  Hermes, Qwen2.5, Qwen3, QwQ
llama      ``{"name": …, "parameters": {…}}``, perhaps behind        Llama 3.1, 3.2, 3.3
           ``<|python_tag|>``, several with ``;`` between them
json       the same, or a list of such objects, perhaps behind a     Mistral; any model that is told to
           text and ``[TOOL_CALLS]``, or in a fence
=========  ====================================================  =================================

A tokenizer with a response template of its own (transformers' ``response_template``) is parsed by that, and other
families by the package renderers (:mod:`.families`). Text is read as JSON and never evaluated. What stands in thoughts
before the first call (``<think>…</think>``, or behind a ``<think>`` that nothing closes) is no call. Where the prompt
has the ``<think>`` and nothing closes it, it opens no thoughts: a call is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Format = Literal["hermes", "llama", "json"]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?[^\S\n]*+\n(.*?)\n```", re.DOTALL)
_TAG = re.compile(r"\[TOOL_CALLS\]\s*(?=[\[{])")
_LINE = re.compile(rf"^[^\S\n]*{_TAG.pattern}", re.MULTILINE)
_OPENING = re.compile(r"\s*(?:<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|```(?:json)?)?\s*")
"""What a call may begin with before its JSON."""
_JSON = re.compile(r"(?:\[\s*)?\{")
_THINKING, _THOUGHT = "<think>", "</think>"
_FIRST = {
    "hermes": re.compile(r"</?think>|<tool_call>"),
    "llama": re.compile(r"</?think>|(?:\A|(?<=</think>))\s*(?:\{|<\|python_tag\|>)"),
    "json": re.compile(r"</?think>|(?:\A|(?<=</think>))\s*(?:\[\s*)?\{|```|\[TOOL_CALLS\]"),
}
"""Where thoughts begin or end, or a call may begin: the tags in a call's arguments are text."""
_DECODER = json.JSONDecoder()
MOST_CALLS = 64
"""Calls of one turn that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """What the policy has called it by, in families whose calls have ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a turn says and calls."""

    content: str
    """The text beside the calls; all of the text if a call can't be parsed."""
    calls: tuple[Call, ...]
    malformed: int
    """Number of calls that can't be parsed; then ``calls`` is empty, since part of them would be misread."""
    reasoning: str = ""
    """Thoughts beside the calls, where they are known apart from the content."""


def format_of(tokenizer: Any, wanted: str) -> Format:
    """The format that ``environments.tools`` names, else that of the chat template."""
    if wanted in get_args(Format):
        return wanted  # type: ignore[return-value]
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if "<tool_call>" in template:
        return "hermes"
    if "python_tag" in template or '"parameters": ' in template:
        return "llama"
    return "json"


def parse(
    text: str,
    style: Format,
    tokenizer: Any = None,
    *,
    prefix: Callable[[], str] = str,
    most: int = MOST_CALLS,
) -> Parsed:
    """Finds the calls in a turn.

    Args:
        text: the turn, special tokens that aren't the end token included.
        style: how calls are written.
        tokenizer: one with a response template of its own is asked first.
        prefix: gives the text before the turn, which such a template reads and which may open thoughts.
        most: calls that are read.

    >>> parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes").calls[
    ...     0
    ... ].name
    'add'
    """
    if getattr(tokenizer, "response_template", None) is not None:
        return _by_template(text, tokenizer, prefix(), most)
    # Policies that are told to think and call at once end no thought.
    thinks = _ends_thoughts(text) and prefix().rstrip().endswith(_THINKING)
    place = _behind_thoughts(text, style, thinks)
    if place is None:
        return _no_call(text)
    thoughts, said = text[:place], text[place:]
    if style == "hermes":
        found = _HERMES.findall(said)[:most]
        return _parsed(text, found, thoughts + _HERMES.sub("", said))
    body = said.strip()
    if style == "llama":
        tagged = body.startswith("<|python_tag|>")
        body = body.removeprefix("<|python_tag|>").strip()
        if not tagged and not body.startswith("{"):
            return _no_call(text)
        return _parsed(text, _several(body, most), thoughts)
    tag = _LINE.search(said)
    if tag is not None and _names_a_call(said[tag.end() :]):
        return _by_tag(text, said, tag, thoughts, most)
    if wanted := [one for one in _FENCE.findall(said) if _names_a_call(one)][:most]:
        return _parsed(text, wanted, thoughts + _FENCE.sub("", said))
    if _JSON.match(body):
        found = _several(body, most) if _names_a_call(body) else []
        return _parsed(text, found, thoughts)
    tag = _TAG.search(said)
    if tag is None:
        return _no_call(text)
    made = _by_tag(text, said, tag, thoughts, most)
    # A text may also be about the tag.
    return _no_call(text) if made.malformed else made


def _by_tag(text: str, said: str, tag: re.Match[str], thoughts: str, most: int) -> Parsed:
    found = _several(said[tag.end() :].strip(), most)
    return _parsed(text, found, thoughts + said[: tag.start()])


def _ends_thoughts(text: str) -> bool:
    """Whether the end of thoughts stands in a text, other than in the arguments of a call with which it begins."""
    begin = _OPENING.match(text)
    assert begin is not None
    try:
        _, end = _DECODER.raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        end = 0
    return text.find(_THOUGHT, end) >= 0


def _behind_thoughts(text: str, style: Format, thinks: bool) -> int | None:
    """Where the thoughts before the first call end; None if they don't."""
    place = 0
    while True:
        if thinks:
            end = text.find(_THOUGHT, place)
            if end < 0:
                return None
            place, thinks = end + len(_THOUGHT), False
            continue
        first = _FIRST[style].search(text, place)
        if first is None or first[0] not in (_THINKING, _THOUGHT):
            return place
        place, thinks = first.end(), first[0] == _THINKING


def _no_call(text: str) -> Parsed:
    return Parsed(content=text, calls=(), malformed=0)


def _names_a_call(text: str) -> bool:
    return '"name"' in text


def _several(body: str, most: int) -> list[str]:
    """JSON objects one after another, as texts; what can't be read stays as one text."""
    found: list[str] = []
    place = 0
    while place < len(body) and len(found) < most:
        try:
            value, end = _DECODER.raw_decode(body, place)
        except (ValueError, RecursionError):
            return [*found, body[place:]]
        found += (
            [json.dumps(one) for one in value] if isinstance(value, list) else [body[place:end]]
        )
        place = end
        while place < len(body) and body[place] in " \n\r\t;,":
            place += 1
    return found[:most]


def _parsed(text: str, found: list[str], rest: str) -> Parsed:
    calls, malformed = [], 0
    for one in found:
        call = _call(one)
        if call is None:
            malformed += 1
        else:
            calls.append(call)
    if malformed:
        return Parsed(content=text, calls=(), malformed=malformed)
    return Parsed(content=rest.strip() if calls else text, calls=tuple(calls), malformed=0)


def _call(text: str) -> Call | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not can_be_sent(value):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        if not can_be_sent(arguments):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(name=name, arguments=arguments)


def can_be_sent(value: Any) -> bool:
    """Whether clients can send a value back as JSON: it has no infinite numbers, no nesting that can be read but not
    written, and no half of a surrogate pair, which JSON can spell but no text has."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _by_template(text: str, tokenizer: Any, prefix: str, most: int) -> Parsed:
    try:
        message = tokenizer.parse_response(text, prefix=prefix)
        found = [json.dumps(one["function"]) for one in message.get("tool_calls") or ()]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Parsed(content=text, calls=(), malformed=1)
    return _parsed(text, found[:most], str(message.get("content") or ""))
