"""Whole conversations: which of their tokens are learned from, and which conversations can't be taken apart."""

from __future__ import annotations

import json
import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tandem.common.config import Config, SourceConfig
from tandem.common.errors import ConfigError, DataError
from tandem.common.records import ExpertTrace, Problem, Source
from tandem.launch.cli import main
from tandem.launch.ingest.counts import SourceCounts
from tandem.launch.ingest.prepare import _without_new
from tandem.launch.ingest.rows import SourceReader
from tandem.launch.run.opened.presets import load
from tandem.reward.grading import Grader

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS / "rollout" / "endpoint"))

from chat_templates import tokenizer  # noqa: E402


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CHAT = [
    said("system", "Add."),
    said("user", "1+1?"),
    said("assistant", "It is 2.\n\nSure"),
    said("user", "\n\nAnd one more?"),
    said("assistant", "\n3"),
    said("user", "the end"),
]
CALL = {"name": "multiply", "arguments": {"a": 1, "b": 22}}
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}]
PLAYED = [
    said("user", "1*22?"),
    said(
        "assistant",
        "",
        # In OpenAI's form arguments are JSON.
        tool_calls=[{"type": "function", "function": {**CALL, "arguments": '{"a": 1, "b": 22}'}}],
    ),
    said("tool", "22"),
    said("assistant", "It is 22."),
    said("user", "Thanks"),
    said("assistant", "Gladly"),
]


def config_of(*overrides: str) -> Config:
    plain = [
        "rollout.max_new_tokens=400",
        "data.max_prompt_tokens=400",
        "data.train=[{path: a.jsonl}]",
    ]
    return load("miniature-sft").resolve([*plain, *overrides])


def read(
    tok: Any, *rows: dict[str, Any], config: Config | None = None, **source: Any
) -> tuple[list[Problem], list[ExpertTrace], SourceCounts]:
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config or config_of()
    with Grader(config.reward) as grader:
        reader = SourceReader(config, tok, grader, lambda text: None)
        return reader.read(SourceConfig(path="a.jsonl", **source), Path("a.jsonl"))


def runs(tok: Any, trace: ExpertTrace) -> list[tuple[bool, str]]:
    """The trace's text in pieces: whether the assistant wrote them, and what they are."""
    assert trace.source is not None
    found: list[tuple[bool, list[int]]] = []
    for token, source in zip(trace.tokens.tolist(), trace.source.tolist(), strict=True):
        own = source == Source.EXPERT
        if not found or found[-1][0] != own:
            found.append((own, []))
        found[-1][1].append(token)
    return [(own, tok.decode(tokens, skip_special_tokens=False)) for own, tokens in found]


# --- which tokens are learned from ---

