"""Accuracy before and after an offline run: one after the other, each once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tandem.common.config import Config, to_yaml
from tandem.common.errors import TandemError
from tandem.common.models import resolve
from tandem.common.run_folder import RunFolder
from tandem.launch.cli import dispatch
from tandem.launch.ingest.prepare import write_miniature
from tandem.launch.notebook.handle import open_run
from tandem.launch.plan.placement import Placement
from tandem.launch.run import offline_evaluation
from tandem.launch.run.offline_evaluation import environment, evaluate, record
from tandem.launch.run.opened.presets import load
from tandem.launch.run.processes.parts import ProcessSpec

ON_CPU = Placement(learner=((),), rollout=())


@pytest.mark.byhand
def test_what_was_computed_before_a_failure_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    words = ["data.evaluate.0.limit=4", "rollout.max_new_tokens=8", f"run.dir={folder.path}"]
    config = load("miniature-sft").resolve([*words, "launch.backoff_seconds=0.1"])
    folder.write_config(to_yaml(config))
    folder.write_run({"run_id": "some"})
    write_miniature(config, folder)
    # There is no model yet, so that the second evaluation fails, and not before the first has ended.
    with pytest.raises(TandemError):
        evaluate(config, folder, ON_CPU, 3, [], print)
    (before,) = folder.logs.glob("evaluate-before*.json")
    made = before.stat()
    shutil.copytree(resolve("miniature"), folder.model)
    found = evaluate(config, folder, ON_CPU, 3, [], print)
    assert [(one["step"], one["problems"]) for one in found] == [(0, 4), (3, 4)]
    again = before.stat()
    assert (again.st_ino, again.st_mtime_ns) == (made.st_ino, made.st_mtime_ns)
    # Another step's model is another one.
    assert [one["step"] for one in evaluate(config, folder, ON_CPU, 4, [found[0]], print)] == [4]
    assert len(list(folder.logs.glob("evaluate-after*.json"))) == 2


def in_this_process(
    config: Config,
    spec: ProcessSpec,
    outs: Sequence[Path],
    say: Callable[[str], None],
) -> None:
    """The words of an evaluation's process; whole offline runs (tests/e2e) start the process itself."""
    assert dispatch(spec.arguments) == 0
    assert all(out.exists() for out in outs)


def test_every_set_is_evaluated_and_what_is_known_of_one_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_evaluation, "_run", in_this_process)
    folder = RunFolder(tmp_path / "run")
    folder.make()
    sets = ", ".join(
        f"{{path: '{{run}}/data/heldout.parquet', name: {name}, limit: {limit}}}"
        for name, limit in (("easy", 2), ("hard/er", 3))
    )
    words = [f"data.evaluate=[{sets}]", "rollout.max_new_tokens=4", f"run.dir={folder.path}"]
    config = load("miniature-sft").resolve(words)
    folder.write_config(to_yaml(config))
    folder.write_run({"run_id": "some"})
    write_miniature(config, folder)
    shutil.copytree(resolve("miniature"), folder.model)
    known = [{"step": step, "set_name": "easy"} for step in (0, 3)]
    others = evaluate(config, folder, ON_CPU, 3, known, print)
    assert [(one["set_name"], one["step"], one["problems"]) for one in others] == [
        *(("hard/er", 0, 3), ("hard/er", 3, 3))
    ]
    (made,) = folder.logs.glob("evaluate-after*.json")
    before = made.stat()
    every = evaluate(config, folder, ON_CPU, 3, [], print)
    assert [(one["set_name"], one["step"], one["problems"]) for one in every] == [
        *(("easy", 0, 2), ("hard/er", 0, 3), ("easy", 3, 2), ("hard/er", 3, 3))
    ]
    assert record(folder, every) == ["easy@0", "hard/er@0", "easy@3", "hard/er@3"]
    assert record(folder, every) == []
    table = open_run(folder.path).evaluations().to_pylist()
    assert [(row["set"], row["step"], row["problems"]) for row in table] == [
        *(("easy", 0, 2), ("hard/er", 0, 3), ("easy", 3, 2), ("hard/er", 3, 3))
    ]
    assert [row["accuracy"] for row in table] == [one["accuracy"] for one in every]
    after = made.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(list(folder.logs.glob("evaluate-after*.json"))) == 2


def test_an_evaluation_sees_the_learners_gpus() -> None:
    placed = Placement(learner=((2,), (3,)), rollout=((4,),))
    assert environment(placed)["CUDA_VISIBLE_DEVICES"] == "2,3"
    # With launch.gpus=none the host's GPUs are others'.
    assert environment(ON_CPU)["CUDA_VISIBLE_DEVICES"] == ""
