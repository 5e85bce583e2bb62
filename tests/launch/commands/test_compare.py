"""``tandem compare``: which cells of two folders are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.common.records import FinishReason, Verdict
from tandem.launch import cli
from tandem.launch.evaluation.run import begin
from tandem.replay.evaluating.evaluated import (
    Cell,
    EvaluatedSample,
    EvaluationFolder,
    Plan,
    write_samples,
)


def evaluation(path: Path, *benchmarks: str) -> str:
    """A finished evaluation of one wrong answer each."""
    folder = EvaluationFolder(path)
    cells = [
        Cell(
            name=name, model="m", benchmark=name, template="own", temperature=0.0, top_p=1.0,
            samples=1, max_new_tokens=8, stop=(), mode="boxed", seed=0,
        )
        for name in benchmarks
    ]  # fmt: skip
    begin(folder, Plan(cells=tuple(cells)))
    for name in benchmarks:
        one = EvaluatedSample(
            problem_id=f"{name}/0", place=0, sample=0, source="", prompt="", response="", gold="",
            finish_reason=FinishReason.STOP, verdict=Verdict.WRONG, answer=Verdict.WRONG,
            components={}, reward=0.0, grader="", tokens=1, logprob=None,
        )  # fmt: skip
        folder.cell(name).mkdir(parents=True)
        write_samples(folder.samples_file(name), [one])
    return str(path)


def test_cells_that_one_side_alone_has_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = evaluation(tmp_path / "first", "aime24", "math-500", "gsm8k")
    second = evaluation(tmp_path / "second", "math-500", "mmlu", "gsm8k")
    assert cli.main(["compare", first, second, "--json"]) == 0
    told = capsys.readouterr()
    assert [Path(one["first_cell"]).parent.name for one in json.loads(told.out)] == [
        "math-500",
        "gsm8k",
    ]
    assert told.err.splitlines() == [
        f"note: not compared, since only {first} has them: aime24 t0 p1 own",
        f"note: not compared, since only {second} has them: mmlu t0 p1 own",
    ]