MARKED = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""A template that marks what the assistant writes, by which transformers makes masks of its own."""


def test_the_masks_are_those_that_transformers_makes_of_a_template_with_marks() -> None:
    tok = deepcopy(tokenizer("chatml"))
    tok.chat_template = MARKED
    (problem,), (trace,), counts = read(tok, {"messages": CHAT}, turns="all")
    # What no answer follows teaches nothing.
    theirs = tok.apply_chat_template(
        CHAT[:-1], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ids, mask = theirs["input_ids"], theirs["assistant_masks"]
    length = len(problem.prompt_tokens)
    # Behind the last end of a turn there is a line break, which nobody learns.
    assert tok.decode(ids[-1:]) == "\n"
    assert mask[-1] == 0
    assert [*problem.prompt_tokens, *trace.tokens] == ids[:-1]
    assert [source == Source.EXPERT for source in trace.source] == list(map(bool, mask[length:-1]))
    assert not any(mask[:length])
    assert (trace.text, counts.traces, counts.earlier_answers) == ("\n3", 1, 0)


def opened(role: str) -> str:
    """How Llama's template begins a message."""
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def test_calls_of_tools_are_learned_and_their_results_are_not() -> None:
    row = {"messages": PLAYED, "tools": TOOLS}
    tok = tokenizer("llama")
    (problem,), (trace,), _ = read(tok, row, turns="all")
    assert '"name": "multiply"' in problem.prompt_text
    assert runs(tok, trace) == [
        (True, '{"name": "multiply", "parameters": {"a": 1, "b": 22}}<|eot_id|>'),
        (
            False,
            f'{opened("ipython")}"22"<|eot_id|>{opened("assistant")}',
        ),
        (True, "It is 22.<|eot_id|>"),
        (
            False,
            f"{opened('user')}Thanks<|eot_id|>{opened('assistant')}",
        ),
        (True, "Gladly<|eot_id|>"),
    ]
    tok = tokenizer("chatml")
    _, (trace,), _ = read(tok, {**row, "tools": json.dumps(TOOLS)}, turns="all")
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 22}}\n</tool_call>'
    assert runs(tok, trace)[:3] == [
        (True, f"{call}<|im_end|>"),
        (
            False,
            "\n<|im_start|>user\n<tool_response>\n22\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "It is 22.<|im_end|>"),
    ]


def test_results_of_several_calls_are_one_message_where_the_template_joins_them() -> None:
    several = [
        PLAYED[0],
        {**PLAYED[1], "tool_calls": [{"function": CALL}] * 2},
        PLAYED[2],
        *PLAYED[2:4],
    ]
    tok = tokenizer("chatml")
    _, (trace,), _ = read(tok, {"messages": several}, turns="all")
    results = "<tool_response>\n22\n</tool_response>"
    assert runs(tok, trace)[1] == (
        False,
        f"\n<|im_start|>user\n{results}\n{results}<|im_end|>\n<|im_start|>assistant\n",
    )


@pytest.mark.parametrize("weight", [0, 0.0, False])
def test_an_answer_of_weight_0_is_context(weight: Any) -> None:
    """As in OpenAI's format for fine-tuning."""
    tok = tokenizer("chatml")
    said_by = [one["role"] for one in PLAYED]
    chats = []
    for silent in ({1}, {3}, {5}, {1, 3}):
        weights = [0 if place in silent else 1 for place in range(len(PLAYED))]
        chat = [
            {**one, "weight": weights[place] or weight} if role == "assistant" else one
            for place, (one, role) in enumerate(zip(PLAYED, said_by, strict=True))
        ]
        chats.append({"messages": chat})
    _, traces, _ = read(tok, *chats, turns="all")
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 22}}\n</tool_call>'
    every = [f"{call}<|im_end|>", "It is 22.<|im_end|>", "Gladly<|im_end|>"]
    assert [[text for own, text in runs(tok, trace) if own] for trace in traces] == [
        every[1:],
        [every[0], every[2]],
        every[:2],
        every[2:],
    ]
    _, (whole,), _ = read(tok, {"messages": PLAYED}, turns="all")
    assert traces[0].tokens.tolist() == whole.tokens.tolist()
    assert traces[2].text == "It is 22."


def test_a_last_answer_of_weight_0_leaves_the_problem_without_a_response() -> None:
    tok = tokenizer("chatml")
    asked, answer = said("user", "1+1?"), said("assistant", "2")
    shared = {"from": "gpt", "value": "2", "weight": 0}
    rows = [
        {"messages": [asked, answer]},
        {"messages": [asked, {**answer, "weight": 0}], "gold": "2"},
        {"messages": [asked, {**answer, "weight": 0.5}]},
        {"messages": [asked, answer, asked, {**answer, "weight": 0}], "gold": "2"},
    ]
    problems, traces, counts = read(tok, *rows)
    assert [problem.prompt_text.count("1+1?") for problem in problems] == [1, 1, 1, 2]
    assert not any("weight" in str(problem.extra) for problem in problems)
    assert [trace.problem_id for trace in traces] == ["a/0", "a/2"]
    assert not counts.bad_rows.counts
    _, _, counts = read(tok, {"messages": [asked, {**answer, "weight": 0}]}, rows[0])
    assert counts.bad_rows.counts == {"no gold answer and no response that is learned from": 1}
    sharegpt = {"conversations": [{"from": "human", "value": "1+1?"}, shared], "gold": "2"}
    problems, traces, _ = read(tok, sharegpt)
    assert (len(problems), traces) == (1, [])
    problems, _, counts = read(tok, *rows, turns="all")
    assert [problem.problem_id for problem in problems] == ["a/0", "a/2", "a/3"]
    assert counts.bad_rows.counts == {"messages has only answers of weight 0": 1}


def test_the_end_token_follows_once_where_the_template_ends_turns_with_another_one() -> None:
    tok = deepcopy(tokenizer("chatml"))
    tok.eos_token = "<|endoftext|>"
    _, (trace,), _ = read(tok, {"messages": CHAT}, turns="all")
    ends = [text for own, text in runs(tok, trace) if own]
    assert ends == ["It is 2.\n\nSure<|im_end|>", "\n3<|im_end|><|endoftext|>"]


