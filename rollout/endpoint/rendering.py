"""Messages to tokens by a tokenizer's chat template, such that no text of theirs becomes a special token.

A template's text is the model's own; what stands in messages and tools is an environment's, a user's or the
policy's. Wherever the latter hold the text of a special token or of a tag of the tokenizer's, such as ``<|im_end|>``
or ``</tool_response>``, it is replaced by private characters before the template renders it, and encoded by a
tokenizer without added tokens afterwards. Other conversations are encoded as ``apply_chat_template`` does.

Which families extend a stream of tokens exactly, that is, render a longer conversation as the shorter one with
something behind it:

=================================  ===========  ==========================================================
family, as published               extends it   otherwise
=================================  ===========  ==========================================================
ChatML, Qwen2, Qwen2.5             yes
Qwen3, QwQ, DeepSeek-R1 distilled  not always   earlier thoughts are left out as soon as a user writes again
Llama 3, 3.1, 3.2                  yes          arguments of calls are written anew
Mistral, Mixtral                   not always   spaces around contents are trimmed
Gemma                              not always   contents are trimmed
=================================  ===========  ==========================================================

It doesn't matter here where a client sends back the answers that it got: what comes after them is rendered behind
a conversation of two words, and added to the tokens that were sampled (:meth:`Renderer.suffix`). A template with
which that can't be done, because it renders the tail of a conversation by what is before it, is rendered whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ...common.errors import DataError

OPEN, CLOSE, FIRST = "\ue000", "\ue001", 0xE100
"""Private characters: an added token's number stands between the first two."""
BRACKETS = ("<>", "[]")
"""How tags among a tokenizer's added tokens begin and end; other added tokens are words like any other."""
MOST_CHARACTERS = 64
"""Characters a token that an observation may have, before it is cut without counting its tokens."""
Message = Mapping[str, Any]


def plain_message(message: Message) -> dict[str, Any]:
    """What two spellings of a message have in common: role, text, and calls with their arguments as values."""
    made: dict[str, Any] = {"role": message.get("role"), "content": text_of(message)}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                pass
        calls.append([function.get("name"), arguments])
    if calls:
        made["tool_calls"] = calls
    return made


