"""Whole learner processes on a real Redis, with a worker that needs no model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import xxhash
import yaml
from msgspec.structs import replace
from safetensors.torch import load_file

from tandem.common import wire
from tandem.common.config import to_yaml
from tandem.common.errors import ConfigError, DataError, RunFailedError, TandemError
from tandem.common.models import resolve
from tandem.common.records import Group, Verdict, Version
from tandem.common.weights.receiver import Target, WeightReceiver
from tandem.common.weights.shared_memory import StagedTensors
from tandem.launch.cli import main
from tandem.learner.resume.journal import History, read, trained
from tandem.learner.resume.state_files import POLICY
from tandem.replay import archive
from tandem.replay.callback_requests import CallbackRequests, Requested
from tandem.replay.evaluating.evaluations import EvaluationRequest
from tandem.replay.ledger_records import Lease
from tandem.replay.members import membership

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow
DEADLINE = 90.0


class Learner:
    """One learner process."""

    def __init__(self, ask: Callable[[dict[str, Any]], dict[str, Any]], **details: Any) -> None:
        self._ask = ask
        self.pid: int = ask(details)["pid"]
        self.code: int | None = None

    def running(self) -> bool:
        if self.code is None:
            self.code = self._ask({"poll": self.pid})["code"]
        return self.code is None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int | None:
        until(lambda: not self.running(), f"the end of learner process {self.pid}")
        return self.code


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Talks to ``learner_server.py``."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("learner_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def answer() -> dict[str, Any]:
        for line in stdout:
            # Libraries may say something of their own while they are imported.
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError("learner_server.py has ended")

    def request(asked: dict[str, Any]) -> dict[str, Any]:
        stdin.write(json.dumps(asked) + "\n")
        stdin.flush()
        return answer()

    try:
        assert answer() == {"ready": True}
        yield request
    finally:
        server.kill()
        server.wait()
        stdin.close()
        stdout.close()


Launch = Callable[..., Learner]


@pytest.fixture
def launch(ask: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Launch]:
    """Starts learner processes, which are gone at the end."""
    started: list[Learner] = []

    def start(run: Any, rank: int = 0, ranks: int = 1, port: int = 0, **further: Any) -> Learner:
        folder = str(run.folder.path)
        learner = Learner(ask, folder=folder, rank=rank, ranks=ranks, port=port, **further)
        started.append(learner)
        return learner

    yield start
    for learner in started:
        if learner.running():
            learner.signal(signal.SIGKILL)
            learner.wait()


StartRun = Callable[..., Any]


@pytest.fixture(scope="module")
def start_run(
    server: Any, made_up: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartRun]:
    """Makes runs in folders of their own."""
    runs = []

    def start(**sections: Any) -> Any:
        quiet = {"at_start": False, "at_end": False}
        sections["evaluate"] = quiet | sections.get("evaluate", {})
        folder = tmp_path_factory.mktemp("run")
        run = made_up.Run(server.join(), made_up.config_of(**sections), folder)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.close()


LUFFY: dict[str, Any] = {
    "run": {"steps": 8},
    "expert": {"per_group": 1},
    "log": {"archive": True},
    # With everything that has a state beside the weights: the coefficients.
    "learner": {
        "objective": {
            "name": "luffy",
            "entropy_target": 2.0,
            "entropy_adapt": "stepped",
            "kl_coefficient": 0.01,
            "kl_reward_coefficient": 0.01,
            "kl_target": 0.05,
        },
        "checkpoint_every": 3,
    },
}


@pytest.fixture(scope="module")
def straight(start_run: StartRun, ask: Any) -> Any:
    """A run of 8 steps that nothing disturbed."""
    run = start_run(**LUFFY)
    run.work()
    finish(run, Learner(ask, folder=str(run.folder.path), rank=0, ranks=1, port=0))
    return run


def finish(run: Any, learner: Learner, expected: int = 0) -> str:
    """Waits for a process to end with this code; returns the run's logs."""
    code = learner.wait()
    text = "\n".join(path.read_text() for path in sorted(run.folder.logs.glob("learner-*.log")))
    assert code == expected, text[-3000:]
    return text


def metrics(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.folder.model / "model.safetensors")


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.01)


def kill_after(groups: int, learner: Learner, run: Any) -> None:
    """Kills the learner once it has trained so many groups, two a step."""
    until(lambda: run.ledger.counts()["trained"] >= groups, f"{groups} trained groups")
    learner.signal(signal.SIGKILL)
    learner.wait()


def test_a_run_ends_finished_with_all_its_records(straight: Any) -> None:
    assert straight.runs.state() == "finished"
    assert [record["step"] for record in metrics(straight)] == list(range(1, 9))
    assert straight.ledger.counts()["trained"] == 16
    names = {name.partition("/")[0] for name in metrics(straight)[-1] if "/" in name}
    kept = {"train", "memory", "ratio", "reward", "rollout", "replay", "time"}
    # The last record also has what workers have told of their transfers, which others have now and then.
    assert names == kept | {"weights"}
    samples = [json.loads(line) for line in straight.folder.samples.read_text().splitlines()]
    assert [record["step"] for record in samples] == [n for n in range(1, 9) for _ in range(2)]
    assert {row["source"] for row in samples[0]["rows"] + samples[1]["rows"]} == {"own", "expert"}


