"""Mistakes on the command line: one line says what to do, before any work, and nothing that was there is lost."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tandem.common.errors import ConfigError
from tandem.launch.cli import main
from tandem.launch.commands import evaluate
from tandem.launch.run.opened.presets import split


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a file and with what looks like two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "here").write_text("what was there\n")
    (tmp_path / "rows.csv").write_text("prompt,response\none,two\n")
    for run in ("run", "other"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("config run", 2, "there is no preset 'run'"),
        ("config ./run", 2, "run is a run's folder: to resume it, name its preset and run.dir="),
        ("start ./run", 2, "run is a run's folder"),
        ("config ./", 2, "can't be read as a preset: Is a directory"),
        ("config here/x.yaml", 2, "here/x.yaml can't be read as a preset: Not a directory"),
        (
            "start miniature --dry-run data.evaluate.0.mode=boxd",
            2,
            "data.evaluate.0.mode='boxd' isn't one of",
        ),
        (
            "start miniature --dry-run run.deterministic=true replay.max_staleness=3",
            2,
            "replay.max_staleness=3 goes against run.deterministic=true, which sets it to 0",
        ),
        ("start miniature --dry-run data.train.1.form=lufy", 2, "data.train.1.form=lufy isn't"),
        ("start miniature --dry-run data.train.0.form=no.such:form", 2, "there is no such module"),
        ("start miniature --dry-run data.template=qwn", 2, "data.template=qwn is neither"),
        ("tasks verifiers --out here", 2, "need --python and --taskset"),
        ("tasks appworld --root run --out here", 2, "run/data/datasets/train.txt can't be read"),
        ("tasks appworld --out run", 2, "run is a folder: name the file to write"),
        ("evaluate --model miniature --data rows.csv --out run", 2, "run is a folder"),
        ("evaluate --model miniature --data rows.csv --set a", 2, "--set a is a set of the run's"),
        ("evaluate --model miniature --benchmark rows.csv --set a", 2, "names rows.csv: leave one"),
        ("evaluate --model miniature --form luffy", 2, "name the file with --data or --benchmark"),
        ("evaluate --model a --data rows.csv --parallel 4", 2, "name it with --endpoint"),
        (
            "evaluate --model a --data rows.csv --api-key-env K",
            2,
            "--api-key-env K is for a server",
        ),
        (
            "evaluate --model a --data rows.csv --request-seconds 9",
            2,
            "--request-seconds 9.0 is for",
        ),
        ("evaluate --recompute run --out no/x", 2, "no isn't a folder: create it first"),
        ("compare run other --out no/x", 2, "no isn't a folder"),
        ("ingest rows.csv --write no/x.parquet", 2, "no isn't a folder"),
        ("ingest rows.csv --as luffy", 2, "--as luffy says what --write OUT writes"),
        ("ingest rows.csv --seed 3", 2, "--seed 3 draws as many rows as --limit N says"),
        ("join-file no/x --from here", 2, "here, which isn't a join file"),
        ("make-miniature here --fresh 2", 1, "here: File exists"),
        ("serve no-org/no-model --port 0", 2, "the hub didn't give its config (HF_HUB_OFFLINE"),
        ("offline miniature-dpo --step 5", 2, "miniature-dpo is a run of several stages"),
        ("status run --run other", 2, "name one run: run or --run other"),
        ("export run --run other", 2, "name one run"),
        ("track run --run other --to tensorboard", 2, "name one run"),
        ("status run --join here", 2, "not with both"),
        ("plan --gpu-memory nan", 2, "--gpu-memory nan should be a number of GB above 0"),
        ("plan --gpus -1", 2, "--gpus -1 should be at least 0"),
        ("plan --response-tokens nan", 2, "--response-tokens nan should be a number of tokens"),
        ("plan --response-tokens 55", 2, "above 0, and at most rollout.max_new_tokens=54"),
        ("plan --prompt-tokens 33", 2, "above 0, and at most data.max_prompt_tokens=32"),
        ("plan --spread inf", 2, "--spread inf should be from 0 to 5"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, said: str
) -> None:
    left = main(words.split())
    out, err = capsys.readouterr()
    assert (left, out) == (code, "")
    assert err.startswith("tandem: ")
    assert said in err
    assert len(err.splitlines()) == 1
    assert (folder / "here").read_text() == "what was there\n"
    assert not list((folder / "run").glob("*.parquet"))


def test_a_missing_file_that_nobody_named_is_a_defect(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its traceback."""
    from tandem.launch import cli

    def lacking(words: object) -> int:
        return len((folder / "internal").read_text())

    monkeypatch.setattr(cli, "dispatch", lacking)
    with pytest.raises(FileNotFoundError):
        main(["status", "run"])


def test_tasks_make_their_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = folder / "data" / "datasets" / "train.txt"
    names.parent.mkdir(parents=True)
    names.write_text("a_1 b_2\n")
    assert main(["tasks", "appworld", "--out", "new/tasks.jsonl", "--environment", "app"]) == 0
    assert capsys.readouterr().out == "new/tasks.jsonl: 2 tasks\n"
    first, second = (folder / "new" / "tasks.jsonl").read_text().splitlines()
    assert first == '{"environment": "app", "task": {"task_id": "a_1"}}'
    assert second == '{"environment": "app", "task": {"task_id": "b_2"}}'


def plan_of(folder: Path, text: str, *words: str) -> argparse.Namespace:
    """The arguments of ``tandem evaluate --plan`` with what its file adds."""
    file = folder / "plan.yaml"
    file.write_text(text)
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    arguments = parser.parse_intermixed_args([*words, "--plan", str(file)])
    evaluate._read_plan(arguments)
    return arguments


def test_the_command_line_overrides_a_plans_settings(folder: Path) -> None:
    text = "settings: [rollout.max_new_tokens=8, run.seed=2]\ntemperatures: [0, 0.6]\nsamples: 4\n"
    for words in (("rollout.max_new_tokens=64",), ("miniature", "rollout.max_new_tokens=64")):
        arguments = plan_of(folder, text, *words)
        name, overrides = split(arguments.words, "")
        assert name == ("miniature" if "miniature" in words else "")
        assert dict(word.split("=") for word in overrides) == {
            "rollout.max_new_tokens": "64",
            "run.seed": "2",
        }
        assert arguments.by_plan["temperature"] == [0, 0.6]
        assert arguments.by_plan["samples"] == [4]


def test_an_empty_list_of_a_plan_has_nothing(folder: Path) -> None:
    assert plan_of(folder, "models:\nbenchmarks:\n").model == []


def test_one_setting_of_a_plan_needs_no_list(folder: Path) -> None:
    assert plan_of(folder, "settings: rollout.engine=vllm\n").words == ["rollout.engine=vllm"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temperatures: [hot]", "temperatures has 'hot', which isn't a number"),
        ("top_p: true", "top_p has True"),
        ("settings: [rollout.engine]", "write each as section.key=value"),
        ("settings: {rollout.engine: vllm}", "write each as section.key=value"),
        ("samples: many", "samples is 'many'"),
        ("limit: 0", "limit is 0"),
        ("models: [a, ]\nbenchmarks: [~]", "benchmarks has an empty entry"),
        ("model: a", "unknown key 'model'"),
    ],
)
def test_a_wrong_value_in_a_plan_is_named(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"plan\.yaml") as refused:
        plan_of(folder, text + "\n")
    assert said in str(refused.value)
