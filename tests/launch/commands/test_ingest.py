"""``tandem ingest``: what it counts, what it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tandem.common.run_folder import RunFolder
from tandem.launch.cli import main
from tandem.launch.ingest.prepare import prepare
from tandem.launch.run.opened.presets import load
from tandem.replay.forms import FORMS, read_rows

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS / "replay"))

from form_rows import BAD, ROWS, asked, write_lines, write_parquet  # noqa: E402


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["ingest", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_ninety_five_of_a_hundred_rows_are_kept(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [ROWS[name](n) for n in range(1, 96)]
    for place, change in zip((7, 20, 21, 50, 99), BAD[name], strict=True):
        rows.insert(place, {**ROWS[name](place), **change})  # type: ignore[dict-item]
    write_lines(here / "a.jsonl", rows)
    (found,) = report(capsys, "a.jsonl")
    assert (found["rows"], found["kept"]) == (100, 95)
    assert sum(found["left_out"].values()) == 5
    assert set(found["first"]) == set(found["left_out"])
    assert main(["ingest", "a.jsonl"]) == 0
    table = capsys.readouterr().out
    assert "kept                95" in table
    assert "a.jsonl row 7, column " in table


def test_the_same_problems_have_the_same_tokens_in_every_form(here: Path) -> None:
    """Whatever the form, prompts and responses reach the tokenizer as the same texts."""
    contents = set()
    for name in ("luffy", "prompt_response", "labelled", "problem_solution", "conversation"):
        path = write_parquet(here / f"{name}.parquet", [ROWS[name](n) for n in range(2, 20, 2)])
        contents.add(tuple((r.content.prompt, r.content.target) for r in read_rows(path)))
    assert len(contents) == 1


def test_any_form_is_written_as_any_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(here / "a.jsonl", [ROWS["luffy"](n) for n in range(1, 8)])
    assert main(["ingest", "a.jsonl", "--write", "b.jsonl", "--as", "conversation"]) == 0
    assert main(["ingest", "b.jsonl", "--write", "c.parquet", "--as", "prompt_response"]) == 0
    assert main(["ingest", "c.parquet", "--write", "d.parquet"]) == 0
    assert "7 rows written to d.parquet (luffy)" in capsys.readouterr().out
    first, last = (list(read_rows(here / name)) for name in ("a.jsonl", "d.parquet"))
    for a, b in zip(first, last, strict=True):
        assert (a.content.prompt, a.content.target, a.content.gold, a.content.data_source) == (
            b.content.prompt,
            b.content.target,
            b.content.gold,
            b.content.data_source,
        )
    assert sorted(file.name for file in here.iterdir()) == [
        "a.jsonl",
        "b.jsonl",
        "c.parquet",
        "d.parquet",
    ]


def test_columns_of_several_kinds_are_written_as_text(here: Path) -> None:
    rows = [
        {**ROWS["prompt_response"](n), "mark": mark} for n, mark in enumerate((3, "a", None, [1]))
    ]
    write_lines(here / "a.jsonl", rows)
    assert main(["ingest", "a.jsonl", "--write", "b.parquet", "--as", "prompt_response"]) == 0
    marks = [row.content.extra.get("mark") for row in read_rows(here / "b.parquet")]
    assert marks == ["3", "a", None, "[1]"]


def test_fractions_and_whole_numbers_that_no_float_holds_are_written_as_text(here: Path) -> None:
    most = (1 << 53) + 1
    numbers = [(0.5, 1, 1), (most, most, 0.5)]
    rows = [
        {**ROWS["question_answer"](n), "mixed": mixed, "large": large, "small": small}
        for n, (mixed, large, small) in enumerate(numbers)
    ]
    write_lines(here / "a.jsonl", rows)
    assert main(["ingest", "a.jsonl", "--write", "b.parquet", "--as", "question_answer"]) == 0
    extras = [row.content.extra for row in read_rows(here / "b.parquet")]
    assert [extra["mixed"] for extra in extras] == ["0.5", str(most)]
    assert [extra["large"] for extra in extras] == [1, most]
    assert [extra["small"] for extra in extras] == [1.0, 0.5]


def test_inner_values_of_several_kinds_are_written_as_text_too(here: Path) -> None:
    infos: list[Any] = [
        {"level": 3, "index": 1, "of": {"year": 2024}},
        {"level": "Level 3", "index": 2, "of": {"year": "2024/25"}},
        {"level": None, "index": 3},
    ]
    rows = [{**ROWS["luffy"](n), "extra_info": info} for n, info in enumerate(infos)]
    write_lines(here / "a.jsonl", rows)
    assert main(["ingest", "a.jsonl", "--write", "b.parquet"]) == 0
    extras = [row.content.extra for row in read_rows(here / "b.parquet")]
    assert extras == [
        {"level": "3", "index": 1, "of": {"year": "2024"}},
        {"level": "Level 3", "index": 2, "of": {"year": "2024/25"}},
        {"index": 3},
    ]


def test_elements_of_several_kinds_and_what_parquet_has_no_type_for_are_written_too(
    here: Path,
) -> None:
    given: list[Any] = [
        {"tags": [1, "a", {"x": 1}], "none": {}, "long": 1 << 70, "deep": [[1], ["a"]]},
        {"tags": [], "none": {}, "long": 3, "deep": [[]]},
    ]
    rows = [{**ROWS["prompt_response"](n), **more} for n, more in enumerate(given)]
    write_lines(here / "a.jsonl", rows)
    assert main(["ingest", "a.jsonl", "--write", "b.parquet", "--as", "prompt_response"]) == 0
    extras = [row.content.extra for row in read_rows(here / "b.parquet")]
    assert [extra["tags"] for extra in extras] == [["1", "a", '{"x": 1}'], []]
    assert [extra["long"] for extra in extras] == [str(1 << 70), "3"]
    assert [extra["deep"] for extra in extras] == [[["1"], ["a"]], [[]]]
    assert all(not extra.get("none") for extra in extras)


def test_what_a_form_cannot_hold_is_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROWS["preference"](n) for n in range(4)]
    del rows[2]["gold"]
    write_lines(here / "a.jsonl", rows)
    words = ("--write", "b.parquet", "--as", "question_answer")
    (found,) = report(capsys, "a.jsonl", *words)
    assert (found["kept"], found["left_out"]) == (3, {"answer is missing": 1})
    assert main(["ingest", "a.jsonl", "--write", "c.parquet", "--as", "countdown"]) != 0
    out, err = capsys.readouterr()
    assert "no row can be written as countdown" in err
    assert "       4  nums is missing\n" in out
    assert not (here / "c.parquet").exists()
    assert not list(here.glob(".c*"))
    words = ("--write", "c.parquet", "--as", "countdown", "--json")
    assert main(["ingest", "a.jsonl", *words]) == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["kept"], found["left_out"]) == (0, {"nums is missing": 4})


@pytest.mark.parametrize("form", ["luffy", "prompt_response", "problem_solution", "gsm8k"])
def test_a_wrong_response_is_not_written_as_one_to_learn_from(
    form: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(here / "kto.jsonl", [ROWS["labelled"](n) for n in range(1, 7)])
    (found,) = report(capsys, "kto.jsonl", "--write", "sft.jsonl", "--as", form)
    reason = f"label says that the response is a wrong one, which the form {form} can't hold"
    assert (found["kept"], found["left_out"]) == (3, {reason: 3})
    assert "kto.jsonl row 0, column label: False " in found["first"][reason]
    written = [row.content.prompt[0].content for row in read_rows(here / "sft.jsonl")]
    assert written == [asked(n) for n in (2, 4, 6)]


@pytest.mark.parametrize("form", ["luffy", "prompt_response", "conversation"])
def test_the_better_response_of_a_pair_is_written_as_one_to_learn_from(
    form: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(here / "dpo.jsonl", [ROWS["preference"](n) for n in (1, 2)])
    (found,) = report(capsys, "dpo.jsonl", "--write", "sft.jsonl", "--as", form)
    assert (found["kept"], found["left_out"]) == (2, {})
    chosen = [row.content.target for row in read_rows(here / "dpo.jsonl")]
    assert [row.content.target for row in read_rows(here / "sft.jsonl")] == chosen


def test_what_the_data_say_of_a_response_stays_with_it(here: Path) -> None:
    write_lines(here / "kto.jsonl", [ROWS["labelled"](n) for n in range(1, 7)])
    write_lines(here / "dpo.jsonl", [ROWS["preference"](n) for n in range(1, 7)])
    assert main(["ingest", "kto.jsonl", "--write", "a.parquet", "--as", "conversation"]) == 0
    assert [row.content.label for row in read_rows(here / "a.parquet")] == [False, True] * 3
    assert main(["ingest", "dpo.jsonl", "--write", "b.parquet", "--as", "hh"]) == 0
    assert {row.content.rejected for row in read_rows(here / "b.parquet")} == {"I don't know."}
    # A question alone may be written of either.
    for name in ("kto.jsonl", "dpo.jsonl"):
        assert main(["ingest", name, "--write", "c.parquet", "--as", "question_answer"]) == 0
        assert [row.content.target for row in read_rows(here / "c.parquet")] == [None] * 6


VERL = {
    "answer": "2 * 3 = <<2*3=6>>6\n#### 6",
    "index": 1,
    "question": "What is twice 3?",
    "split": "train",
}
"""What verl's rows of GSM8K have in ``extra_info``."""


