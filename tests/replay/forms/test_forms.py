"""Every form is found by its columns, reads what it says, and loses only the rows that can't be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from form_rows import BAD, ROWS, asked, solution, write_array, write_lines, write_parquet

from tandem.common.errors import ConfigError, DataError
from tandem.replay.forms import (
    FORMS,
    DataRow,
    LeftOut,
    Message,
    check_form,
    form_of,
    named_form,
    read_rows,
)
from tandem.replay.forms.row import RowError

FORM_NAMES = [form.name for form in FORMS]
WITHOUT_GOLD = ("hh", "countdown", "multiple_choice", "task", "prompt", "instructions")
WITH_GOLD = [name for name in FORM_NAMES if name not in WITHOUT_GOLD]
WITH_TARGET = [name for name in WITH_GOLD if name not in ("question_answer", "gsm8k")]


def all_of(path: Path, form: str | None = None) -> list[DataRow]:
    return list(read_rows(path, form))


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_every_form_has_rows_here():
    assert sorted(ROWS) == sorted(BAD) == sorted(FORM_NAMES)


@pytest.mark.parametrize("name", FORM_NAMES)
class TestEveryForm:
    def test_it_is_found_by_its_columns(self, name: str, tmp_path: Path):
        rows = [ROWS[name](n) for n in range(1, 5)]
        found = [
            [vars_of(row) for row in all_of(path, form)]
            for path in (
                write_lines(tmp_path / "a.jsonl", rows),
                write_lines(tmp_path / "a.jsonl.gz", rows),
                write_array(tmp_path / "a.json", rows),
                write_parquet(tmp_path / "a.parquet", rows),
            )
            for form in (None, name)
        ]
        assert found == found[:1] * len(found)
        assert len(found[0]) == 4

    def test_five_bad_rows_of_a_hundred_are_left_out_with_their_reasons(
        self, name: str, tmp_path: Path
    ):
        rows: list[Any] = [ROWS[name](n) for n in range(1, 96)]
        places = (7, 20, 21, 50, 99)
        for place, change in zip(places, BAD[name], strict=True):
            assert isinstance(change, dict)
            rows.insert(place, {**ROWS[name](place), **change})
        left_out = LeftOut()
        kept = list(read_rows(write_lines(tmp_path / "a.jsonl", rows), left_out=left_out))
        assert (len(kept), len(left_out)) == (95, 5)
        assert [row.number for row in kept] == [n for n in range(100) if n not in places]
        for text in left_out.first.values():
            assert "a.jsonl row " in text
        with pytest.raises(DataError, match=r"a\.jsonl row 7, column "):
            all_of(tmp_path / "a.jsonl")

    def test_what_is_written_is_read_again(self, name: str, tmp_path: Path):
        form = named_form(name)
        assert form.write is not None
        rows = all_of(write_lines(tmp_path / "a.jsonl", [ROWS[name](n) for n in range(1, 9)]))
        written = [form.write(row.content) for row in rows]
        for again in (
            write_parquet(tmp_path / "b.parquet", written),
            write_lines(tmp_path / "b.jsonl", written),
        ):
            assert [vars_of(row) for row in all_of(again, name)] == [vars_of(row) for row in rows]


def vars_of(row: DataRow) -> dict[str, Any]:
    content = row.content
    return {name: getattr(content, name) for name in content.__slots__}


@pytest.mark.parametrize("name", WITH_GOLD)
def test_the_question_is_the_same_in_every_form(name: str, tmp_path: Path):
    (row,) = all_of(write_lines(tmp_path / "a.jsonl", [ROWS[name](600)]))
    assert row.content.prompt == (Message(role="user", content=asked(600)),)
    assert row.content.gold == (solution(600) if name == "problem_solution" else "1200")
    if name in WITH_TARGET:
        assert row.content.target == solution(600)


@pytest.mark.parametrize(
    ("given", "label"),
    [
        *((True, True), (1, True), ("True", True), ("1", True)),
        *((False, False), (0, False), (0.0, False), ("false", False), ("0", False)),
    ],
)
def test_a_label_counts_with_every_prompt_and_response(given: Any, label: bool, tmp_path: Path):
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}]
    rows: list[dict[str, Any]] = [
        {"instruction": "2+2?", "output": "5"},
        {"prompt": "2+2?", "output": "5"},
        {"query": "2+2?", "completion": "5"},
        {"messages": said},
    ]
    for number, row in enumerate(rows):
        path = write_lines(tmp_path / f"{number}.jsonl", [{**row, "label": given}])
        (found,) = all_of(path)
        content = found.content
        assert (content.prompt[-1].content, content.target) == ("2+2?", "5")
        assert (content.label, dict(content.extra)) == (label, {})
        form = form_of(path, found.raw)
        assert form.write is not None
        assert form.read(form.write(content)).label is label


def test_a_label_of_a_conversation_is_about_its_last_answer_and_otherwise_a_column(
    tmp_path: Path,
):
    asked = {"role": "user", "content": "2+2?"}
    rows = [
        {"messages": [asked], "label": False},
        {"messages": [asked, {"role": "assistant", "content": "4"}], "label": "sums"},
    ]
    found = [row.content for row in all_of(write_lines(tmp_path / "a.jsonl", rows))]
    assert [content.label for content in found] == [None, None]
    assert [content.extra for content in found] == [{"label": False}, {"label": "sums"}]


@pytest.mark.parametrize("label", [2, -1, 0.5, "2", 10**30])
def test_a_number_that_is_no_label_is_refused(label: Any, tmp_path: Path):
    rows = [
        {"prompt": "2+2?", "completion": "5", "label": label},
        {"messages": [said("user", "2+2?"), said("assistant", "5")], "label": label},
    ]
    for row in rows:
        with pytest.raises(DataError, match="isn't true or false: store a boolean, or "):
            all_of(write_lines(tmp_path / "a.jsonl", [row]))


def test_csv_may_hold_labels(tmp_path: Path):
    (tmp_path / "a.csv").write_text("prompt,completion,label\n2+2?,4,True\n2+2?,5,0\n")
    assert [row.content.label for row in all_of(tmp_path / "a.csv")] == [True, False]


def test_the_rationale_of_gsm8k_loses_its_annotations(tmp_path: Path):
    (row,) = all_of(write_lines(tmp_path / "a.jsonl", [ROWS["gsm8k"](600)]))
    assert row.content.target == "Twice 600 is 600*2=1200.\n#### 1200"


def test_countdown_keeps_what_its_reward_needs(tmp_path: Path):
    (row,) = all_of(write_lines(tmp_path / "a.jsonl", [ROWS["countdown"](4)]))
    assert row.content.extra == {"nums": [4, 2, 3], "target": 11}
    assert "4, 2, 3" in row.content.prompt[0].content
    assert row.content.gold == "11"


def test_a_pair_may_share_its_prompt(tmp_path: Path):
    user, yes, no = (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "assistant", "content": "5"},
    )
    rows = [
        {"chosen": "2+2? It is 4", "rejected": "2+2? Five"},
        {"chosen": [user, yes], "rejected": [user, no]},
        {"prompt": "2+2?", "chosen": [yes], "rejected": [no]},
    ]
    found = all_of(write_lines(tmp_path / "a.jsonl", rows))
    assert [row.content.prompt[0].content for row in found] == ["2+2?"] * 3
    assert [(row.content.target, row.content.rejected) for row in found] == [
        (" It is 4", " Five"),
        ("4", "5"),
        ("4", "5"),
    ]


@pytest.mark.parametrize("column", ["prompt", "question", "instruction", "input"])
def test_a_pair_may_have_its_question_in_a_column(column: str, tmp_path: Path):
    """As in Intel's and Argilla's sets, where both answers may begin with the same words."""
    row = {column: "2+2?", "chosen": "It is 4", "rejected": "It is 5"}
    rows = [{"system": "Be short.", **row}, {"system": "", **row}, {**row, "system": None}]
    found = all_of(write_lines(tmp_path / "a.jsonl", rows))
    user = Message(role="user", content="2+2?")
    system = Message(role="system", content="Be short.")
    assert [row.content.prompt for row in found] == [(system, user), (user,), (user,)]
    for one in found:
        assert (one.content.target, one.content.rejected) == ("It is 4", "It is 5")
        assert one.content.extra == {}


def test_messages_that_a_pair_shares_may_be_a_part_of_its_prompt(tmp_path: Path):
    first = [said("user", "Hi"), said("assistant", "Salut")]
    system, last = said("system", "Answer in French."), said("user", "2+2?")
    whole = [system, *first, last]

    def row(prompt: Any, shared: list[dict[str, Any]]) -> dict[str, Any]:
        answers = {"chosen": "4", "rejected": "5"}
        pair = {key: [*shared, said("assistant", answer)] for key, answer in answers.items()}
        return {"prompt": prompt, **pair}

    rows = [row(whole, [last]), row([last], whole), row(whole, whole), row("2+2?", whole)]
    # A beginning of it, nothing, and messages that go on from the column.
    rows += [
        row(whole[:2], whole),
        row(whole[:3], whole),
        row([], whole),
        row(whole[:2], whole[2:]),
        *(row([system, *asked], whole[1:]) for asked in ([], [first[0]], [last])),
    ]
    for found in all_of(write_lines(tmp_path / "a.jsonl", rows)):
        assert [one.content for one in found.content.prompt] == [one["content"] for one in whole]
    for prompt, shared in (([said("user", "3+3?")], whole), (first, first[1:])):
        with pytest.raises(DataError, match=r"column prompt: .* two different conversations: le"):
            all_of(write_lines(tmp_path / "a.jsonl", [row(prompt, shared)]))


def test_a_pair_with_an_empty_question_is_left_out(tmp_path: Path):
    """What its answers have in common isn't its prompt."""
    row = {"question": "2+2?", "chosen": "It is 4", "rejected": "It is 5"}
    rows = [row, {**row, "question": None}, {**row, "question": ""}]
    left_out = LeftOut()
    assert len(list(read_rows(write_lines(tmp_path / "a.jsonl", rows), left_out=left_out))) == 1
    assert left_out.counts == {"prompt is missing": 1, "question is empty": 1}


