"""A real worker process against a real Redis, a real ledger and a real weight publisher."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# In this folder.
from forked import Forked
from forked_targets import impatient, retries_soon, unchanged, work
from msgspec.structs import replace

from tandem.common.config import Config, build, to_yaml
from tandem.common.models import load_model, load_tokenizer, resolve
from tandem.common.prompts import encode
from tandem.common.records import (
    ENVIRONMENT,
    CommitResult,
    ExpertTrace,
    FinishReason,
    Group,
    Problem,
    Source,
    Verdict,
    Version,
)
from tandem.common.telemetry import Clock
from tandem.common.weights.manifest import ScoredRows
from tandem.learner.scored import fixed_rows
from tandem.replay.connection import connect
from tandem.replay.evaluating.evaluated import Cell
from tandem.replay.evaluating.evaluations import EvaluationJob, EvaluationRequest
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings, Row
from tandem.replay.members import Members, membership
from tandem.replay.store import RunStore
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.generation import Generation
from tandem.rollout.leases import HeldGroup, Leases
from tandem.rollout.new_weights.commit_check import CommitCheck
from tandem.rollout.submission import Submitter, live_pools

pytestmark = pytest.mark.usefixtures("forkserver")


def until(holds: Callable[[], Any], what: str | Callable[[], str], deadline: float = 40.0) -> Any:
    """Waits for a true value and returns it."""
    end = time.monotonic() + deadline
    while not (found := holds()):
        if time.monotonic() > end:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {deadline:.0f} s in vain for {told}")
        time.sleep(0.01)
    return found


class Bench:
    """Everything of a run but the worker: Redis, ledger, pool, and a learner that only counts."""

    def __init__(
        self, server: Any, pool_of: Any, folder: Path, config: Config | None = None
    ) -> None:
        from tandem.common.weights.sender import WeightSender

        self.server = server
        self.folder = folder
        self.join = server.join()
        self.store = connect(self.join)
        self.runs = RunStore(self.store)
        self.ledger = Ledger(self.store, "learner-0")
        self.members = Members(self.store)
        self.config = config or settings()
        tokenizer = load_tokenizer("miniature")
        self.problems = [problem(tokenizer, number) for number in range(40)]
        self.runs.put_config(to_yaml(self.config))
        self.runs.put_problems(self.problems)
        self.traces = [trace(tokenizer, number) for number in range(0, 40, 2)]
        self.runs.put_traces(self.traces)
        self.runs.put_eval_set("heldout", self.problems[:12])
        self.ledger.create(LedgerSettings.of(self.config, [("train", 40, 1)], "digest"))
        self.model = load_model("miniature")
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.judged: list[Group] = []
        self.term = self.ledger.new_term()
        self.publisher = WeightSender(membership(self.store, "learner-0"), self.config, self.term)
        self.publisher.start()
        self.publish(0)
        self.step = 0
        self.silent = False
        self.held_back: set[tuple[str, int]] = set()
        """Groups and attempts that the pool leaves unanswered."""
        self.pool = pool_of(self.runs.curve_client(), self._judge)
        self.members.register(
            "reward",
            "reward-0",
            {
                "endpoint": self.pool.address.endpoint,
                "public_key": self.pool.address.public_key,
            },
        )
        self.workers: list[Forked] = []
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)
        self._heart.start()

    def _beat(self) -> None:
        while not self._ended.wait(1.0):
            self.members.beat("reward-0")

    def publish(self, step: int) -> None:
        """A version whose weights differ a little from the one before."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.0001)
        named = list(self.model.named_parameters())
        self.weights[step] = {name: p.detach().clone() for name, p in named}
        self.publisher.publish(Version(term=self.term, step=step), named, self._scored())

    def _scored(self) -> ScoredRows:
        """What the weights make of the rows by which workers check theirs."""
        rows = fixed_rows(self.model.config.vocab_size, 256, seed=7)
        found = self.logprobs(torch.from_numpy(rows))
        return ScoredRows(
            rows=tuple(map(tuple, rows.tolist())), logprobs=tuple(map(tuple, found.tolist()))
        )

    @torch.no_grad()
    def logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[B, S - 1]`` of all tokens but the first, by the model as it is."""
        every = self.model(input_ids=tokens).logits[:, :-1].float().log_softmax(-1)
        return every.gather(2, tokens[:, 1:, None]).squeeze(2)

    def _judge(self, group: Group) -> tuple[CommitResult, str] | None:
        if self.silent or (group.group_id, group.attempt) in self.held_back:
            return None
        self.judged.append(group)
        graded = [replace(sample, verdict=Verdict.WRONG, reward=0.0) for sample in group.samples]
        ledger = Ledger(self.store, "reward-0")
        return ledger.commit(replace(group, samples=tuple(graded))), ""

    def move_pool(self, host: str) -> None:
        """Gives the pool another address of this host: what it left unanswered goes out again."""
        moved = self.pool.address.endpoint.replace("127.0.0.1", host)
        self.members.beat("reward-0", {"endpoint": moved})

    def worker(
        self,
        change: Callable[[], None] = unchanged,
        name: str = "rollout-0",
        **environment: str,
    ) -> Forked:
        """Starts a worker process, in which ``change`` is called first."""
        log = self.folder / f"{name}.log"
        process = Forked(log, work, self.join, name, change, **environment)
        self.workers.append(process)
        return process

    def log(self, name: str = "rollout-0") -> str:
        return (self.folder / f"{name}.log").read_text()

    def train(self, steps: int) -> list[Group]:
        """Takes, confirms and publishes so many steps; returns the last one's groups."""
        groups: list[Group] = []
        for _ in range(steps):
            step = self.step + 1
            row = self.take(step)
            groups = self.ledger.fetch(row)
            self.ledger.confirm(step, self.term)
            self.publish(step)
            self.step = step
        return groups

    def take(self, step: int) -> Row:
        """A step's row, as soon as it can be cut."""
        found: list[Any] = []

        def cut() -> bool:
            found[:] = [self.ledger.take(step, self.term)]
            return isinstance(found[0], Row)

        until(cut, lambda: f"row {step}: {found} {self.runs.reports()} {self.log()[-3000:]}")
        row: Row = found[0]
        return row

    def held(self) -> tuple[int, int] | None:
        """Version that the worker says it holds."""
        for member in self.members.live("rollout"):
            version = member.info.get("version")
            return tuple(version) if version else None
        return None

    def close(self) -> None:
        for process in self.workers:
            process.kill()
        self._ended.set()
        self._heart.join(5)
        self.pool.die()
        self.publisher.close()
        self.store.close()