@pytest.mark.parametrize("form", ["prompt", "luffy", "conversation"])
def test_long_columns_are_written_whole(form: str, here: Path) -> None:
    tests = [f"assert f({n}) == {n}" for n in range(200)]
    write_lines(here / "a.jsonl", [{"prompt": "Write f", "gold": "f", "tests": tests}])
    assert main(["ingest", "a.jsonl", "--write", "b.jsonl", "--as", form]) == 0
    (row,) = read_rows(here / "b.jsonl")
    assert row.content.extra["tests"] == tests


def test_long_binary_columns_are_not_written(here: Path) -> None:
    more = {"image": {"bytes": b"\x00" * 2_000}, "pixels": b"\x00" * 2_000, "level": 3}
    pq.write_table(pa.table({"prompt": ["q"], **{n: [of] for n, of in more.items()}}), "a.parquet")
    assert main(["ingest", "a.parquet", "--write", "b.jsonl", "--as", "prompt"]) == 0
    assert json.loads((here / "b.jsonl").read_text()).keys() == {"prompt", "ability", "level"}


@pytest.mark.parametrize("name", ["b.jsonl", "b.parquet"])
def test_a_conversation_keeps_what_its_earlier_messages_have_beside_their_content(
    name: str, here: Path
) -> None:
    asked = {"role": "user", "content": "2+2?", "name": "Ann"}
    wrong = {"role": "assistant", "content": "5", "weight": 0}
    right = {"role": "assistant", "content": "4"}
    chat = {"messages": [asked, wrong, asked, right]}
    shared = {
        "conversations": [
            {"from": "human", "value": "2+2?"},
            {"from": "gpt", "value": "5", "weight": 0},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "4"},
        ]
    }
    write_lines(here / "a.jsonl", [chat, {**chat, "system": "Add."}, shared])
    assert main(["ingest", "a.jsonl", "--write", name, "--as", "conversation"]) == 0
    rows = [row.content.turns for row in read_rows(here / name, whole=True)]
    assert [[one.get("weight") for one in turns] for turns in rows] == [[0, None, None]] * 3
    assert [turns[1].get("name") for turns in rows] == ["Ann", "Ann", None]