def test_a_killed_and_resumed_run_is_the_run_it_would_have_been(
    straight: Any, start_run: StartRun, launch: Launch
) -> None:
    killed = start_run(**LUFFY)
    killed.work()
    kill_after(10, launch(killed), killed)
    log = finish(killed, launch(killed))
    assert "resumes from the checkpoint of step" in log

    for name, tensor in weights(straight).items():
        assert torch.equal(weights(killed)[name], tensor), name
    for name in ("train/loss", "train/entropy_coefficient", "train/kl_reward_coefficient"):
        wanted = [record[name] for record in metrics(straight)]
        assert len(set(wanted)) > 4
        assert [record[name] for record in metrics(killed)] == wanted
    assert [record["step"] for record in metrics(killed)] == list(range(1, 9))
    names = [path.name for path in sorted(killed.folder.archive.iterdir())]
    assert names == [archive.file_name(step) for step in range(1, 9)]

    # Every group stands in one row, and every row is applied on the line that was kept.
    records = list(read(killed.folder.journal))
    rows = [r for r in records if r["kind"] == "row"]
    ids = Counter(entry["id"] for r in rows for entry in r["row"]["groups"])
    assert [r["step"] for r in rows] == list(range(1, 9))
    assert set(ids.values()) == {1}
    assert {r["term"] for r in records} == {1, 2}
    assert killed.ledger.counts()["trained"] == 16
    kept = sorted(path.name for path in killed.folder.checkpoints.glob("step-*"))
    assert len(kept) == 2
    assert kept[-1] == "step-00000008"