def settings(*overrides: str) -> Config:
    return build(
        {
            "run": {"steps": 1000, "seed": 7},
            "model": {"path": resolve("miniature")},
            "data": {"train": [{"path": "unused.parquet", "name": "train"}]},
            # Problems with a trace have one sample that begins with half of it.
            "expert": {"per_group": 1, "prefix": "fixed", "prefix_high": 0.5},
            "rollout": {"group_size": 4, "groups_per_batch": 3, "max_new_tokens": 40},
            "replay": {"groups_per_step": 2, "max_staleness": 1, "lease_seconds": 20},
            "launch": {"drain_seconds": 20},
        },
        overrides,
    )


def problem(tokenizer: Any, number: int) -> Problem:
    text = f"{10 + number}+3-1+2=?<think>"
    return Problem(
        problem_id=f"train/{number}",
        prompt_text=text,
        prompt_tokens=encode(tokenizer, text),
        gold=f"{14 + number}",
        data_source="test",
        trace_ids=(f"train/{number}#0",) if number % 2 == 0 else (),
        ability="math",
        extra={},
    )


def trace(tokenizer: Any, number: int) -> ExpertTrace:
    """An expert's answer to an even problem."""
    text = f"{10 + number}+3={13 + number}</think>\\boxed{{{14 + number}}}"
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    return ExpertTrace(
        trace_id=f"train/{number}#0",
        problem_id=f"train/{number}",
        tokens=tokens,
        logprobs=-np.arange(len(tokens), dtype=np.float32) / 8,
        text=text,
        tokenizer_digest="",
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={},
        grader=None,
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, pools: Any, servers: Any) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "redis").mkdir()
    with servers.running(folder / "redis") as server:
        made = Bench(server, pools.StandInPool, folder)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def worker(bench: Bench) -> Forked:
    """The worker process that the tests below share."""
    return bench.worker(retries_soon)


