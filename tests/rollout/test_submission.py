"""A finished group is kept until its receipt has come, whatever becomes of the pools."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from tandem.common.errors import DeadlineError, StoreError, WireError
from tandem.common.records import (
    CommitResult,
    FinishReason,
    Group,
    GroupReceipt,
    Sample,
    SamplingParams,
    VersionSpan,
)
from tandem.common.sockets import new_keys
from tandem.rollout.submission import PoolAddress, Submitter


def group(number: int = 0, *, length: int = 4) -> Group:
    tokens = np.arange(length, dtype=np.int32)
    sample = Sample(
        tokens=tokens,
        source=np.zeros(length, dtype=np.uint8),
        logprobs=np.zeros(length, dtype=np.float32),
        spans=(VersionSpan(term=1, step=0, start=0, end=length),),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        text="x",
        reward=None,
        verdict=None,
        components={},
        extracted=None,
        grader=None,
    )
    return Group(
        group_id=f"0-{number}",
        attempt=1,
        worker="rollout-0",
        problem_id="p/0",
        prompt_tokens=tokens,
        prompt_text="x",
        gold="1",
        data_source="test",
        samples=(sample, sample),
        trace_ids=(),
        extra={},
    )


class Registry:
    """Pools as a worker finds them."""

    def __init__(self) -> None:
        self.pools: list[PoolAddress] = []
        self.away = False

    def __call__(self) -> list[PoolAddress]:
        if self.away:
            raise StoreError("Redis is away")
        return list(self.pools)


class Bench:
    """Pools, a registry and submitters, all closed at the end."""

    def __init__(self, pool_of: Any) -> None:
        self.client = new_keys()
        self.registry = Registry()
        self.receipts: list[GroupReceipt] = []
        self.came = threading.Condition()
        self._pool_of = pool_of
        self._open: list[Callable[[], None]] = []

    def pool(self, judge: Any, member: str = "reward-0", *, known: bool = True) -> Any:
        pool = self._pool_of(self.client, judge, member)
        self._open.append(pool.die)
        if known:
            others = [p for p in self.registry.pools if p.member != member]
            self.registry.pools = [*others, pool.address]
        return pool

    def submitter(self, **settings: Any) -> Submitter:
        def on_receipt(receipt: GroupReceipt) -> None:
            with self.came:
                self.receipts.append(receipt)
                self.came.notify_all()

        submitter = Submitter("rollout-0", self.registry, self.client, on_receipt, **settings)
        submitter.start()
        self._open.append(submitter.close)
        return submitter

    def close(self) -> None:
        for close in reversed(self._open):
            close()


@pytest.fixture
def bench(pools: Any) -> Iterator[Bench]:
    made = Bench(pools.StandInPool)
    yield made
    made.close()


def test_every_group_is_sent_once_and_receipted(bench: Bench, pools: Any) -> None:
    pool = bench.pool(pools.commits)
    submitter = bench.submitter()
    for number in range(20):
        submitter.submit(group(number))
    submitter.drain(10)
    assert sorted(r.group_id for r in bench.receipts) == sorted(f"0-{n}" for n in range(20))
    assert len(pool.received) == 20
    assert submitter.stats().results == {"committed": 20}
    assert submitter.stats().resent == 0


def test_a_handshake_is_heard_of_however_quick_it_is(
    bench: Bench, pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = zmq.Socket.get_monitor_socket

    def late(socket: Any, *args: Any) -> Any:
        # On loopback a handshake takes less than this: a socket that is connected is through it.
        threading.Event().wait(0.3)
        return attach(socket, *args)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", late)
    bench.pool(pools.commits)
    submitter = bench.submitter()
    submitter.submit(group())
    submitter.drain(10)
    assert len(bench.receipts) == 1


def test_a_link_that_hears_nothing_is_made_again(
    bench: Bench, pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, deaf = zmq.Socket.get_monitor_socket, iter([0])

    def first_hears_nothing(socket: Any, events: int) -> Any:
        return attach(socket, next(deaf, events) or zmq.EVENT_MONITOR_STOPPED)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", first_hears_nothing)
    bench.pool(pools.commits)
    submitter = bench.submitter(relink_seconds=0.3)
    submitter.submit(group())
    submitter.drain(10)
    assert len(bench.receipts) == 1


@pytest.mark.parametrize("result", list(CommitResult))
def test_each_of_the_four_results_ends_the_matter(
    bench: Bench, pools: Any, result: CommitResult
) -> None:
    bench.pool(lambda group: (result, "why"))
    submitter = bench.submitter()
    submitter.submit(group())
    submitter.drain(10)
    assert [r.result for r in bench.receipts] == [result]


def test_a_group_waits_for_the_first_pool(bench: Bench, pools: Any) -> None:
    submitter = bench.submitter()
    submitter.submit(group())
    assert submitter.outstanding == 1
    bench.pool(pools.commits)
    submitter.drain(10)
    assert submitter.outstanding == 0


def test_groups_of_a_pool_that_dies_go_to_another_one(bench: Bench, pools: Any) -> None:
    first = bench.pool(pools.is_silent)
    submitter = bench.submitter()
    submitter.submit(group(0))
    submitter.submit(group(1))
    assert first.wait_received(2)
    second = bench.pool(pools.commits, "reward-1")
    first.die()
    submitter.drain(10)
    assert {s.group.group_id for s in second.received} == {"0-0", "0-1"}
    assert submitter.stats().resent == 2


def test_groups_of_a_pool_that_dies_go_to_its_next_life(bench: Bench, pools: Any) -> None:
    first = bench.pool(pools.is_silent)
    submitter = bench.submitter()
    submitter.submit(group())
    assert first.wait_received(1)
    first.die()
    again = bench.pool(pools.commits)  # The same member at another port, with other keys.
    submitter.drain(10)
    assert [s.group.group_id for s in again.received] == ["0-0"]
    assert first.received[0].request_id == again.received[0].request_id


def test_a_pool_that_leaves_the_registry_is_left(bench: Bench, pools: Any) -> None:
    silent = bench.pool(pools.is_silent)
    submitter = bench.submitter()
    submitter.submit(group())
    assert silent.wait_received(1)
    bench.registry.pools = []
    bench.pool(pools.commits, "reward-1")
    submitter.drain(10)


def test_a_lost_receipt_is_asked_for_again(bench: Bench, pools: Any) -> None:
    answers = iter([None, (CommitResult.DUPLICATE, "")])
    pool = bench.pool(lambda group: next(answers))
    submitter = bench.submitter(resend_seconds=0.3)
    submitter.submit(group())
    submitter.drain(10)
    assert len(pool.received) == 2
    assert [r.result for r in bench.receipts] == [CommitResult.DUPLICATE]


def test_a_second_receipt_changes_nothing(bench: Bench, pools: Any) -> None:
    late = threading.Event()

    def judge(_: Group) -> tuple[CommitResult, str]:
        late.wait(1.0)  # Longer than the submitter's patience: it sends the group again.
        return CommitResult.COMMITTED, ""

    pool = bench.pool(judge)
    submitter = bench.submitter(resend_seconds=0.3)
    submitter.submit(group(0))
    assert pool.wait_received(2)
    late.set()
    submitter.submit(group(1))
    submitter.drain(10)
    assert sorted(r.group_id for r in bench.receipts) == ["0-0", "0-1"]


def test_load_is_spread_over_the_pools(bench: Bench, pools: Any) -> None:
    both = [bench.pool(pools.is_silent, f"reward-{i}") for i in range(2)]
    submitter = bench.submitter()
    _until(lambda: submitter.stats().pools == 2)
    for number in range(10):
        submitter.submit(group(number))
    _until(lambda: sum(len(pool.received) for pool in both) == 10)
    assert {len(pool.received) for pool in both} == {5}


def _until(holds: Callable[[], bool], deadline: float = 10.0) -> None:
    end = time.monotonic() + deadline
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_while_redis_is_away_known_pools_stay(bench: Bench, pools: Any) -> None:
    bench.pool(pools.commits)
    submitter = bench.submitter()
    submitter.submit(group(0))
    submitter.drain(10)
    bench.registry.away = True
    submitter.submit(group(1))
    submitter.drain(10)


def test_a_pool_with_another_key_gets_nothing(bench: Bench, pools: Any) -> None:
    pool = bench.pool(pools.commits, known=False)
    wrong = PoolAddress(
        member="reward-0", endpoint=pool.address.endpoint, public_key=new_keys().public
    )
    bench.registry.pools = [wrong]
    submitter = bench.submitter()
    submitter.submit(group())
    with pytest.raises(DeadlineError, match=r"1 finished groups .* reward-0 .* \(not connected\)"):
        submitter.drain(1.0)
    assert pool.received == []


def test_room_is_bounded_and_comes_back(bench: Bench, pools: Any) -> None:
    pool = bench.pool(pools.is_silent)
    submitter = bench.submitter(most=2)
    submitter.submit(group(0))
    assert submitter.wait_room(0)
    submitter.submit(group(1))
    assert not submitter.wait_room(0)
    assert pool.wait_received(2)
    pool.die()
    bench.pool(pools.commits, "reward-1")
    assert submitter.wait_room(10)


def test_a_group_that_is_too_long_for_the_wire_is_refused_at_once(bench: Bench) -> None:
    submitter = bench.submitter()
    with pytest.raises(WireError, match="limit"):
        submitter.submit(group(length=8_000_000))
    assert submitter.outstanding == 0
