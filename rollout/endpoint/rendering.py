"""Messages to tokens by a tokenizer's chat template, such that no text of theirs becomes a special token.

A template's text is the model's own; the text of messages and tools is an environment's, a user's or the
policy's. Wherever the latter hold the text of a special token or of a tag of the tokenizer's, such as ``<|im_end|>``
or ``</tool_response>``, it is replaced by private characters before the template renders it, and encoded by a
tokenizer without added tokens afterwards. Other conversations are encoded as ``apply_chat_template`` does.

Not every family renders a longer conversation as the shorter one with something after it (docs/environments.md has the
table). It doesn't matter here where a client sends back the answers that it got: what comes after them is rendered after
a conversation of two messages, and added to the tokens that were sampled (:meth:`Renderer.suffix`). Where a template
has no special token at an answer's end, or refuses such a conversation, all of it is rendered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from ...common.errors import DataError

OPEN, CLOSE, FIRST = "\ue000", "\ue001", 0xE100
"""Private characters: an added token's number is written between the first two."""
BRACKETS = ("<>", "[]")
"""How tags among a tokenizer's added tokens begin and end; other added tokens are words like any other."""
MOST_CHARACTERS = 64
"""Characters a token that an observation may have, before it is cut without counting its tokens."""
MARK = "\ue002"
"""Stands for the answer in the conversation behind which a tail is rendered."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have. Templates write them as they are, so that no other text may be one."""
NOTHING = re.compile("(?!)")
"""Matches no text."""
TAIL = frozenset(ROLES) - {"assistant"}
"""Roles of messages that go on behind an answer without rendering the conversation anew."""
Message = Mapping[str, Any]


def plain_message(message: Message) -> dict[str, Any]:
    """What two spellings of a message have in common: role, text, and calls with their arguments as values."""
    made: dict[str, Any] = {"role": message.get("role"), "content": text_of(message)}
    calls = []
    for call in message.get("tool_calls") or ():
        function = _function_of(call)
        calls.append([function.get("name"), _arguments_of(function)])
    if calls:
        made["tool_calls"] = calls
    return made