def text_of(message: Message) -> str:
    """A message's text; parts of other kinds than text are refused.

    Raises:
        DataError: the content is neither text nor a list of texts.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
    raise DataError("a message's content should be text, or a list of texts")


class Renderer:
    """Renders with one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a backend of its own (a fast one).
        observation_tokens: longer texts of tools, and of users after the first answer, are cut in the middle.
    """

    def __init__(self, tokenizer: Any, observation_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._longest = observation_tokens
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        special = set(tokenizer.all_special_tokens)
        tags = [name for name in added if name in special or name[:1] + name[-1:] in BRACKETS]
        # The private characters themselves, so that a text that holds them comes back as it was.
        self._names = [*tags, OPEN, CLOSE]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._any = re.compile("|".join(map(re.escape, self._names)))
        self._special = re.compile(
            "|".join(map(re.escape, [*(tag for tag in tags if tag in special), OPEN, CLOSE]))
        )
        self._hidden = re.compile(f"({OPEN}.{CLOSE})", re.DOTALL)
        self._suffixes: dict[Any, str | None] = {}

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer without its added tokens."""
        from tokenizers import Tokenizer

        content = json.loads(self._tokenizer.backend_tokenizer.to_str())
        content["added_tokens"] = []
        content["post_processor"] = None
        return Tokenizer.from_str(json.dumps(content))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text whose special tokens count, as of a prompt of ``/v1/completions``."""
        return list(self._tokenizer.encode(_utf8(text), add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: bool = True,
    ) -> list[int]:
        """Tokens of a whole conversation.

        Args:
            messages: in OpenAI's form.
            tools: the tools that are offered, in OpenAI's form.
            opened: whether the assistant's next turn is opened.

        Raises:
            DataError: the template can't render it.
        """
        return self._encoded(self._text(messages, tools, opened))

    def suffix(self, tail: Sequence[Message], last: int, ended: bool) -> list[int] | None:
        """Tokens that a conversation gains by messages of users and tools behind an answer.

        Args:
            tail: the messages.
            last: the answer's last token.
            ended: whether the policy has ended the answer with that token.

        Returns:
            None if the template doesn't render them apart from what is before.
        """
        called = tail[0].get("role") == "tool"
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        before: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]}
            if called
            else {"role": "assistant", "content": "y"},
        ]
        end = self.decode([last]) if ended else str(self._tokenizer.eos_token or "")
        try:
            short = self._text(before, None, False)
            long = self._text([*before, *self._bounded(tail)], None, True, bounded=True)
        except DataError:
            return None
        place = short.rfind(end) if end else -1
        if place < 0 or not long.startswith(short[: place + len(end)]):
            return None
        return self._encoded(long[place + (len(end) if ended else 0) :])

    def _bounded(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages with texts alone, long observations cut."""
        made, answered = [], False
        for message in messages:
            role = message.get("role")
            if not isinstance(role, str):
                raise DataError("a message has no role")
            one: dict[str, Any] = {**message, "content": text_of(message)}
            if role == "tool" or (answered and role == "user"):
                one["content"] = self._observation(one["content"])
            answered = answered or role in ("assistant", "tool")
            made.append(one)
        return made

    def _observation(self, text: str) -> str:
        """A text of at most so many tokens: its beginning and its end, with a mark between them."""
        half = self._longest // 2
        if len(text) <= self._longest:
            return text
        if len(text) > MOST_CHARACTERS * self._longest:
            keep = MOST_CHARACTERS * half
            text = f"{text[:keep]}{text[-keep:]}"
        tokens = self._plain.encode(_utf8(text), add_special_tokens=False).ids
        if len(tokens) <= self._longest:
            return text
        first, last = (self._plain.decode(part) for part in (tokens[:half], tokens[-half:]))
        return f"{first}\n[… {len(tokens) - 2 * half:,} tokens left out …]\n{last}"

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        opened: bool,
        *,
        bounded: bool = False,
    ) -> str:
        """The template's text, in which added tokens of the contents are hidden."""
        hidden = []
        for message in messages if bounded else self._bounded(messages):
            pattern = self._special if message.get("role") == "assistant" else self._any
            one = {
                key: self._hide(value, pattern) for key, value in message.items() if key != "role"
            }
            for call in one.get("tool_calls") or ():
                function = call.get("function", call)
                if isinstance(function.get("arguments"), str):
                    # Templates write the arguments as JSON, which a text would be a second time.
                    try:
                        function["arguments"] = json.loads(function["arguments"])
                    except ValueError:
                        pass
            hidden.append({"role": message["role"], **one})
        offered = [self._hide(tool, self._any) for tool in tools] if tools else None
        try:
            text = self._tokenizer.apply_chat_template(
                hidden, tools=offered, add_generation_prompt=opened, tokenize=False
            )
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's
            raise DataError(
                f"the chat template can't render the conversation: {type(error).__name__}: {error}"
            ) from None
        return str(text)

    def _hide(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(
                lambda found: f"{OPEN}{chr(FIRST + self._numbers[found[0]])}{CLOSE}", value
            )
        if isinstance(value, Mapping):
            return {
                self._hide(key, self._special): self._hide(one, pattern)
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [self._hide(one, pattern) for one in value]
        return value

    def _encoded(self, text: str) -> list[int]:
        """Tokens of a rendered text: hidden tokens as letters, all others as the tokenizer has them."""
        if OPEN not in text:
            return self.encode(text)
        tokens: list[int] = []
        for part in self._hidden.split(text):
            if part.startswith(OPEN):
                name = self._names[ord(part[1]) - FIRST]
                tokens += self._plain.encode(name, add_special_tokens=False).ids
            elif part:
                tokens += self.encode(part)
        return tokens


def _utf8(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