def test_a_systems_message_of_the_config_is_part_of_the_prompt() -> None:
    config = config_of("data.system_prompt=Be brief.", "data.remove_system=true")
    tok = tokenizer("chatml")
    (problem,), (trace,), _ = read(tok, {"messages": CHAT}, config=config, turns="all")
    assert problem.prompt_text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert runs(tok, trace)[0] == (True, "It is 2.\n\nSure<|im_end|>")


def test_the_tokens_that_are_graded_are_those_of_the_last_answer() -> None:
    # Of a maximum and a buffer of 1 the component is less the number of tokens.
    length = "{name: dapo_overlong, weight: 0, params: {max_length: 1, buffer: 1}}"
    config = config_of(
        "reward.mode=last_number", f"reward.components=[{{name: accuracy}}, {length}]"
    )
    row = {"messages": CHAT, "gold": "3"}
    tok = tokenizer("chatml")
    _, (trace,), _ = read(tok, row, config=config, turns="all")
    (_, answer) = runs(tok, trace)[-1]
    assert answer == "\n3<|im_end|>"
    assert trace.components["dapo_overlong"] == -len(tok.encode(answer))


# --- conversations that can't be taken apart ---


def test_a_template_that_writes_earlier_messages_otherwise_is_refused_by_name() -> None:
    tok = tokenizer("thinking")
    thought = [*CHAT[1:2], said("assistant", "<think>\nwhy\n</think>\n\n2"), *CHAT[3:5]]
    alone = {"messages": [*CHAT[1:2], said("assistant", "<think>\nwhy\n</think>\n\n2")]}
    problems, traces, counts = read(tok, {"messages": thought}, alone, turns="all")
    assert [problem.problem_id for problem in problems] == ["a/1"]
    assert len(traces) == 1
    reason = "messages is what the chat template writes otherwise once more messages follow"
    assert counts.bad_rows.counts == {reason: 1}
    first = counts.bad_rows.first[reason]
    assert re.search(
        r"a\.jsonl row 0: column messages: '<think>.*' is what.*with message 4 it is", first
    )
    assert "set turns=last" in first
    # With no other row it is all that is left to say.
    with pytest.raises(
        DataError, match=r"the first, a\.jsonl row 0: column messages: .*set turns=last"
    ):
        read(tok, {"messages": thought}, turns="all")
    with pytest.raises(DataError, match=r"row 0: column messages: .* data\.bad_rows=leave_out"):
        read(tok, {"messages": thought}, config=config_of("data.bad_rows=refuse"), turns="all")


def test_a_template_that_ends_no_answer_with_a_special_token_is_refused() -> None:
    tok = deepcopy(tokenizer("chatml"))
    tok.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="without a special token to stop at"):
        read(tok, {"messages": CHAT}, turns="all")


def test_what_a_template_refuses_is_a_row_that_is_left_out() -> None:
    several = {"messages": [PLAYED[0], {**PLAYED[1], "tool_calls": [{"function": CALL}] * 2}]}
    _, traces, counts = read(tokenizer("llama"), several, {"messages": CHAT}, turns="all")
    assert len(traces) == 1
    assert "only supports single tool-calls" in next(iter(counts.bad_rows.first.values()))


def test_a_model_without_a_chat_template_is_refused() -> None:
    tok = deepcopy(tokenizer("chatml"))
    tok.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template.*turns=last"):
        read(tok, {"messages": CHAT}, turns="all")


def test_rows_with_one_response_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"the form prompt_response.*store the rows in the form conversation"
    ):
        read(tokenizer("chatml"), {"prompt": "1+1?", "response": "2"}, turns="all")


@pytest.mark.parametrize("characters", [300, 1_000_000])
def test_a_conversation_over_the_limit_is_left_out_whole(characters: int) -> None:
    tok = tokenizer("chatml")
    long = [*CHAT[:3], said("user", "=" * characters), *CHAT[4:]]
    limited = config_of("rollout.max_new_tokens=100")
    problems, traces, counts = read(
        tok, {"messages": long}, {"messages": CHAT}, config=limited, turns="all"
    )
    assert (len(problems), len(traces), counts.long_traces) == (2, 1, 1)
    refusing = config_of("rollout.max_new_tokens=100", "data.overlong=refuse")
    with pytest.raises(DataError, match=r"row 0: the trace has .* rollout\.max_new_tokens is 100"):
        read(tok, {"messages": long}, config=refusing, turns="all")


# --- where it isn't set ---


