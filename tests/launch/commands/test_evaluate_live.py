"""``tandem evaluate RUN@live``: jobs in a run's ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.common.config import to_yaml
from tandem.common.records import FinishReason, Verdict, Version
from tandem.common.run_folder import JoinInfo, RunFolder
from tandem.launch.evaluation.asked import Asked, benchmark
from tandem.launch.evaluation.fleet import _Fleet
from tandem.launch.evaluation.parts import Samples
from tandem.launch.evaluation.plan import prepare
from tandem.launch.evaluation.run import begin, work
from tandem.launch.miniature.parquet import table
from tandem.launch.miniature.problems import distinct
from tandem.launch.progress import Progress
from tandem.launch.run.opened.presets import load
from tandem.replay.connection import connect
from tandem.replay.evaluating.evaluated import EvaluatedSample, EvaluationFolder
from tandem.replay.evaluating.evaluations import EvaluationJob, EvaluationRequest, EvaluationResult
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.members import Members
from tandem.replay.store import RunStore
from tandem.rollout.engine import FinishedGroup, GroupRequest
from tandem.rollout.evaluate.answering import SamplesRefusedError
from tandem.rollout.evaluate.claims import ClaimedEvaluations
from tandem.rollout.evaluate.elsewhere import sample_of


class Live:
    """A run that goes on, as far as others see it: its folder, its ledger and a worker's entry."""

    def __init__(self, folder: Path, join: JoinInfo) -> None:
        pq.write_table(
            table(distinct(Random(2), 2, 8), split="heldout", with_target=False),
            folder / "two.parquet",
        )
        run = RunFolder(folder / "run")
        run.path.mkdir()
        run.run_json.write_text("{}")
        run.write_join(join)
        self.config = load("miniature").resolve([])
        run.config.write_text(to_yaml(self.config))
        self.store = connect(join)
        self.runs, self.members = RunStore(self.store), Members(self.store)
        self.ledger = Ledger(self.store, "learner-0")
        self.ledger.create(LedgerSettings.of(self.config, [("train", 8, 1)], "digest"))
        self.version = Version(term=self.ledger.new_term(), step=0)
        held = {"version": [self.version.term, self.version.step]}
        self.members.register("rollout", "rollout-0", held)
        self.asked = Asked(
            models=(f"{run.path}@live",), benchmarks=tuple(benchmark(str(folder / "two.parquet")))
        )
        self.exports = folder / "exports"


@pytest.fixture
def live(tmp_path: Path, server: Any) -> Iterator[Live]:
    found = Live(tmp_path, server.join())
    yield found
    found.store.close()


def test_a_command_that_goes_on_takes_no_samples_of_a_job_that_it_gave_up(
    tmp_path: Path, live: Live
) -> None:
    runs, store = live.runs, live.store
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
            request = runs.claim_evaluation("rollout-0", live.version)
            if request is None:
                return True
            claimed.append(request)
            if len(claimed) == 1:
                raise KeyboardInterrupt
            # The worker had not heard of the end of its first job, and is done with it first.
            finish(claimed[0] if len(claimed) == 2 else request)
            return True

    with prepare(live.asked, live.config, live.exports, None) as prepared:
        (cell,) = prepared.plan.cells
        places = prepared.benchmark(cell.name).places(cell)
        progress = Turns(StringIO(), "evaluate", None)
        fleet = _Fleet(runs, live.members, live.ledger)
        with pytest.raises(KeyboardInterrupt):
            fleet.answer(prepared, folder, cell, places, progress)
        fleet.answer(prepared, folder, cell, places[4:], progress)
    assert sorted(Samples(folder, cell.name).found()) == places[4:]
    assert runs.jobs() == []
    assert store.redis.exists(store.key("evaluation_results"), store.key("evaluation_samples")) == 0


class Strict:
    """An engine that refuses one prompt of all."""

    def __init__(self, version: Version, refused: str) -> None:
        self.version = version
        self.refused = refused

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        answer = json.dumps({"choices": [{"text": "7"}]}).encode()
        for request in requests:
            id_ = request.group_id
            if request.prompt_text == self.refused:
                yield FinishedGroup(group_id=id_, samples=(), error="is too long", refused=True)
            else:
                yield FinishedGroup(group_id=id_, samples=(sample_of(request, answer),))


class Endless:
    """An engine that never finishes."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.begun = asyncio.Event()

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        self.begun.set()
        await asyncio.Event().wait()
        yield FinishedGroup(group_id=requests[0].group_id, samples=())


def test_a_worker_ends_an_evaluation_that_another_has_claimed(live: Live) -> None:
    async def in_redis(call: Callable[[], Any]) -> Any:
        return call()

    async def settled(**_: Any) -> None:
        pass

    async def lose() -> None:
        engine: Any = Endless(live.version)
        check: Any = SimpleNamespace(suspect=False, settled=settled)
        claims = ClaimedEvaluations(
            "rollout-0", engine, live.runs, live.config, check, asyncio.Lock(), in_redis
        )
        request = live.runs.claim_evaluation("rollout-0", live.version)
        assert request is not None
        work = asyncio.create_task(claims.run(request))
        try:
            await asyncio.wait_for(engine.begun.wait(), 60)
            live.store.redis.hset(live.store.key("evaluation_claims"), request.id, "1 rollout-0")
            assert live.runs.claim_evaluation("rollout-1", live.version) == request
            await asyncio.to_thread(claims.renew)
            await asyncio.wait_for(work, 10)
        finally:
            claims.close()
        assert claims.done == 0

    with prepare(live.asked, live.config, live.exports, None) as prepared:
        (cell,) = prepared.plan.cells
        live.runs.put_eval_set("job:x", prepared.benchmark(cell.name).problems)
        reward = live.config.reward.model_dump(mode="json")
        job = EvaluationJob(cell=cell, wanted=((0, 0),), reward=reward)
        live.runs.request_evaluation(
            EvaluationRequest(id="job:x/0", set_name="job:x", step=0, job=job), live.version.term
        )
        asyncio.run(lose())
    assert live.runs.renew_evaluation("job:x/0", "rollout-1")


def test_a_sample_that_a_worker_cant_make_costs_no_other(tmp_path: Path, live: Live) -> None:
    folder = EvaluationFolder(tmp_path / "out")

    async def in_redis(call: Callable[[], Any]) -> Any:
        return call()

    async def settled(**_: Any) -> None:
        pass

    with prepare(live.asked, live.config, live.exports, None) as prepared:
        (cell,) = prepared.plan.cells
        problems = prepared.benchmark(cell.name).problems
        engine: Any = Strict(live.version, problems[2].prompt_text)
        check: Any = SimpleNamespace(suspect=False, settled=settled)
        claims = ClaimedEvaluations(
            "rollout-0", engine, live.runs, live.config, check, asyncio.Lock(), in_redis
        )

        class Turns(Progress):
            """The worker's turn comes while the command waits."""

            def turn(self) -> bool:
                request = live.runs.claim_evaluation("rollout-0", live.version)
                if request is not None:
                    asyncio.run(claims.run(request))
                return True

        begin(folder, prepared.plan)
        try:
            with pytest.raises(SamplesRefusedError, match=r"^1 sample can't be made: .*too long"):
                work(prepared, folder, progress=Turns(StringIO(), "evaluated", None))
        finally:
            claims.close()
    assert {place for place, _ in Samples(folder, cell.name).found()} == {*range(8)} - {2}
    assert claims.done == 1