def _function_of(call: Any) -> Mapping[str, Any]:
    """The function's name and arguments in a call of either spelling."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _arguments_of(function: Mapping[str, Any]) -> Any:
    """A call's arguments as values, where they are JSON."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return arguments


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
        special = {
            *tokenizer.all_special_tokens,
            *(one.content for one in tokenizer.added_tokens_decoder.values() if one.special),
        }
        tags = [name for name in added if name in special or name[:1] + name[-1:] in BRACKETS]
        # The private characters themselves, so that a text that holds them comes back as it was.
        self._names = [*tags, OPEN, CLOSE]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._any = re.compile("|".join(map(re.escape, self._names)))
        self._special = re.compile(
            "|".join(map(re.escape, [*(tag for tag in tags if tag in special), OPEN, CLOSE]))
        )
        ends = "|".join(re.escape(tag) for tag in tags if tag in special) or NOTHING.pattern
        self._ends = re.compile(ends)
        # Special tokens one after another; the first one is a group.
        self._closing = re.compile(f"({ends})(?:{ends})*")
        self._hidden = re.compile(f"({OPEN}.{CLOSE})", re.DOTALL)

    @cached_property
    def _backend(self) -> Any:
        """A copy of the tokenizer's backend: cheaper to ask, and not shared with the engine's threads."""
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def _plain(self) -> Any:
        """The same without its added tokens."""
        from tokenizers import Tokenizer

        content = json.loads(self._tokenizer.backend_tokenizer.to_str())
        content |= {
            "added_tokens": [],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        return Tokenizer.from_str(json.dumps(content))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text whose special tokens count, as of a prompt of ``/v1/completions``."""
        tokens: list[int] = self._backend.encode(_utf8(text), add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones included.

        Raises:
            DataError: one of them can't be a token.
        """
        try:
            text: str = self._backend.decode(list(tokens), skip_special_tokens=False)
        except OverflowError:
            raise DataError("token ids should be whole numbers from 0") from None
        return text

    def special_texts(self, tokens: Sequence[int]) -> list[str]:
        """The texts of special tokens at which a client wants an answer to end.

        Raises:
            DataError: one is a token that isn't special.
        """
        found = []
        for token in tokens:
            text = self.special(token)
            if text is None:
                raise DataError(
                    f"stop_token_ids: {token} isn't a special token: name its text in stop instead"
                )
            found.append(text)
        return found

    def special(self, token: int) -> str | None:
        """The text of a special token; None if the token is another one."""
        text = self.decode([token])
        return text if self._ends.fullmatch(text) else None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: bool = True,
        plain: bool = False,
    ) -> list[int]:
        """Tokens of a whole conversation.

        Args:
            messages: in OpenAI's form.
            tools: the tools that are offered, in OpenAI's form.
            opened: whether the assistant's next turn is opened.
            plain: whether it is encoded as ``apply_chat_template`` does, with special tokens wherever their text
                stands, and nothing is cut.

        Raises:
            DataError: the template can't render it.
        """
        if plain:
            return self.encode(self._text(messages, tools, opened, plain=True))
        return self._encoded(self._text(messages, tools, opened))

    def characters(self, messages: Sequence[Message]) -> int:
        """About how many characters of a conversation would be rendered, long observations cut."""
        most, found, answered = MOST_CHARACTERS * self._longest, 0, False
        for message in messages:
            role, length = message.get("role"), len(text_of(message))
            is_observation = role == "tool" or (answered and role == "user")
            found += min(length, most) if is_observation else length
            answered = answered or role in ("assistant", "tool")
        return found

    def suffix(
        self,
        tail: Sequence[Message],
        last: int,
        ended: bool,
        calls: Sequence[Any] = (),
        *,
        with_tools: bool = False,
    ) -> list[int] | None:
        """Tokens that a conversation gains by messages of others behind an answer.

        Args:
            tail: the messages.
            last: the answer's last token.
            ended: whether the policy has ended the answer. If it did so by a special token, this one stands for
                the template's own end of a turn; otherwise the latter is added.
            calls: the answer's tool calls in OpenAI's form, whose names some templates write beside the results.
            with_tools: whether the conversation has tools, for which some models have a template of their own.

        Returns:
            None if the template doesn't render them apart from what is before.
        """
        if not tail or any(message.get("role") not in TAIL for message in tail):
            return None
        for before in _before(tail[0], calls):
            try:
                text = self._text(
                    [*before, *self._bounded(tail, answered=True)],
                    None,
                    True,
                    bounded=True,
                    with_tools=with_tools,
                )
            except DataError:
                continue
            # The first one: what a client wrote comes after it.
            answer = text.find(MARK)
            closing = self._closing.search(text, answer) if answer >= 0 else None
            if closing is not None:
                return self._encoded(text[closing.start() + self._written(closing, last, ended) :])
        return None

    def lost(self) -> str:
        """What the tokens of an episode would lack of a tool's call and its result; empty if they have both.

        Raises:
            DataError: the template refuses them.
        """
        parameters = {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        }
        offered = {"name": "f", "description": "x", "parameters": parameters}
        tool = {"type": "function", "function": offered}

        def tokens(argument: int, result: str) -> tuple[int | None, list[int]]:
            function = {"name": "f", "arguments": {"a": argument}}
            call = {"id": "call00000", "type": "function", "function": function}
            answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            told: Message = {"role": "tool", "tool_call_id": "call00000", "content": result}
            behind = self.suffix([told], 0, False, [call], with_tools=True)
            if behind is None:
                return None, self.render([{"role": "user", "content": "x"}, answer, told], [tool])
            # The call is in what the policy has sampled.
            return argument, behind

        first = tokens(1, "3")
        if first == tokens(1, "4"):
            return "a tool's result"
        return "a tool's call" if first == tokens(2, "3") else ""

    def _written(self, closing: re.Match[str], last: int, ended: bool) -> int:
        """How many characters of the special tokens that close an answer the policy has written itself."""
        said = self.special(last)
        if said is None:
            return 0
        # A call and the turn may have an end each, and the policy may have written both.
        place = closing[0].find(said)
        if place == 0 or (ended and place > 0):
            return place + len(said)
        return len(closing[1]) if ended else 0

    def _bounded(
        self, messages: Sequence[Message], *, answered: bool = False, whole: bool = False
    ) -> list[dict[str, Any]]:
        """Messages with texts alone, long observations cut unless they should stay whole."""
        made = []
        for message in messages:
            role = message.get("role")
            if role not in ROLES:
                raise DataError(f"a message's role should be one of {', '.join(ROLES)}")
            one: dict[str, Any] = {**message, "content": text_of(message)}
            if not whole and (role == "tool" or (answered and role == "user")):
                one["content"] = self._observation(one["content"])
            answered = answered or role in ("assistant", "tool")
            made.append(one)
        return made

    def _observation(self, text: str) -> str:
        """The text cut to that number of tokens: its beginning and its end, with a mark between them."""
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
        plain: bool = False,
        with_tools: bool = False,
    ) -> str:
        """The template's text, in which added tokens of the contents are hidden, unless it is plain. ``with_tools``
        says that the conversation has tools even if they aren't written here."""
        hidden = []
        for message in messages if bounded else self._bounded(messages, whole=plain):
            pattern = self._special if message.get("role") == "assistant" else self._any
            pattern = NOTHING if plain else pattern
            one = {key: value for key, value in message.items() if key != "role"}
            if one.get("tool_calls"):
                one["tool_calls"] = [_with_values(call) for call in one["tool_calls"]]
            # After the arguments were read: JSON can spell the text of a special token in other letters.
            one = {key: self._hide(value, pattern) for key, value in one.items()}
            hidden.append({"role": message["role"], **one})
        every = NOTHING if plain else self._any
        offered = [self._hide(tool, every) for tool in tools] if tools else None
        # Of several templates, transformers takes the one for tools where it is given any, if only an empty list.
        templates = getattr(self._tokenizer, "chat_template", None)
        if with_tools and isinstance(templates, dict) and "tool_use" in templates:
            offered = offered or []
        render = partial(
            self._tokenizer.apply_chat_template,
            tools=offered,
            add_generation_prompt=opened,
            tokenize=False,
        )
        try:
            try:
                text = render(hidden)
            except TypeError:
                # Some templates, such as DeepSeek-V3's, put arguments into their text as they are.
                text = render([_with_json(message) for message in hidden])
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
                self._hide(key, pattern): self._hide(one, pattern) for key, one in value.items()
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