def test_by_default_the_last_answer_is_learned_from_and_the_others_are_told_of() -> None:
    tok = tokenizer("chatml")
    chat = CHAT[:-1]
    (one, _), (trace, _), counts = read(tok, {"messages": chat}, {"messages": CHAT[:3]})
    assert trace.source is None
    assert "It is 2." in one.prompt_text
    assert tok.decode(trace.tokens) == "\n3<|im_end|>"
    assert counts.earlier_answers == 1
    assert "1 rows' earlier answers (only the last one of each row is learned from)" in str(counts)
    _, (first, _), counts = read(tok, {"messages": chat}, {"messages": CHAT[:3]}, turns="all")
    assert first.source is not None
    assert "earlier answers" not in str(counts)


def test_messages_that_end_with_another_response_than_the_solution_are_told_of() -> None:
    """As OpenR1-Math has a model's response beside a person's solution; NuminaMath has the solution in both."""
    tok = tokenizer("chatml")
    row = {"problem": "1+1?", "solution": "It is 2."}
    ends = ("One and one, so 2.", "It is 2.\n", "")
    rows = [{**row, "messages": [said("user", "1+1?"), said("assistant", end)]} for end in ends]
    _, traces, counts = read(tok, *rows, row)
    assert [tok.decode(t.tokens, skip_special_tokens=True) for t in traces] == ["It is 2."] * 4
    assert "1 rows' messages (they end with another response than the solution; " in str(counts)
    _, (trace,), counts = read(tok, rows[0], form="conversation")
    assert tok.decode(trace.tokens, skip_special_tokens=True) == ends[0]
    assert counts.other_responses == 0


def test_tools_that_no_prompt_shows_are_told_of() -> None:
    tok = tokenizer("chatml")
    rows = [{"messages": CHAT[:3], "tools": tools} for tools in (TOOLS, json.dumps(TOOLS), [], "")]
    problems, _, counts = read(tok, *rows)
    assert not any("multiply" in problem.prompt_text for problem in problems)
    assert "2 rows' tools (only turns=all renders that column)" in str(counts)
    # Whether a row has a response or not, whatever its form, and none beyond the limit.
    asked = [{"messages": CHAT[:2], "tools": TOOLS, "gold": "22"}] * 2
    for turns in ("last", "all"):
        _, traces, counts = read(tok, *asked, turns=turns)
        assert (traces, counts.unused_tools) == ([], 2)
    _, _, counts = read(tok, *asked, limit=1)
    assert counts.unused_tools == 1
    _, _, counts = read(tok, {"prompt": "1*22=?", "gold": "22", "tools": json.dumps(TOOLS)})
    assert counts.unused_tools == 1
    problems, _, counts = read(tok, *rows[:2], turns="all")
    assert all("multiply" in problem.prompt_text for problem in problems)
    assert "tools" not in str(counts)


def test_a_conversation_of_one_answer_is_the_same_either_way() -> None:
    tok = tokenizer("chatml")
    _, (last,), _ = read(tok, {"messages": CHAT[:3]})
    _, (every,), _ = read(tok, {"messages": CHAT[:3]}, turns="all")
    assert every.source.tolist() == [Source.EXPERT] * len(every.tokens)
    assert replace(every, source=None).tokens.tolist() == last.tokens.tolist()


def test_older_runs_have_the_same_digest_of_their_inputs() -> None:
    tree = config_of().data.model_dump(mode="json")
    assert "turns" not in _without_new(tree)["train"][0]
    tree["train"][0]["turns"] = "all"
    assert _without_new(tree)["train"][0]["turns"] == "all"


def test_the_command_counts_them_and_both_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text(json.dumps({"messages": CHAT[:-1]}) + "\n")
    assert main(["ingest", "a.jsonl"]) == 0
    assert re.search("1  rows' earlier answers", capsys.readouterr().out)
    lengths = []
    for turns in ("last", "all"):
        words = ["ingest", "a.jsonl", "--model", "miniature-tools", "--turns", turns, "--json"]
        assert main(words) == 0
        (report,) = json.loads(capsys.readouterr().out)
        lengths.append([report["lengths"][name]["p100"] for name in ("prompt", "response")])
        assert (report["left_out"] == {}) is (turns == "all")
    (long_prompt, short), (prompt, longer) = lengths
    assert long_prompt + short == prompt + longer
    assert prompt < long_prompt


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--write", "b.jsonl"], "--write writes rows as they are"),
        ([], "name the model with --model"),
    ],
)
def test_what_the_command_refuses(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    assert main(["ingest", "a.jsonl", "--turns", "all", *words]) != 0
    assert why in capsys.readouterr().err
