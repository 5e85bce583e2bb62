"""The pool as its own process: ZeroMQ with CURVE in front, a real ledger in real Redis behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from judges import JudgeProcess

from tandem.common import config as configs
from tandem.common import wire
from tandem.common.records import (
    CommitResult,
    GroupReceipt,
    GroupSubmission,
    Problem,
    Verdict,
    Version,
)
from tandem.common.run_folder import JoinInfo, RunFolder
from tandem.common.sockets import CurveKeys, connect_dealer, new_keys
from tandem.replay.connection import Store, connect
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Lease, LedgerSettings, Row
from tandem.replay.members import Member, Members
from tandem.replay.store import RunStore
from tandem.reward.reading import modes

PROGRAM = """
import sys
from pathlib import Path
from tandem.common import config
from tandem.common.run_folder import read_join
from tandem.common.telemetry import start_log
from tandem.replay.connection import connect
from tandem.replay.store import RunStore
from tandem.reward import pool
import yaml

join = read_join(Path(sys.argv[1]))
store = connect(join)
tree = yaml.safe_load(RunStore(store).config_yaml())
store.close()
start_log("reward")
sys.exit(pool.main(join, config.build(tree), name=sys.argv[2], folder=None))
"""


@dataclass
class Run:
    """A created ledger, and pools that work for it."""

    join: JoinInfo
    store: Store
    ledger: Ledger
    term: int
    folder: Path

    def lease(self, count: int = 1) -> list[Lease]:
        return list(self.ledger.lease(Version(term=self.term, step=0), count).leases)

    def pools(self) -> list[Member]:
        return Members(self.store).live("reward")

    @contextmanager
    def pool(self, name: str = "reward-0") -> Iterator[subprocess.Popen[bytes]]:
        folder = RunFolder(self.folder)
        folder.write_join(self.join)
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder.join), name], stderr=log
        )
        try:
            yield process
        finally:
            log.close()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def log(self, name: str = "reward-0") -> str:
        return (self.folder / f"{name}.log").read_text()


class Worker:
    """The rollout side: one DEALER to one pool."""

    def __init__(self, member: Member, keys: CurveKeys | None, identity: str = "w") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = connect_dealer(
            self.context,
            member.info["endpoint"],
            identity=identity,
            server_public=member.info["public_key"],
            client=keys,
        )

    def send(self, data: bytes, seconds: float = 10.0) -> bool:
        """False where no connection takes it."""
        if not self.socket.poll(int(seconds * 1000), zmq.POLLOUT):
            return False
        self.socket.send(data)
        return True

    def submit(self, request_id: int, group: Any) -> None:
        assert self.send(wire.encode(GroupSubmission(request_id=request_id, group=group)))

    def receipt(self, seconds: float = 20.0) -> GroupReceipt | None:
        if not self.socket.poll(int(seconds * 1000)):
            return None
        return wire.decode(self.socket.recv(), GroupReceipt)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def make_run(server: Any, folder: Path, overrides: list[str]) -> Run:
    tree = {
        "run": {"steps": 100},
        "data": {"train": [{"path": "a.parquet"}]},
        "rollout": {"group_size": 2},
        "reward": {"deadline_seconds": 2.0},
    }
    config = configs.build(tree, overrides)
    join = server.join()
    store = connect(join, name="test")
    run = RunStore(store)
    run.put_config(configs.to_yaml(config))
    import numpy as np

    run.put_problems(
        Problem(
            problem_id=f"a/{row}",
            prompt_text="1+1=?<think>",
            prompt_tokens=np.arange(5, dtype=np.int32),
            gold="2",
            data_source="m",
            ability="math",
            trace_ids=(),
            extra={},
        )
        for row in range(64)
    )
    ledger = Ledger(store, "rollout-0")
    ledger.create(LedgerSettings.of(config, [("a", 64, 1)], "digest"))
    return Run(join, store, ledger, ledger.new_term(), folder)


@pytest.fixture(scope="module")
def run(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made = make_run(
        server,
        tmp_path_factory.mktemp("run"),
        ["replay.groups_per_step=2", "replay.max_staleness=20"],
    )
    yield made
    made.store.close()


@pytest.fixture(scope="module")
def pool(run: Run, make: Any) -> Iterator[subprocess.Popen[bytes]]:
    """One pool for the tests that don't end it."""
    with run.pool() as process:
        make.until(lambda: run.pools() or process.poll() is not None, "the pool", 60)
        assert process.poll() is None, run.log()
        yield process


