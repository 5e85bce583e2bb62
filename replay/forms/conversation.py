"""A conversation: ``messages`` (``{role, content}``) or ``conversations`` (ShareGPT's ``{from, value}``).

The last message, if it is the assistant's, is the response; those before it are the prompt. With ``turns: all`` of a
source the prompt is what stands before the first answer, all answers are learned from, and there may be calls of tools
(``tool_calls``), their results (messages of the role ``tool``) and a column ``tools``. A text in ``system`` is the first
message, of the role system, unless there is one. An answer whose message has a ``weight`` of 0 isn't learned from. A gold
answer may stand in ``ground_truth``, ``gold``, ``expected_answer`` or ``answer``, the data set's name in ``dataset`` or
``source``, and in ``label`` whether the last answer is a wanted one, true or false (1 or 0); a text that says neither is
a column like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .form import Form
from .row import (
    CONVERSATIONS,
    DEEPEST,
    GOLDS,
    SOURCES,
    SYSTEM,
    TOOL,
    Content,
    Message,
    RowError,
    as_list,
    as_messages,
    first_filled,
    first_of,
    gold,
    is_deeper,
    is_learned,
    is_missing,
    messages,
    others,
    plain,
    present,
    source_of,
    truth,
    unread,
    whole_messages,
    with_system,
    without_nulls,
)

SAID = ("role", "content", "from", "value")
"""Keys of a message that every form with messages reads."""
TOOLS = "tools"
"""Column with the tools that a conversation is offered."""


def read(row: Mapping[str, Any]) -> Content:
    column = _column(row)
    found = messages(row, column)
    if found[-1].role != "assistant":
        return _content(row, found, None)
    return _content(row, found[:-1], found[-1].content if is_learned(row[column][-1]) else None)


def read_whole(row: Mapping[str, Any]) -> Content:
    column = _column(row)
    found = whole_messages(row, column)
    answers = [place for place, one in enumerate(found) if one["role"] == "assistant"]
    if not answers:
        return read(row)
    learned = [place for place in answers if is_learned(found[place])]
    if not learned:
        raise RowError(column, row[column], "has only answers of weight 0", "leave the row out")
    first, last = answers[0], learned[-1]
    if any(one["role"] == TOOL for one in found[:first]):
        raise RowError(
            column, row[column], "begins with a tool's message", "let an answer call the tool"
        )
    prompt = tuple(Message(role=one["role"], content=one["content"]) for one in found[:first])
    offered = row.get(TOOLS)
    tools = () if is_missing(offered) else tuple(as_list(without_nulls(offered), TOOLS))
    return _content(
        row, prompt, found[last]["content"], turns=tuple(found[first : last + 1]), tools=tools
    )


def _column(row: Mapping[str, Any]) -> str:
    return first_of(row, CONVERSATIONS) or CONVERSATIONS[0]


def _content(
    row: Mapping[str, Any],
    prompt: tuple[Message, ...],
    target: str | None,
    turns: tuple[Mapping[str, Any], ...] = (),
    tools: tuple[Mapping[str, Any], ...] = (),
) -> Content:
    column = _column(row)
    if not any(message.role == "user" for message in prompt):
        raise RowError(column, row[column], "has no user's message", "a prompt needs one")
    golds = (*GOLDS, "answer")
    answered = first_of(row, golds)
    label = _label(row) if target is not None else None
    return Content(
        prompt=with_system(row, prompt),
        gold=gold(row[answered], answered) if answered else "",
        target=target,
        label=label,
        data_source=source_of(row),
        extra=others(
            row,
            (
                *CONVERSATIONS,
                *golds,
                *SOURCES,
                SYSTEM,
                *((TOOLS,) if turns else ()),
                *(("label",) if label is not None else ()),
            ),
        ),
        turns=turns,
        tools=tools,
        beside=_beside(row[column][: len(prompt)]),
        unread=unread(row, column) if target is not None and not turns else None,
    )


def _beside(said: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    # Parquet gives all messages of a column the same keys.
    found = tuple(
        {key: value for key, value in one.items() if key not in SAID and value is not None}
        for one in said
    )
    return found if any(found) else ()


def _label(row: Mapping[str, Any]) -> bool | None:
    """Whether the last answer is a wanted one; None if the row doesn't say, as where its label is a class's name."""
    given = row.get("label")
    label = truth(given)
    # Among 0 and 1 another number is a mistake, or they are numbers of classes.
    if label is None and not is_missing(given) and _is_number(given):
        raise _no_label(given)
    return label


def unread_label(row: Mapping[str, Any], content: Content) -> RowError | None:
    """The error of a conversation whose ``label`` is a text other than true and false, where labels judge answers; None
    for any other row."""
    judged = content.label is not None or content.rejected is not None
    if judged or first_of(row, CONVERSATIONS) is None or first_filled(row, ("label",)) is None:
        return None
    return _no_label(row["label"])


def unused_tools(row: Mapping[str, Any], content: Content) -> bool:
    """Whether a row has tools that its prompt doesn't show, as only that of a conversation does that is read whole."""
    has_tools = first_filled(row, (TOOLS,)) is not None and row[TOOLS] not in ([], "[]")
    return has_tools and not content.turns


def _no_label(given: Any) -> RowError:
    way_out = "store a boolean, or give the column another name if it doesn't judge the answer"
    return RowError("label", given, "isn't true or false", way_out)


def _is_number(value: Any) -> bool:
    if not isinstance(value, str):
        return isinstance(value, int | float)
    try:
        float(value)
    except ValueError:
        return False
    return True


def write(content: Content) -> dict[str, Any]:
    found: list[dict[str, Any]] = [*as_messages(content.prompt)]
    # The first message may be of the column system.
    for message, beside in zip(reversed(found), reversed(content.beside), strict=False):
        if is_deeper(beside):
            way_out = "store deep values as JSON text"
            raise RowError("messages", beside, f"has over {DEEPEST} levels", way_out)
        message.update(plain(beside, travels=False))
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
    read_whole=read_whole,
    write=write,
)
