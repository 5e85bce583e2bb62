"""``tandem evaluate RUN@live``: jobs in a run's ledger."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.common.config import to_yaml
from tandem.common.records import FinishReason, Verdict, Version
from tandem.common.run_folder import RunFolder
from tandem.launch.evaluation.fleet import _Fleet
from tandem.launch.evaluation.parts import Samples
from tandem.launch.evaluation.plan import Asked, benchmark, prepare
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


def test_a_command_that_goes_on_takes_no_samples_of_a_job_that_it_gave_up(
    tmp_path: Path, server: Any
) -> None:
    pq.write_table(
        table(distinct(Random(2), 2, 8), split="heldout", with_target=False),
        tmp_path / "two.parquet",
    )
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.run_json.write_text("{}")
    config = load("miniature").resolve([])
    run.config.write_text(to_yaml(config))
    store = connect(server.join())
    runs, members = RunStore(store), Members(store)
    ledger = Ledger(store, "learner-0")
    ledger.create(LedgerSettings.of(config, [("train", 8, 1)], "digest"))
    version = Version(term=ledger.new_term(), step=0)
    members.register("rollout", "rollout-0", {"version": [version.term, version.step]})
    asked = Asked(
        models=(f"{run.path}@live",), benchmarks=tuple(benchmark(str(tmp_path / "two.parquet")))
    )
    folder = EvaluationFolder(tmp_path / "out")
    claimed: list[EvaluationRequest] = []

    def finish(request: EvaluationRequest) -> None:
        assert request.job is not None
        made = [
            EvaluatedSample(
                problem_id=f"two/{at}", place=at, sample=number, source="", prompt="", response="",
                gold="", finish_reason=FinishReason.STOP, verdict=Verdict.WRONG, answer=Verdict.WRONG,
                components={}, reward=0.0, grader="", tokens=1, logprob=None,
            )
            for at, number in request.job.wanted
        ]  # fmt: skip
        runs.put_samples(request.id, made)
        runs.finish_evaluation(
            request.id,
            EvaluationResult(
                id=request.id, set_name="two", step=0, accuracy=0.0, problems=1, format_share=0.0,
                mean_length=1.0, seconds=0.1, member="rollout-0",
            ),
        )  # fmt: skip

    class Turns(Progress):
        """Is told while the command waits for a worker."""

        def turn(self) -> bool:
            request = runs.claim_evaluation("rollout-0", version)
            if request is None:
                return True
            claimed.append(request)
            if len(claimed) == 1:
                raise KeyboardInterrupt
            # The worker had not heard of the end of its first job, and is done with it first.
            finish(claimed[0] if len(claimed) == 2 else request)
            return True

    with prepare(asked, config, tmp_path / "exports", None) as prepared:
        (cell,) = prepared.plan.cells
        places = prepared.benchmark(cell.name).places(cell)
        progress = Turns(StringIO(), "evaluate", None)
        fleet = _Fleet(runs, members, ledger)
        with pytest.raises(KeyboardInterrupt):
            fleet.answer(prepared, folder, cell, places, progress)
        fleet.answer(prepared, folder, cell, places[4:], progress)
    assert sorted(Samples(folder, cell.name).found()) == places[4:]
    assert runs.jobs() == []
    assert store.redis.exists(store.key("evaluation_results"), store.key("evaluation_samples")) == 0
    store.close()
