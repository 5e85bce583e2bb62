"""What a row of any form becomes, and the errors of rows that can't be used."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from ...common.errors import DataError
from ...common.records import Float32Array

ROLES = ("system", "user", "assistant")
CONVERSATIONS = ("messages", "conversations")
TOOL = "tool"
"""The role of a message with a tool's result."""
WEIGHT = "weight"
"""Key of an answer's message that says whether it is learned from, in OpenAI's format for fine-tuning."""
UNREAD = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a message under which an answer may say more than its content."""
SHOWN = 60
SOURCES = ("data_source", "dataset", "source", "problem_source")
"""Columns that may say where a row is from; the first one that isn't blank counts."""
GOLDS = ("gold", "ground_truth", "expected_answer")
"""Columns that may hold the gold answer; the first one that isn't blank counts."""
SYSTEM = "system"
"""Column that may hold the system message of a prompt."""
HISTORY = "history"
"""Column that may hold the turns before a question."""
DEEPEST = 6
"""Levels of nesting of a column that is kept; a record may have eight."""
MAX_BYTES = 1_000
"""Most bytes of a column that is kept: they become text, and an image would be of no use to anyone."""


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """One message of a prompt."""

    role: str
    """system, user or assistant."""
    content: str


class Content(Struct, frozen=True, kw_only=True, eq=False):
    """What one row says."""

    prompt: tuple[Message, ...]
    """At least one message; none for the task of an environment that shows it itself."""
    gold: str = ""
    """The gold answer as stated there: an answer, or a solution that holds it; empty if there is none."""
    target: str | None = None
    """A response: the expert's trace, or the better one of a pair; None without one."""
    rejected: str | None = None
    """The worse response of a pair."""
    label: bool | None = None
    """Whether ``target`` is a wanted response; None if the form doesn't say."""
    data_source: str = ""
    """The data set's own name for where the row is from; empty = the source's name."""
    ability: str = "math"
    """What the row exercises."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other columns, as plain values of any length; None for an absent value."""
    kept_whole: Collection[str] = ()
    """Those of them that a problem keeps however long they are."""
    target_logprobs: Float32Array | None = None
    """``[tokens of the target + 1]`` nats, under the expert's own tokenizer; None if unknown."""
    turns: tuple[Mapping[str, Any], ...] = ()
    """Messages from the first answer to the last one, ``target``, in OpenAI's form and with values as arguments of tool
    calls, if all answers of a conversation are learned from; the prompt is then what stands before them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that such a conversation is offered, in OpenAI's form."""
    beside: tuple[Mapping[str, Any], ...] = ()
    """What the prompt's last messages have beside role and content, such as a weight of 0, one for each; empty if none has
    anything. Only a conversation that is written needs it."""
    unread: RowError | None = None
    """Why a response can't be learned from: its message says more than the content that was read. The prompt can be used."""


class RowError(DataError):
    """A row that can't be used.

    Args:
        column: the column; ``ground_truth`` of the column ``reward_model`` is ``reward_model.ground_truth``.
        value: its value, of which the message shows the beginning.
        what: what is wrong with it, as in ``isn't text``.
        way_out: what the user can do.
    """

    def __init__(self, column: str, value: Any, what: str, way_out: str) -> None:
        self.reason = f"{column} {what}"
        shown = repr(value)
        if len(shown) > SHOWN:
            shown = shown[:SHOWN] + "…"
        super().__init__(f"column {column}: {shown} {what}: {way_out}")


class UnwantedRow(RowError):
    """A row that a form of the user's own leaves out. Nothing is wrong with it."""


def text(row: Mapping[str, Any], column: str) -> str:
    """A column's text, which must not be blank."""
    value = row.get(column)
    if value is None:
        raise RowError(column, value, "is missing", "give the row a text")
    if not isinstance(value, str):
        raise RowError(column, value, "isn't text", "store text")
    if not value.strip():
        raise RowError(column, value, "is empty", "give the row a text")
    return value


