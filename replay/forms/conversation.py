"""A conversation: ``messages`` (``{role, content}``) or ``conversations`` (ShareGPT's ``{from, value}``).

The last message, if it is the assistant's, is the response; those before it are the prompt. A gold
answer may stand in ``ground_truth``, ``gold``, ``expected_answer`` or ``answer``, the data set's name
in ``dataset`` or ``source``, and in ``label`` whether the response is a wanted one, true or false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import (
    GOLDS,
    SOURCES,
    Content,
    RowError,
    as_messages,
    first_of,
    gold,
    messages,
    others,
    present,
    source_of,
)

CONVERSATIONS = ("messages", "conversations")


def read(row: Mapping[str, Any]) -> Content:
    column = first_of(row, CONVERSATIONS) or CONVERSATIONS[0]
    found = messages(row, column)
    target = found[-1].content if found[-1].role == "assistant" else None
    prompt = found[:-1] if target is not None else found
    if not any(message.role == "user" for message in prompt):
        raise RowError(column, row[column], "has no user's message", "a prompt needs one")
    golds = (*GOLDS, "answer")
    answered = first_of(row, golds)
    label = row.get("label")
    is_label = isinstance(label, bool) and target is not None
    return Content(
        prompt=prompt,
        gold=gold(row[answered], answered) if answered else "",
        target=target,
        label=label if is_label else None,
        data_source=source_of(row),
        extra=others(row, (*CONVERSATIONS, *golds, *SOURCES, *(["label"] if is_label else []))),
    )


def write(content: Content) -> dict[str, Any]:
    found = as_messages(content.prompt)
    if content.target is not None:
        found.append({"role": "assistant", "content": content.target})
    return {
        **content.extra,
        **present(
            messages=found,
            ground_truth=content.gold,
            label=content.label,
            dataset=content.data_source,
        ),
    }


FORM = Form(
    name="conversation",
    about="messages or conversations, as in chat data",
    columns=tuple((column,) for column in CONVERSATIONS),
    also=(*GOLDS, *SOURCES),
    read=read,
    write=write,
)
