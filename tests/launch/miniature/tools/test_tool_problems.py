"""The products, and that what is written about them is what the chat template renders."""

from __future__ import annotations

import json
from random import Random

import pytest

from tandem.common.errors import TandemError
from tandem.launch.miniature.tools.environments import Calculator, FalseCalculator, NoCalculator
from tandem.launch.miniature.tools.problems import Product, boxed, distinct, draw, result_message
from tandem.launch.miniature.tools.tokenizer import build

SCHEMA = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def test_the_example_of_the_docstring():
    problem = Product(a=137, b=258)
    assert problem.question == "137*258=?"
    assert problem.answer == "35346"
    assert boxed(problem.answer) == "\\boxed{35346}"


def test_a_call_is_json_between_the_tags_of_hermes():
    opening, call, closing = Product(a=137, b=258).call.split("\n")
    assert (opening, closing) == ("<tool_call>", "</tool_call>")
    assert json.loads(call) == {"name": "multiply", "arguments": {"a": 137, "b": 258}}


def test_operands_have_three_digits_and_a_seed_gives_the_same_problems():
    problems = [draw(Random(3)) for _ in range(2)] + distinct(Random(4), 300)
    assert problems[0] == problems[1]
    assert all(100 <= n <= 999 for p in problems for n in (p.a, p.b))
    assert distinct(Random(4), 300) == problems[2:]


def test_problems_differ_and_leave_out_the_excluded_ones(monkeypatch: pytest.MonkeyPatch):
    # With 16 problems in all, drawing 4 beside 4 others would certainly repeat one.
    monkeypatch.setattr("tandem.launch.miniature.tools.problems.LARGEST", 103)
    others = distinct(Random(0), 4)
    found = distinct(Random(0), 4, exclude=others)
    assert len({*others, *found}) == 8
    with pytest.raises(TandemError, match=r"9 distinct products beside 0 .* more than 8"):
        distinct(Random(0), 9)


@pytest.mark.parametrize("offered", [True, False])
def test_conversations_are_written_as_the_template_renders_them(offered: bool):
    tokenizer, problem = build(), Product(a=137, b=258)
    tools = [SCHEMA] if offered else None

    def rendered(*messages: dict) -> str:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}, *messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert isinstance(text, str)
        return text

    assert rendered() == problem.prompt(offered=offered)
    call = {"name": "multiply", "arguments": {"a": 137, "b": 258}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    told = {"role": "tool", "content": "35346"}
    assert rendered(said, told) == (
        problem.prompt(offered=offered) + problem.call + "<|im_end|>" + result_message("35346")
    )


def test_the_calculator_multiplies_and_the_false_one_never_does():
    for problem in distinct(Random(5), 500):
        assert str(Calculator().multiply(problem.a, problem.b)) == problem.answer
        assert str(FalseCalculator().multiply(problem.a, problem.b)) != problem.answer


@pytest.mark.parametrize("kind", [Calculator, FalseCalculator, NoCalculator])
def test_an_environment_adds_nothing_to_the_prompt_and_pays_nothing(kind: type):
    environment = kind()
    assert environment.reset(prompt=[], reward_model={}) is None
    public = {name for name in dir(environment) if not name.startswith("_")} - {"reset"}
    assert public == (set() if kind is NoCalculator else {"multiply"})