def test_every_group_is_archived_as_it_was_committed(
    straight: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = straight.folder
    folder.write_run({"state": "finished"})
    assert main(["archive", str(folder.path), "--out", str(tmp_path / "out")]) == 0
    assert "16 groups of 8 steps" in capsys.readouterr().out
    found = list(archive.read(tmp_path / "out" / "groups-00000.parquet"))
    rows = [record["row"] for record in read(folder.journal) if record["kind"] == "row"]
    assert [one.row for one in found if one.place == 0] == rows
    entries = [(row["step"], entry) for row in rows for entry in row["groups"]]
    for one, (step, entry) in zip(found, entries, strict=True):
        assert (one.step, one.group.group_id) == (step, entry["id"])
        assert xxhash.xxh3_64_hexdigest(wire.encode(one.group)) == entry["digest"]
        assert [trace.trace_id for trace in one.traces] == entry["traces"]
    with pytest.raises(DataError, match="isn't empty"):
        archive.join([], tmp_path / "out")
    (folder.archive / archive.file_name(3)).rename(tmp_path / "3.parquet")
    assert main(["archive", str(folder.path), "--out", str(tmp_path / "rest")]) == 0
    assert "1 steps are missing" in capsys.readouterr().err
    (tmp_path / "3.parquet").rename(folder.archive / archive.file_name(3))


def test_a_resume_that_fails_leaves_every_record_as_it_was(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(run={"steps": 12}, learner={"checkpoint_every": 2})
    run.work()
    kill_after(14, launch(run), run)
    files = (run.folder.metrics, run.folder.samples, run.folder.journal)
    before = [path.read_bytes() for path in files]
    aside = run.folder.checkpoints.rename(run.folder.path / "aside")
    log = finish(run, launch(run), expected=2)
    assert "There is no checkpoint to save" in log
    assert [path.read_bytes() for path in files] == before

    shutil.rmtree(run.folder.checkpoints)
    aside.rename(run.folder.checkpoints)
    finish(run, launch(run))
    assert [record["step"] for record in metrics(run)] == list(range(1, 13))
    told = [json.loads(line)["step"] for line in run.folder.samples.read_text().splitlines()]
    assert told == [step for step in range(1, 13) for _ in range(2)]
    assert trained(run.folder.journal) == {
        record["step"]: (record["train/rows"], record["train/tokens_own"])
        for record in metrics(run)
    }


def test_a_flipped_bit_in_a_checkpoint_costs_some_steps_and_changes_nothing(
    straight: Any, start_run: StartRun, launch: Launch
) -> None:
    run = start_run(**LUFFY)
    run.work()
    kill_after(14, launch(run), run)
    # Weights and moments of one rank lie in one file.
    (path,) = (run.folder.checkpoints / "step-00000006" / POLICY).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    log = finish(run, launch(run))
    assert f"left out a checkpoint: {path} is damaged" in log
    assert "resumes from the checkpoint of step 3" in log
    for name, tensor in weights(straight).items():
        assert torch.equal(weights(run)[name], tensor), name


def told(run: Any) -> list[str]:
    """Ids of the evaluations in the metrics, sorted by step."""
    ids = [str(record["eval/id"]) for record in metrics(run) if "eval/id" in record]
    return sorted(ids, key=lambda id_: int(id_.partition("@")[2]))


EVALUATED: dict[str, Any] = {
    "run": {"steps": 12},
    "learner": {"checkpoint_every": 5},
    "evaluate": {"at_start": True, "at_end": True, "every": 2},
    "data": {"evaluate": [{"path": "x", "name": "held"}]},
}


@pytest.mark.parametrize("under_way", [2, 8])
def test_every_evaluation_is_told_once_though_the_learner_is_killed(
    start_run: StartRun, launch: Launch, under_way: int
) -> None:
    """One is under way at the death, and those before it have records that are cut or kept."""
    run = start_run(**EVALUATED)
    run.evaluates = lambda request: request.step < under_way
    run.work()
    kill_after(18, launch(run), run)
    run.evaluates = lambda request: True
    finish(run, launch(run))
    assert told(run) == [f"held@{step}" for step in range(0, 13, 2)]
    assert run.runs.open_evaluations() == []


def test_an_exact_evaluation_is_exact_though_the_learner_dies_while_it_waits(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(**EVALUATED | {"evaluate": EVALUATED["evaluate"] | {"exact": True}})
    run.evaluates = lambda request: request.step < 4
    run.work()
    first = launch(run)
    until(lambda: run.runs.open_evaluations() == ["held@4"], "the evaluation of step 4")
    first.signal(signal.SIGKILL)
    first.wait()
    run.evaluates = lambda request: True
    finish(run, launch(run))
    found = [record for record in metrics(run) if "eval/id" in record]
    assert [record["step"] for record in found] == list(range(0, 13, 2))
    assert [record["eval/due"] for record in found] == list(range(0, 13, 2))


def test_the_best_model_is_kept_though_the_learner_dies_while_it_waits_for_its_evaluation(
    start_run: StartRun, launch: Launch
) -> None:
    """Its result is there before the next learner has trained the step again."""
    settings: dict[str, Any] = {
        "run": {"steps": 8},
        "learner": {"checkpoint_every": 1000},
        "data": EVALUATED["data"],
        # All are equally good, so that the first one is the best.
        "evaluate": {"every": 4, "exact": True, "best": "held/accuracy"},
    }
    straight, run = start_run(**settings), start_run(**settings)
    straight.work()
    finish(straight, launch(straight))
    run.evaluates = lambda request: False
    run.work()
    first = launch(run)
    until(lambda: run.runs.open_evaluations() == ["held@4"], "the evaluation of step 4")
    first.signal(signal.SIGKILL)
    first.wait()
    run.evaluates = lambda request: True
    until(lambda: not run.runs.open_evaluations(), "the end of the evaluation")
    finish(run, launch(run))
    assert json.loads((run.folder.best / "best.json").read_text())["step"] == 4
    kept = load_file(run.folder.best / "model.safetensors")
    for name, tensor in load_file(straight.folder.best / "model.safetensors").items():
        assert torch.equal(kept[name], tensor), name
    assert any(not torch.equal(kept[name], last) for name, last in weights(run).items())


def test_an_evaluation_that_comes_after_its_wait_is_told_and_not_kept(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(
        run={"steps": 8},
        data=EVALUATED["data"],
        evaluate={"every": 4, "exact": True, "best": "held/accuracy"},
    )
    claimed: list[EvaluationRequest] = []
    answer = run.answer

    def keep(request: EvaluationRequest) -> bool:
        claimed.append(request)
        return False

    def late(lease: Lease, held: Version) -> Group:
        # A group of step 7: the learner has given up the wait, and waits for this one.
        if lease.group_id == "2-0":
            until(lambda: run.ledger.counts()["trained"] >= 12, "step 6")
            run.finish_evaluation(claimed[0], 4)
            until(lambda: "held@4" in told(run), "the record of the evaluation")
        return answer(lease, held)

    run.evaluates, run.answer = keep, late
    run.work()
    log = finish(run, launch(run, abandoned=0.5))
    assert "goes on without the evaluation held@4: no rollout worker has been there" in log
    said = (
        "held/accuracy of step 4 is 0.5, which came when the learner had gone on to step 6 without it: it doesn't count "
        f"for {run.folder.best}, since the learner no longer has its weights; if its checkpoint is kept, "
        f"`tandem export {run.folder.path} --best held/accuracy` finds it"
    )
    assert log.count(said) == 1
    assert not run.folder.best.exists()


def test_an_evaluation_that_was_never_asked_for_is_asked_for_at_the_resume(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(**EVALUATED)
    run.work()
    kill_after(18, launch(run), run)
    # As if the kill had come between a step and its request, and Redis had lost a result.
    redis, key = run.store.redis, run.store.key
    for name in ("evaluations", "evaluation_results"):
        redis.hdel(key(name), "held@6", "held@8")
    redis.zrem(key("evaluations_open"), "held@6", "held@8")
    finish(run, launch(run))
    assert told(run) == [f"held@{step}" for step in range(0, 13, 2)]
    late = {r["eval/id"]: r for r in metrics(run) if "eval/id" in r}["held@6"]
    assert late["eval/due"] == 6
    assert late["step"] >= 8


def test_a_step_that_is_undone_loses_no_evaluation(start_run: StartRun, launch: Launch) -> None:
    sections = EVALUATED | {"run": {"steps": 6}}
    run = start_run(**sections | {"learner": {"checkpoint_every": 3, "minibatches": 2}})
    poison(run, {"1-3"})
    answer = run.answer

    def late(lease: Lease, held: Version) -> Group:
        # By then it stands in the metrics above the checkpoint, from where it is cut.
        while lease.group_id == "1-3" and "held@4" not in told(run):
            run.evaluate(Version(term=held.term, step=run.ledger.journalled()))
            time.sleep(0.02)
        return answer(lease, held)

    run.answer = late
    run.work()
    assert "step 5: loss or gradient not finite" in finish(run, launch(run))
    assert told(run) == [f"held@{step}" for step in range(0, 7, 2)]


def test_a_payload_that_was_flipped_ends_the_run_once_with_what_can_be_saved(
    straight: Any,
    start_run: StartRun,
    launch: Launch,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start_run(**LUFFY)
    run.work()
    kill_after(14, launch(run), run)
    run.folder.config.write_text(to_yaml(run.config))
    entry = next(r["row"] for r in read(run.folder.journal) if r["step"] == 7)["groups"][0]
    name = run.store.key(f"payload:{entry['id']}:{entry['attempt']}:{entry['digest']}")
    data = bytearray(run.store.call("get", name))
    data[len(data) // 2] ^= 1
    run.store.call("set", name, bytes(data))
    before = run.folder.metrics.read_bytes()
    log = finish(run, launch(run), expected=2)
    assert f"the samples of group {entry['id']} (row 7) are not the ones" in log
    assert "The model as it was trained up to step 6 can be saved" in log
    assert f"`tandem export {run.folder.path}`" in log
    assert run.folder.metrics.read_bytes() == before

    run.folder.write_run({"run_id": run.join.run_id})
    # It would take the place of pytest's own.
    monkeypatch.setattr("tandem.launch.commands.export.start_log", lambda *_: None)
    command = ["export", str(run.folder.path)]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("the model of step 6 is in ")
    exported = load_file(run.folder.path / "model-of-step-6" / "model.safetensors")
    trained_on = load_file(straight.folder.model / "model.safetensors")
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in trained_on.items()}
    assert main(command) == 2
    assert "already exists: name another folder with --out" in capsys.readouterr().err


def poison(run: Any, bad_groups: set[str]) -> None:
    """Lets the worker hand in rewards that make loss and gradient infinite or NaN."""
    answer = run.answer

    def poisoned(lease: Any, held: Any) -> Any:
        group = answer(lease, held)
        if lease.group_id not in bad_groups:
            return group
        samples = (replace(group.samples[0], reward=math.inf), *group.samples[1:])
        return replace(group, samples=samples)

    run.answer = poisoned


def test_a_drain_ends_the_wait_for_a_batch(start_run: StartRun, launch: Launch) -> None:
    run = start_run(run={"steps": 6})
    learner = launch(run)
    until(lambda: bool(run.runs.reports().get("learner-0")), "a first report")
    assert "waiting for group 0-0" in run.runs.reports()["learner-0"]["waiting"]
    learner.signal(signal.SIGTERM)
    assert "drained at step 0" in finish(run, learner)
    assert run.runs.state() == "running"
    # What it has saved is where the next one goes on.
    run.work()
    assert "resumes from the checkpoint of step 0" in finish(run, launch(run))
    assert run.ledger.counts()["trained"] == 12


def test_steps_that_are_not_finite_are_quarantined_and_undone(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(run={"steps": 6}, learner={"checkpoint_every": 1, "minibatches": 2})
    # Step 2 fails at its first update; step 4 at its second, after one that must be undone.
    poison(run, {"0-2", "1-1"})
    run.work()
    log = finish(run, launch(run))
    assert "step 2: loss or gradient not finite; its groups are quarantined: 0-2, 0-3" in log
    assert "step 4: loss or gradient not finite; its groups are quarantined: 1-0, 1-1" in log
    counts = run.ledger.counts()
    assert counts["rejected:quarantined"] == 4
    assert counts["trained"] == 8
    ends = outcomes(run)
    assert [step for step, kind in ends.items() if kind == "quarantined"] == [2, 4]
    records = list(read(run.folder.journal))
    assert [r["step"] for r in records if r["kind"] == "resumed"] == [3]

    # A run in which those groups never were does the same to the bit.
    clean = start_run(run={"steps": 6}, learner={"checkpoint_every": 1, "minibatches": 2})
    poison(clean, {"0-2", "1-0"})
    clean.work()
    finish(clean, launch(clean))
    for name, tensor in weights(clean).items():
        assert torch.equal(weights(run)[name], tensor), name


def test_before_the_first_checkpoint_a_new_start_undoes_a_step(
    start_run: StartRun, launch: Launch
) -> None:
    sections = {"run": {"steps": 5}, "learner": {"checkpoint_every": 1000, "minibatches": 2}}
    run = start_run(**sections)
    poison(run, {"0-5"})
    run.work()
    # Which a supervisor starts again.
    log = finish(run, launch(run), expected=TandemError.exit_code)
    assert "the learner starts again from the base model, without step 3" in log
    assert run.runs.state() == "running"
    log = finish(run, launch(run))
    assert "trains steps 1 to 3 again from the journal" in log
    assert run.ledger.counts()["rejected:quarantined"] == 2
    applied = {record["step"]: record["train/applied"] for record in metrics(run)}
    assert applied == {1: 1.0, 2: 1.0, 3: 0.0, 4: 1.0, 5: 1.0}

    clean = start_run(**sections)
    poison(clean, {"0-4"})
    clean.work()
    finish(clean, launch(clean))
    for name, tensor in weights(clean).items():
        assert torch.equal(weights(run)[name], tensor), name


def test_steps_that_new_starts_undo_are_counted_as_others_are(
    start_run: StartRun, launch: Launch
) -> None:
    learner = {"checkpoint_every": 1000, "minibatches": 2, "max_nonfinite": 2}
    run = start_run(run={"steps": 6}, learner=learner)
    poison(run, {"0-3", "0-5"})
    run.work()
    finish(run, launch(run), expected=TandemError.exit_code)
    log = finish(run, launch(run), expected=RunFailedError.exit_code)
    assert "2 steps in a row had a loss or gradient that isn't finite" in log
    assert run.runs.state() == "failed"


def test_a_run_that_is_to_end_while_it_goes_back_loses_no_update(
    start_run: StartRun, launch: Launch
) -> None:
    sections = {"run": {"steps": 9}, "learner": {"checkpoint_every": 4, "minibatches": 2}}
    run = start_run(**sections)
    poison(run, {"2-3"})
    run.work()
    learner = launch(run)
    journal = run.folder.journal
    until(
        lambda: journal.exists() and "quarantined" in outcomes(run).values(), "a quarantined step"
    )
    learner.signal(signal.SIGTERM)
    log = finish(run, learner)
    assert int(re.findall(r"drained at step (\d+)", log)[-1]) < 7
    finish(run, launch(run))
    assert run.ledger.counts()["rejected:quarantined"] == 2

    clean = start_run(**sections)
    poison(clean, {"2-2"})
    clean.work()
    finish(clean, launch(clean))
    for name, tensor in weights(clean).items():
        assert torch.equal(weights(run)[name], tensor), name


def test_a_quarantined_step_keeps_its_record_when_the_run_is_resumed_before_it(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(run={"steps": 6}, learner={"checkpoint_every": 1000})
    poison(run, {"0-2"})
    run.work()
    kill_after(6, launch(run), run)
    assert "again from the journal" in finish(run, launch(run))
    applied = {record["step"]: record["train/applied"] for record in metrics(run)}
    assert applied == {1: 1.0, 2: 0.0, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}
    assert len(metrics(run)) == 6


def test_a_journal_that_is_an_older_copy_than_redis_gets_the_outcomes_that_it_lacks(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(run={"steps": 6}, learner={"checkpoint_every": 1000})
    poison(run, {"0-2"})
    run.work()
    kill_after(4, launch(run), run)
    journal = run.folder.journal
    lines = journal.read_bytes().splitlines(keepends=True)
    # All but what became of step 2, and what came then.
    journal.write_bytes(b"".join(lines[:3]))
    finish(run, launch(run))
    assert outcomes(run)[2] == "quarantined"
    assert History(journal).applied_step == 6


def test_inspect_has_the_last_steps_though_the_very_last_one_is_quarantined(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(run={"steps": 4}, log={"inspect": True})
    poison(run, {"1-0"})
    run.work()
    assert "step 4: loss or gradient not finite" in finish(run, launch(run))
    logs = sorted(path.name for path in run.folder.inspect.iterdir())
    assert logs == ["steps-000001-000003.eval"]


def test_a_quarantined_version_has_the_weights_of_the_steps_before_it(
    start_run: StartRun, launch: Launch
) -> None:
    """Where not every step is published: the last one that was is older than they are."""
    run = start_run(
        run={"steps": 4},
        weights={"every": 2},
        data={"evaluate": [{"path": "x", "name": "held"}]},
        evaluate={"at_end": True},
    )
    poison(run, {"1-0"})
    begun = load_file(Path(resolve(run.config.model.path)) / "model.safetensors")
    held = {name: tensor.clone() for name, tensor in begun.items()}
    steps = []

    def load(staged: StagedTensors | None, version: Version) -> float:
        for name, tensor in staged.tensors() if staged is not None else []:
            held[name].copy_(tensor)
        steps.append(version.step)
        return 0.0

    def evaluates(request: EvaluationRequest) -> bool:
        until(lambda: request.step in steps, f"the weights of step {request.step}")
        return True

    receiver = WeightReceiver(
        membership(run.store, "rollout-0"),
        run.config,
        Target(
            specs=[(n, tuple(t.shape), run.config.engine_dtype) for n, t in begun.items()],
            load=load,
        ),
        run.ledger.term,
    )
    run.evaluates = evaluates
    run.work()
    with contextlib.closing(receiver):
        receiver.start()
        log = finish(run, launch(run))
    assert "step 4: loss or gradient not finite" in log
    assert told(run) == ["held@4"]
    for name, tensor in weights(run).items():
        assert torch.equal(held[name], tensor), name


def sampled_elsewhere(run: Any, groups: set[str]) -> None:
    """Has the worker answer these groups with log-probs of −40: far over bounds of a slack of 1e12, as
    which the made-up log-probs of the others are not."""
    made = run.answer

    def answered(lease: Lease, held: Version) -> Group:
        group: Group = made(lease, held)
        if group.group_id not in groups:
            return group
        samples = tuple(replace(s, logprobs=np.full_like(s.logprobs, -40.0)) for s in group.samples)
        return replace(group, samples=samples)

    run.answer = answered


def checked(on_alarm: str, **more: Any) -> dict[str, Any]:
    """Sections of a run whose ratio check finds those groups."""
    check = {"on_alarm": on_alarm, "slack": 1e12}
    return {"learner": {"ratio_check": check, **more}, "replay": {"max_staleness": 0}}


@pytest.mark.parametrize("on_alarm", ["tell", "quarantine"])
def test_what_was_sampled_elsewhere_is_told_or_quarantined(
    on_alarm: str, start_run: StartRun, launch: Launch
) -> None:
    run = start_run(**checked(on_alarm))
    sampled_elsewhere(run, {"0-2"})
    run.work()
    assert launch(run).wait() == 0
    records = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    alarms = {r["step"]: r["train/applied"] for r in records if r.get("ratio/alarm")}
    assert alarms == {2: float(on_alarm == "tell")}
    (log,) = run.folder.logs.glob("learner-*.log")
    told = re.findall(
        r"step 2: log-probs as sampled and as learned differ \(lag 0, .*\(bound", log.read_text()
    )
    assert told
    counts = run.ledger.counts()
    assert counts.get("rejected:quarantined", 0) == (0 if on_alarm == "tell" else 2)
    report = run.runs.reports()["learner-0"]
    assert report["alarm"].startswith("step 2: log-probs as sampled")


def test_alarms_in_a_row_end_the_run_as_other_bad_steps_do(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(**checked("quarantine", max_nonfinite=2))
    sampled_elsewhere(run, {"0-2", "0-4"})
    run.work()
    assert launch(run).wait() != 0
    (log,) = run.folder.logs.glob("learner-*.log")
    assert "2 steps in a row had" in log.read_text()
    assert "the last one step 3, log-probs as sampled" in log.read_text()


def test_a_run_that_an_alarm_stopped_goes_on_as_its_message_says(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(**checked("stop"))
    sampled_elsewhere(run, {"0-2"})
    run.work()

    def last_words() -> str:
        (log,) = run.folder.logs.glob("learner-*.log")
        return str(log.read_text().splitlines()[-1])

    for _ in range(2):
        # The same groups again, and so the same end: with a checkpoint from before them.
        assert launch(run).wait() != 0
        assert re.search(
            r"step 2 is not trained .*mean k3.* \(bound .*The checkpoint of step 1 .*"
            r"on_alarm is tell \(.*\) or quarantine",
            last_words(),
        )
        assert run.runs.state() == "failed"
        assert [c.name for c in run.folder.checkpoints.glob("step-*")] == ["step-00000001"]
    go_on_with(run, ratio_check={"on_alarm": "quarantine"})
    assert launch(run).wait() == 0
    assert outcomes(run)[2] == "quarantined"
    assert run.runs.state() == "finished"


def test_a_step_that_was_trained_is_trained_again_though_its_alarm_would_now_refuse_it(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(**checked("tell", checkpoint_every=1000))
    sampled_elsewhere(run, {"0-2"})
    run.work()
    kill_after(6, launch(run), run)
    go_on_with(run, ratio_check={"on_alarm": "quarantine"})
    log = finish(run, launch(run))
    assert "again from the journal" in log
    assert outcomes(run) == dict.fromkeys(range(1, 7), "applied")
    assert run.runs.state() == "finished"
    assert run.ledger.counts()["trained"] == 12


def test_a_trained_step_that_is_not_finite_when_it_is_trained_again_is_quarantined(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(learner={"checkpoint_every": 1000})
    run.work()
    kill_after(6, launch(run), run)
    # Step 1 makes weights of 1e30, of which no later step can compute a loss.
    go_on_with(run, optimizer={"lr": 1e30}, max_nonfinite=1000)
    log = finish(run, launch(run))
    assert "step 3: loss or gradient not finite; its groups are quarantined: 0-4, 0-5" in log
    assert outcomes(run) == {1: "applied", **dict.fromkeys(range(2, 7), "quarantined")}
    counts = run.ledger.counts()
    assert (counts["trained"], counts["rejected:quarantined"]) == (2, 10)
    assert run.ledger.state_of("0-4") == "rejected(quarantined, 3)"
    assert run.runs.state() == "finished"


def outcomes(run: Any) -> dict[int, str]:
    """What became of each step in the end, by the journal."""
    records = [r for r in read(run.folder.journal) if r["kind"] in ("applied", "quarantined")]
    return {record["step"]: record["kind"] for record in records}


def go_on_with(run: Any, **learner: Any) -> None:
    """Resumes the run with other settings of the learner, as `tandem start` does."""
    config = run.config.model_dump(mode="json")
    for name, value in learner.items():
        before = config["learner"][name]
        config["learner"][name] = before | value if isinstance(value, dict) else value
    run.runs.put_config(yaml.safe_dump(config))
    run.runs.set_state("running")


def test_samples_kept_for_a_resume_never_fill_redis_for_good(
    own_server: Any,
    made_up: ModuleType,
    launch: Launch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A row is 2 MB; no checkpoint is due before the end, and Redis has room for about five rows.
    config = made_up.config_of(
        run={"steps": 12},
        learner={"checkpoint_every": 1000},
        rollout={"max_new_tokens": 8000},
        evaluate={"at_start": False, "at_end": False},
    )
    run = made_up.Run(own_server.join(), config, tmp_path / "run")
    answer = run.answer

    def long(lease: Lease, held: Version) -> Group:
        return replace(answer(lease, held), prompt_text="x" * (1 << 20))

    monkeypatch.setattr(run, "answer", long)
    used = int(run.store.redis.info("memory")["used_memory"])
    run.store.redis.config_set("maxmemory", used + (14 << 20))
    run.work()
    try:
        finish(run, launch(run))
        assert run.ledger.counts()["trained"] == 24
        assert [r["step"] for r in metrics(run)] == list(range(1, 13))
    finally:
        run.close()


def test_a_learner_starts_trains_and_saves_while_redis_is_over_its_memory(
    own_server: Any, made_up: ModuleType, launch: Launch, tmp_path: Path
) -> None:
    config = made_up.config_of(run={"steps": 2}, evaluate={"at_start": False, "at_end": False})
    run = made_up.Run(own_server.join(), config, tmp_path / "run")
    try:
        run.runs.curve_client()
        held = Version(term=run.ledger.new_term(), step=0)
        for lease in run.ledger.lease(held, 4).leases:
            run.ledger.commit(run.answer(lease, held))
        run.store.redis.config_set("maxmemory", 1)
        finish(run, launch(run))
        assert run.ledger.counts()["trained"] == 4
        assert run.runs.reports()["learner-0"]["version"][1] == 2
    finally:
        run.close()


def test_too_many_bad_steps_in_a_row_end_the_run(start_run: StartRun, launch: Launch) -> None:
    run = start_run(run={"steps": 6}, learner={"max_nonfinite": 2})
    poison(run, {"0-2", "0-4"})
    run.work()
    log = finish(run, launch(run), expected=3)
    assert "2 steps in a row had a loss or gradient that isn't finite" in log
    assert run.runs.state() == "failed"


def test_offline_sft_lowers_the_loss_without_a_worker(start_run: StartRun, launch: Launch) -> None:
    run = start_run(
        run={"steps": 30},
        learner={
            "source": "offline",
            "objective": {"name": "sft", "aggregation": "token_mean"},
            "optimizer": {"lr": 3e-3},
        },
        rollout={"workers": 0},
        evaluate={"at_end": True},
    )
    finish(run, launch(run))
    nll = [record["train/nll"] for record in metrics(run)]
    assert len(nll) == 30
    assert sum(nll[-3:]) / 3 < 0.5 * sum(nll[:3]) / 3
    rows = [r["row"]["offline"] for r in read(run.folder.journal) if r["kind"] == "row"]
    # Each pass goes through all three traces, two at a step.
    flat = [name for row in rows for name in row]
    for start in range(0, 60, 3):
        assert len(set(flat[start : start + 3])) == 3
    assert run.runs.state() == "finished"


def worse_traces(made_up: ModuleType) -> list[Any]:
    """The worse responses of pairs, whose better ones are the stored traces."""
    return [
        replace(
            made_up.trace(n),
            trace_id=f"a/{n}#1",
            tokens=np.array([16, 17, 10, 1], np.int32),
            reward=0.0,
            verdict=Verdict.WRONG,
        )
        for n in range(made_up.EXPERTS)
    ]


def test_held_out_pairs_are_measured_at_steps_that_are_quarantined(
    start_run: StartRun, launch: Launch, made_up: ModuleType
) -> None:
    run = start_run(
        run={"steps": 3},
        data={"heldout_pairs": 0.4},
        learner={
            "source": "offline",
            # So steep that no gradient is finite.
            "objective": {"name": "dpo", "beta": 1e300},
            "max_nonfinite": 2,
            "checkpoint_every": 1000,
        },
        rollout={"workers": 0},
        evaluate={"every": 1},
    )
    run.runs.put_traces(worse_traces(made_up))

    def measured() -> list[int]:
        return [record["step"] for record in metrics(run) if "heldout/preference_pairs" in record]

    finish(run, launch(run), expected=RunFailedError.exit_code)
    assert measured() == [1]
    # The first two are now passed over, as quarantined before, and the third one is the last.
    run.runs.set_state("running")
    finish(run, launch(run))
    assert outcomes(run) == dict.fromkeys((1, 2, 3), "quarantined")
    assert measured() == [1, 2, 3]


def test_held_out_pairs_are_compared_when_a_callback_wants_it_without_a_held_out_set(
    start_run: StartRun, launch: Launch, made_up: ModuleType
) -> None:
    run = start_run(
        run={"steps": 3, "callbacks": ["elsewhere:one"]},
        data={"heldout_pairs": 0.4},
        learner={"source": "offline", "objective": {"name": "dpo"}},
        rollout={"workers": 0},
    )
    run.runs.put_traces(worse_traces(made_up))
    CallbackRequests(run.store).put(Requested(evaluate=1))
    said = finish(run, launch(run))
    compared = [one["step"] for one in metrics(run) if "heldout/preference_pairs" in one]
    assert compared == [1, 3]
    assert "nobody evaluates" not in said


def test_an_offline_run_that_moves_nothing_ends_and_says_why(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(
        run={"steps": 30},
        # All traces are paid alike, so that whitened rewards are 0.
        learner={
            "source": "offline",
            "objective": {"name": "luffy", "advantage": "reinforce_pp"},
            "max_idle": 3,
        },
        rollout={"workers": 0},
    )
    log = finish(run, launch(run), expected=RunFailedError.exit_code)
    assert "step 3: no token of the last 3 steps could move the gradient" in log
    assert "choose sft" in log
    assert run.runs.state() == "failed"
    assert [record["train/idle_steps"] for record in metrics(run)] == [1, 2, 3]
    assert not run.folder.model.exists()


def test_an_online_run_that_moves_nothing_says_so_once_and_goes_on(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(run={"steps": 8}, learner={"max_idle": 3})
    answer = run.answer

    def equal(lease: Lease, held: Version) -> Group:
        group: Group = answer(lease, held)
        # The groups of steps 3 to 6: two a step, in their order, of six problems.
        same = 4 <= run.ledger.order.serial(lease.group_id) < 12
        samples = [
            replace(s, reward=1.0 if same else float(i)) for i, s in enumerate(group.samples)
        ]
        return replace(group, samples=tuple(samples))

    run.answer = equal
    run.work()
    log = finish(run, launch(run))
    assert log.count("could move the gradient") == 1
    idle = [record["train/idle_steps"] for record in metrics(run)]
    assert idle == [0, 0, 1, 2, 3, 4, 0, 0]
    assert run.runs.state() == "finished"


def test_a_class_that_derives_from_dpo_learns_from_stored_pairs(
    start_run: StartRun, launch: Launch, made_up: ModuleType
) -> None:
    after = []
    for objective in ({"name": "dpo"}, {"name": "tandem.learner.objectives:Dpo", "rejected": True}):
        run = start_run(
            run={"steps": 4},
            learner={"source": "offline", "objective": objective, "optimizer": {"lr": 1e-3}},
            rollout={"workers": 0},
        )
        run.runs.put_traces(worse_traces(made_up))
        finish(run, launch(run))
        assert metrics(run)[-1]["train/preference_pairs"] == 2
        assert metrics(run)[-1]["train/loss"] < metrics(run)[0]["train/loss"]
        after.append(weights(run))
    built_in, derived = after
    assert all(torch.equal(derived[key], built_in[key]) for key in built_in)


def test_what_a_class_needs_is_asked_only_before_the_first_record_of_a_run(
    start_run: StartRun, launch: Launch
) -> None:
    run = start_run(
        run={"steps": 2}, learner={"objective": {"name": "tandem.learner.objectives:Reinforce"}}
    )
    assert run.config.replay.max_staleness == 1
    log = finish(run, launch(run), expected=ConfigError.exit_code)
    assert "set replay.max_staleness=0" in log
    # An older version has begun it.
    run.folder.journal.touch()
    run.work()
    finish(run, launch(run))
    assert len(metrics(run)) == 2


def test_an_objective_of_ones_own_trains(start_run: StartRun, launch: Launch) -> None:
    """The function of docs/objectives.md, by its import path, is grpo without its clips."""
    unclipped = {"clip_low": None, "clip_high": None, "dual_clip": None}
    runs = []
    for objective in (
        {"name": "own_objective:unclipped"},
        {"name": "grpo", **unclipped},
        {"name": "broken_objectives:with_sums"},
    ):
        run = start_run(run={"steps": 4}, learner={"objective": objective})
        run.work()
        finish(run, launch(run))
        runs.append(run)
    own, built_in, with_sums = runs
    losses = [record["train/loss"] for record in metrics(built_in)]
    assert [record["train/loss"] for record in metrics(with_sums)] == pytest.approx(
        losses, abs=1e-7
    )
    assert all(record["train/mine"] >= 2 for record in metrics(with_sums) if record["train/loss"])
    assert any(loss != 0 for loss in losses)
    assert [record["train/loss"] for record in metrics(own)] == pytest.approx(losses, abs=1e-7)
    for name, tensor in weights(built_in).items():
        torch.testing.assert_close(weights(own)[name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("name", "told"),
    [("typo", "no attribute 'logprob' ("), ("without_gradient", "its loss has no gradient")],
)
def test_a_bug_in_an_objective_of_ones_own_ends_the_run_at_once(
    name: str, told: str, start_run: StartRun, launch: Launch
) -> None:
    objective = {"name": f"broken_objectives:{name}"}
    run = start_run(run={"steps": 4}, learner={"objective": objective})
    run.work()
    log = finish(run, launch(run), expected=RunFailedError.exit_code)
    (line,) = [line for line in log.splitlines() if told in line]
    assert f"broken_objectives:{name} failed at step 1: " in line
    assert ("broken_objectives.py, line " in line) == (name == "typo")
    assert "Traceback" not in log
    assert run.runs.state() == "failed"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(pid: int) -> set[str]:
    """Local addresses of a process's listening TCP sockets."""
    found = psutil.Process(pid).net_connections("tcp")
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


def test_a_rank_on_which_an_objective_fails_ends_the_others(
    start_run: StartRun, launch: Launch
) -> None:
    objective = {"name": "broken_objectives:on_the_second_rank"}
    pair = start_run(run={"steps": 4}, learner={"objective": objective, "ranks": 2})
    port = free_port()
    ranks = [launch(pair, rank, 2, port) for rank in range(2)]
    pair.work()
    log = finish(pair, ranks[1], expected=RunFailedError.exit_code)
    assert "failed at step 1: ValueError: only here (" in log
    assert ranks[0].wait() not in (0, None)


def test_two_ranks_train_as_one_does_and_listen_on_loopback_only(
    straight: Any, start_run: StartRun, launch: Launch
) -> None:
    pair = start_run(**(LUFFY | {"learner": {**LUFFY["learner"], "ranks": 2}}))
    port = free_port()
    ranks = [launch(pair, rank, 2, port) for rank in range(2)]
    until(lambda: bool(pair.runs.reports().get("learner-0")), "a first report")
    addresses = {address for rank in ranks for address in listening(rank.pid)}
    assert addresses == {"127.0.0.1"}
    pair.work()
    for rank in ranks:
        log = finish(pair, rank)
    assert "on 2 rank(s), ZeRO-1" in log
    for one, two in zip(metrics(straight), metrics(pair), strict=True):
        assert two["ratio/tokens"] == one["ratio/tokens"]
        for name in (
            *("train/loss", "train/grad_norm", "train/ratio_mean", "train/tokens_own"),
            *("ratio/log_ratio", "ratio/log_ratio_p99", "ratio/k3", "ratio/k3_p99"),
        ):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    for name, tensor in weights(straight).items():
        # The mean: Adam blows rounding up where a gradient is 0 but for rounding (biases of k).
        assert float((weights(pair)[name] - tensor).abs().mean()) < 2e-5, name


def test_a_dead_rank_ends_the_others(start_run: StartRun, launch: Launch) -> None:
    run = start_run(run={"steps": 8}, learner={"ranks": 2})
    port = free_port()
    leader, follower = (launch(run, rank, 2, port) for rank in range(2))
    until(lambda: bool(run.runs.reports().get("learner-0")), "a first report")
    leader.signal(signal.SIGKILL)
    leader.wait()
    assert follower.wait() != 0