def messages(row: Mapping[str, Any], column: str) -> tuple[Message, ...]:
    """A column's messages, at least one; also ShareGPT's ``{from, value}``."""
    found = []
    for item in _items(row, column):
        role, content = item["role"], item["content"]
        if role not in ROLES:
            way_out = f"use one of {', '.join(ROLES)}"
            if role == "tool":
                way_out += ", or turns=all of a source, which reads tools' messages as well"
            raise RowError(column, role, "isn't a role", way_out)
        if not isinstance(content, str) or not content:
            way_out = "it must be text"
            if item.get("tool_calls"):
                way_out += ", or set turns=all of a source, which reads calls of tools as well"
            raise _no_content(column, content, role, way_out)
        found.append(Message(role=role, content=content))
    return tuple(found)


def whole_messages(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """The same with tools' messages, calls of tools and whatever else stands in a message, as a chat template reads it."""
    found = []
    for item in _items(row, column):
        message = plain(without_nulls(item), travels=False)
        role, calls = message.get("role"), message.get("tool_calls")
        if role not in (*ROLES, TOOL):
            raise RowError(column, role, "isn't a role", f"use one of {', '.join((*ROLES, TOOL))}")
        if calls is not None:
            message["tool_calls"] = [_call(call, column) for call in as_list(calls, column)]
        content = message.setdefault("content", "")
        may_be_empty = role == TOOL or bool(calls)
        if not isinstance(content, str) or not (content or may_be_empty):
            raise _no_content(column, content, str(role), "it must be text")
        found.append(message)
    return found


def _no_content(column: str, content: Any, role: str, way_out: str) -> RowError:
    return RowError(column, content, f"is the content of a message of the role {role}", way_out)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether an answer is learned from: unless its weight is 0. Any other weight counts as 1."""
    return truth(message.get(WEIGHT)) is not False


def as_list(value: Any, column: str) -> list[Any]:
    """A list of maps, which may be stored as JSON."""
    found = _from_json(value)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RowError(column, value, "isn't a list of objects", "store one, or its JSON")
    return found


def _call(call: dict[str, Any], column: str) -> dict[str, Any]:
    """A call of a tool with its arguments as values: OpenAI's form has them as JSON, which templates would write as a
    text."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(
            column, call, "is a call of no tool", "store {'function': {'name': …, 'arguments': …}}"
        )
    made = {**function, "arguments": _from_json(function.get("arguments", {}))}
    return {**call, "function": made} if "function" in call else made


def without_nulls(value: Any) -> Any:
    """A value without the keys whose value is null, at any depth: parquet gives all maps of a column the same keys.
    Texts of JSON keep theirs."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    """The value that a text of JSON stands for; whatever isn't one as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _items(row: Mapping[str, Any], column: str) -> Iterator[dict[str, Any]]:
    """The maps in a column of messages, each with ``role`` and ``content``."""
    value = row.get(column)
    way_out = "store a list of {'role': …, 'content': …}"
    if not isinstance(value, list) or not value:
        raise RowError(column, value, "isn't a list of messages", way_out)
    for item in value:
        if isinstance(item, dict) and {"from", "value"} <= item.keys():
            said = item["from"]
            role = _SHAREGPT.get(said, said)
            beside = {key: more for key, more in item.items() if key not in ("from", "value")}
            yield {**beside, "role": role, "content": item["value"]}
        elif (
            isinstance(item, dict)
            and "role" in item
            and ("content" in item or item.get("tool_calls"))
        ):
            yield {"content": None, **item}
        else:
            raise RowError(column, item, "isn't a message", way_out)


_SHAREGPT = {"human": "user", "gpt": "assistant", "user": "user", "system": "system"}


def prompt(row: Mapping[str, Any], column: str) -> tuple[Message, ...]:
    """A column's prompt: messages that don't end with an answer, or the text of one question."""
    if not isinstance(row.get(column), list):
        return question(text(row, column))
    found = messages(row, column)
    if found[-1].role == "assistant":
        raise RowError(
            column,
            found[-1].content,
            "ends with an assistant's message",
            "a prompt ends with what is asked; put the answer into a column of its own",
        )
    return found


def with_system(row: Mapping[str, Any], asked: tuple[Message, ...]) -> tuple[Message, ...]:
    """A prompt behind the text of the column ``system``, unless it is blank or the prompt has a system message."""
    system = row.get(SYSTEM)
    # Some writers have false, 0 or an empty list where there is none.
    if _is_blank(system) or not system or (asked and asked[0].role == "system"):
        return asked
    if not isinstance(system, str):
        way_out = "store text, or give the column another name"
        raise RowError(SYSTEM, system, "isn't text", way_out)
    return (Message(role="system", content=system), *asked)


