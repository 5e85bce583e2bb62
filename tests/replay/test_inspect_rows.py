"""What evaluations and runs keep, as logs for Inspect's viewer."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from tandem.common.config import Config, build
from tandem.common.records import FinishReason, Verdict
from tandem.common.run_folder import RunFolder, write_atomic
from tandem.replay.evaluating.evaluated import (
    Cell,
    EvaluatedSample,
    EvaluationFolder,
    Plan,
    write_samples,
)
from tandem.replay.inspecting import rows as logs


def config() -> Config:
    return build({"run": {"steps": 1}, "data": {"train": [{"path": "x"}]}}, [])


def record(
    step: int, rows: list[dict[str, Any]] | None = None, problem: str = "a/1"
) -> dict[str, Any]:
    """A group as samples.jsonl has it."""
    return {
        "step": step,
        "group_id": f"0-{step}",
        "problem_id": problem,
        "data_source": "a",
        "worker": "rollout-0",
        "prompt": "1+1=?",
        "gold": "2",
        "rows": rows if rows is not None else [row("correct"), row("wrong"), row("crashed")],
    }


def row(verdict: str, **changes: Any) -> dict[str, Any]:
    return {
        "source": "own",
        "text": "2",
        "tokens": 4,
        "finish_reason": "stop",
        "reward": 1.0,
        "verdict": verdict,
        "extracted": "2",
        "components": {"format": 1.0},
        "versions": ["1.3", "1.5"],
        **changes,
    }


def contents(path: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(path) as log:
        return [json.loads(log.read(n)) for n in log.namelist() if n.startswith("samples/")]


def test_a_group_is_one_id_with_verdicts_components_and_staleness() -> None:
    right, wrong, lost = logs.of_record(record(7))
    assert (right.is_right, wrong.is_right, lost.is_right) == (True, False, None)
    assert right.id == wrong.id == "7 a/1"
    assert right.numbers == {"reward": 1.0, "format": 1.0}
    assert right.metadata["staleness"] == 3
    assert right.metadata["versions"] == "1.3 1.5"
    assert (right.metadata["source"], right.metadata["step"]) == ("own", 7)
    assert right.messages == [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "2"},
    ]
    (cut,) = logs.of_record(record(7, [row("wrong", finish_reason="length")]))
    assert cut.stop_reason == "max_tokens"
    expert = {"source": "expert", "trace_id": "a/1#0", "text": "2", "tokens": 2, "reward": 1.0}
    (trace,) = logs.of_record(record(7, [{**expert, "verdict": "correct"}]))
    assert (trace.metadata["source"], trace.metadata["trace_id"]) == ("expert", "a/1#0")
    assert "staleness" not in trace.metadata


def test_an_episode_has_its_turns_calls_and_what_the_environment_said() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    turns = [
        {"shown": "", "text": f"I add. {call}"},
        {"shown": "tool: 2", "text": "so <tool_call>{broken</tool_call>"},
        {"shown": "user: go on", "text": "2"},
        {"shown": "the end"},
    ]
    played = row("correct", turns=turns, environment="sums", figures={"tool_calls": 2.0})
    (sample,) = logs.of_record(record(1, [played]))
    assert [one["role"] for one in sample.messages] == [
        *("user", "assistant", "tool", "assistant", "user", "assistant", "user")
    ]
    (made,) = sample.messages[1]["tool_calls"]
    assert (made["function"], made["arguments"]) == ("add", {"a": 1})
    assert sample.messages[2]["tool_call_id"] == made["id"]
    assert "tool_calls" not in sample.messages[3]
    assert sample.metadata["environment"] == "sums"
    assert sample.metadata["figure/tool_calls"] == 2.0
    # Without its texts an episode has at least its last answer.
    (bare,) = logs.of_record(record(1, [row("wrong", turns=[{"tokens": [0, 3]}])]))
    assert bare.messages[-1]["content"] == "2"


def lines(folder: RunFolder, steps: range) -> None:
    folder.path.mkdir(exist_ok=True)
    text = "".join(json.dumps(record(step)) + "\n" for step in steps for _ in range(2))
    write_atomic(folder.samples, text)


def test_a_runs_logs_are_blocks_of_steps_each_written_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    lines(folder, range(1, 31))
    first, last = logs.run_logs(folder, config())
    assert (first.name, last.name) == ("steps-000001-000020.eval", "steps-000021-000030.eval")
    # Twenty steps, two groups each, with three samples a group; two groups of a problem are one id.
    assert len(contents(first)) == 120
    assert {one["epoch"] for one in contents(first)} == {1, 2, 3, 4, 5, 6}
    stamp = first.stat().st_mtime_ns
    lines(folder, range(1, 41))
    assert [path.name for path in logs.run_logs(folder, config())] == [
        "steps-000001-000020.eval",
        "steps-000021-000040.eval",
    ]
    assert first.stat().st_mtime_ns == stamp
    assert not last.exists()
    assert len(list(folder.inspect.iterdir())) == 2


def test_a_log_with_more_steps_stays_when_one_with_fewer_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    lines(folder, range(1, 16))
    whole = [record(step) for step in range(1, 16)]
    newer = logs.write_run_log(folder, config(), whole)
    # As `tandem view` does, which read the samples before the run wrote more.
    logs.write_run_log(folder, config(), whole[:10])
    assert len(contents(newer)) == 15 * 3
    logs.write_run_log(folder, config(), whole)
    assert list(folder.inspect.iterdir()) == [newer]


def test_logs_of_steps_that_are_trained_again_go_and_their_block_comes_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    lines(folder, range(1, 46))
    logs.run_logs(folder, config())
    lines(folder, range(1, 31))
    kept = logs.cut_logs(folder, 30)
    assert [path.name for path in sorted(folder.inspect.iterdir())] == ["steps-000001-000020.eval"]
    assert [one["step"] for one in kept] == [step for step in range(21, 31) for _ in range(2)]
    assert logs.cut_logs(folder, 0) == []
    assert not list(folder.inspect.iterdir())


def test_each_finished_cell_of_an_evaluation_has_a_log(tmp_path: Path) -> None:
    cells = [cell("one"), cell("two")]
    folder = EvaluationFolder(tmp_path)
    import msgspec

    write_atomic(folder.plan_json, msgspec.json.encode(Plan(cells=tuple(cells))))
    folder.cell("one").mkdir(parents=True)
    write_samples(
        folder.samples_file("one"),
        [evaluated(0), evaluated(1, verdict=Verdict.CRASHED, answer=Verdict.CRASHED)],
    )
    (path,) = logs.evaluation_logs(folder)
    assert path == folder.cell("one") / "one.eval"
    right, lost = contents(path)
    assert (right["id"], right["scores"]["answer"]["value"]) == ("a:0", "C")
    assert lost["scores"]["answer"]["value"] == "N"
    assert right["metadata"]["version"] == "1.20"
    assert right["scores"]["format"]["value"] == 1.0
    with zipfile.ZipFile(path) as log:
        header = json.loads(log.read("header.json"))
    assert header["eval"]["metadata"]["template"] == "own"
    assert header["plan"]["config"]["temperature"] == 0.6
    stamp = path.stat().st_mtime_ns
    assert list(logs.evaluation_logs(folder)) == [path]
    assert path.stat().st_mtime_ns == stamp


def cell(name: str) -> Cell:
    return Cell(
        name=name,
        model="m",
        benchmark="a",
        template="own",
        temperature=0.6,
        top_p=1.0,
        samples=1,
        max_new_tokens=8,
        stop=(),
        mode="boxed",
        seed=0,
    )


def evaluated(place: int, **changes: Any) -> EvaluatedSample:
    given: dict[str, Any] = {
        "problem_id": f"a/{place}",
        "place": place,
        "sample": 0,
        "source": "a",
        "prompt": "1+1=?",
        "response": "2",
        "gold": "2",
        "finish_reason": FinishReason.STOP,
        "verdict": Verdict.CORRECT,
        "answer": Verdict.CORRECT,
        "components": {"format": 1.0},
        "reward": 1.0,
        "grader": "g@1",
        "tokens": 2,
        "logprob": -0.5,
        "version": "1.20",
    }
    return EvaluatedSample(**{**given, **changes})
