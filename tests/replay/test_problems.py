"""Problems in Redis: looked up one by one, whichever version of Tandem stored them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from tandem.common import wire
from tandem.common.errors import StoreError, WireError
from tandem.replay import problems
from tandem.replay.connection import Store
from tandem.replay.problems import ProblemIds
from tandem.replay.rules.order import LAST_SERIAL
from tandem.replay.store import RunStore

ROWS = {"every row": (0, 1, 2, 3), "some rows": (1, 2, 5, 300), "one gap": (0, 1, 2, 4)}


def put_as_before(store: Store, some: list[Any]) -> None:
    """Stores problems as the first version did."""
    for problem in some:
        source, row = problems.split_id(problem.problem_id)
        store.redis.hset(store.key("problems"), problem.problem_id, wire.encode(problem))
        store.redis.zadd(store.key(f"problem_ids:{source}"), {problem.problem_id: row})


def put_now(store: Store, some: list[Any]) -> None:
    RunStore(store).put_problems(some)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("put", [put_now, put_as_before])
def test_problems_are_found_by_their_places(
    store: Store, make: Any, put: Callable[[Store, list[Any]], None], rows: tuple[int, ...]
):
    put(store, [make.problem(f"a/{row}") for row in rows])
    put(store, [make.problem(f"b/x/{row}") for row in (7, 9)])
    ids = ProblemIds(store, [("a", 4, 1), ("b/x", 2, 1)])
    places = [(0, 3), (1, 0), (0, 0), (0, 3), (1, 1), (0, 1), (0, 2)]
    names = [f"a/{rows[3]}", "b/x/7", f"a/{rows[0]}", f"a/{rows[3]}", "b/x/9", f"a/{rows[1]}"]
    assert ids.at(places) == [*names, f"a/{rows[2]}"]


@pytest.mark.parametrize("put", [put_now, put_as_before])
def test_a_source_of_another_size_is_refused(
    store: Store, make: Any, put: Callable[[Store, list[Any]], None]
):
    put(store, [make.problem(f"a/{row}") for row in range(3)])
    with pytest.raises(StoreError, match=r"source 'a' has 3 problems in Redis, .* made for 4"):
        ProblemIds(store, [("a", 4, 1)]).at([(0, 0)])


@pytest.mark.parametrize("step", [1, 2])
def test_a_first_lease_reads_the_ids_of_no_other_problems(store: Store, make: Any, step: int):
    count = 20_000
    problems.put_rows(store, {"b": range(0, step * count, step)})
    world = make.world(store, sources=(("b", count, 1),), put=False)
    worker = world.member("rollout-1")
    before = store.redis.info("stats")["total_net_output_bytes"]
    (lease,) = world.lease(ledger=worker)
    assert problems.split_id(lease.problem_id)[1] % step == 0
    assert store.redis.info("stats")["total_net_output_bytes"] - before < count


def test_a_stored_problem_is_the_same_again(make: Any):
    extra = {"index": 3, "nested": {"list": [1, "x", None, 0.5]}}
    problem = make.problem("a/3", extra=extra, trace_ids=("a/3#0",), gold="½")
    for data in (problems.encode(problem), wire.encode(problem)):
        found = structs.asdict(problems.decode("a/3", data))
        wanted = structs.asdict(problem)
        assert np.array_equal(found.pop("prompt_tokens"), wanted.pop("prompt_tokens"))
        assert found == wanted


def test_a_problem_takes_little_more_than_its_prompt(make: Any):
    problem = make.problem("gsm8k/7473", data_source="gsm8k")
    its_own = len(problem.prompt_text) + 4 * len(problem.prompt_tokens) + len(problem.gold)
    assert len(problems.encode(problem)) - its_own < 60


def test_what_stands_under_another_problems_id_is_refused(make: Any):
    with pytest.raises(StoreError, match=r"problem 'a/1' in Redis is damaged: it is 'a/0'"):
        problems.decode("a/1", wire.encode(make.problem("a/0")))
    with pytest.raises(WireError, match="expected StoredProblem"):
        problems.decode("a/1", wire.encode(make.sample(0)))


@pytest.mark.parametrize("data", [b"\0", b"\1\0\0\0\0\0\0\0", bytes(8)])
def test_damaged_rows_are_refused(data: bytes):
    with pytest.raises(
        StoreError, match="rows of source 'a' in Redis is damaged: it isn't ascending"
    ):
        problems.read_rows(data, "a")


@pytest.mark.parametrize("name", ["nonsense", "a/", "a/-1", "a/x", f"a/{2**32}"])
def test_an_id_without_a_row_is_refused(name: str):
    with pytest.raises(StoreError, match="<source>/<row>"):
        problems.split_id(name)


def test_a_run_of_an_older_version_goes_on(store: Store, make: Any):
    world = make.world(store, sources=(("a", 100, 1),), sorted_up_to=LAST_SERIAL)
    leased = [lease.problem_id for lease in world.lease(count=4)]
    store.redis.delete(store.key("problems"), store.key("problem_rows:a"))
    store.redis.hdel(store.key("meta"), "sorted_up_to")
    put_as_before(store, [make.problem(f"a/{row}", gold=str(row)) for row in range(100)])
    later = world.member("rollout-1")
    assert later.problem_ids([f"0-{position}" for position in range(4)]) == leased
    found = RunStore(store).problems(leased)
    assert [problem.gold for problem in found] == [name.removeprefix("a/") for name in leased]
    # The settings of today, which a resumed run comes with, change nothing of its order.
    later.create({**structs_of(world.settings), "sorted_up_to": 10})
    assert later.settings.sorted_up_to == LAST_SERIAL
    assert later.problem_ids(["0-0"]) == leased[:1]


def structs_of(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in type(settings).__dataclass_fields__}