def test_it_feeds_the_ledger_with_groups_of_the_configured_shape(
    bench: Bench, worker: Forked
) -> None:
    groups = bench.train(4)
    assert len(groups) == 2
    for group in groups:
        assert group.worker == "rollout-0"
        assert len(group.samples) == 4
        original = next(p for p in bench.problems if p.problem_id == group.problem_id)
        assert group.prompt_tokens.tolist() == original.prompt_tokens.tolist()
        for sample in group.samples:
            assert sample.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert 1 <= len(sample.tokens) <= 40
            begun = int((sample.source == Source.EXPERT).sum())
            assert not np.isnan(sample.logprobs[begun:]).any()
            assert sample.spans[0].start == begun
            assert sample.spans[-1].end == len(sample.tokens)


def test_a_sample_begins_with_a_part_of_the_problems_trace(bench: Bench, worker: Forked) -> None:
    known = {trace.problem_id: trace.tokens for trace in bench.traces}
    seen = set()
    for group in (group for _ in range(3) for group in bench.train(1)):
        begun = [int((s.source == Source.EXPERT).sum()) for s in group.samples]
        whole = known.get(group.problem_id)
        half = 0 if whole is None else len(whole) // 2
        assert begun == [0, 0, 0, half]
        # The expert's own log-probs, which the weight of its tokens divides by.
        recorded = -np.arange(half, dtype=np.float32) / 8
        np.testing.assert_array_equal(group.samples[-1].logprobs[:half], recorded)
        assert group.trace_ids == ()
        last = group.samples[-1]
        assert half < len(last.tokens) <= 40
        if whole is not None:
            assert last.tokens[:half].tolist() == whole[:half].tolist()
        seen.add(half > 0)
    assert seen == {True, False}


def test_no_token_is_older_than_the_ledger_admits(bench: Bench, worker: Forked) -> None:
    for _ in range(5):
        for group in bench.train(1):
            assert group.oldest_step is not None
            assert bench.step - 1 - group.oldest_step <= bench.config.replay.max_staleness


def test_it_follows_the_published_versions(bench: Bench, worker: Forked) -> None:
    bench.train(1)
    wanted = (bench.term, bench.step)
    until(lambda: bench.held() == wanted, f"version {wanted} in the registry")


def test_it_makes_a_due_evaluation(bench: Bench, worker: Forked) -> None:
    bench.train(1)
    bench.runs.request_evaluation(
        EvaluationRequest(id="heldout@1", set_name="heldout", step=bench.step, limit=10),
        bench.term,
    )
    result = until(lambda: bench.runs.evaluation("heldout@1"), "the evaluation")
    assert result.problems == 10
    assert result.step == bench.step
    assert 0.0 <= result.accuracy <= 1.0
    assert result.member == "rollout-0"
    assert result.version == f"{bench.term}.{bench.step}"
    assert sum(result.problems_by_source.values()) == 10
    assert result.accuracy_by_source.keys() == result.problems_by_source.keys()


def test_it_makes_the_samples_of_a_job_and_then_goes_on_with_groups(
    bench: Bench, worker: Forked
) -> None:
    cell = Cell(
        name="c", model="run@live", benchmark="heldout", template="own", temperature=1.0, top_p=0.9,
        samples=3, max_new_tokens=8, stop=(), mode="boxed", seed=5, second_mode="math_verify",
    )  # fmt: skip
    bench.runs.put_eval_set("job:x", bench.problems[:4])
    wanted = ((3, 2), (0, 1), (3, 0))
    for number in range(3):
        request = EvaluationRequest(
            id=f"job:x/{number}",
            set_name="job:x",
            step=0,
            job=EvaluationJob(
                cell=cell, wanted=wanted[number:], reward={"graders": 1}, token_ids=True
            ),
        )
        bench.runs.request_evaluation(request, bench.term)
    names = [f"job:x/{number}" for number in range(3)]
    until(lambda: len(bench.runs.evaluation_results(names)) == 3, lambda: bench.log()[-2000:])
    found = {(s.place, s.sample): s for s in bench.runs.samples("job:x/0")}
    assert sorted(found) == sorted(wanted)
    again = bench.runs.samples("job:x/2")
    assert [found[(3, 0)].token_ids] == [one.token_ids for one in again]
    for one in found.values():
        assert one.problem_id == bench.problems[one.place].problem_id
        assert one.second is not None
        assert one.version
    # None of it is the run's own.
    own = [one.id for one in bench.runs.evaluations()] + bench.runs.asked_evaluations()
    assert not [name for name in own if name in names]
    until(lambda: bench.judged, "groups between the jobs")
    for name in names:
        bench.runs.forget_job(name)
    bench.runs.forget_set("job:x")
    assert bench.runs.jobs() == []
    assert bench.runs.eval_set_names() == ["heldout"]