@pytest.fixture
def worker(run: Run, pool: subprocess.Popen[bytes]) -> Iterator[Worker]:
    made = Worker(run.pools()[0], RunStore(run.store).curve_client())
    yield made
    made.close()


def of(lease: Lease, make: Any, texts: list[str], **changes: Any) -> Any:
    return make.group(
        texts,
        group_id=lease.group_id,
        attempt=lease.attempt,
        problem_id=lease.problem_id,
        **changes,
    )


RIGHT = "1+1=2</think> \\boxed{2}"
WRONG = "1+1=3</think> \\boxed{3}"


def test_groups_are_graded_committed_and_receipted(
    run: Run, pool: subprocess.Popen[bytes], worker: Worker, make: Any
) -> None:
    leases = run.lease(2)
    for number, lease in enumerate(leases):
        worker.submit(number, of(lease, make, [RIGHT, WRONG]))
    receipts = [worker.receipt() for _ in leases]
    assert {r.request_id: r.result for r in receipts if r} == {
        0: CommitResult.COMMITTED,
        1: CommitResult.COMMITTED,
    }
    row = run.ledger.take(1, run.term)
    assert isinstance(row, Row)
    for group in run.ledger.fetch(row):
        assert [s.verdict for s in group.samples] == [Verdict.CORRECT, Verdict.WRONG]
        assert [s.reward for s in group.samples] == [1.0, 0.0]
        assert group.samples[0].grader == modes.mode("boxed").grader


def test_a_group_sent_again_is_a_duplicate_and_is_answered(
    run: Run, worker: Worker, make: Any
) -> None:
    group = of(run.lease()[0], make, [RIGHT, WRONG])
    worker.submit(1, group)
    first = worker.receipt()
    worker.submit(2, group)
    second = worker.receipt()
    assert first is not None
    assert second is not None
    assert (first.result, second.result) == (CommitResult.COMMITTED, CommitResult.DUPLICATE)
    assert second.request_id == 2


def test_a_slow_group_holds_up_no_other_and_one_grading_answers_both_sendings(
    run: Run, worker: Worker, make: Any
) -> None:
    slow, quick = run.lease(2)
    hanging = of(slow, make, [f"</think> \\boxed{{{make.hang}}}", WRONG], gold="x^2+2")
    worker.submit(1, hanging)
    worker.submit(2, hanging)
    worker.submit(3, of(quick, make, [RIGHT, WRONG]))
    order = [worker.receipt() for _ in range(3)]
    assert [r.request_id for r in order if r] == [3, 1, 2]
    assert all(r.result is CommitResult.COMMITTED for r in order if r)


def test_a_group_without_two_verdicts_is_rejected_with_its_reason(
    run: Run, worker: Worker, make: Any
) -> None:
    worker.submit(1, of(run.lease()[0], make, [RIGHT, WRONG], gold=""))
    receipt = worker.receipt()
    assert receipt is not None
    assert receipt.result is CommitResult.REJECTED
    assert "ungraded" in receipt.detail


