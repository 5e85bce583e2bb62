"""``tandem grade``: rows in, graded rows out, through real graders."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.launch.cli import main

HANG = "(x+y+z+w+v+1)^{97}"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def boxed(number: int, answer: str, gold: str | None = None, **more: Any) -> dict[str, Any]:
    row = {"id": number, "completion": f"thoughts</think> \\boxed{{{answer}}}", **more}
    return row if gold is None else {**row, "gold": gold}


ROWS = (
    boxed(0, "2(x+1)", "2x+2"),
    boxed(1, "\\frac{1}{2}", "0.5"),
    boxed(2, HANG, "x+1"),
    boxed(3, "4", "5"),
    boxed(4, "2(x+1)", "2x+2"),
    {"id": 5, "completion": "half a pair \ud800", "gold": "5"},
    {"id": "six", "completion": [{"role": "assistant", "content": "\\boxed{7}"}], "gold": 7},
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rows_are_graded_and_a_table_is_printed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "in.jsonl", *ROWS)
    command = ["grade", "in.jsonl", "reward.deadline_seconds=1", "--out", "out.jsonl"]
    assert main(command) == 0
    rows = read(here / "out.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert [row["verdict"] for row in rows] == [
        "correct", "correct", "timeout", "wrong", "correct", "wrong", "correct",
    ]  # fmt: skip
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert rows[0]["components"] == {"accuracy": 1.0, "format": 0.0}
    assert rows[0]["extracted"] == "2(x+1)"
    assert rows[2]["seconds"] >= 1.0
    assert {**ROWS[0]}.items() <= rows[0].items()
    told = capsys.readouterr().out
    assert "correct                   4   57.1%        1.0000" in told
    assert "timeout                   1   14.3%        0.0000" in told
    # A run that was cut off in the middle of a line goes on behind the last whole one.
    text = (here / "out.jsonl").read_text().splitlines(keepends=True)
    (here / "out.jsonl").write_text("".join(text[:3]) + text[3][:40])
    assert main(command) == 0
    again = read(here / "out.jsonl")
    assert [r | {"seconds": 0} for r in again] == [r | {"seconds": 0} for r in rows]
    told = capsys.readouterr().out
    assert "3 of the rows were graded before" in told
    assert "correct                   4   57.1%" in told
    # What was graded in another way isn't gone on with.
    assert main([*command, "--mode", "exact"]) == 2
    assert "--fresh" in capsys.readouterr().err
    assert main([*command, "--mode", "exact", "--fresh"]) == 0
    assert read(here / "out.jsonl")[0]["verdict"] == "wrong"
    assert len(read(here / "out.jsonl.1")) == 7
    # What was moved aside before stays.
    assert main([*command, "--fresh"]) == 0
    assert [read(here / f"out.jsonl.{n}")[0]["verdict"] for n in (1, 2)] == ["correct", "wrong"]
    assert "out.jsonl is now out.jsonl.2" in capsys.readouterr().err


def test_a_group_is_graded_whole_where_its_rest_is_left(here: Path) -> None:
    texts = ["a" * length + "</think> \\boxed{4}" for length in (10, 20, 60, 90)]
    rows = [
        {"id": n, "completion": text, "gold": "4", "group": group, "reward": 7.0}
        for n, (group, text) in enumerate((g, text) for g in "pq" for text in texts)
    ]
    write(here / "in.jsonl", *rows)
    command = ["grade", "in.jsonl", "--out", "out.jsonl", "--reward", "length_open_r1"]
    assert main(command) == 0
    whole = read(here / "out.jsonl")
    assert len({row["reward"] for row in whole}) == 4
    for there in (2, 4, 6):
        # What a row says of an earlier grading isn't compared.
        write(here / "out.jsonl", *whole[:there])
        assert main(command) == 0
        assert [row["reward"] for row in read(here / "out.jsonl")] == [
            row["reward"] for row in whole
        ]


def test_another_mix_of_the_same_components_does_not_go_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "in.jsonl", *({"id": n, "completion": "a a a"} for n in range(3)))
    ngram = "params: {ngram: 1, unit: words}"
    part = f"{{name: repetition, weight: 0.5, {ngram}}}"
    command = ["grade", "in.jsonl", "--out", "out.jsonl", "--reward"]
    assert main([*command, part]) == 0
    whole = (here / "out.jsonl").read_text()
    for other in (part.replace("0.5", "1"), part.replace("ngram: 1", "ngram: 2")):
        assert main([*command, other]) == 2
        assert "out.jsonl line 1 isn't a row of this input graded by" in capsys.readouterr().err
        assert (here / "out.jsonl").read_text() == whole
    # What changes no grade may change.
    rows = read(here / "out.jsonl")
    write(here / "out.jsonl", *rows[:1])
    assert main([*command, part, "reward.graders=1"]) == 0
    again = read(here / "out.jsonl")
    assert [row["reward"] for row in again] == [row["reward"] for row in rows]


def test_components_alone_need_no_gold_and_no_grader_process(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = "".join(
        json.dumps({"id": n, "completion": text, "group": "g"}) + "\n"
        for n, text in enumerate(("a a a a", "a b c d e f"))
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    code = main(
        ["grade", "-", "--reward", "{name: repetition, params: {ngram: 1, unit: words}}",
         "--reward", "format"]
    )  # fmt: skip
    assert code == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["reward"] for row in rows] == [-0.75, 0.0]
    assert [row["verdict"] for row in rows] == [None, None]
    assert "no gold" in err


def test_a_function_of_ones_own_in_the_working_folder_gets_columns_and_groups(here: Path) -> None:
    (here / "my_rewards.py").write_text(
        "def best(completions, level, **columns):\n"
        "    most = max(map(len, completions))\n"
        "    return [one * (len(text) == most) for text, one in zip(completions, level)]\n"
    )
    write(
        here / "in.jsonl",
        {"id": 1, "completion": "a", "level": 2, "group": "p"},
        {"id": 2, "completion": "bb", "level": 2, "group": "p"},
        {"id": 3, "completion": "c", "extra": {"level": 5}, "group": "q"},
    )
    command = [sys.executable, "-m", "tandem.launch", "grade", "in.jsonl"]
    command += ["--out", "out.jsonl", "--reward", "my_rewards:best"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["reward"] for row in read(here / "out.jsonl")] == [0.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("body", "told", "line"),
    [
        ("[1 / 0 for _ in completions]", "ZeroDivisionError: division by zero", True),
        ("(1 / 0 for _ in completions)", "ZeroDivisionError: division by zero", True),
        ("completions[0]['content']", "(its completions were given as text", True),
        ("1.0", "TypeError: it returned 1.0, not a list of 1 numbers", False),
    ],
    ids=["raises", "raises in a generator", "takes a text for messages", "returns a number"],
)
def test_an_error_of_a_function_is_shown_once_from_its_own_line_on(
    here: Path, body: str, told: str, line: bool
) -> None:
    # Annotated, so that it gets texts whatever it does with them.
    function = f"def broken(completions: list[str], **columns):\n    return {body}\n"
    (here / "own_grades.py").write_text(function)
    write(here / "in.jsonl", *(boxed(number, "4", "4") for number in range(200)))
    command = [sys.executable, "-m", "tandem.launch", "grade", "in.jsonl", "--out", "out.jsonl"]
    command += ["--reward", "own_grades:broken"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert {row["verdict"] for row in read(here / "out.jsonl")} == {"crashed"}
    assert told in done.stderr
    assert done.stderr.count("Traceback") == int(line)
    assert ('own_grades.py", line 2' in done.stderr) == line
    assert "/reward/graders/" not in done.stderr
    assert len(done.stderr.splitlines()) < 60


def test_an_integer_beyond_64_bits_is_a_text_for_a_function(here: Path) -> None:
    (here / "my_rewards.py").write_text(
        "def known(completions, number, **columns):\n"
        "    return [float(text == one) for text, one in zip(completions, number)]\n"
    )
    number = 123456789012345678901234567890
    write(
        here / "in.jsonl",
        {"id": 1, "completion": str(number), "number": number},
        {"id": 2, "completion": "7", "number": 7},
    )
    command = [sys.executable, "-m", "tandem.launch", "grade", "in.jsonl"]
    command += ["--out", "out.jsonl", "--reward", "my_rewards:known"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["reward"] for row in read(here / "out.jsonl")] == [1.0, 0.0]
    assert read(here / "out.jsonl")[0]["number"] == number


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"id": 1, "gold": "2"}', "line 2 has no 'completion' (it has id, gold)"),
        ('{"completion": "2", "gold": "2"}', "line 2 has no 'id'"),
        ('{"id": 1, "completion": "2"}', "line 2 has no 'gold'"),
        ('{"id": 1, "completion": 2, "gold": true}', "line 2: gold is bool"),
        ('{"id": 1, "completion": {}, "gold": ""}', "line 2: completion is dict"),
        ('{"id": 1', "line 2 isn't JSON"),
        ("[1]", "line 2 isn't a JSON object but list"),
        (
            '{"id": 1, "completion": "2", "gold": "2", "finish_reason": "eos"}',
            "finish_reason='eos'",
        ),
        ('{"id": 1, "completion": "2", "gold": "2", "extra": 3}', "extra is int"),
        ('{"id": 1, "completion": "2", "gold": "2", "completion_ids": ["a"]}', "completion_ids"),
    ],
)
def test_a_line_that_is_no_row_is_named_before_anything_is_graded(
    here: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    (here / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    assert main(["grade", "in.jsonl", "--out", "out.jsonl"]) == 2
    assert told in capsys.readouterr().err
    assert not (here / "out.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing.jsonl"], "nothing.jsonl can't be read"),
        (["in.jsonl", "--mode", "boxd"], "did you mean boxed"),
        (["in.jsonl", "--reward", "formt"], "did you mean format"),
        (["in.jsonl", "--reward", "{nam: format}"], "nam"),
        (["in.jsonl", "--out", "no/where.jsonl"], "no/where.jsonl can't be written"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    write(here / "in.jsonl", ROWS[0])
    assert main(["grade", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


def test_ctrl_c_leaves_whole_rows_to_go_on_from(here: Path) -> None:
    write(here / "in.jsonl", boxed(0, "3(x+1)", "3x+3"), boxed(1, HANG, "x+2"))
    command = [sys.executable, "-m", "tandem.launch", "grade", "in.jsonl", "--out", "out.jsonl"]
    # Started in the background, as CI may be, this process ignores SIGINT, and so would the child.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [*command, "reward.deadline_seconds=60"], stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        out = here / "out.jsonl"
        _until(lambda: out.exists() and out.read_text().endswith("\n"))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "out.jsonl has 1 rows; the same command goes on" in said
    assert [row["id"] for row in read(out)] == [0]


def _until(condition: Any, seconds: float = 60.0) -> None:
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_prompts_end_as_the_template_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A response that goes on from an open <think> is in the right form only if the prompt opened it."""
    rows = tmp_path / "rows.jsonl"
    text = "4 is it</think> <answer>4</answer>"
    rows.write_text(json.dumps({"id": 1, "completion": text, "gold": "4"}) + "\n")
    style = ["--reward", "{name: format, params: {style: tags}}"]
    paid = []
    for words in ([], ["data.template=r1_zero"], ["data.prefill=<think>"]):
        assert main(["grade", str(rows), *words, *style]) == 0
        paid.append(json.loads(capsys.readouterr().out.splitlines()[0])["reward"])
    assert paid == [0.0, 1.0, 1.0]