def test_an_evaluation_that_can_not_be_made_is_given_up_and_the_worker_goes_on(
    bench: Bench, worker: Forked
) -> None:
    bench.runs.request_evaluation(
        EvaluationRequest(id="lost@1", set_name="lost", step=bench.step), bench.term
    )
    until(lambda: bench.runs.given_up_evaluations(), "the end of the attempts")
    assert "no held-out set 'lost'" in bench.runs.given_up_evaluations()["lost@1"]
    bench.train(1)


def test_it_reports_what_it_does(bench: Bench, worker: Forked) -> None:
    report = until(lambda: bench.runs.reports().get("rollout-0"), "a report")
    assert report["role"] == "rollout"
    assert report["pid"] == worker.pid
    assert report["counts"]["groups"] >= 1
    assert report["counts"]["tokens"] > report["counts"]["samples"]
    assert set(report["submission"]["results"]) <= {"committed"}
    # The learner stands still, so that the worker waits for the ledger's admission.
    report = until(
        lambda: (r := bench.runs.reports()["rollout-0"])["waiting_for"] and r, "an idle report"
    )
    assert "admission" in report["waiting_for"]


def test_groups_finished_while_redis_is_away_are_not_lost(bench: Bench, worker: Forked) -> None:
    bench.silent = True
    bench.publish(bench.step + 1)  # Admits the next groups, which then find no receipt.
    before = len(bench.pool.received)
    bench.take(bench.step + 1)
    bench.ledger.confirm(bench.step + 1, bench.term)
    bench.step += 1
    assert bench.pool.wait_received(before + 1, 20)
    bench.server.kill()
    bench.silent = False
    bench.server.start()
    bench.move_pool("localhost")
    bench.train(3)
    assert worker.poll() is None


def test_a_worker_that_is_killed_takes_up_its_leases_when_it_is_back(
    bench: Bench, worker: Forked
) -> None:
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    bench.worker()
    bench.train(2)


def test_on_sigterm_it_drains_and_leaves(bench: Bench) -> None:
    process = bench.workers[-1]
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, bench.log()[-2000:]
    assert bench.members.live("rollout") == []
    assert bench.ledger.counts().get("leased", 0) == 0


@pytest.mark.slow
def test_it_ends_by_itself_when_the_run_is_finished(bench: Bench) -> None:
    process = bench.worker()
    until(lambda: bench.held(), "the new worker")
    bench.runs.set_state("finished")
    assert process.wait(20) == 0, bench.log()[-2000:]


@pytest.mark.slow
def test_it_ends_with_the_run_while_it_waits_for_receipts(
    tmp_path: Path, pools: Any, servers: Any
) -> None:
    (tmp_path / "redis").mkdir()
    config = settings("replay.max_staleness=20", "launch.drain_seconds=4")
    with servers.running(tmp_path / "redis") as server:
        bench = Bench(server, pools.StandInPool, tmp_path, config)
        bench.silent = True
        try:
            process = bench.worker()
            until(
                lambda: (
                    "receipts" in bench.runs.reports().get("rollout-0", {}).get("waiting_for", "")
                ),
                "a worker that waits for receipts",
            )
            bench.runs.set_state("finished")
            process.wait(20)
            assert "the run is finished; rollout-0 ends" in bench.log()
        finally:
            bench.close()


LATE = (
    "rollout.engine=late_engine:make",
    "expert.per_group=0",
    "expert.prefix=null",
    "replay.group_deadline_seconds=1.5",
    "replay.max_attempts=1",
)
"""Half of the groups have samples that end, none has only such samples."""


