"""``tandem evaluate RUN@live --workers N``: which of its processes asks the run."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq

from tandem.common.config import to_yaml
from tandem.common.records import FinishReason, Verdict, Version
from tandem.common.run_folder import RunFolder
from tandem.launch.evaluation.asked import Asked, benchmark, ways
from tandem.launch.evaluation.plan import prepare
from tandem.launch.evaluation.run import begin, finish, work
from tandem.launch.miniature.parquet import table
from tandem.launch.miniature.problems import distinct
from tandem.launch.progress import Progress
from tandem.launch.run.opened.presets import load
from tandem.replay.connection import connect
from tandem.replay.evaluating.evaluated import EvaluatedSample, EvaluationFolder
from tandem.replay.evaluating.evaluations import EvaluationRequest, EvaluationResult
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.members import Members
from tandem.replay.store import RunStore


class Fleet(Progress):
    """The run's worker: does a job whenever the command that has asked waits."""

    def __init__(self, runs: RunStore, version: Version) -> None:
        super().__init__(StringIO(), "evaluated", None)
        self.runs = runs
        self.version = version
        self.jobs = 0

    def turn(self) -> bool:
        request = self.runs.claim_evaluation("rollout-0", self.version)
        if request is not None:
            self.jobs += 1
            self.answer(request)
        return super().turn()

    def answer(self, request: EvaluationRequest) -> None:
        assert request.job is not None
        made = [
            EvaluatedSample(
                problem_id=f"two/{at}", place=at, sample=number, source="", prompt="", response="",
                gold="", finish_reason=FinishReason.STOP, verdict=Verdict.WRONG, answer=Verdict.WRONG,
                components={}, reward=0.0, grader="", tokens=1, logprob=None,
            )
            for at, number in request.job.wanted
        ]  # fmt: skip
        self.runs.put_samples(request.id, made)
        result = EvaluationResult(
            id=request.id, set_name="two", step=0, accuracy=0.0, problems=1, format_share=0.0,
            mean_length=1.0, seconds=0.1, member="rollout-0",
        )  # fmt: skip
        self.runs.finish_evaluation(request.id, result)


def test_one_of_several_processes_asks_a_live_run_for_all_samples(
    tmp_path: Path, server: Any
) -> None:
    problems = table(distinct(Random(2), 2, 8), split="heldout", with_target=False)
    pq.write_table(problems, tmp_path / "two.parquet")
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.run_json.write_text("{}")
    config = load("miniature").resolve([])
    run.config.write_text(to_yaml(config))
    join = server.join()
    run.write_join(join)
    store = connect(join)
    ledger = Ledger(store, "learner-0")
    ledger.create(LedgerSettings.of(config, [("train", 8, 1)], "digest"))
    version = Version(term=ledger.new_term(), step=0)
    Members(store).register("rollout", "rollout-0", {"version": [version.term, version.step]})
    (held_out,) = benchmark(str(tmp_path / "two.parquet"))
    asked = Asked(
        models=(f"{run.path}@live",),
        benchmarks=tuple(ways(held_out, {"samples": [16], "temperature": [0.5, 1.0]}, {})),
    )
    folder = EvaluationFolder(tmp_path / "out")
    fleet = Fleet(RunStore(store), version)
    with prepare(asked, config, tmp_path / "exports", None) as prepared:
        begin(folder, prepared.plan)
        # With the same names of jobs two processes would take each other's for what a killed command has left.
        work(prepared, folder, worker=(1, 2), progress=fleet)
        assert fleet.jobs == 0
        work(prepared, folder, worker=(0, 2), progress=fleet)
        finish(folder, prepared, parquet=False)
    # 128 samples of each cell, 64 a job.
    assert fleet.jobs == 4
    for cell in prepared.plan.cells:
        places = Counter((one.place, one.sample) for one in folder.samples(cell.name))
        assert places == Counter((place, n) for place in range(8) for n in range(16))
    assert fleet.runs.jobs() == []
    store.close()