def test_a_prompt_with_a_system_message_keeps_it(tmp_path: Path):
    own, user = {"role": "system", "content": "Own."}, {"role": "user", "content": "2+2?"}
    row = {"prompt": [own, user], "system": "Another.", "chosen": "4", "rejected": "5"}
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert [message.content for message in found.content.prompt] == ["Own.", "2+2?"]


BE_SHORT = Message(role="system", content="Be short.")
SHARED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHARED},
        {"messages": [said("user", "2+2?"), said("assistant", "4")]},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"prompt": [said("user", "2+2?")], "completion": "4", "label": True},
        {"prompt": "2+2?"},
        {"prompt": "2+2?", "gold": "4"},
        {"problem": "2+2?", "answer": "4"},
    ],
)
def test_a_system_prompt_may_stand_in_a_column(row: dict[str, Any], tmp_path: Path):
    """As in Bespoke-Stratos, OpenThoughts and LLaMA-Factory's forms."""
    blank = (" ", None, False, 0, [], {})
    rows = [{"system": system, **row} for system in ("Be short.", *blank)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    user = Message(role="user", content="2+2?")
    whole = "messages" in row or "conversations" in row
    for all_answers in {False, whole}:
        found = [one.content for one in read_rows(path, whole=all_answers)]
        assert [content.prompt for content in found] == [(BE_SHORT, user), *[(user,)] * len(blank)]
        assert [content.extra for content in found] == [{}] * len(rows)
    left_out = LeftOut()
    write_lines(path, [{**row, "system": 7}])
    assert list(read_rows(path, left_out=left_out)) == []
    assert left_out.counts == {"system isn't text": 1}
    assert "or give the column another name" in left_out.first["system isn't text"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [said("system", "Own."), said("user", "2+2?"), said("assistant", "4")]},
        {"prompt": [said("system", "Own."), said("user", "2+2?")], "response": "4"},
    ],
)
def test_a_system_message_counts_before_the_column(row: dict[str, Any], tmp_path: Path):
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [{**row, "system": "Be short."}]))
    assert [m.content for m in found.content.prompt] == ["Own.", "2+2?"]


