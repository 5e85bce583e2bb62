"""What a person is told of a ledger: the oldest lease, ages of what waits, bytes by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tandem.replay.connection import connect
from tandem.replay.inspecting.inspection import KINDS, memory_use, oldest_lease, waiting_ages
from tandem.replay.store import RunStore

Worlds = Callable[..., Any]


def test_the_oldest_lease_is_the_one_that_was_given_first(world: Worlds):
    w = world()
    assert oldest_lease(w.ledger) is None
    first, second = w.lease(count=2)
    serial = w.ledger.order.serial(second.group_id)
    # As if it had been leased 100 s before.
    w.store.redis.hincrby(w.store.key(f"group:{serial}"), "leased_ms", -100_000)
    found = oldest_lease(w.member("board"))
    assert found is not None
    assert (found.group_id, found.worker, found.attempt) == (second.group_id, "rollout-0", 1)
    assert 100 <= found.seconds < 110
    w.commit([second])
    found = oldest_lease(w.ledger)
    assert found is not None
    assert found.group_id == first.group_id


def test_graded_groups_are_counted_by_the_age_that_they_have_in_the_next_row(
    world: Worlds, make: Any
):
    w = world(max_staleness=20, groups_per_step=1)
    for number in range(1, 13):
        w.step(number)
    leases = w.lease(held=12, count=5)
    for lease, step in zip(leases, (12, 11, 11, 1, None), strict=True):
        w.commit([lease], step=step)
    found = waiting_ages(w.ledger)
    assert found.counts == (1, 2, 0, 0, 0, 0, 0, 0, 1)
    assert found.without_own_tokens == 1


def big(make: Any, lease: Any, tokens: int) -> Any:
    """A graded group of so many tokens a sample."""
    values = {
        "tokens": np.zeros(tokens, np.int32),
        "source": np.zeros(tokens, np.uint8),
        "logprobs": np.full(tokens, -0.5, np.float32),
        "spans": (),
    }
    return make.graded(lease, samples=(make.sample(0, **values), make.sample(0, **values)))


def test_bytes_are_told_by_what_the_keys_are(world: Worlds, make: Any):
    w = world(groups_per_step=1, max_staleness=9)
    run = RunStore(w.store)
    run.put_eval_set("heldout", [make.problem(f"h/{row}") for row in range(50)])
    leases = w.lease(count=4)
    # 2 samples of 9 bytes a token: 18 KB, 36 KB, 72 KB.
    for lease, thousands in zip(leases, (1, 2, 4), strict=False):
        w.ledger.commit(big(make, lease, 1000 * thousands))
    w.store.redis.set(w.store.key(f"payload:{leases[3].group_id}:1:x"), b"\0" * 9000)
    w.ledger.take(1, w.term)
    w.ledger.confirm(1, w.term)
    w.ledger.take(2, w.term)
    found = memory_use(w.ledger)
    assert not found.estimated
    assert tuple(found.kinds) == KINDS
    kilobytes = {kind: size // 1000 for kind, size in found.kinds.items()}
    assert 18 <= kilobytes["payloads_retained"] < 30
    assert 36 <= kilobytes["payloads_taken"] < 48
    assert 72 <= kilobytes["payloads_waiting"] < 90
    assert 9 <= kilobytes["payloads_uncommitted"] < 15
    assert kilobytes["problems"] > 5
    assert found.kinds["evaluation_sets"] > 50 * 50
    assert found.kinds["ledger"] > 500
    assert found.kinds["answers"] > 100
    assert found.kinds["traces"] == 0
    assert found.used > sum(found.kinds.values())


def test_another_run_on_the_same_server_is_not_counted(server: Any, make: Any):
    stores = [connect(server.join()) for _ in range(2)]
    first, other = (make.world(store) for store in stores)
    before = memory_use(first.ledger).kinds
    other.commit(other.lease(count=4))
    assert memory_use(first.ledger).kinds == before
    for store in stores:
        store.close()


@pytest.mark.parametrize("limit", [{"most_keys": 600}, {"seconds": 0.0}])
def test_where_keys_are_too_many_the_rest_is_judged_by_those_seen(
    own_server: Any, make: Any, limit: dict[str, Any]
):
    store = connect(own_server.join())
    w = make.world(store, groups_per_step=1)
    pipeline = store.redis.pipeline(transaction=False)
    for number in range(3000):
        pipeline.set(store.key(f"payload:0-{number % 90}:{number}:x"), b"\0" * 1000)
    pipeline.execute()
    whole, part = memory_use(w.ledger), memory_use(w.ledger, **limit)
    assert not whole.estimated
    assert part.estimated
    # What is there once is never guessed at.
    assert part.kinds["problems"] >= whole.kinds["problems"] * 0.9
    if limit.get("most_keys"):
        ratio = part.kinds["payloads_retained"] / whole.kinds["payloads_retained"]
        assert 0.8 < ratio < 1.25
    store.close()