@pytest.mark.parametrize("form", ["conversation", "prompt_response", "question_answer", "prompt"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_rows_other_columns_do_not_make_it_one_of_another_form(
    form: str, ending: str, here: Path
) -> None:
    infos: list[Any] = [
        {"index": 0},
        VERL,
        {"ground_truth": "7", "label": False, "messages": "x", "gold": "7"},
        {"solution": "\\boxed{7}", "chosen": "a", "rejected": "b", "target": 7, "nums": [1]},
        {"system": "Be short.", "history": [["2+2?", "4"]]},
        {"options": ["a", "b"], "answerKey": "A", "task": {"x": 1}, "output": "7"},
    ]
    for number, start in enumerate((infos, infos[1:], infos[3:])):
        rows = [{**ROWS["luffy"](n), "extra_info": info} for n, info in enumerate(start)]
        write_lines(here / "a.jsonl", rows)
        name = f"{number}.{ending}"
        assert main(["ingest", "a.jsonl", "--write", name, "--as", form]) == 0
        found = [row.content for row in read_rows(here / name)]
        first = [row.content for row in read_rows(here / "a.jsonl")]
        assert [(c.prompt, c.gold, c.label, c.rejected) for c in found] == [
            (c.prompt, c.gold, None, None) for c in first
        ]
        if form in ("conversation", "prompt_response"):
            assert [c.target for c in found] == [c.target for c in first]


def test_a_column_whose_name_is_anothers_is_kept_under_a_name_of_its_own(here: Path) -> None:
    write_lines(here / "a.jsonl", [{**ROWS["luffy"](3), "extra_info": VERL}])
    assert main(["ingest", "a.jsonl", "--write", "b.parquet", "--as", "conversation"]) == 0
    (row,) = read_rows(here / "b.parquet")
    assert row.content.extra == {
        "extra_answer": VERL["answer"],
        "index": 1,
        "extra_question": VERL["question"],
        "split": "train",
    }


def test_a_column_is_renamed_in_all_rows_or_in_none(here: Path) -> None:
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    more = {"level": 1, "environment": "sums", "choices": ["a", "b"], "query": "x"}
    rows = [{"messages": said, "gold": "4", "final_answer": gold, **more} for gold in "45"]
    write_lines(here / "a.jsonl", rows)
    for form in ("prompt_response", "question_answer", "prompt", "conversation"):
        assert main(["ingest", "a.jsonl", "--write", "b.jsonl", "--as", form]) == 0
        found = [row.content for row in read_rows(here / "b.jsonl", form)]
        assert [content.gold for content in found] == ["4", "4"]
        for content, gold in zip(found, "45", strict=True):
            assert content.extra == {
                "extra_final_answer": gold,
                "level": 1,
                "environment": "sums",
                "extra_choices": ["a", "b"],
                "extra_query": "x",
            }


@pytest.mark.parametrize("form", ["prompt", "question_answer", "prompt_response", "conversation"])
def test_the_columns_of_countdown_keep_their_names(form: str, here: Path) -> None:
    """The reward component `equation` finds them by these."""
    solved = {"prompt": "Make 3.", "response": "1+2", "gold": "3"}
    said = solved if form == "prompt_response" else {}
    write_lines(here / "a.jsonl", [{**said, "nums": [1, 2], "target": 3}])
    assert main(["ingest", "a.jsonl", "--write", "b.jsonl", "--as", form]) == 0
    (row,) = read_rows(here / "b.jsonl")
    assert (row.content.extra["nums"], row.content.extra["target"]) == ([1, 2], 3)


def test_a_column_like_the_responses_does_not_take_its_place(here: Path) -> None:
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "RIGHT"}]
    more = dict.fromkeys(("completion", "response", "output", "solution", "target"), "OTHER")
    write_lines(here / "a.jsonl", [{"messages": said, "label": True, **more}])
    for form in ("labelled", "prompt_response", "conversation", "problem_solution"):
        assert main(["ingest", "a.jsonl", "--write", "b.jsonl", "--as", form]) == 0
        (row,) = read_rows(here / "b.jsonl")
        assert row.content.target == "RIGHT"