def test_earlier_turns_may_stand_in_a_column(tmp_path: Path):
    """LLaMA-Factory's ``history``."""
    texts = ('[["2+2?", "4"]]', "[]", "{}", "", " ")
    row: dict[str, Any] = {
        "instruction": "Add 1.",
        "input": "",
        "output": "5",
        "system": "Be short.",
    }
    rows = [{**row, "history": turns} for turns in ([["2+2?", "4"]], [], None)]
    for path in (
        write_lines(tmp_path / "a.jsonl", rows),
        write_parquet(tmp_path / "a.parquet", rows),
        # As CSV has them.
        write_lines(tmp_path / "b.jsonl", [{**row, "history": h} for h in texts]),
    ):
        first, *others = (one.content for one in all_of(path))
        said_before = [(m.role, m.content) for m in first.prompt]
        assert said_before == [
            ("system", "Be short."),
            ("user", "2+2?"),
            ("assistant", "4"),
            ("user", "Add 1."),
        ]
        assert (first.target, first.extra) == ("5", {})
        assert [(len(one.prompt), one.extra) for one in others] == [(2, {})] * len(others)


def test_a_pair_may_have_earlier_turns(tmp_path: Path):
    row = {"chosen": "5", "rejected": "6", "history": [["2+2?", "4"]]}
    both = {
        side: [said("user", "q"), said("assistant", row[side])] for side in ("chosen", "rejected")
    }
    rows = [
        {**row, "instruction": "Add 1.", "input": "", "system": "Be short."},
        {**row, "prompt": [said("user", "q")]},
        {**row, **both},
    ]
    texts = []
    for number, one in enumerate(rows):
        (found,) = all_of(write_lines(tmp_path / f"{number}.jsonl", [one]))
        texts.append([message.content for message in found.content.prompt])
        assert found.content.extra == ({"history": row["history"]} if number else {})
    assert texts == [["Be short.", "2+2?", "4", "Add 1."], ["q"], ["q"]]
    # With a response beside them they are pairs still.
    assert (
        form_of(tmp_path, {**row, "prompt": "", "response": "", "system": ""}).name == "preference"
    )


