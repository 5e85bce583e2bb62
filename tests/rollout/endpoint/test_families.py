"""Tool calls of families that the package renderers knows."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from chat_templates import tokenizer
from endpoint_calls import CONTEXT, planted, spec, tool

from tandem.common.errors import ConfigError
from tandem.rollout.endpoint.chat import Chat
from tandem.rollout.endpoint.families import FamilyParser, family_of
from tandem.rollout.endpoint.requests import wanted
from tandem.rollout.endpoint.sessions import Session

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="module")
def qwen() -> Any:
    """A tokenizer that has what Qwen3.5's has."""
    made = copy.deepcopy(tokenizer("thinking"))
    made.add_special_tokens({"additional_special_tokens": list(VISION)})
    return made


def call(a: str, b: str, name: str = "multiply") -> str:
    given = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in (("a", a), ("b", b))
    )
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def read(parser: FamilyParser | None, own: Any, text: str, most: int = 9) -> Any:
    assert parser is not None
    tokens = own.encode(text, add_special_tokens=False)
    return parser.parse(tokens, text, prompt=[], tools=[tool()], most=most)


def test_calls_in_xml_are_read_with_the_types_of_their_schema(qwen: Any) -> None:
    parser = family_of(qwen, "renderers:qwen3.5")
    found = read(parser, qwen, f"<think>\nhm\n</think>\n\nSo:\n{call('2', '3')}\n{call('4', '5')}")
    assert [(one.name, one.arguments) for one in found.calls] == [
        ("multiply", {"a": 2, "b": 3}),
        ("multiply", {"a": 4, "b": 5}),
    ]
    assert (found.content.strip(), found.reasoning.strip(), found.malformed) == ("So:", "hm", 0)
    assert len(read(parser, qwen, call("2", "3") * 3, most=1).calls) == 1


def test_a_call_that_cant_be_read_is_counted_and_its_text_kept(qwen: Any) -> None:
    parser = family_of(qwen, "renderers:qwen3.5")
    broken = f"{call('2', '3')}\n<tool_call>\n<parameter=a>\n1"
    found = read(parser, qwen, broken)
    assert (found.content, found.calls, found.malformed) == (broken, (), 1)
    plain = read(parser, qwen, "It is 6.")
    assert (plain.content, plain.calls, plain.malformed) == ("It is 6.", (), 0)


def test_a_tool_that_isnt_there_is_a_call_like_any_other(qwen: Any) -> None:
    (found,) = read(family_of(qwen, "renderers:qwen3.5"), qwen, call("2", "3", name="divide")).calls
    assert found.name == "divide"


@pytest.fixture(scope="module")
def kimi() -> Any:
    """A tokenizer that has what Kimi K2's has."""
    made = copy.deepcopy(tokenizer("chatml"))
    roles = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    parts = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    made.add_special_tokens({"additional_special_tokens": [*roles, *section, *parts]})
    return made


def kimi_call(arguments: str) -> str:
    said = f"<|tool_call_begin|>functions.multiply:0<|tool_call_argument_begin|>{arguments}"
    return (
        f"<|tool_calls_section_begin|>{said}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )


def test_a_call_of_a_family_whose_calls_have_ids_keeps_its_own(kimi: Any) -> None:
    chat = Chat(kimi, "renderers:kimi-k2", 2048)
    session = Session("key", "url", spec(), CONTEXT)
    asked = [{"role": "user", "content": "137*258=?"}]
    ticket = asyncio.run(chat.place(session, asked, [tool()]))
    said = kimi_call('{"a": 137, "b": 258}')
    sample = planted(kimi.encode(said, add_special_tokens=False), said)
    (made,) = chat.answer(session, ticket, sample, asked, [tool()], wanted({})).message[
        "tool_calls"
    ]
    assert (made["id"], made["function"]["name"]) == ("functions.multiply:0", "multiply")


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": NaN}'])
def test_arguments_that_no_client_can_send_back_are_malformed(kimi: Any, arguments: str) -> None:
    found = read(family_of(kimi, "renderers:kimi-k2"), kimi, kimi_call(arguments))
    assert (found.calls, found.malformed) == ((), 1)


def test_by_itself_only_a_published_models_own_name_chooses_it(qwen: Any) -> None:
    assert family_of(qwen, "auto") is None
    named = copy.deepcopy(qwen)
    named.name_or_path = "Qwen/Qwen3.5-4B"
    assert family_of(named, "auto") is not None
    assert family_of(named, "hermes") is None
    assert Chat(named, "auto", 100)._family is not None
    assert Chat(named, "json", 100)._family is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("no-such", "it has .*qwen3.5"), ("qwen3.5", "doesn't fit this model's tokenizer")],
)
def test_a_family_that_isnt_there_or_doesnt_fit_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        family_of(tokenizer("chatml"), f"renderers:{name}")


def test_without_the_package_a_family_is_refused_with_what_to_install(
    qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert family_of(qwen, "auto") is None
    with pytest.raises(ConfigError, match=r"tandem-rl\[renderers\]"):
        family_of(qwen, "renderers:qwen3.5")


THOUGHT = "<|channel|>analysis<|message|>A product.<|end|><|start|>assistant"
CALLED = ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 137, "b": 258}<|call|>'


@pytest.mark.parametrize("thought", ["", THOUGHT], ids=["at once", "after a thought"])
def test_the_token_that_ends_a_turn_of_gpt_oss_also_closes_its_call(
    monkeypatch: pytest.MonkeyPatch, thought: str
) -> None:
    # Its vocabulary would be downloaded, and only rendering needs it.
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda name: None)
    own = tokenizer("gpt-oss")
    chat = Chat(own, "renderers:gpt-oss", 2048)
    session = Session("key", "url", spec(), CONTEXT)
    asked = [{"role": "user", "content": "137*258=?"}]
    ticket = asyncio.run(chat.place(session, asked, [tool()]))
    said = thought + CALLED
    sample = planted(own.encode(said, add_special_tokens=False), said)
    answer = chat.answer(session, ticket, sample, asked, [tool()], wanted({}))
    assert (answer.finish_reason, answer.malformed) == ("tool_calls", 0)
    (made,) = answer.message["tool_calls"]
    assert made["function"] == {"name": "multiply", "arguments": '{"a": 137, "b": 258}'}
    assert answer.message.get("reasoning_content", "") == ("A product." if thought else "")
    assert (session.tool_calls, session.malformed_calls) == (1, 0)