def test_a_damaged_message_is_refused_by_name_and_the_pool_goes_on(
    run: Run, worker: Worker, make: Any
) -> None:
    group = of(run.lease()[0], make, [RIGHT, WRONG])
    whole = wire.encode(GroupSubmission(request_id=7, group=group))
    worker.send(whole[:-3])
    worker.send(b"")
    worker.send(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    worker.send(wire.encode(Version(term=1, step=1)))
    nobody = make.group([RIGHT, WRONG], group_id="not an id")
    worker.submit(8, nobody)
    worker.send(whole)
    receipt = worker.receipt()
    assert receipt is not None
    assert (receipt.request_id, receipt.result) == (7, CommitResult.COMMITTED)
    told = run.log()
    assert "its checksum doesn't match" in told
    assert "is truncated" in told
    assert "is a 'Version', not the expected GroupSubmission" in told


def test_a_client_without_the_runs_key_gets_nothing(
    run: Run, pool: subprocess.Popen[bytes], make: Any
) -> None:
    member = run.pools()[0]
    group = of(run.lease()[0], make, [RIGHT, WRONG])
    data = wire.encode(GroupSubmission(request_id=1, group=group))
    for keys in (new_keys(), None):
        stranger = Worker(member, keys, identity="stranger")
        try:
            # The handshake is refused, so that no connection ever takes a message.
            assert not stranger.send(data, seconds=0.5) or stranger.receipt(0.5) is None
        finally:
            stranger.close()
    friend = Worker(member, RunStore(run.store).curve_client(), identity="friend")
    try:
        friend.submit(1, group)
        receipt = friend.receipt()
        assert receipt is not None
        # The strangers' copies never reached the ledger.
        assert receipt.result is CommitResult.COMMITTED
    finally:
        friend.close()


def test_the_pool_reports_and_counts_its_graders_deaths(
    run: Run, pool: subprocess.Popen[bytes], make: Any
) -> None:
    graders = make.until(lambda: graders_of(pool.pid), "graders")
    victim = graders[-1]
    os.kill(victim, signal.SIGKILL)
    make.until(
        lambda: any(str(victim) in r["detail"] for r in RunStore(run.store).restarts()),
        "the counted restart",
    )
    report = make.until(lambda: RunStore(run.store).reports().get("reward-0"), "a report")
    assert report["role"] == "reward"
    assert report["pid"] == pool.pid
    assert "clock" in report
    assert report["grader/restarts"] >= 1


def graders_of(pool: int) -> list[int]:
    """Processes below the pool: zygote first."""
    try:
        return [p.pid for p in psutil.Process(pool).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def gone(pids: list[int]) -> Callable[[], bool]:
    def check() -> bool:
        for pid in pids:
            try:
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    return False
            except psutil.NoSuchProcess:
                continue
        return True

    return check


def test_sigterm_finishes_what_is_in_flight_and_leaves(
    server: Any, tmp_path: Path, make: Any
) -> None:
    run = make_run(server, tmp_path, ["reward.graders=1"])
    with run.pool() as process:
        make.until(lambda: run.pools() or process.poll() is not None, "the pool", 60)
        worker = Worker(run.pools()[0], RunStore(run.store).curve_client())
        slow, quick = run.lease(2)
        worker.submit(1, of(slow, make, [f"</think> \\boxed{{{make.hang}}}", WRONG], gold="x+2"))
        worker.submit(2, of(quick, make, [RIGHT, WRONG]))
        first = worker.receipt()
        process.send_signal(signal.SIGTERM)
        second = worker.receipt()
        assert process.wait(20) == 0
        assert [r.request_id for r in (first, second) if r] == [2, 1]
        assert run.pools() == []
        worker.close()
    run.store.close()


def test_a_pool_that_is_killed_leaves_no_grader_behind(
    server: Any, tmp_path: Path, make: Any
) -> None:
    run = make_run(server, tmp_path, ["reward.graders=1"])
    with run.pool() as process:
        make.until(lambda: run.pools() or process.poll() is not None, "the pool", 60)
        # One of them in the middle of a request that it would never leave by itself.
        worker = Worker(run.pools()[0], RunStore(run.store).curve_client())
        lease = run.lease()[0]
        worker.submit(1, of(lease, make, [f"</think> \\boxed{{{make.hang}}}", WRONG], gold="x+3"))
        below = make.until(
            lambda: len(graders_of(process.pid)) >= 2 and graders_of(process.pid), "graders"
        )
        process.kill()
        process.wait()
        make.until(gone(below), "the end of all that the pool had started")
        worker.close()
    run.store.close()


def judged(url: str, **params: Any) -> list[str]:
    """Overrides of a run whose samples a judge scores beside their accuracy."""
    of_judge = {"url": url, "model": "tiny", "prompt": "{response}", **params}
    parts = [{"name": "accuracy"}, {"name": "judge", "weight": 0.5, "params": of_judge}]
    return [f"reward.components={json.dumps(parts)}", "reward.graders=1"]


def test_a_slow_judge_holds_up_its_own_groups_only_and_no_grader(
    server: Any, tmp_path: Path, make: Any
) -> None:
    with JudgeProcess(tmp_path / "requests") as judge:
        run = make_run(server, tmp_path, judged(judge.url))
        with run.pool() as process:
            make.until(lambda: run.pools() or process.poll() is not None, "the pool", 60)
            worker = Worker(run.pools()[0], RunStore(run.store).curve_client())
            slow, quick, compared = run.lease(3)
            # None of them is answered before 4 s.
            texts = [f"{n} \\boxed{{2}} do:slow_4000" for n in range(8)]
            worker.submit(1, of(slow, make, [*texts, WRONG]))
            make.until(lambda: len(judge.requests("chat")) >= 9, "the slow questions")
            worker.submit(2, of(quick, make, [RIGHT, WRONG]))
            # The only grader is free for an answer that needs one.
            root = "</think> \\boxed{\\sqrt{8}} do:score_2"
            worker.submit(3, of(compared, make, [root, WRONG], gold="2\\sqrt{2}"))
            order = [worker.receipt(30.0) for _ in range(3)]
            assert {r.request_id for r in order[:2] if r} == {2, 3}
            assert [r.request_id for r in order[2:] if r] == [1]
            assert all(r.result is CommitResult.COMMITTED for r in order if r)
            worker.close()
        run.store.close()


def test_a_judge_that_dies_costs_rows_and_the_pool_goes_on_when_it_is_back(
    server: Any, tmp_path: Path, make: Any
) -> None:
    judge = JudgeProcess(tmp_path / "requests")
    run = make_run(server, tmp_path, judged(judge.url, retries=1))
    with run.pool() as process:
        make.until(lambda: run.pools() or process.poll() is not None, "the pool", 60)
        worker = Worker(run.pools()[0], RunStore(run.store).curve_client())
        first, second, third = run.lease(3)
        worker.submit(1, of(first, make, ["</think> \\boxed{2} do:hang", RIGHT, WRONG]))
        make.until(
            lambda: (
                len(judge.requests("chat")) == 3
                and RunStore(run.store).reports().get("reward-0", {}).get("grader/judge_asked") == 2
            ),
            "two of its answers",
        )
        judge.stop()
        # The hanging question ends with its server; two samples have their scores.
        receipt = worker.receipt(30.0)
        assert receipt is not None
        assert receipt.result is CommitResult.COMMITTED
        worker.submit(2, of(second, make, [RIGHT + " ", WRONG + " "]))
        receipt = worker.receipt(30.0)
        assert receipt is not None
        assert receipt.result is CommitResult.REJECTED
        assert receipt.detail.startswith("ungraded: 0 of its own samples have a verdict")
        with JudgeProcess(tmp_path / "requests", port=judge.port):
            worker.submit(3, of(third, make, [RIGHT + "  ", WRONG + "  "]))
            receipt = worker.receipt(30.0)
            assert receipt is not None
            assert receipt.result is CommitResult.COMMITTED
        report = make.until(
            lambda: (
                (r := RunStore(run.store).reports()["reward-0"])["grader/judge_asked"] == 7 and r
            ),
            "the report of all questions",
        )
        assert report["grader/judge_failures"] == 3
        assert report["grader/judge_failed"] == 3
        assert report["grader/judge_retries"] == 3
        assert "the sample leaves the baseline" in run.log()
        worker.close()
    run.store.close()