@pytest.mark.parametrize("history", ["the war", "[1]", [["2+2?"]], [["2+2?", ""]], {"a": 1}, 7])
def test_a_history_of_something_else_is_a_column_like_others(history: Any, tmp_path: Path):
    row = {"prompt": "q", "response": "r", "history": history}
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert [message.content for message in found.content.prompt] == ["q"]
    assert found.content.extra == {"history": history}


def test_a_prompt_of_messages_has_its_earlier_turns_already(tmp_path: Path):
    row = {"prompt": [said("user", "q")], "response": "r", "history": [["2+2?", "4"]]}
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert [message.content for message in found.content.prompt] == ["q"]
    assert found.content.extra == {"history": [["2+2?", "4"]]}


@pytest.mark.parametrize("column", ["input", "context"])
def test_an_instruction_comes_with_what_it_is_about(column: str, tmp_path: Path):
    """Alpaca's ``input`` and Dolly's ``context``, which are blank in many rows."""
    rows = [
        {"instruction": "Add them.", column: "2 and 2", "response": "4"},
        {"instruction": "What is 2 + 2?", column: "", "response": "4"},
    ]
    found = all_of(write_lines(tmp_path / "a.jsonl", rows))
    asked = [row.content.prompt[0].content for row in found]
    assert asked == ["Add them.\n\n2 and 2", "What is 2 + 2?"]
    assert [row.content.extra for row in found] == [{}, {}]


def test_numina_says_when_a_problem_has_no_answer(tmp_path: Path):
    row = {"problem": "Prove it.", "solution": "Clearly.", "answer": "proof", "source": "olympiads"}
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert (found.content.gold, found.content.data_source) == ("", "olympiads")


def test_a_problem_with_an_answer_needs_no_solution(tmp_path: Path):
    """As in DeepScaleR-Preview, where some solutions are blank."""
    rows = [
        {"problem": "2+2?", "answer": "4", "solution": "\\boxed{4}"},
        {"problem": "2+2?", "answer": "4", "solution": " "},
        {"problem": "2+2?", "answer": "4", "solution": None},
        {"problem": "Prove it.", "answer": "proof", "solution": ""},
    ]
    left_out = LeftOut()
    found = list(read_rows(write_lines(tmp_path / "a.jsonl", rows), left_out=left_out))
    kept = [(row.content.gold, row.content.target) for row in found]
    assert kept == [("4", "\\boxed{4}"), ("4", None), ("4", None)]
    assert left_out.counts == {"solution is missing": 1}