def with_history(
    row: Mapping[str, Any], column: str | None, asked: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """A prompt behind its system message and the earlier turns that LLaMA-Factory has in ``history``, ``[question,
    answer]`` each.

    Args:
        row: a row.
        column: its column with the question; None without one.
        asked: the question.

    Returns:
        The whole prompt, and the columns that stand before the question. ``history`` isn't among them if it holds
        something else, or if the question is a list of messages, which has the turns already.
    """
    turns = _earlier_turns(row, column)
    used = (SYSTEM,) if turns is None else (SYSTEM, HISTORY)
    return with_system(row, (*(turns or ()), *asked)), used


def _earlier_turns(row: Mapping[str, Any], column: str | None) -> tuple[Message, ...] | None:
    turns = _from_json(row.get(HISTORY))
    if _is_blank(turns) or turns in ([], {}):
        return ()
    has_messages = column is None or isinstance(row[column], list)
    if has_messages or not isinstance(turns, list) or not all(map(_is_turn, turns)):
        return None
    return tuple(
        Message(role=role, content=said)
        for turn in turns
        for role, said in zip(("user", "assistant"), turn, strict=True)
    )


def _is_turn(turn: Any) -> bool:
    pair = isinstance(turn, list) and len(turn) == 2
    return pair and all(isinstance(said, str) and said.strip() for said in turn)


def question(content: str) -> tuple[Message, ...]:
    """A prompt that is one user's message."""
    return (Message(role="user", content=content),)


def instruction(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The prompt of the column ``instruction``, with the text that it is about: ``input``, else ``context``."""
    asked = prompt(row, "instruction")
    about = first_filled(row, ("input", "context"))
    if about is None or isinstance(row["instruction"], list):
        return asked
    return question(f"{asked[0].content}\n\n{text(row, about)}")


def response(row: Mapping[str, Any], column: str) -> str:
    """A column's response: a text, or one assistant message."""
    if not isinstance(row.get(column), list):
        return text(row, column)
    found = messages(row, column)
    if len(found) != 1:
        raise RowError(
            column, row[column], f"has {len(found)} messages", "a response is one assistant message"
        )
    if found[0].role != "assistant":
        raise RowError(column, found[0].role, "isn't an assistant's message", "it must be one")
    return found[0].content


def unread(row: Mapping[str, Any], column: str) -> RowError | None:
    """The error of a response whose message has calls of tools, or thoughts that its content lacks; None for any other."""
    if not isinstance(row.get(column), list):
        return None
    *_, said = _items(row, column)
    content = _in_one_line(str(said["content"]))
    for key in UNREAD:
        more = _from_json(said.get(key))
        if isinstance(more, str):
            # Some writers have the thoughts in both places.
            more = "" if _in_one_line(more) in content else more
        elif isinstance(more, Mapping) and all(value is None for value in more.values()):
            # Parquet may have such a call where there is none.
            more = None
        if isinstance(more, str | list | Mapping) and more:
            way_out = "put it into the content as the model is to write it"
            if column in CONVERSATIONS:
                way_out = (
                    f"set turns=all, with which the model's chat template writes it, or {way_out}"
                )
            return RowError(
                f"{column}.{key}", said[key], "is a part of the answer that isn't read", way_out
            )
    return None


def _in_one_line(said: str) -> str:
    """A text with single blanks in the place of its space."""
    return " ".join(said.split())


def gold(value: Any, column: str) -> str:
    """A gold answer as text: ``142`` for 142.0, the only text of a list of one; "" for a missing one.

    Raises:
        RowError: it is something else, blank, or not a finite number.
    """
    if is_missing(value):
        return ""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(column, value, "isn't a gold answer", "store a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(column, value, "isn't finite", "store a text or a finite number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not str(value).strip():
        raise RowError(column, value, "is empty", "give the row an answer to grade by")
    return str(value)


def truth(value: Any) -> bool | None:
    """What a label says: true or false, which may be stored as 1 or 0 and as text; None if it says neither.

    >>> [truth(label) for label in (True, 0, 1.0, "False", "1", "yes", -1, None)]
    [True, False, True, False, True, None, None, None]
    """
    if isinstance(value, str):
        return _TRUTHS.get(value.strip().lower())
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


# Of a column with gaps pandas writes 1.0 and 0.0.
_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def source_of(row: Mapping[str, Any]) -> str:
    """Where the row is from; empty if it doesn't say."""
    column = first_of(row, SOURCES)
    return str(row[column]) if column else ""


def gold_of(row: Mapping[str, Any]) -> str:
    """The row's gold answer; empty if it has none."""
    column = first_of(row, GOLDS)
    return gold(row[column], column) if column else ""


def ability(row: Mapping[str, Any]) -> str:
    """What the row exercises; ``math`` if it doesn't say."""
    return "math" if is_missing(row.get("ability")) else text(row, "ability")


def one_question(content: Content, form: str) -> str:
    """The text of a prompt that is one user's message.

    Raises:
        RowError: it is more than that.
    """
    if len(content.prompt) != 1 or content.prompt[0].role != "user":
        roles = [message.role for message in content.prompt]
        raise RowError("prompt", roles, "is a conversation", f"the form {form} holds one question")
    return content.prompt[0].content


def needed(value: Any, column: str, form: str) -> Any:
    """A value without which a row of a form can't be written."""
    if value is None or value == "":
        raise RowError(column, value, "is missing", f"the form {form} needs it")
    return value


def as_messages(prompt: tuple[Message, ...]) -> list[dict[str, str]]:
    """Messages as plain values."""
    return [{"role": message.role, "content": message.content} for message in prompt]


def as_prompt(content: Content) -> str | list[dict[str, str]]:
    """A prompt as a column's value: the text of one question, or messages."""
    if len(content.prompt) == 1 and content.prompt[0].role == "user":
        return content.prompt[0].content
    return as_messages(content.prompt)


def present(**columns: Any) -> dict[str, Any]:
    """The columns that have a value."""
    return {name: value for name, value in columns.items() if value is not None and value != ""}


def is_missing(value: Any) -> bool:
    """Whether a column has no value: None, or NaN, which pandas writes in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def first_of(row: Mapping[str, Any], columns: Collection[str]) -> str | None:
    """The first of these columns that the row has a value in; one with a blank text only if no other has one."""
    having = (column for column in columns if not is_missing(row.get(column)))
    return first_filled(row, columns) or next(having, None)


def first_filled(row: Mapping[str, Any], columns: Collection[str]) -> str | None:
    """The first of these columns that the row has a value in which isn't blank."""
    return next((name for name in columns if not _is_blank(row.get(name))), None)


def _is_blank(value: Any) -> bool:
    return is_missing(value) or (isinstance(value, str) and not value.strip())


def others(row: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """The row's other columns as plain values, without empty, very deep and long binary ones."""
    return {
        str(name): plain(value)
        for name, value in row.items()
        if not (name in used or is_missing(value) or is_deeper(value) or _bytes(value) > MAX_BYTES)
    }


def _bytes(value: Any) -> int:
    """Number of bytes in a value that are binary."""
    if isinstance(value, bytes):
        return len(value)
    if not isinstance(value, Mapping | list | tuple):
        return 0
    return sum(map(_bytes, value.values() if isinstance(value, Mapping) else value))


def plain(value: Any, *, travels: bool = True) -> Any:
    """A value as JSON has it; parquet's other types (dates, decimals) become text.

    Args:
        value: any value of a row.
        travels: whether records carry it, which hold no whole numbers beyond 64 bits: they become text too.
    """
    if isinstance(value, dict):
        return {str(name): plain(inner, travels=travels) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, travels=travels) for inner in value]
    if travels and isinstance(value, int) and not has_64_bits(value):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def has_64_bits(value: int) -> bool:
    """Whether a record can hold this whole number."""
    return -(1 << 63) <= value < 1 << 64


def is_deeper(value: Any, most: int = DEEPEST) -> bool:
    """Whether a value has more levels of nesting than this; a text or a number is one level.

    >>> is_deeper([[1]], 3), is_deeper([[1]], 2)
    (False, True)
    """
    if not isinstance(value, Mapping | list | tuple):
        return most < 1
    # Not deeper than asked: a row may be nested deeper than functions can be.
    if most < 2:
        return most < 1 or len(value) > 0
    inside = value.values() if isinstance(value, Mapping) else value
    return any(
        is_deeper(inner, most - 1) for inner in inside if isinstance(inner, Mapping | list | tuple)
    )