@pytest.mark.parametrize("stragglers", ["mask", "leave_out"])
def test_at_its_deadline_a_group_keeps_what_was_sampled(
    tmp_path: Path, pools: Any, servers: Any, stragglers: str
) -> None:
    (tmp_path / "redis").mkdir()
    config = settings(*LATE, f"learner.objective.stragglers={stragglers}")
    with servers.running(tmp_path / "redis") as server:
        bench = Bench(server, pools.StandInPool, tmp_path, config)
        try:
            bench.worker()
            groups = bench.train(1)
            for group in groups:
                assert int(group.prompt_tokens.sum()) % 2 == 0
                # The fourth never began: without a token it can be no row.
                *ended, late = group.samples
                assert [s.finish_reason for s in ended] == [FinishReason.STOP] * 2
                assert late.finish_reason is FinishReason.DEADLINE
                assert len(late.tokens) > max(len(s.tokens) for s in ended)
                assert np.isfinite(late.logprobs).all()
                assert late.spans[-1].end == len(late.tokens)

            def reported() -> dict[str, int] | None:
                report = bench.runs.reports().get("rollout-0")
                found = report["counts"] if report else {"groups": 0}
                return found if found["groups"] >= 2 else None

            counts = until(reported, "a report of both groups")
            assert counts["partial_groups"] == counts["groups"]
            # Where no sample ended nothing can be learned: a failed attempt.
            until(bench.ledger.dead_letters, "a group that was given up")
            for dead in bench.ledger.dead_letters():
                assert dead["reason"] == "0 of 4 samples finished before its deadline"
        finally:
            bench.close()


SCRIPTED = ("rollout.engine=scripted_engine:make", "expert.per_group=0", "expert.prefix=null")


def test_a_worker_that_is_leased_a_group_again_while_it_generates_it_begins_it_anew(
    tmp_path: Path, pools: Any, servers: Any
) -> None:
    (tmp_path / "redis").mkdir()
    config = settings(
        *SCRIPTED,
        *(
            "rollout.engine=late_engine:make",
            "replay.window=2",
            "replay.late=drop",
            "rollout.groups_ahead=1",
        ),
        # Any failed attempt would be told of for good.
        "replay.max_attempts=1",
    )
    with servers.running(tmp_path / "redis") as server:
        bench = Bench(server, pools.StandInPool, tmp_path, config)
        try:
            process = bench.worker(TANDEM_ENDLESS_ONCE="0-0")
            # The second row passes over the group, which would become too old, and revokes it.
            bench.train(2)

            def generated() -> Group | None:
                return next((g for g in bench.judged if g.group_id == "0-0"), None)

            group = until(generated, lambda: bench.log()[-3000:])
            # The worker had it, the ledger revoked it, and the worker has it again.
            assert group.attempt == 3
            assert min(steps_of([group])) >= 1
            bench.train(2)
            assert bench.ledger.dead_letters() == []
            assert process.poll() is None
        finally:
            bench.close()


def in_generation(
    tmp_path: Path, pools: Any, servers: Any, scenario: Callable[..., Awaitable[Any]]
) -> Any:
    """Runs a scenario with a worker's leases and generation, an engine and a pool that sends no receipts."""
    (tmp_path / "redis").mkdir()

    async def run(bench: Bench) -> Any:
        ledger = Ledger(bench.store, "rollout-0")
        version = Version(term=bench.term, step=0)
        engine: Any = TorchEngine(
            load_model("miniature"), load_tokenizer("miniature"), version=version
        )
        leases = Leases(ledger, bench.runs, bench.config, lambda _: None)
        check = CommitCheck(
            engine,
            dtypes=("float32", "float32"),
            bound=0.0,
            temperature=1.0,
            runs_on=True,
            seconds=10.0,
            longest=100,
        )
        submitter = Submitter(
            "rollout-0",
            partial(live_pools, bench.members),
            bench.runs.curve_client(),
            lambda _: None,
            most=100,
        )
        generation = Generation(
            "rollout-0",
            bench.config,
            engine,
            ledger,
            leases,
            check,
            submitter,
            asyncio.to_thread,
            lambda: None,
        )
        await engine.start()
        submitter.start()
        try:
            _, groups = leases.take(version, 1)
            async with asyncio.timeout(40):
                return await scenario(leases, generation, groups[0])
        finally:
            submitter.close()
            await engine.close()

    with servers.running(tmp_path / "redis") as server:
        bench = Bench(
            server,
            pools.StandInPool,
            tmp_path,
            settings("expert.per_group=0", "expert.prefix=null"),
        )
        bench.silent = True
        try:
            return asyncio.run(run(bench))
        finally:
            bench.close()