def test_space_about_the_responses_of_a_pair_costs_no_row(here: Path) -> None:
    write_lines(here / "a.jsonl", [{"chosen": "2+2? It is 4", "rejected": "2+2? Five"}])
    assert main(["ingest", "a.jsonl", "--write", "b.jsonl", "--as", "hh"]) == 0
    (row,) = read_rows(here / "b.jsonl")
    assert (row.content.target, row.content.rejected) == ("It is 4", "Five")


def test_a_row_that_would_read_as_another_one_is_left_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**ROWS["prompt_response"](n), "nums": [1, 2], "target": 3} for n in (1, 2)]
    write_lines(here / "a.jsonl", [*rows, {"prompt": "?", "response": "#### 1\n", "gold": "(1,2)"}])
    write_lines(here / "b.jsonl", [ROWS["countdown"](n) for n in (1, 2, 3)])
    _, found = report(capsys, "b.jsonl", "a.jsonl", "--write", "c.jsonl", "--as", "countdown")
    other = "row would be read as another one than it is, written as countdown"
    assert found["left_out"] == {other: 2, "nums is missing": 1}
    _, found = report(capsys, "b.jsonl", "a.jsonl", "--write", "d.jsonl", "--as", "gsm8k")
    assert found["left_out"] == {other.replace("countdown", "gsm8k"): 1}