def test_open_math_reasoning_is_read(tmp_path: Path):
    row = {
        "problem": "2+2?",
        "generated_solution": "<think>hm</think> \\boxed{4}",
        "expected_answer": "4",
        "problem_source": "aops_c4",
        "pass_rate_72b_tir": "0.9",
    }
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert (found.content.gold, found.content.target) == ("4", "<think>hm</think> \\boxed{4}")
    assert found.content.extra == {"pass_rate_72b_tir": "0.9"}


def test_a_conversation_can_be_read_with_all_its_answers(tmp_path: Path):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [
        {
            "messages": [
                said("system", "s"),
                said("user", "q", name="Ann"),
                said("assistant", None, tool_calls=[call]),
                said("tool", "", tool_call_id="1"),
                said("assistant", "one", reasoning_content="so"),
                said("user", "thanks"),
            ],
            "tools": [{"function": {"name": "add"}}],
            "gold": "1",
            "level": 2,
        },
        {"messages": [said("user", "q")], "tools": [], "gold": "1", "level": 1},
    ]
    for path in (
        write_lines(tmp_path / "a.jsonl", rows),
        write_parquet(tmp_path / "a.parquet", rows),
    ):
        one, asked_only = (row.content for row in read_rows(path, whole=True))
        assert [(m.role, m.content) for m in one.prompt] == [("system", "s"), ("user", "q")]
        assert list(one.turns) == [
            said(
                "assistant",
                "",
                tool_calls=[{**call, "function": {"name": "add", "arguments": {"a": 1}}}],
            ),
            said("tool", "", tool_call_id="1"),
            said("assistant", "one", reasoning_content="so"),
        ]
        assert (one.target, one.gold, one.extra) == ("one", "1", {"level": 2})
        assert one.tools == ({"function": {"name": "add"}},)
        assert (asked_only.turns, asked_only.target) == ((), None)
        with pytest.raises(DataError, match="is the content of a message of the role assistant"):
            all_of(path)
    results = {"messages": [said("user", "q"), said("tool", "1"), said("assistant", "a")]}
    with pytest.raises(DataError, match=r"'tool' isn't a role.* or turns=all of a source"):
        all_of(write_lines(tmp_path / "b.jsonl", [results]))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([said("assistant", "a")], "has no user's message"),
        (
            [said("user", "q"), said("tool", "1"), said("assistant", "a")],
            "begins with a tool's message",
        ),
        (
            [said("user", "q"), said("assistant", "")],
            "is the content of a message of the role assistant",
        ),
        (
            [said("user", "q"), said("assistant", ["a"])],
            "is the content of a message of the role assistant",
        ),
        ([said("user", "q"), said("assistant", "", tool_calls=["add"])], "isn't a list of objects"),
        ([said("user", "q"), said("assistant", "", tool_calls=[{"a": 1}])], "is a call of no tool"),
        ([said("user", "q"), said("judge", "a")], "isn't a role"),
    ],
)
def test_conversations_that_can_not_be_read_with_all_their_answers(
    messages: list[Any], why: str, tmp_path: Path
):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    with pytest.raises(DataError, match=why):
        list(read_rows(path, whole=True))


def test_a_form_with_one_response_has_no_conversations(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [ROWS["prompt_response"](1)])
    for read in (lambda: list(read_rows(path, whole=True)), lambda: check_form(path, whole=True)):
        with pytest.raises(DataError, match=r"prompt_response, whose rows have one response each"):
            read()


def test_columns_of_two_forms_need_a_name(tmp_path: Path):
    row = {"question": "2+2?", "answer": "4", "messages": [{"role": "user", "content": "x"}]}
    assert all_of(write_lines(tmp_path / "a.jsonl", [row]))[0].content.gold == "4"
    row = {"question": "2+2?", "answer": "4", "prompt": "3+3?", "response": "6"}
    path = write_lines(tmp_path / "b.jsonl", [row])
    with pytest.raises(DataError, match="prompt_response or question_answer"):
        all_of(path)
    assert all_of(path, "prompt_response")[0].content.target == "6"


