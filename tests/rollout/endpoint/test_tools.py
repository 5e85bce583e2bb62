"""Tool calls in what a policy has written."""

from __future__ import annotations

import pytest

from tandem.rollout.endpoint.tools import parse

CALL = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
ARGUMENTS = {"a": 1, "b": [2]}


@pytest.mark.parametrize(
    ("style", "text", "content", "names"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", ["add"]),
        ("hermes", f"I add. <tool_call>{CALL}</tool_call>", "I add.", ["add"]),
        (
            "hermes",
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
            "",
            ["add"] * 2,
        ),
        ("hermes", f"<tool_call>{CALL}", "", ["add"]),
        ("hermes", "It is 3.", "It is 3.", []),
        ("hermes", CALL, CALL, []),
        ("llama", CALL.replace("arguments", "parameters"), "", ["add"]),
        ("llama", f"<|python_tag|>{CALL}; {CALL}", "", ["add"] * 2),
        ("llama", "It is 3.", "It is 3.", []),
        ("json", f"[{CALL}, {CALL}]", "", ["add"] * 2),
        ("json", f"Let me:\n```json\n{CALL}\n```", "Let me:", ["add"]),
        ("json", '{"answer": 3}', '{"answer": 3}', []),
    ],
)
def test_calls_are_found(style: str, text: str, content: str, names: list[str]) -> None:
    found = parse(text, style)  # type: ignore[arg-type]
    assert (found.content, [call.name for call in found.calls], found.malformed) == (
        content,
        names,
        0,
    )
    assert all(call.arguments == ARGUMENTS for call in found.calls)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>oops</tool_call>"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("llama", "<|python_tag|>import os"),
        ("llama", '{"name": "add", '),
        ("json", '```json\n{"name": add}\n```'),
    ],
)
def test_a_call_that_cant_be_parsed_is_counted_and_stays_text(style: str, text: str) -> None:
    found = parse(text, style)  # type: ignore[arg-type]
    assert (found.content, found.calls) == (text, ())
    assert found.malformed >= 1


def test_arguments_may_be_json_in_a_text() -> None:
    found = parse('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "hermes")
    assert found.calls[0].arguments == {"a": 1}
