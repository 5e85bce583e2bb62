"""What a person is told: progress lines, the summary and its table, idle shares."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tandem.common.run_folder import RunFolder
from tandem.launch.board.history import History
from tandem.launch.board.progress import Progress
from tandem.launch.board.tail import MetricsTail
from tandem.launch.plan.hardware import Gpu, Machine
from tandem.launch.run import summary
from tandem.launch.run.opened.presets import load
from tandem.launch.run.processes.idle import IdleShares
from tandem.launch.run.summary import Course, Findings
from tandem.learner.resume.journal import Journal


def record(step: int, **more: object) -> str:
    return (
        json.dumps(
            {
                "step": step,
                "time": 1000.0 + step / 2,
                "reward/mean": 0.25,
                "train/rows": 64.0,
                "train/tokens_own": 100.0,
                "train/tokens_expert": 7.0,
                "replay/staleness_mean": 0.5,
                "replay/staleness_max": 1.0,
                "time/wait/batch": 0.1,
                "time/total": 0.5,
                **more,
            }
        )
        + "\n"
    )


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *lines: str) -> None:
    with open(path, "a") as file:
        file.write("".join(lines))


# --- the tail ---


def test_the_tail_reads_each_record_once(metrics: Path) -> None:
    tail = MetricsTail(metrics)
    assert tail.read() == []
    write(metrics, record(1), record(2))
    assert [r["step"] for r in tail.read()] == [1, 2]
    write(metrics, record(3))
    assert [r["step"] for r in tail.read()] == [3]
    assert tail.read() == []


def test_the_tail_waits_for_the_end_of_a_line(metrics: Path) -> None:
    tail = MetricsTail(metrics)
    write(metrics, record(1)[:20])
    assert tail.read() == []
    write(metrics, record(1)[20:])
    assert [r["step"] for r in tail.read()] == [1]


def test_the_tail_begins_anew_when_the_file_was_cut_back(metrics: Path) -> None:
    tail = MetricsTail(metrics)
    write(metrics, record(1), record(2), record(3))
    tail.read()
    other = metrics.with_suffix(".new")
    write(other, record(1), record(2))
    os.replace(other, metrics)
    assert [r["step"] for r in tail.read()] == [1, 2]


# --- progress ---


def progress(metrics: Path, said: list[str], *, total: int = 40) -> Progress:
    return Progress(metrics, total=total, every=10, say=said.append)


def test_a_line_every_so_many_steps_and_at_the_end(metrics: Path) -> None:
    said: list[str] = []
    watched = progress(metrics, said, total=25)
    write(metrics, *(record(step) for step in range(1, 26)))
    watched.update()
    assert [line.split("  ")[0] for line in said] == ["step 10/25", "step 20/25", "step 25/25"]
    assert watched.step == 25


def test_a_line_has_the_figures_and_the_time_left(metrics: Path) -> None:
    said: list[str] = []
    watched = progress(metrics, said)
    write(metrics, *(record(step) for step in range(1, 10)))
    write(
        metrics,
        json.dumps({"step": 0, "eval/id": "heldout@0", "eval/heldout/accuracy": 0.125}) + "\n",
        record(10),
    )
    watched.update()
    (line,) = said
    assert line.split("  ") == [
        *("step 10/40", "reward 0.250", "held-out 12.5% (step 0)", "staleness 0.5"),
        *("128 samples/s", "restarts 0", "0:15 left"),
    ]


def test_a_line_has_the_accuracy_on_the_first_of_several_held_out_sets(metrics: Path) -> None:
    def evaluated(name: str, accuracy: float) -> str:
        return (
            json.dumps({"step": 0, "eval/id": f"{name}@0", f"eval/{name}/accuracy": accuracy})
            + "\n"
        )

    said: list[str] = []
    watched = Progress(metrics, total=40, every=10, say=said.append, held_out=("math", "zebra"))
    write(metrics, evaluated("zebra", 0.5), *(record(step) for step in range(1, 11)))
    write(metrics, evaluated("math", 0.125), *(record(step) for step in range(11, 21)))
    watched.update()
    assert "held-out" not in said[0]
    assert said[1].split("  ")[2] == "held-out math 12.5% (step 0)"


def test_an_alarm_is_told_with_the_next_line_and_once(metrics: Path) -> None:
    said: list[str] = []
    watched = progress(metrics, said)
    alarmed = {
        "ratio/alarm": 1.0,
        "ratio/lag": 0,
        "ratio/tokens": 5,
        "ratio/k3": 2,
        "ratio/k3_bound": 1,
    }
    write(metrics, *(record(step) for step in range(1, 4)))
    write(metrics, json.dumps({"step": 4, "term": 1, "time": 4.0, **alarmed}) + "\n")
    write(metrics, *(record(step) for step in range(5, 21)))
    watched.update()
    alarm, ten, twenty = said
    assert alarm.startswith(
        "alarm: step 4: log-probs as sampled and as learned differ (lag 0, 5 tokens)"
    )
    assert ten.startswith("step 10/40")
    assert twenty.startswith("step 20/40")


def test_repeated_steps_are_no_progress(metrics: Path) -> None:
    said: list[str] = []
    watched = progress(metrics, said)
    write(metrics, *(record(step) for step in range(1, 15)))
    watched.update()
    write(metrics, *(record(step) for step in range(8, 15)))
    watched.update()
    assert watched.step == 14
    assert len(said) == 1


def test_what_an_earlier_life_wrote_is_not_told_again(metrics: Path) -> None:
    write(metrics, *(record(step) for step in range(1, 31)))
    said: list[str] = []
    watched = progress(metrics, said)
    watched.update()
    assert (watched.step, said) == (30, [])


def test_a_learner_that_has_cut_the_metrics_back_is_followed_without_a_second_reading(
    metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    watched = progress(metrics, said)
    evaluation = json.dumps({"step": 0, "eval/id": "q@0", "eval/q/accuracy": 0.5}) + "\n"
    write(metrics, evaluation, *(record(step) for step in range(1, 16)))
    watched.update()
    kept = metrics.with_suffix(".new")
    write(kept, evaluation, *(record(step) for step in range(1, 13)))
    os.replace(kept, metrics)
    added: list[object] = []
    add = History.add
    monkeypatch.setattr(History, "add", lambda self, one: added.append(one) or add(self, one))
    # Not even sorted anew with each record.
    monkeypatch.setattr(History, "evaluations", property(lambda self: pytest.fail("sorted")))
    # Only what is kept of them is parsed, which is all of so few.
    monkeypatch.setattr("tandem.launch.board.tail.parsed", lambda lines: pytest.fail("parsed"))
    watched.update()
    assert len(added) == 13
    watched.update()
    assert len(added) == 13
    assert (watched.step, watched.history.newest) == (15, json.loads(record(12)))
    monkeypatch.undo()
    write(metrics, *(record(step, term=2) for step in range(13, 21)))
    watched.update()
    assert [line.split("  ")[0] for line in said] == ["step 10/40", "step 20/40"]
    assert len(watched.history.evaluations) == 1


def test_an_alarm_of_steps_that_were_cut_is_told_once(metrics: Path) -> None:
    said: list[str] = []
    watched = progress(metrics, said)
    figures = {"lag": 0, "tokens": 5, "k3": 2, "k3_bound": 1, "alarm": 1.0}
    alarm = {f"ratio/{name}": value for name, value in figures.items()}
    write(metrics, *(record(step, **alarm if step in (4, 9) else {}) for step in range(1, 11)))
    watched.update()
    kept = metrics.with_suffix(".new")
    write(kept, *(record(step, **alarm if step == 4 else {}) for step in range(1, 9)))
    os.replace(kept, metrics)
    watched.update()
    write(metrics, *(record(step) for step in range(9, 21)))
    watched.update()
    told = [line.split("  ")[0].partition(": log-probs")[0] for line in said]
    assert told == ["alarm: step 9", "step 10/40", "step 20/40"]


# --- idle ---


def test_idle_shares_are_weighted_by_the_time_that_reports_cover() -> None:
    idle = IdleShares()
    pool = {"role": "reward", "time": 1.0, "clock": {"wait/groups": 3.0, "grade": 1.0, "total": 4}}
    idle.add({"reward-0": pool})
    idle.add({"reward-0": pool})
    idle.add({"reward-0": {**pool, "time": 2.0, "clock": {"grade": 4.0, "total": 4.0}}})
    assert idle.shares() == {"reward": 0.375}


def test_a_report_without_a_clock_counts_nothing() -> None:
    idle = IdleShares()
    idle.add({"learner-0": {"role": "learner", "time": 1.0, "seconds": {"total": 4.0}}})
    assert idle.shares() == {}


# --- the summary ---


def test_the_summary_adds_up_what_was_trained(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    write(folder.metrics, *(record(step) for step in range(1, 4)))
    write(
        folder.logs / "restarts.jsonl",
        json.dumps({"process": "rollout-0", "time": "t", "exit": "SIGKILL"}) + "\n",
    )
    findings = Findings(
        evaluations=[
            {"set_name": "heldout", "step": 0, "accuracy": 0.0, "problems": 500},
            {"set_name": "heldout", "step": 3, "accuracy": 0.5, "problems": 100},
            {"set_name": "heldout", "step": 3, "accuracy": 0.75, "problems": 500},
            {"set_name": "other", "step": 3, "accuracy": 0.1, "problems": 900},
        ],
        grader_restarts=[{"name": "reward-0", "time": 0.0, "detail": "grader 7: deadline"}],
        idle={"rollout": 0.2},
    )
    made = summary.make(
        folder=folder,
        config=load("miniature").resolve([]),
        record={"run_id": "r", "preset": "miniature", "overrides": []},
        findings=findings,
        wall_seconds=61.0,
        machine=Machine(gpus=(), cores=2, memory_mb=1024),
    )
    assert (made["accuracy_before"], made["accuracy_after"]) == (0.0, 0.75)
    assert (made["steps"], made["samples_trained"], made["tokens_trained"]) == (3, 192, 321)
    assert [restart["process"] for restart in made["restarts"]] == ["rollout-0", "reward-0"]
    assert made["staleness_max"] == 1
    assert made["idle_shares"] == {"learner": 0.2, "rollout": 0.2}
    assert made["packages"]["numpy"]
    text = "\n".join(summary.table(made, folder))
    assert "0.0% -> 75.0% (500 problems of heldout)" in text
    assert "1:01" in text
    assert "rollout 20%" in text
    summary.write(folder, made)
    assert json.loads(folder.summary.read_text()) == made


def test_what_was_trained_is_told_by_the_journal_whatever_became_of_the_metrics(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    journal = Journal(folder.journal)
    for step in range(1, 6):
        journal.row(1, step, {"step": step})()
        # The first one as a version of Tandem wrote it that knew no counts.
        journal.applied(1, step, {"samples": 64, "tokens": 100} if step > 1 else None)()
    journal.close()
    write(folder.metrics, record(1), record(5))
    made = summary.make(
        folder=folder,
        config=load("miniature").resolve([]),
        record={"run_id": "r", "preset": "miniature", "overrides": []},
        findings=Findings(),
        wall_seconds=61.0,
        machine=Machine(gpus=(), cores=2, memory_mb=1024),
    )
    assert (made["samples_trained"], made["tokens_trained"]) == (5 * 64, 4 * 100 + 107)


def test_the_course_of_a_metric_is_from_its_first_tenth_to_its_last() -> None:
    records = [{"step": n, "reward/mean": float(n)} for n in range(1, 41)]
    records += [{"step": 40, "eval/heldout/accuracy": 1.0}, {"step": 41, "reward/mean": None}]
    for count, course in ((42, [2.5, 38.5]), (3, [1.0, 3.0])):
        made = Course()
        for record in records[:count]:
            made.add(record)
        assert made.ends() == {"reward/mean": course}


def test_the_first_step_is_timed_from_the_last_start() -> None:
    step = {"train/rows": 64, "train/tokens_own": 100, "train/tokens_expert": 0}
    records = [
        {"step": 1, "time": 90.0, **step},
        {"step": 1, "time": 104.0, "eval/x/accuracy": 1.0},
    ]
    records += [{"step": 2, "time": 107.5, **step}, {"step": 3, "time": 109.0, **step}]
    for began, found in ((100.0, {"first_step": 7.5}), (80.0, {"first_step": 10.0}), (None, {})):
        made = Course(began)
        for record in records:
            made.add(record)
        assert made.first_step == found


def test_the_table_tells_how_the_reward_went_and_where_the_report_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    made = {
        "steps": 40,
        "accuracy_after": None,
        "course": {
            "reward/mean": [0.125, 0.875],
            "reward/zero_variance": [0.5, 0.25],
            "replay/staleness_mean": [0.0, 0.75],
        },
        "staleness_max": 2,
        "epochs": 2.5,
        "samples_trained": 1,
        "tokens_trained": 1,
        "wall_seconds": 1.0,
        "restarts": [],
        "idle_shares": {},
    }
    text = "\n".join(summary.table(made, folder))
    assert "0.125 -> 0.875" in text
    assert "50% -> 25%" in text
    assert "0.8 steps at the end, 2 at most" in text
    assert "report.png" not in text
    folder.report.touch()
    assert "report.png" in "\n".join(summary.table(made, folder))


def test_the_next_command_fits_the_machine() -> None:
    config = load("miniature").resolve([])
    laptop = Machine(gpus=(), cores=2, memory_mb=1024)
    eight = tuple(Gpu(index=i, name="H100", memory_mb=81559) for i in range(8))
    node = Machine(gpus=eight, cores=64, memory_mb=1 << 20)
    assert "miniature-on-policy" in summary.next_command(config, "miniature", laptop)
    assert "8gpu" in summary.next_command(config, "miniature", node)


def test_a_summary_is_json_also_where_a_figure_has_no_value(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    summary.write(folder, {"evaluations": [{"format_share": math.nan, "accuracy": 0.5}], "n": 1})
    text = folder.summary.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "evaluations": [{"format_share": None, "accuracy": 0.5}],
        "n": 1,
    }