ODD = {"gsm8k": {"answer": "It is 4."}, "hh": {"chosen": "Human: q\n\nAssistant: a"}}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("place", [0, 1, 62])
def test_odd_rows_do_not_decide_for_the_others(name: str, place: int, tmp_path: Path):
    rows = [{**ROWS[name](n), **(ODD[name] if n <= place else {})} for n in range(99)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    left_out = LeftOut()
    found = list(read_rows(path, left_out=left_out))
    assert [row.number for row in found] == list(range(place + 1, 99))
    assert [vars_of(row) for row in found] == [
        vars_of(row) for row in read_rows(path, name, LeftOut())
    ]
    assert len(left_out) == place + 1


def test_a_heading_does_not_make_an_answer_one_of_gsm8k(tmp_path: Path):
    row = {"question": "2+2?", "answer": "#### Sum\nIt is 4."}
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert found.content.gold == row["answer"]


def test_unknown_columns_and_forms_are_named(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", [{"bla": 1}])
    with pytest.raises(DataError, match=r"no known form \(it has bla\): .*one of luffy, "):
        all_of(path)
    with pytest.raises(ConfigError, match="form=lufy isn't known"):
        all_of(path, "lufy")


def test_a_form_can_be_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_forms.py").write_text(
        "def read(row):\n"
        "    if row['n'] == 2: return None\n"
        "    if row['n'] == 3: raise KeyError('three')\n"
        "    if row['n'] == 4: raise SystemExit('bye')\n"
        "    return {'prompt': str(row['n']), 'gold': str(row['n'])}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write_lines(tmp_path / "a.jsonl", [{"n": n} for n in range(6)])
    left_out = LeftOut()
    rows = list(read_rows(path, "own_forms:read", left_out))
    assert [row.content.gold for row in rows] == ["0", "1", "5"]
    assert left_out.counts == {
        "row was left out by own_forms:read": 1,
        "row was refused by own_forms:read": 2,
    }
    with pytest.raises(ConfigError, match="own_forms:write"):
        list(read_rows(path, "own_forms:write"))
    # Where bad rows are refused, what the function leaves out on purpose is none of them.
    left_out = LeftOut()
    with pytest.raises(DataError, match=r"row 3, .* was refused by own_forms:read: KeyError"):
        list(read_rows(path, "own_forms:read", left_out, refuses=True))
    assert left_out.counts == {"row was left out by own_forms:read": 1}


def test_keys_that_only_parquet_adds_are_no_arguments_of_a_call(tmp_path: Path):
    def called(arguments: Any, properties: Any) -> dict[str, Any]:
        call = {"function": {"name": "w", "arguments": arguments}}
        tool = {"function": {"name": "w", "parameters": {"properties": properties}}}
        answer = said("assistant", "", tool_calls=[call])
        return {"messages": [said("user", "q"), answer], "tools": [tool]}

    text = {"type": "string"}
    rows = [
        called({"city": "a", "at": {"x": 1}}, {"city": text}),
        called({"zip": 3}, {"zip": text}),
    ]
    found = read_rows(write_parquet(tmp_path / "a.parquet", rows), whole=True)
    for row, one in zip(rows, found, strict=True):
        assert list(one.content.turns) == row["messages"][1:]
        assert list(one.content.tools) == row["tools"]
    # Whoever writes JSON as text means its nulls.
    as_text = called('{"city": null}', {})
    as_text["tools"] = '[{"name": "w", "default": null}]'
    (found_text,) = read_rows(write_parquet(tmp_path / "b.parquet", [as_text]), whole=True)
    (call,) = found_text.content.turns[0]["tool_calls"]
    assert call["function"]["arguments"] == {"city": None}
    assert found_text.content.tools == ({"name": "w", "default": None},)


def test_sharegpts_answers_keep_their_calls_where_a_template_writes_them(tmp_path: Path):
    calls = [{"function": {"name": "look", "arguments": {}}}]
    answer = {"from": "gpt", "value": "I look.", "tool_calls": calls}
    row = {"conversations": [{"from": "human", "value": "q"}, answer]}
    (found,) = read_rows(write_lines(tmp_path / "a.jsonl", [row]), whole=True)
    assert found.content.turns == (said("assistant", "I look.", tool_calls=calls),)


def test_numbers_beyond_64_bits_stay_numbers_where_a_template_writes_them(tmp_path: Path):
    call = {"function": {"name": "pay", "arguments": {"wei": 10**21}}}
    row = {"messages": [said("user", "q"), said("assistant", "", tool_calls=[call])]}
    (found,) = read_rows(write_lines(tmp_path / "a.jsonl", [row]), whole=True)
    assert found.content.turns[0]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"nums": [10**30, 1], "target": 2}, "nums isn't a list of whole numbers of 64 bits"),
        ({"nums": [1, 1], "target": 10**30}, "target isn't a whole number of 64 bits"),
        ({"task": {"a": [[[[[1]]]]]}}, "task has over 6 levels"),
    ],
)
def test_a_row_that_needs_what_no_record_can_hold_is_left_out(
    row: dict[str, Any], reason: str, tmp_path: Path
):
    left_out = LeftOut()
    assert list(read_rows(write_lines(tmp_path / "a.jsonl", [row]), left_out=left_out)) == []
    assert left_out.counts == {reason: 1}


