"""Whole conversations as tokens to learn from: those of the assistant, and between them those of users and tools.

An answer is what the model's chat template writes for it behind the conversation before it with the assistant's next turn
opened, up to and with the special token that ends it. So it begins where a model that is asked begins, and ends where it
ends. Whatever stands between two answers is context. For this the text up to an answer has to be how the text up to the next
one begins. Some templates break that, as those that leave earlier thoughts out: with them no text shows all turns as the
model would have written them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common import prompts
from ...common.config import Config
from ...common.config.checks.choices import whole_conversations
from ...common.errors import ConfigError
from ...common.plain import one_line
from ...common.records import Source
from ...replay.forms import Content, RowError
from ...replay.forms.row import as_messages, is_learned

COLUMN = "messages"
WAY_OUT = "set turns=last, or give the model's folder another chat_template.jinja"
SHOWN = 20
"""Characters that are shown from where two texts differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of a conversation."""

    said: str
    """What the assistant says."""
    after: str
    """The special token that ends it, and what the template writes between it and the next answer."""
    learned: bool = True
    """Whether it is learned from; False = context, since the data give it a weight of 0."""


def check(config: Config, tokenizer: Any) -> None:
    """Refuses to learn from all answers where a conversation can't be told apart.

    Raises:
        ConfigError: the model has no chat template, or the prompts aren't of it.
    """
    refused = whole_conversations(config.data)
    if refused is not None:
        raise ConfigError(refused)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the model has no chat template, by which turns=all tells answers from what users and tools wrote: put a "
            "chat_template.jinja into its folder, or set turns=last"
        )


def answers(tokenizer: Any, content: Content, config: Config) -> tuple[Answer, ...]:
    """The answers of a conversation, in order.

    Args:
        tokenizer: the model's, with a chat template.
        content: a row with ``turns``.
        config: has the system prompt.

    Raises:
        RowError: the template can't render it, doesn't write it turn by turn, or ends no answer with a special token.
    """
    messages: list[Any] = [*as_messages(content.prompt), *content.turns]
    messages = prompts.with_system(messages, config.data)
    places = [place for place, one in enumerate(messages) if one["role"] == "assistant"]
    try:
        before = prompts.by_chat_template(
            tokenizer, [messages[:place] for place in places], content.tools, opened=True
        )
        behind = prompts.by_chat_template(
            tokenizer, [messages[: place + 1] for place in places], content.tools, opened=False
        )
    except Exception as error:  # noqa: BLE001 - a chat template may raise anything
        why = "is why the chat template refused a row"
        raise RowError(COLUMN, one_line(error), why, WAY_OUT) from None
    ending = re.compile(f"({'|'.join(map(re.escape, _special(tokenizer)))})\\s*$")
    found = []
    for number, place in enumerate(places):
        start, text = before[number], behind[number]
        _check_begins(text, start, f"message {place + 1}")
        closed = ending.search(text, len(start))
        if closed is None:
            raise RowError(
                COLUMN,
                text[-SHOWN:],
                "is how the chat template ends an answer, without a special token to stop at",
                WAY_OUT,
            )
        whole = text[: closed.end(1)]
        if number + 1 < len(places):
            whole = before[number + 1]
            _check_begins(whole, text, f"message {places[number + 1] + 1}")
        end = closed.start(1)
        learned = is_learned(messages[place])
        found.append(Answer(said=text[len(start) : end], after=whole[end:], learned=learned))
    return tuple(found)


def _check_begins(text: str, start: str, which: str) -> None:
    """Refuses a conversation up to a message if a shorter one isn't how it begins."""
    if text.startswith(start):
        return
    pairs = enumerate(zip(start, text, strict=False))
    differ = next((place for place, (one, other) in pairs if one != other), len(text))
    raise RowError(
        COLUMN,
        start[differ:][:SHOWN],
        "is what the chat template writes otherwise once more messages follow",
        f"with {which} it is {text[differ:][:SHOWN]!r}: {WAY_OUT}",
    )


def _special(tokenizer: Any) -> list[str]:
    """The texts of the special tokens, longer ones first."""
    added = tokenizer.added_tokens_decoder.values()
    found = {*tokenizer.all_special_tokens, *(one.content for one in added if one.special)}
    return sorted(found, key=len, reverse=True)


def size(conversation: Sequence[Answer]) -> int:
    """Characters of a conversation behind its prompt."""
    return sum(len(one.said) + len(one.after) for one in conversation)


def encode(
    tokenizer: Any, conversations: Sequence[Sequence[Answer]]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
    """For each conversation its ``[L]`` token ids behind the prompt, and their ``[L]`` sources.

    Each answer is encoded by itself, as when it is sampled, and whatever is behind it from its special token on, as in the
    whole text. The last token is the tokenizer's end token, which is added if the template writes another one.
    """
    texts = [text for each in conversations for one in each for text in (one.said, one.after)]
    encoded = iter(prompts.encode_all(tokenizer, texts))
    for each in conversations:
        tokens, sources = [], []
        for answer in each:
            said, after = next(encoded), next(encoded)
            tokens += [said, after]
            # The special token is the assistant's.
            own = Source.EXPERT if answer.learned else Source.ENVIRONMENT
            sources += [own] * (len(said) + 1) + [Source.ENVIRONMENT] * (len(after) - 1)
        joined = prompts.ended(tokenizer, np.concatenate(tokens))
        sources += [Source.EXPERT] * (len(joined) - len(sources))
        yield joined, np.array(sources, np.uint8)
