"""Tool calls in what a policy has written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chat_templates import tokenizer

from tandem.rollout.endpoint.tools import MOST_CALLS, format_of, parse

ADD = '{"name": "add", "arguments": {"a": 1, "b": [true, "x"]}}'
SUB = '{"name": "sub", "parameters": {}}'
ADDED = ("add", {"a": 1, "b": [True, "x"]})
SUBBED = ("sub", {})


def tagged(*calls: str) -> str:
    return "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("style", "text", "calls", "content"),
    [
        ("hermes", f"Let me see.{tagged(ADD)}", [ADDED], "Let me see."),
        ("hermes", tagged(ADD, SUB), [ADDED, SUBBED], ""),
        ("hermes", f"<tool_call>{ADD}", [ADDED], ""),
        ("hermes", ADD, [], ADD),
        ("hermes", "no call", [], "no call"),
        ("llama", SUB, [SUBBED], ""),
        ("llama", f"<|python_tag|>{ADD}", [ADDED], ""),
        ("llama", f"{ADD}; {SUB}", [ADDED, SUBBED], ""),
        ("llama", f"It is {SUB}", [], f"It is {SUB}"),
        ("json", ADD, [ADDED], ""),
        ("json", f"[{ADD}, {SUB}]", [ADDED, SUBBED], ""),
        ("json", f"[TOOL_CALLS] [{ADD}, {SUB}]", [ADDED, SUBBED], ""),
        ("json", f"I call it.\n[TOOL_CALLS][{ADD}]", [ADDED], "I call it."),
        ("json", f"[1] I call it.\n[TOOL_CALLS][{ADD}]", [ADDED], "[1] I call it."),
        ("json", f"I call [TOOL_CALLS][{ADD}]", [ADDED], "I call"),
        (
            "json",
            f"As in [TOOL_CALLS] [1].\n[TOOL_CALLS][{ADD}]",
            [ADDED],
            "As in [TOOL_CALLS] [1].",
        ),
        ("json", f"```json\n{SUB}\n```\n[TOOL_CALLS][{ADD}]", [ADDED], f"```json\n{SUB}\n```"),
        ("json", f"So:\n```json\n{ADD}\n```", [ADDED], "So:"),
        ("json", f"[1] So:\n```json\n{ADD}\n```", [ADDED], "[1] So:"),
        ("json", "So:\n```\nprint(1)\n```", [], "So:\n```\nprint(1)\n```"),
        ("json", '{"answer": 3}', [], '{"answer": 3}'),
        ("json", "3", [], "3"),
    ],
)
def test_calls_are_found(style: Any, text: str, calls: Any, content: str) -> None:
    found = parse(text, style)
    assert [(call.name, call.arguments) for call in found.calls] == calls
    assert (found.content, found.malformed) == (content, 0)


THOUGHT = f"<think>Perhaps {tagged(SUB)} or\n```json\n{SUB}\n```? <tool_call></tool_call></think>"


@pytest.mark.parametrize(
    ("style", "call"),
    [
        ("hermes", tagged(ADD)),
        ("llama", ADD),
        ("json", ADD),
        ("json", f"```json\n{ADD}\n```"),
        ("json", f"[TOOL_CALLS][{ADD}]"),
    ],
)
@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_a_call_is_read_behind_thoughts_and_never_in_them(
    style: Any, call: str, opened: str
) -> None:
    thought = THOUGHT.removeprefix("<think>") if opened else THOUGHT
    found = parse(f"{thought}\n\n{call}", style, prefix=lambda: opened)
    assert [(one.name, one.arguments) for one in found.calls] == [ADDED]
    assert (found.content, found.malformed) == (thought, 0)
    found = parse(f"{call}{thought}{call}" if opened else call, style, prefix=lambda: opened)
    assert [one.name for one in found.calls] == ["add"]
    for text in (f"{thought}\n\nThe answer is 4.", f"{thought}Hm. <think>{call}"):
        found = parse(text, style, prefix=lambda: opened)
        assert (found.content, found.calls, found.malformed) == (text, (), 0)


TAGS = '{"name": "write", "arguments": {"text": "a </think> <think> [TOOL_CALLS] [1]"}}'


@pytest.mark.parametrize(
    ("style", "call"),
    [
        ("hermes", f"<tool_call>{TAGS}</tool_call>"),
        ("llama", TAGS),
        ("llama", f"<|python_tag|>{TAGS}"),
        ("json", TAGS),
        ("json", f"[{TAGS}]"),
        ("json", f"```json\n{TAGS}\n```"),
        ("json", f"[TOOL_CALLS][{TAGS}]"),
    ],
)
@pytest.mark.parametrize("thought", ["", "<think>x</think>\n", "x</think>\n"])
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_tags_in_an_argument_are_text(style: Any, call: str, thought: str, prompt: str) -> None:
    (found,) = parse(f"{thought}{call}", style, prefix=lambda: prompt).calls
    assert found.arguments == {"text": "a </think> <think> [TOOL_CALLS] [1]"}


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", f"{tagged(ADD)} <think>x</think> done"),
        ("hermes", f"{tagged(ADD)}</think>"),
        ("json", f"So:\n```json\n{ADD}\n```\nElsewhere it is [TOOL_CALLS] [1]."),
    ],
)
def test_tags_behind_a_call_leave_it_a_call(style: Any, text: str) -> None:
    assert [call.name for call in parse(text, style).calls] == ["add"]


@pytest.mark.parametrize(
    "text",
    [
        'Mistral writes [TOOL_CALLS] [{"name": ...}]. The answer is 3.',
        f"Mistral writes [TOOL_CALLS] [{ADD}]. The answer is 3.",
        '[TOOL_CALLS]add[ARGS]{"name": 1}',
    ],
)
def test_a_text_about_the_tag_is_no_call(text: str) -> None:
    found = parse(text, "json")
    assert (found.content, found.calls, found.malformed) == (text, (), 0)


@pytest.mark.parametrize(
    "call",
    [
        "{",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": "no JSON"}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}',
        '{"name": "\\udfff", "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": "{\\"a\\": Infinity}"}',
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "[" * 100_000,
        "{'name': 'f', 'arguments': __import__('os').system('true')}",
    ],
)
@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_a_malformed_call_is_told_and_the_text_kept(style: Any, call: str) -> None:
    text = f"<tool_call>{call}</tool_call>" if style == "hermes" else f"<|python_tag|>{call}"
    found = parse(text, style)
    assert (found.content, found.calls, found.malformed) == (text, (), 1)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "<tool_call></tool_call>"),
        ("llama", "<|python_tag|>import os"),
        ("llama", '{"name": "add", '),
        ("json", '```json\n{"name": add}\n```'),
        ("json", '[TOOL_CALLS][{"name": "add", }]'),
        ("json", 'I call it.\n[TOOL_CALLS][{"name": "add", }]'),
    ],
)
def test_what_looks_like_a_call_and_isnt_json_is_malformed(style: Any, text: str) -> None:
    found = parse(text, style)
    assert (found.content, found.calls, found.malformed) == (text, (), 1)


def test_a_fence_behind_a_tagged_call_is_not_called_in_its_place() -> None:
    found = parse(f"[TOOL_CALLS][{ADD}]\n```json\n{SUB}\n```", "json")
    assert (found.calls, found.malformed) == ((), 1)


def test_of_parallel_calls_none_is_made_where_one_is_malformed() -> None:
    found = parse(tagged(ADD, "{", "["), "hermes")
    assert (found.calls, found.malformed) == ((), 2)


@pytest.mark.parametrize("style", ["hermes", "llama", "json"])
def test_no_more_calls_are_read_than_a_turn_may_have(style: Any) -> None:
    text = {
        "hermes": tagged(*[ADD] * 100),
        "llama": ";".join([ADD] * 100),
        "json": json.dumps([json.loads(ADD)] * 100),
    }[style]
    assert len(parse(text, style).calls) == MOST_CALLS
    assert len(parse(text, style, most=3).calls) == 3


def test_arguments_as_text_are_read_too() -> None:
    (call,) = parse('{"name": "f", "arguments": "{\\"a\\": 1}"}', "json").calls
    assert call.arguments == {"a": 1}


def test_both_halves_of_a_surrogate_pair_are_a_letter() -> None:
    (call,) = parse('{"name": "f", "arguments": {"a": "\\ud83d\\ude42"}}', "json").calls
    assert call.arguments == {"a": "🙂"}


@pytest.mark.parametrize(
    ("form", "style"),
    [("chatml", "hermes"), ("thinking", "hermes"), ("miniature", "hermes"), ("llama", "llama")],
)
def test_the_format_goes_by_the_chat_template(form: str, style: str) -> None:
    assert format_of(tokenizer(form), "auto") == style
    assert format_of(tokenizer(form), "json") == "json"


def test_a_tokenizers_own_response_template_is_asked_first() -> None:
    import copy

    own = copy.deepcopy(tokenizer("chatml"))
    own.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "[[",
                "close": "]]",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    text = f"Let me see.[[{ADD}]]"
    found = parse(text, "hermes", own, prefix=lambda: "<|im_start|>assistant\n")
    assert [(call.name, call.arguments) for call in found.calls] == [ADDED]
    assert found.content == "Let me see."
    broken = parse("[[{]]", "hermes", own, prefix=lambda: "<|im_start|>assistant\n")
    assert (broken.content, broken.calls, broken.malformed) == ("[[{]]", (), 1)