NAN, INFINITY = float("nan"), float("inf")


def test_nan_is_no_value(tmp_path: Path):
    rows = [
        {"question": "1+1", "answer": NAN, "source": NAN},
        {"question": "1+1", "answer": NAN, "ground_truth": 2.0, "ability": NAN},
        {"problem": "1+1", "answer": NAN, "solution": "\\boxed{2}", "expected_answer": NAN},
        {"instruction": "Add.", "input": NAN, "context": "1, 1", "output": "2", "gold": NAN},
    ]
    found = [all_of(write_lines(tmp_path / "a.jsonl", [row]))[0].content for row in rows]
    assert [content.gold for content in found] == ["", "2", "\\boxed{2}", ""]
    assert [content.data_source for content in found] == [""] * 4
    assert found[3].prompt[0].content == "Add.\n\n1, 1"
    assert [content.extra for content in found] == [{}] * 4
    talk = {"messages": [said("user", "1+1"), said("assistant", "2")], "tools": NAN, "level": NAN}
    (row,) = read_rows(write_lines(tmp_path / "a.jsonl", [talk]), whole=True)
    assert (row.content.tools, row.content.extra) == ((), {})


BLANK = [
    ({"problem": "q", "solution": "s", "expected_answer": "", "answer": "5"}, "5", "s"),
    ({"problem": "q", "solution": "\\boxed{5}", "answer": " "}, "\\boxed{5}", "\\boxed{5}"),
    ({"prompt": "q", "response": "r", "gold": "", "ground_truth": "5"}, "5", "r"),
    ({"prompt": "", "instruction": "q", "response": " ", "output": "r"}, "", "r"),
    ({"question": "", "problem": "q", "answer": "", "ground_truth": "5"}, "5", None),
    ({"prompt": "", "input": "q", "chosen": "r", "rejected": "s"}, "", "r"),
]


@pytest.mark.parametrize(("row", "gold", "target"), BLANK)
def test_a_blank_text_stands_in_no_other_columns_way(
    row: dict[str, Any], gold: str, target: str | None, tmp_path: Path
):
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert found.content.prompt[0].content == "q"
    assert (found.content.gold, found.content.target) == (gold, target)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "1+1", "answer": INFINITY}, "answer isn't finite"),
        ({"question": "1+1", "answer": [NAN]}, "answer isn't finite"),
        ({"problem": "1+1", "answer": -INFINITY, "solution": "so"}, "answer isn't finite"),
        (
            {"data_source": "x", "prompt": "1+1", "reward_model": {"ground_truth": NAN}},
            "reward_model.ground_truth is missing",
        ),
    ],
)
def test_a_gold_answer_is_finite(row: dict[str, Any], reason: str, tmp_path: Path):
    left_out = LeftOut()
    assert list(read_rows(write_lines(tmp_path / "a.jsonl", [row]), left_out=left_out)) == []
    assert left_out.counts == {reason: 1}