def _with_values(call: Any) -> dict[str, Any]:
    """A call whose arguments are values: templates write them as JSON, which a text would be a second time."""
    return _with_arguments(call, _arguments_of(_function_of(call)))


def _with_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        given = _function_of(call).get("arguments")
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(_with_arguments(call, text))
    return {**message, "tool_calls": calls} if calls else dict(message)


def _with_arguments(call: Any, arguments: Any) -> dict[str, Any]:
    made = {**_function_of(call), "arguments": arguments}
    return {**call, "function": made} if "function" in call else made


def _before(first: Message, calls: Sequence[Any]) -> list[list[Message]]:
    """Questions with an answer behind which messages can be rendered that begin with this one, the best first."""
    question: Message = {"role": "user", "content": "x"}
    said: list[Message] = [question, {"role": "assistant", "content": MARK}]
    if first.get("role") != "tool":
        return [said]
    asked = first.get("tool_call_id")
    made = [(call.get("id"), _function_of(call).get("name")) for call in calls]
    made = made or [(asked, first.get("name"))]
    found = [made]
    if len(made) > 1:
        # Some templates refuse several calls, or write the first one alone.
        found.append([next((one for one in made if one[0] == asked), made[0])])
    called: list[list[Message]] = [
        [question, {"role": "assistant", "content": "", "tool_calls": _marked(some)}]
        for some in found
    ]
    # Some templates write results and no calls, which then are in the policy's own tokens alone.
    return [*called, said]


def _marked(calls: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Calls of these ids and names. The mark is an argument of the last one: some templates leave out the text of an
    answer that calls."""
    return [
        {
            "id": str(call_id or "call00000"),
            "type": "function",
            "function": {
                "name": str(name or "tool"),
                "arguments": {MARK: 0} if number == len(calls) else {},
            },
        }
        for number, (call_id, name) in enumerate(calls, 1)
    ]


def _utf8(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