@pytest.mark.parametrize("form", [form.name for form in FORMS if form.name != "task"])
def test_a_task_without_a_prompt_is_left_out_of_forms_with_one(
    form: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(here / "a.jsonl", [ROWS["task"](1)])
    write_lines(here / "b.jsonl", [ROWS[form](2)])
    found = report(capsys, "b.jsonl", "a.jsonl", "--write", "c.jsonl", "--as", form)
    assert [one["kept"] for one in found] == [1, 0]


def test_a_set_and_its_complement(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LUFFY's SFT -> RL: the right traces first, then the questions that aren't among them."""
    rows = [ROWS["luffy"](n) for n in range(1, 11)]
    for row in rows[:4]:
        row["reward_model"]["ground_truth"] = "1"
    write_lines(here / "all.jsonl", rows)
    (sft,) = report(capsys, "all.jsonl", "--correct", "--write", "sft.parquet")
    assert (sft["kept"], sft["left_out"]) == (6, {"targets not correct": 4})
    (rl,) = report(capsys, "all.jsonl", "--except", "sft.parquet", "--write", "rl.parquet")
    assert (rl["kept"], rl["left_out"]) == (4, {"in sft.parquet": 6})
    asked_of = [row.content.prompt[0].content for row in read_rows(here / "rl.parquet")]
    assert asked_of == [asked(n) for n in range(1, 5)]


def test_tasks_without_a_prompt_are_told_apart(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROWS["task"](n) for n in range(1, 6)]
    write_lines(here / "all.jsonl", rows)
    again = [{**row, "task": dict(reversed(row["task"].items())), "gold": "0"} for row in rows]
    write_lines(here / "some.jsonl", again[:2])
    (found,) = report(capsys, "all.jsonl", "--except", "some.jsonl")
    assert (found["kept"], found["left_out"]) == (3, {"in some.jsonl": 2})


def test_excluded_questions_are_found_like_other_files(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a home folder, in the hub's cache, and in a form that has to be named."""
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("HF_HOME", str(here / "hf"))
    both: list[Any] = [
        {"question": asked(n), "answer": str(2 * n), "prompt": asked(n), "response": "?"}
        for n in range(4)
    ]
    write_lines(here / "all.jsonl", both)
    write_lines(here / "some.jsonl", both[:1])
    write_lines(here / "other.jsonl", [ROWS["question_answer"](0)])
    cached = here / "hf" / "tandem" / "an-org--sums--train"
    cached.mkdir(parents=True)
    write_lines(cached / "train.jsonl", both[:1])
    (cached / ".complete").touch()
    for name in ("~/some.jsonl", "an-org/sums:train", "other.jsonl"):
        (found,) = report(capsys, "all.jsonl", "--form", "question_answer", "--except", name)
        assert (found["kept"], found["left_out"]) == (3, {f"in {name}": 1})


@pytest.mark.parametrize("drawn", [False, True])
def test_a_limit_counts_rows_that_are_not_excluded(
    drawn: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROWS["question_answer"](n) for n in range(1, 11)]
    write_lines(here / "all.jsonl", rows)
    write_lines(here / "first.jsonl", rows[:6])
    words = ["--except", "first.jsonl", "--limit", "3", *(["--seed", "1"] if drawn else [])]
    write = ["--write", "b.parquet", "--as", "question_answer"]
    (found,) = report(capsys, "all.jsonl", *words, *write)
    why = "not drawn" if drawn else "over --limit"
    assert (found["rows"], found["kept"]) == (10, 3)
    assert found["left_out"] == {"in first.jsonl": 6, why: 1}
    written = {row.content.prompt[0].content for row in read_rows(here / "b.parquet")}
    assert len(written) == 3
    assert written < {asked(n) for n in range(7, 11)}


def test_a_smaller_subset_is_a_part_of_a_larger_one(here: Path) -> None:
    write_lines(here / "a.jsonl", [ROWS["question_answer"](n) for n in range(200)])
    found = []
    for count in (10, 40):
        words = ["--limit", str(count), "--seed", "7", "--write", f"{count}.parquet"]
        assert main(["ingest", "a.jsonl", *words, "--as", "question_answer"]) == 0
        rows = read_rows(here / f"{count}.parquet")
        found.append({row.content.prompt[0].content for row in rows})
    assert [len(one) for one in found] == [10, 40]
    assert found[0] < found[1]
    assert found[0] != {asked(n) for n in range(10)}


def test_tokens_are_counted_by_a_models_tokenizer(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "7+5", "response": "7+5=12"}
    write_lines(here / "a.jsonl", [row] * 3)
    (found,) = report(capsys, "a.jsonl", "--model", "miniature")
    assert found["lengths"]["prompt"]["p50"] == 3
    assert found["lengths"]["response"]["p100"] == 7  # With the end token.


@pytest.mark.parametrize(
    "settings",
    [
        {"expert": {"per_group": 1}},
        {"expert": {"per_group": 0}},
        {"learner": {"source": "offline", "objective": {"name": "sft"}}},
    ],
    ids=["with traces", "without traces", "offline"],
)
def test_with_a_preset_rows_are_counted_as_its_run_counts_them(
    settings: dict[str, Any], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": "1+1=?", "response": "2. \\boxed{2}", "gold": "2"},
        {"prompt": "1+2=?", "response": "4. \\boxed{4}", "gold": "3"},
        {"prompt": "1+3=?", "response": "4. \\boxed{4}"},
        {"prompt": "1+4=?", "response": "5. \\boxed{5}", "gold": "\\frac{"},
        {"prompt": "1+5=?" * 400, "response": "\\boxed{6}", "gold": "6"},
        {"prompt": "1+6=?", "response": "\\boxed{7}" * 400, "gold": "7"},
    ]
    write_lines(here / "a.jsonl", rows)
    preset = {
        "run": {"steps": 1},
        "model": {"path": "miniature"},
        "data": {"train": [{"path": str(here / "a.jsonl")}], "max_prompt_tokens": 32},
        "rollout": {"max_new_tokens": 54},
        **settings,
    }
    (here / "p.yaml").write_text(yaml.safe_dump(preset))
    (found,) = report(capsys, "a.jsonl", "--preset", "p.yaml")
    counts = prepare(load("p.yaml").resolve([]), RunFolder(here / "run")).counts["a"]
    assert found["left_out"] == {what: number for number, what in counts.left_out() if number}
    assert (found["rows"], found["kept"]) == (counts.seen, counts.problems)


def test_hostile_texts_leave_the_terminal_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(here / "a.jsonl", [{"question": "\x1b]0;x\x07\u202e", "answer": ["\x1b[2J", 1]}])
    assert main(["ingest", "a.jsonl"]) == 2
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(out)


OWN = """
import sys

number = 3

def card(row):
    return {"question": row["front"] + "=?", "answer": row["back"]}

def typo(row):
    return {"question": row["frnt"], "answer": row["back"]}

def leaves(row):
    sys.exit("bye")

def takes_none():
    return {}
"""


def test_a_form_of_ones_own_is_found_where_the_command_is_given(here: Path) -> None:
    (here / "shapes.py").write_text(OWN)
    (here / "goes.py").write_text("raise SystemExit('bye')")
    write_lines(here / "a.jsonl", [{"front": f"1+{n}", "back": str(1 + n)} for n in range(3)])

    def ingest(form: str) -> tuple[int, str, str]:
        words = [sys.executable, "-P", "-m", "tandem.launch", "ingest", "a.jsonl", "--form", form]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    code, table, _ = ingest("shapes:card")
    assert code == 0
    assert "kept                 3" in table
    for form in ("shapes:typo", "shapes:leaves"):
        code, table, told = ingest(form)
        assert code == 2
        assert f"3  row was refused by {form}" in table
        assert "no row can be used, of 3: the table says" in told
    for form, why in (
        ("shapes:number", "isn't a function: 3"),
        ("shapes:takes_none", "can't be called with a row"),
        ("goes:away", "can't be imported: SystemExit: bye"),
    ):
        code, table, told = ingest(form)
        assert (code, table) == (2, "")
        assert f"form={form} {why}" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.jsonl"], "none.jsonl is missing"),
        (["a.jsonl", "--form", "gsm9k"], "form=gsm9k isn't known"),
        (["a.jsonl", "--as", "gsm9k", "--write", "x.parquet"], "form=gsm9k isn't known"),
        (["a.jsonl", "--except", "none.jsonl"], "none.jsonl is missing"),
        (["a.jsonl", "--except", "bad.jsonl"], "--except bad.jsonl: not one of its rows"),
        (["a.jsonl", "--limit", "0"], "at least 1 row"),
        (["data.max_prompt_tokens=4"], "name at least one data file"),
        (["a.jsonl", "data.max_promt_tokens=4"], "max_prompt_tokens"),
    ],
)
def test_refusals(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(here / "a.jsonl", [ROWS["question_answer"](1)])
    write_lines(here / "bad.jsonl", [{"question": "", "answer": "1"}])
    before = sorted(here.iterdir())
    assert main(["ingest", *words]) != 0
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert sorted(here.iterdir()) == before


def test_an_interrupted_write_leaves_nothing(here: Path) -> None:
    path = here / "a.jsonl"
    write_lines(path, [ROWS["question_answer"](n) for n in range(200_000)])
    command = [sys.executable, "-m", "tandem.launch.cli", "ingest", str(path)]
    child = subprocess.Popen([*command, "--write", "b.parquet", "--as", "question_answer"])
    while not (here / ".b.parquet.part").exists():
        assert child.poll() is None
    child.send_signal(2)
    assert child.wait(30) == 130
    assert sorted(file.name for file in here.iterdir()) == ["a.jsonl"]