def test_a_form_refuses_to_write_what_it_cannot_hold(tmp_path: Path):
    (row,) = all_of(write_lines(tmp_path / "a.jsonl", [ROWS["question_answer"](4)]))
    for name in (
        "prompt_response",
        "preference",
        "hh",
        "countdown",
        "problem_solution",
        "labelled",
    ):
        write = named_form(name).write
        assert write is not None
        with pytest.raises(RowError, match=r"the form .* needs it"):
            write(row.content)


ARC = {"id": "x", "question": "2 + 2?", "choices": {"text": ["3", "4"], "label": ["A", "B"]}}
GPQA = {"Question": "2 + 2?\n", "Correct Answer": "4\n", "Explanation": "two and two"}


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({**ARC, "answerKey": "B"}, "B"),
        ({**ARC, "choices": {"text": ["3", "4"], "label": ["1", "2"]}, "answerKey": "2"}, "B"),
        ({"question": "2 + 2?", "choices": ["3", "4"], "answer": 1, "subject": "sums"}, "B"),
        (
            {
                "question": "2 + 2?",
                "options": ["3", "4"],
                "answer": "B",
                "answer_index": 1,
                "src": "x",
            },
            "B",
        ),
    ],
)
def test_published_multiple_choice_sets_are_read_alike(
    row: dict[str, Any], gold: str, tmp_path: Path
):
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert found.content.prompt[0].content == "2 + 2?\nA) 3\nB) 4"
    assert (found.content.gold, found.content.target) == (gold, None)
    assert "answer_index" not in found.content.extra


def test_gpqa_gets_an_order_of_options_that_does_not_show_the_answer(tmp_path: Path):
    rows = [
        {
            **GPQA,
            "Question": f"{n} + 2?",
            **{f"Incorrect Answer {k}": str(10 * k + n) for k in (1, 2, 3)},
        }
        for n in range(40)
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = all_of(path)
    golds = [row.content.gold for row in found]
    assert set(golds) == set("ABCD")
    for row in found:
        assert f"\n{row.content.gold}) 4" in row.content.prompt[0].content + "\n"
        assert row.content.extra == {}
    assert [row.content.gold for row in all_of(path)] == golds


def test_olympiad_bench_has_its_answer_in_a_list_of_one(tmp_path: Path):
    row = {"question": "2 + 2?", "solution": ["by counting"], "final_answer": ["$4$"], "unit": None}
    path = write_lines(tmp_path / "a.jsonl", [row, {**row, "solution": []}])
    kept = [(found.content.gold, found.content.target) for found in all_of(path)]
    assert kept == [("$4$", "by counting"), ("$4$", None)]
    (found, _) = all_of(path, "question_answer")
    assert (found.content.gold, found.content.target) == ("$4$", None)


def test_columns_of_questions_and_answers_may_begin_with_a_capital(tmp_path: Path):
    row = {"ID": "2024-I-1", "Problem": "2 + 2?", "Solution": "by counting", "Answer": 4}
    (found,) = all_of(write_lines(tmp_path / "a.jsonl", [row]))
    assert (found.content.prompt[0].content, found.content.gold) == ("2 + 2?", "4")
    assert found.content.extra == {"ID": "2024-I-1", "Solution": "by counting"}


def test_a_call_of_a_tool_without_text_names_the_setting_that_reads_it(tmp_path: Path):
    call = {"function": {"name": "add", "arguments": "{}"}}
    turns = [said("user", "2+2?"), said("assistant", None, tool_calls=[call])]
    row = {"messages": [*turns, said("tool", "4"), said("assistant", "4")]}
    with pytest.raises(DataError, match="turns=all"):
        all_of(write_lines(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize("column", ["system", "history"])
def test_what_stands_before_the_question_does_not_tell_the_form(column: str) -> None:
    """The columns with what stands before a question say nothing of what follows it."""
    asked = "\n\nHuman: q\n\nAssistant:"
    rows: list[dict[str, Any]] = [
        {"chosen": f"{asked} a", "rejected": f"{asked} b"},
        {"prompt": "q", "response": "r", "answer": "4"},
        {"question": "q", "answer": "so\n#### 4", "prompt": "q", "response": "r"},
    ]
    for row in rows:
        found = []
        for columns in (row, {**row, column: []}):
            try:
                found.append(form_of(Path("a.jsonl"), columns).name)
            except DataError:
                found.append("several")
        assert found[0] == found[1]
