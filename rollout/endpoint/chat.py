"""A conversation in a session: where its messages continue what was sampled, and what an answer looks like."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...common.records import FinishReason, Sample
from .families import family_of
from .rendering import MOST_CHARACTERS, Message, Renderer, plain_message
from .requests import Wanted
from .sessions import Answered, Branch, Session, Ticket
from .tools import MOST_CALLS, Parsed, format_of, parse

LONG_CHARACTERS = 32_768
"""A longer conversation is rendered by a thread, while the worker's loop goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An assistant's message in OpenAI's form."""

    message: dict[str, Any]
    finish_reason: str
    malformed: int
    """Number of its tool calls that can't be parsed."""


class Chat:
    """Conversations with one tokenizer.

    Args:
        tokenizer: with a chat template.
        tools: ``environments.tools``.
        observation_tokens: see :class:`.rendering.Renderer`.
    """

    def __init__(self, tokenizer: Any, tools: str, observation_tokens: int) -> None:
        self.renderer = Renderer(tokenizer, observation_tokens)
        self._tokenizer = tokenizer
        self._format = format_of(tokenizer, tools)
        self._family = None
        if tools != "auto" or getattr(tokenizer, "response_template", None) is None:
            self._family = family_of(tokenizer, tools)

    async def place(
        self,
        session: Session,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Ticket:
        """Finds where a conversation continues the session.

        Without a session all of it is rendered, as ``apply_chat_template`` does. If it consists of an earlier one, the answer that this one got, and messages of users and tools, their
        tokens go behind the recorded ones. Otherwise all of it is rendered, and placed by its tokens or text.

        Raises:
            DataError: the template can't render it.
            NoRoomError: no token could be sampled after it.
        """
        plain = [plain_message(message) for message in messages]
        offered = _canonical(tools)
        for branch, turn in _latest(session):
            count = turn.messages
            tail = messages[count:]
            if not (count and tail and branch.tools == offered):
                continue
            if turn.streamed and turn is branch.turns[-1] and not branch.busy:
                self._shorten(session, branch, plain[:count])
            if branch.messages[:count] != plain[:count]:
                continue
            calls = messages[count - 1].get("tool_calls") or ()
            added = self.renderer.suffix(
                tail, branch.tokens[turn.end - 1], turn.ended, calls, with_tools=bool(tools)
            )
            if added is None:
                continue
            if turn is branch.turns[-1] and not branch.busy:
                return session.extend(branch, added)
            return session.fork(branch, turn, added)
        if len(messages) > session.room:
            raise session.no_room(
                f"the conversation has {len(messages):,} messages, and there is room for "
                f"{session.room:,} tokens"
            )
        characters = self.renderer.characters(messages)
        session.check_characters(characters, MOST_CHARACTERS)
        render = partial(self.renderer.render, messages, tools, plain=not session.key)
        prompt = await asyncio.to_thread(render) if characters > LONG_CHARACTERS else render()
        repeats = any(one in plain for one in _answers(session))
        return session.place(prompt, self.renderer.decode, repeats=repeats)

    def _shorten(self, session: Session, branch: Branch, given: list[dict[str, Any]]) -> None:
        """Cuts an answer whose client may have gone to what the client goes on with: there may have been more of it
        by then, or all of it."""
        *before, said = given
        text = said["content"]
        if branch.messages[:-1] != before or said != {"role": "assistant", "content": text}:
            return

        def decode(tokens: Sequence[int]) -> str:
            return str(
                self._tokenizer.decode(
                    tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )

        if branch.messages[-1] != said and session.shorten(branch, text, decode):
            branch.messages[-1] = said

    def answer(
        self,
        session: Session,
        ticket: Ticket,
        sample: Sample,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        want: Wanted,
        *,
        may_call: bool = True,
    ) -> Answer:
        """Records a turn and makes a message of it."""
        turn = session.record(ticket, sample)
        said = Parsed(content=sample.text, calls=(), malformed=0)
        if tools and may_call:
            # A stop string that ends an answer may also end a call.
            has_end = turn.ended and self.renderer.special(int(sample.tokens[-1])) is not None
            tokens = sample.tokens.tolist()
            most = 1 if want.single_call else MOST_CALLS
            text = self.renderer.decode(tokens[:-1] if has_end else tokens)
            if self._family is not None:
                # All tokens: the one that ends a turn of gpt-oss also closes its call.
                said = self._family.parse(
                    *(tokens, text),
                    prompt=ticket.context.tolist(),
                    tools=tools,
                    most=most,
                )
            else:
                said = parse(
                    text,
                    self._format,
                    self._tokenizer,
                    prefix=lambda: self.renderer.decode(ticket.context.tolist()),
                    most=most,
                )
        content = said.content if said.calls else want.said(sample.text, turn.ended)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call.id or _call_id(session, ticket, number),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for number, call in enumerate(said.calls)
            ]
        session.tool_calls += len(said.calls) + said.malformed
        session.malformed_calls += said.malformed
        turn.malformed = bool(said.malformed)
        branch = ticket.branch
        plain = [plain_message(one) for one in messages]
        if plain[: len(branch.messages)] != branch.messages:
            # The client has divided the same text among its messages in another way.
            for earlier in branch.turns:
                earlier.messages = 0
        branch.messages = [*plain, plain_message(message)]
        branch.tools = _canonical(tools)
        turn.messages = len(branch.messages)
        cut = sample.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        reason = "length" if cut else "tool_calls" if said.calls else "stop"
        return Answer(message=message, finish_reason=reason, malformed=said.malformed)


def _latest(session: Session) -> list[tuple[Branch, Answered]]:
    """All turns of a session's branches, of each branch and of all branches the latest first."""
    return [
        (branch, turn) for branch in reversed(session.branches) for turn in reversed(branch.turns)
    ]


def _answers(session: Session) -> list[dict[str, Any]]:
    """The messages with which a session was answered, except empty ones."""
    found = [
        branch.messages[turn.messages - 1]
        for branch in session.branches
        for turn in branch.turns
        if turn.messages
    ]
    return [one for one in found if one["content"].strip() or "tool_calls" in one]


def _call_id(session: Session, ticket: Ticket, number: int) -> str:
    """Nine letters and digits, as the templates of Mistral's models want them: the same when an episode is played
    again, since templates write them into prompts, and others in every other turn and session."""
    spec = session.spec
    name = f"{spec.seed}/{spec.name}/{ticket.order}/{number}"
    return base64.b32encode(hashlib.blake2b(name.encode()).digest())[:9].decode()


def _canonical(tools: Sequence[Mapping[str, Any]] | None) -> str | None:
    return json.dumps(tools, sort_keys=True) if tools else None