def test_a_finished_group_that_waits_for_its_receipt_is_not_late(
    tmp_path: Path, pools: Any, servers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(leases: Leases, generation: Generation, held: HeldGroup) -> None:
        generation.begin([held])
        await generation.wait(30)
        assert generation.counts["groups"] == 1
        held.deadline = 0.0
        leases.end_late()
        assert leases.ids() == [held.lease.group_id]
        assert not held.is_late

    in_generation(tmp_path, pools, servers, scenario)
    assert "past their deadline" not in caplog.text


def test_a_group_whose_deadline_passes_while_it_waits_for_its_earlier_attempt_is_given_back(
    tmp_path: Path, pools: Any, servers: Any
) -> None:
    async def scenario(leases: Leases, generation: Generation, held: HeldGroup) -> None:
        generation.begin([held])
        leases.give_back(held.lease, "revoked", failed=False)
        _, (again,) = leases.take(Version(term=1, step=0), 1)
        assert again.lease.group_id == held.lease.group_id
        generation.begin([again])
        again.deadline = 0.0
        leases.end_late()
        await generation.wait(30)
        assert (generation.groups, generation.counts["groups"]) == (0, 0)
        assert leases.ids() == []
        _, (returned,) = leases.take(Version(term=1, step=0), 1)
        assert returned.lease.group_id == held.lease.group_id

    in_generation(tmp_path, pools, servers, scenario)


def test_the_receipt_of_a_revoked_attempt_leaves_the_next_one_alone(
    tmp_path: Path, pools: Any, servers: Any
) -> None:
    (tmp_path / "redis").mkdir()
    config = settings(*SCRIPTED, "replay.lease_seconds=6")
    with servers.running(tmp_path / "redis") as server:
        bench = Bench(server, pools.StandInPool, tmp_path, config)
        try:
            bench.held_back = {("0-0", 1), ("0-0", 2)}
            bench.worker()

            def received(attempt: int) -> bool:
                groups = [sent.group for sent in bench.pool.received]
                return ("0-0", attempt) in [(group.group_id, group.attempt) for group in groups]

            until(lambda: received(1), lambda: bench.log()[-3000:])
            holder = bench.store.call("hget", bench.store.key("group:0"), "holder").decode()
            assert bench.store.script("give_back", holder, 0, 1, "revoked", 0) == 1
            until(lambda: received(2), lambda: bench.log()[-3000:])
            bench.held_back = {("0-0", 2)}
            bench.move_pool("localhost")
            until(lambda: "0-0 attempt 1: superseded" in bench.log(), lambda: bench.log()[-3000:])

            def deadline() -> float:
                return bench.store.call("zscore", bench.store.key("deadlines"), 0) or 0.0

            first = deadline()
            until(lambda: deadline() > first, "a renewal")
            bench.held_back = set()
            bench.move_pool("127.0.0.1")
            assert bench.take(1).ids[0].attempt == 2
        finally:
            bench.close()


def test_a_worker_that_an_outage_has_ended_takes_up_its_groups_as_if_nothing_had_failed(
    tmp_path: Path, pools: Any, servers: Any
) -> None:
    (tmp_path / "redis").mkdir()
    config = settings(*SCRIPTED, "replay.max_attempts=1", "launch.drain_seconds=5")
    with servers.running(tmp_path / "redis") as server:
        bench = Bench(server, pools.StandInPool, tmp_path, config)
        try:
            bench.silent = True
            process = bench.worker(impatient)
            assert bench.pool.wait_received(3, 40), bench.log()[-3000:]
            bench.server.kill()
            assert process.wait(40) == 1, bench.log()[-3000:]
            # What a drain could give back to nobody, it tries once and not for each group; before that
            # a group may have been given back whose samples it has cut short.
            assert bench.log().count("wasn't given back and will expire") in (1, 2)
            bench.server.start()
            bench.silent = False
            bench.worker()
            bench.train(1)
            assert bench.ledger.dead_letters() == []
        finally:
            bench.close()


PLANTED = (
    "rollout.engine=planted_engine:make",
    "expert.per_group=0",
    "expert.prefix=null",
    "replay.max_attempts=1",
)
"""One failed attempt of a group is its last."""


def test_no_more_groups_of_episodes_are_leased_than_a_batch_has(
    tmp_path: Path, pools: Any, servers: Any
) -> None:
    use = "environments.use={world: {form: agent, target: 'played_worlds:agent'}}"
    (tmp_path / "redis").mkdir()
    config = settings(*SCRIPTED, use, "replay.groups_per_step=9")
    with servers.running(tmp_path / "redis") as server:
        bench = Bench(server, pools.StandInPool, tmp_path, config)
        try:
            task = {ENVIRONMENT: {"name": "world", "row": {}}}
            bench.runs.put_problems([replace(one, extra=task) for one in bench.problems])
            # A server that nobody reaches: no episode ends.
            known = {
                "endpoint": "tcp://127.0.0.1:9",
                "public_key": bench.pool.address.public_key,
                "environments": ["world"],
                "slots": 1,
            }
            bench.members.register("environments", "environments-0", known)
            bench.worker()

            def playing() -> dict[str, Any] | None:
                bench.members.beat("environments-0")
                report = bench.runs.reports().get("rollout-0", {})
                return report if (report.get("episodes") or {}).get("under_way") else None

            report = until(playing, lambda: bench.log()[-3000:])
            assert (report["leases"], report["episodes"]["under_way"]) == (3, 12)
        finally:
            bench.close()


@contextmanager
def bench_in(folder: Path, pools: Any, servers: Any, *overrides: str) -> Iterator[Bench]:
    """A bench with a Redis of its own."""
    (folder / "redis").mkdir()
    with servers.running(folder / "redis") as server:
        bench = Bench(server, pools.StandInPool, folder, settings(*PLANTED, *overrides))
        try:
            yield bench
        finally:
            bench.close()


@pytest.fixture
def planted(tmp_path: Path, pools: Any, servers: Any) -> Iterator[Bench]:
    with bench_in(tmp_path, pools, servers) as bench:
        yield bench


def steps_of(groups: Sequence[Group]) -> set[int]:
    return {span.step for g in groups for sample in g.samples for span in sample.spans}


def test_it_leaves_when_its_weights_are_not_those_that_were_published(planted: Bench) -> None:
    process = planted.worker(TANDEM_PLANTED="2,99")
    planted.train(1)
    planted.runs.request_evaluation(
        EvaluationRequest(id="heldout@2", set_name="heldout", step=2, limit=10), planted.term
    )
    planted.train(1)
    assert process.wait(30) == 65, planted.log()[-3000:]
    said = planted.log()
    version = f"version {planted.term}.2 isn't what the learner published"
    assert said.count(version) == 2
    assert "what it sampled is discarded, and it is fetched again" in said
    assert "given rows: row " in said
    assert "learner's -" in said
    assert "loaded 2 times. If it is the engine's own rounding, raise weights.check_bound" in said
    assert "rollout-0 ends so that a fresh process can try again" in said
    # No token of that version has left it, and nothing is lost or counted against anybody.
    assert steps_of(planted.judged) <= {0, 1}
    assert planted.runs.evaluation("heldout@2") is None
    assert planted.ledger.dead_letters() == []
    assert planted.ledger.counts().get("leased", 0) == 0
    # The next one has no fault, and does what was given back.
    planted.worker()
    planted.train(2)
    until(lambda: max(steps_of(planted.judged)) >= 2, "samples of the version or a later one")
    until(lambda: planted.runs.evaluation("heldout@2"), "the evaluation")


def test_it_leaves_an_evaluation_to_others_when_its_engine_has_died(planted: Bench) -> None:
    process = planted.worker(TANDEM_BROKEN="heldout t0")
    until(lambda: len(planted.judged) == 4, "the groups of the first weights")
    planted.runs.request_evaluation(
        EvaluationRequest(id="heldout@0", set_name="heldout", step=0, limit=10), planted.term
    )
    assert process.wait(20) == 1, planted.log()[-3000:]
    assert "the engine has died; rollout-0 ends so that" in planted.log()
    assert planted.runs.given_up_evaluations() == {}
    assert planted.ledger.dead_letters() == []
    planted.worker()
    until(lambda: planted.runs.evaluation("heldout@0"), "the evaluation")


def test_a_version_that_was_loaded_wrongly_once_is_fetched_anew(planted: Bench) -> None:
    process = planted.worker(TANDEM_PLANTED="2,1")
    planted.train(5)
    assert process.poll() is None, planted.log()[-3000:]

    def checked() -> dict[str, Any] | None:
        found = planted.runs.reports().get("rollout-0", {}).get("weights", {})
        return found if found.get("check", {}).get("failures") else None

    report = until(checked, "a report of the failure")
    assert report["reloaded"] == 1
    assert report["check"]["failures"] == 1
    assert report["check"]["checks"] >= 3
    assert not report["check"]["suspect"]
    told = planted.runs.reports()["rollout-0"]["alarm"]
    assert f"version {planted.term}.2 isn't what the learner published (given rows: row" in told
    assert report["check"]["difference"] <= report["check"]["bound"]
    assert planted.ledger.dead_letters() == []
    # Whatever was submitted was sampled from the weights that it names.
    for group in planted.judged:
        for sample in group.samples:
            if len(sample.spans) > 1:
                continue
            planted.model.load_state_dict(planted.weights[sample.spans[0].step], strict=False)
            row = torch.from_numpy(np.concatenate([group.prompt_tokens, sample.tokens]))
            scored = planted.logprobs(row.long()[None])[0, len(group.prompt_tokens) - 1 :]
            np.testing.assert_allclose(scored.numpy(), sample.logprobs, atol=1e-3)


@pytest.fixture
def waiting(tmp_path: Path, pools: Any, servers: Any) -> Iterator[Bench]:
    """New weights wait for running samples, and a batch is a step."""
    overrides = "rollout.groups_per_batch=2", "rollout.update_wait_seconds=5"
    with bench_in(tmp_path, pools, servers, *overrides) as bench:
        yield bench


def leased_for(bench: Bench, step: int) -> bool:
    """Whether groups are leased for this step's weights while the worker still holds older ones."""
    keys = bench.store.call("keys", bench.store.key("group:*"))
    groups = [bench.store.call("hmget", key, "state", "step") for key in keys]
    found = groups.count([b"leased", str(step).encode()])
    held = bench.held()
    return found == 2 and held is not None and held[1] < step


def test_groups_are_leased_for_weights_that_wait_for_running_samples(waiting: Bench) -> None:
    waiting.worker(TANDEM_SLOW="1,2.0")
    # Two batches are admitted under the first weights, and two steps need them.
    until(lambda: len(waiting.judged) == 4, "the groups of the first weights")
    waiting.train(1)
    until(lambda: leased_for(waiting, 1), "leases for the weights that are loaded", 10.0)
    waiting.train(3)
    assert [steps_of([group]) for group in waiting.judged[:6]] == [{0}] * 4 + [{1}] * 2


def test_where_such_weights_are_refused_their_groups_are_given_back(waiting: Bench) -> None:
    waiting.worker(TANDEM_SLOW="1,1.0", TANDEM_REFUSED="1")
    until(lambda: len(waiting.judged) == 4, "the groups of the first weights")
    waiting.train(1)
    until(lambda: leased_for(waiting, 1), "leases for the weights that are refused", 10.0)
    until(lambda: waiting.ledger.counts()["admitted"] == 2, "groups that were given back", 10.0)
    waiting.train(2)
    # Under the first weights they would have been too stale.
    assert steps_of(waiting.judged[:4]) == {0}
    until(lambda: len(waiting.judged) >= 6, "the groups that were given back")
    assert min(steps_of(waiting.judged[4:])) >= 2
    assert waiting.ledger.dead_letters() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heldout@1", "job:x/0"])
def test_an_evaluation_that_waits_for_weights_doesnt_begin_once_a_drain_cuts_short(
    tmp_path: Path, pools: Any, servers: Any, name: str
) -> None:
    cell = Cell(
        name="c", model="run@live", benchmark="heldout", template="own", temperature=1.0, top_p=0.9,
        samples=1, max_new_tokens=8, stop=(), mode="boxed", seed=5,
    )  # fmt: skip
    job = EvaluationJob(cell=cell, wanted=((0, 0),), reward={"graders": 1})
    overrides = "rollout.update_wait_seconds=5", "launch.drain_seconds=2.5"
    with bench_in(tmp_path, pools, servers, *overrides) as bench:
        process = bench.worker(TANDEM_SLOW="1,4.0")
        bench.runs.request_evaluation(
            EvaluationRequest(
                id=name,
                set_name="heldout",
                step=1,
                limit=10,
                job=job if name.startswith("job:") else None,
            ),
            bench.term,
        )
        bench.train(1)

        def claimed() -> bool:
            return bool(bench.store.call("hexists", bench.store.key("evaluation_claims"), name))

        # For the weights that are being loaded, which takes longer than the time until a drain cuts short.
        until(claimed, lambda: bench.log()[-3000:])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, bench.log()[-3000:]
        assert f"evaluation {name} was given back: drained" in bench.log()
        assert bench.runs.evaluation(name) is None
        assert not claimed()


def test_shares_of_time_count_what_is_still_going_on() -> None:
    clock = Clock()
    with clock.doing("generate"):
        time.sleep(0.02)
        first = clock.take()
        time.sleep(0.02)
    second = clock.take()
    for taken in (first, second):
        assert 0.02 <= taken["generate"] <= taken["total"]
