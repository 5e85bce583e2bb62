"""Pairs of a better and a worse response: ``chosen`` and ``rejected``, each a text or a list of messages.

The prompt is the first column there of ``prompt``, ``question``, ``instruction`` (with ``input`` or
``context`` behind it) and ``input``: a text or a list of messages. A text in ``system`` becomes its system
message unless it has one, and ``history`` has the turns before a question of text, as in ``prompt_response``.
In a row with none of these columns both responses begin with the prompt: it is what they have in common, by
message for lists and by character for texts (TRL's implicit prompt), where a blank at its end belongs to the
responses. Messages that two lists have in common are the prompt in any row, unless they are only the end of what the
column asks: then it is the column. If they begin with an answer to it, they follow it, and a system message that only
the column has stands before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import (
    GOLDS,
    SOURCES,
    Content,
    Message,
    RowError,
    as_prompt,
    first_of,
    gold_of,
    instruction,
    messages,
    needed,
    others,
    present,
    prompt,
    question,
    source_of,
    text,
    unread,
    with_history,
)

PROMPTS = ("prompt", "question", "instruction", "input")


def read(row: Mapping[str, Any]) -> Content:
    common: tuple[Message, ...] = ()
    if isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list):
        common, chosen, rejected = _of_messages(row)
        asked = _conversation(row, common) if common else _asked(row)
    else:
        chosen, rejected = text(row, "chosen"), text(row, "rejected")
        asked = _asked(row)
        # Two answers to a question in a column of its own have no prompt in common, only a few words.
        if not asked and not any(column in row for column in PROMPTS):
            shared = shared_prompt(chosen, rejected)
            asked = question(shared) if shared.strip() else ()
            chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
    if not asked:
        raise RowError("prompt", None, "is missing", "both responses have to begin with it, else")
    check_pair(chosen, rejected)
    whole, before = with_history(row, None if common else first_of(row, PROMPTS), asked)
    used = (*PROMPTS, *before)
    if row.get("instruction") is not None:
        used = (*used, "context")
    return Content(
        prompt=whole,
        gold=gold_of(row),
        target=chosen,
        rejected=rejected,
        data_source=source_of(row),
        extra=others(row, (*used, "chosen", "rejected", *GOLDS, *SOURCES)),
        unread=unread(row, "chosen") or unread(row, "rejected"),
    )


def _asked(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """What the row's own column asks; nothing without one."""
    column = first_of(row, PROMPTS)
    if column is None:
        return ()
    return instruction(row) if column == "instruction" else prompt(row, column)


def _conversation(row: Mapping[str, Any], common: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation that these shared messages and the row's own column make: one of them is a part of the other, its
    system message aside, or the shared ones go on from the column with an answer."""
    column = first_of(row, PROMPTS)
    if column is None or not isinstance(row[column], list) or not row[column]:
        return common
    asked = messages(row, column)
    shared = _words(common)
    # An answer that the responses begin with again isn't what they answer.
    if _words(asked)[-len(shared) :] == shared and asked[-1].role != "assistant":
        return asked
    system = asked[:1] if asked[0].role == "system" != common[0].role else ()
    ours = _words(asked[len(system) :])
    if ours in (shared[: len(ours)], shared[-len(ours) :]):
        return (*system, *common)
    if asked[-1].role != "assistant" and common[0].role == "assistant":
        return (*asked, *common)
    what = "and the messages that both responses begin with are two different conversations"
    raise RowError(column, row[column], what, "leave one of them out")


def _words(said: tuple[Message, ...]) -> list[tuple[str, list[str]]]:
    return [(message.role, message.content.split()) for message in said]


def check_pair(chosen: str, rejected: str) -> None:
    """Refuses a pair that says nothing: with an empty side, or two equal ones."""
    for column, value in (("chosen", chosen), ("rejected", rejected)):
        if not value.strip():
            raise RowError(column, value, "is empty", "a pair needs two responses")
    if chosen == rejected:
        raise RowError("rejected", rejected, "is the chosen response", "a pair needs two of them")


def shared_prompt(chosen: str, rejected: str) -> str:
    """What two texts begin with, without a blank at its end.

    >>> shared_prompt("The sky is blue", "The sky is black")
    'The sky is bl'
    >>> shared_prompt("2+2? Four", "2+2? Five")
    '2+2? F'
    >>> shared_prompt("2+2? 4", "2+2? 5")
    '2+2?'
    """
    pairs = enumerate(zip(chosen, rejected, strict=False))
    end = next((place for place, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    return chosen[:end].removesuffix(" ")


def _of_messages(row: Mapping[str, Any]) -> tuple[tuple[Message, ...], str, str]:
    chosen, rejected = messages(row, "chosen"), messages(row, "rejected")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    for column, rest in (("chosen", chosen[shared:]), ("rejected", rejected[shared:])):
        if len(rest) != 1 or rest[0].role != "assistant":
            raise RowError(
                column,
                row[column],
                "isn't one answer to the shared messages",
                "a pair is two answers of the assistant to the same messages",
            )
    return chosen[:shared], chosen[-1].content, rejected[-1].content


def write(content: Content) -> dict[str, Any]:
    return {
        **content.extra,
        **present(
            prompt=as_prompt(content),
            chosen=needed(content.target, "chosen", "preference"),
            rejected=needed(content.rejected, "rejected", "preference"),
            gold=content.gold,
            data_source=content.data_source,
        ),
    }


FORM = Form(
    name="preference",
    about="chosen/rejected, with or without a prompt, as for DPO",
    columns=(("chosen", "rejected"),),
    also=(*PROMPTS, *GOLDS, *SOURCES),
    read=read,
    write=write,
)
