"""``tandem tasks``: tasks of foreign environments as data rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tandem.launch.cli import main

HERE = Path(__file__).resolve().parent


@pytest.fixture
def python(tmp_path: Path) -> str:
    """This Python with a package that stands in for verifiers."""
    made = tmp_path / "venv" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.write_text(f'#!/bin/sh\nPYTHONPATH={HERE / "standin"} exec {sys.executable} "$@"\n')
    made.chmod(0o755)
    return str(made)


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_tasks_of_a_taskset(python: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["tasks", "verifiers", "--python", python, "--taskset", "games", "--out", str(out)]
    assert main([*command, "--environment", "mine", "--set", "game=Go"]) == 0
    assert [row["task"]["name"] for row in rows(out)] == ["Go#0", "Go#1", "Go#2"]
    assert rows(out)[0]["environment"] == "mine"
    assert rows(out)[0]["task"]["prompt"] == "Grüß Gott"


def test_a_taskset_without_end_needs_a_count(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["tasks", "verifiers", "--python", python, "--taskset", "games", "--out", str(out)]
    assert main([*command, "--set", "endless=true"]) != 0
    assert "say how many" in capsys.readouterr().err
    assert main([*command, "--set", "endless=true", "--count", "5"]) == 0
    assert len(rows(out)) == 5
    assert "environment" not in rows(out)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--python", "/nowhere"], "/nowhere can't be run"),
        (["--taskset", "none"], "taskset 'none' not found"),
        (["--set", "game"], "KEY=VALUE"),
        (["--count", "0"], "at least 1"),
    ],
)
def test_what_cant_be_listed_is_one_line(
    python: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    words: str,
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["tasks", "verifiers", "--python", python, "--taskset", "games", "--out", str(out)]
    assert main([*command, *changes]) != 0
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_the_tasks_of_appworld(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = tmp_path / "data" / "datasets"
    lists.mkdir(parents=True)
    (lists / "dev.txt").write_text("one_1\none_2\ntwo_1\n")
    out = tmp_path / "rows.jsonl"
    command = ["tasks", "appworld", "--root", str(tmp_path), "--out", str(out)]
    assert main([*command, "--split", "dev", "--count", "2"]) == 0
    assert rows(out) == [{"task": {"task_id": "one_1"}}, {"task": {"task_id": "one_2"}}]
    assert main(command) != 0
    assert "train.txt can't be read" in capsys.readouterr().err
