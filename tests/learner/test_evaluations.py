"""Asking for evaluations, and what comes back, on a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from msgspec import structs

from tandem.common.records import Version
from tandem.learner.loop import evaluations as module
from tandem.learner.loop.evaluations import Evaluations, record_of
from tandem.replay.connection import Store, connect
from tandem.replay.evaluating.evaluations import (
    EVALUATION_FAILURES,
    EvaluationRequest,
    EvaluationResult,
)
from tandem.replay.members import Members
from tandem.replay.store import RunStore


@pytest.fixture
def store(server: Any) -> Iterator[Store]:
    made = connect(server.join(), name="test")
    yield made
    made.close()


Make = Callable[..., Evaluations]


@pytest.fixture
def make(store: Store, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)

    def build(
        stopping: Callable[[], bool] = lambda: False, total: int = 4, **evaluate: Any
    ) -> Evaluations:
        config = made_up.config_of(
            evaluate={"every": 2, "limit": 10, "samples": 3} | evaluate,
            data={
                "evaluate": [
                    {"path": "x", "name": "heldout"},
                    {"path": "y", "name": "hard", "limit": 5},
                ]
            },
        )
        return Evaluations(RunStore(store), Members(store), config, total, stopping)

    return build


def claim(store: Store, step: int) -> EvaluationRequest | None:
    return RunStore(store).claim_evaluation("rollout-0", Version(term=1, step=step))


def answer(store: Store, request: EvaluationRequest) -> None:
    RunStore(store).finish_evaluation(
        request.id,
        EvaluationResult(
            id=request.id,
            set_name=request.set_name,
            step=request.step,
            accuracy=0.5,
            problems=10,
            format_share=1.0,
            mean_length=20.0,
            seconds=0.1,
            member="rollout-0",
        ),
    )


def test_a_set_has_its_own_temperature_and_samples(store: Store, made_up: ModuleType) -> None:
    own = {"path": "y", "name": "own", "temperature": 0.6, "samples": 8}
    config = made_up.config_of(
        evaluate={"every": 2}, data={"evaluate": [{"path": "x", "name": "heldout"}, own]}
    )
    Evaluations(RunStore(store), Members(store), config, 4, lambda: False).request(0)
    requests = [claim(store, 0), claim(store, 0)]
    for request in requests[:1]:
        assert request is not None
        answer(store, request)
    requests[1] = claim(store, 0)
    found = {r.set_name: (r.temperature, r.samples) for r in requests if r is not None}
    assert found == {"heldout": (0.0, 1), "own": (0.6, 8)}


def test_first_and_last_use_the_whole_set_and_those_between_a_part(
    make: Make, store: Store
) -> None:
    found = {}
    evaluations = make()
    for step in range(5):
        for _ in evaluations.request(step):
            request = claim(store, step)
            assert request is not None
            found[request.id] = (request.limit, request.samples)
            answer(store, request)
    assert found == {
        "heldout@0": (None, 3),
        "hard@0": (5, 3),
        "heldout@2": (10, 3),
        "hard@2": (5, 3),
        "heldout@4": (None, 3),
        "hard@4": (5, 3),
    }


def test_a_run_that_ends_early_where_a_part_was_asked_for_asks_for_the_whole_set(
    make: Make, store: Store
) -> None:
    evaluations = make(total=100)
    found = {}
    for is_last in (False, True, True):
        for _ in evaluations.request(2, is_last=is_last):
            request = claim(store, 2)
            if request is not None:
                found[request.id] = request.limit
                answer(store, request)
    assert found == {
        "heldout@2": 10,
        "hard@2": 5,
        "heldout@2.whole": None,
    }
    results = {result.id: record_of(result) for result in evaluations.arrived()}
    assert results.keys() == found.keys()
    assert all(record["eval/due"] == 2 for record in results.values())
    assert make(total=100).request(3, is_last=True) == ["heldout@3", "hard@3"]


def test_what_is_switched_off_is_not_asked_for(make: Make) -> None:
    evaluations = make(at_start=False, at_end=False, every=0)
    assert [evaluations.request(step) for step in range(5)] == [[]] * 5


def test_each_result_arrives_once(make: Make, store: Store) -> None:
    evaluations = make()
    evaluations.request(2)
    assert evaluations.arrived() == []
    request = claim(store, 2)
    assert request is not None
    answer(store, request)
    assert [result.id for result in evaluations.arrived()] == [request.id]
    assert evaluations.arrived() == []


def test_a_wait_ends_with_the_results(make: Make, store: Store) -> None:
    evaluations = make()
    ids = evaluations.request(2)
    for _ in ids:
        request = claim(store, 2)
        assert request is not None
        answer(store, request)
    got: list[str] = []
    assert evaluations.wait(ids, lambda result: got.append(result.id))
    assert sorted(got) == ["hard@2", "heldout@2"]


def test_what_redis_has_lost_is_asked_for_again(make: Make, store: Store) -> None:
    def worker() -> bool:
        request = claim(store, 2)
        if request is not None:
            answer(store, request)
        return False

    evaluations = make(worker)
    ids = evaluations.request(2)
    # A server that was killed may have lost its last second.
    store.redis.delete(store.key("evaluations"), store.key("evaluations_open"))
    assert evaluations.wait(ids, lambda result: None, deadline=10.0)
    assert RunStore(store).asked_evaluations() == sorted(ids)


def test_a_wait_ends_without_workers_at_the_deadline_and_in_a_drain(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations = make()
    ids = evaluations.request(2)
    assert not evaluations.wait(ids, lambda result: None, deadline=0.05)
    assert "it was not done in 0 s" in caplog.text
    monkeypatch.setattr(module, "ABANDONED_SECONDS", 0.05)
    assert not evaluations.wait(ids, lambda result: None)
    assert "no rollout worker has been there" in caplog.text
    draining = make(lambda: True)
    assert not draining.wait(draining.request(2), lambda result: None)


def test_a_learner_that_starts_takes_up_what_its_predecessor_asked_for(
    make: Make, store: Store
) -> None:
    first = make(total=10)
    first.request(2)
    for _ in range(2):
        request = claim(store, 2)
        assert request is not None
        answer(store, request)
    first.request(4)
    second = make(total=10)
    second.begin(2, recorded={"hard@2"})
    assert [result.id for result in second.arrived()] == ["heldout@2"]
    # Steps that its predecessor was killed before it could ask for are asked for, others once.
    second.request_since(2, 6)
    assert sorted(second.open()) == ["hard@4", "hard@6", "heldout@4", "heldout@6"]
    assert RunStore(store).open_evaluations() == ["hard@4", "heldout@4", "hard@6", "heldout@6"]


def test_an_evaluation_that_was_given_up_is_waited_for_no_longer(
    make: Make, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations = make()
    ids = evaluations.request(2)
    for _ in ids:
        request = claim(store, 2)
        assert request is not None
        claims = store.key("evaluation_claims")
        for _ in range(EVALUATION_FAILURES):
            store.redis.hset(claims, request.id, "9 rollout-0")
            RunStore(store).give_back_evaluation(
                request.id, "rollout-0", reason="problem a/7 can't be answered", failed=True
            )
    assert evaluations.wait(ids, lambda result: None)
    assert "evaluation hard@2 is given up" in caplog.text
    assert "problem a/7 can't be answered" in caplog.text


def test_a_record_carries_what_each_source_gave_and_the_version_that_was_measured() -> None:
    result = EvaluationResult(
        id="heldout@60",
        set_name="heldout",
        step=63,
        version="2.63 2.64",
        accuracy=0.5,
        samples=4,
        pass_rate=0.75,
        accuracy_by_source={"gsm8k": 0.25, "lab/math": 0.75},
        pass_by_source={"gsm8k": 0.5, "lab/math": 1.0},
        problems_by_source={"gsm8k": 2, "lab/math": 2},
        problems=4,
        format_share=1.0,
        mean_length=20.0,
        seconds=0.1,
        member="rollout-0",
    )
    found = record_of(result)
    assert {found[name] for name in ("step", "eval/due", "eval/version")} == {63, 60, "2.63 2.64"}
    assert found["eval/heldout/pass@4"] == 0.75
    assert found["eval/heldout/source/gsm8k/accuracy"] == 0.25
    assert found["eval/heldout/source/lab/math/pass@4"] == 1.0
    assert found["eval/heldout/source/lab/math/problems"] == 2
    more = structs.replace(result, figures={"maj@4": 0.5, "source/gsm8k/pass@2": 0.4})
    assert record_of(more)["eval/heldout/maj@4"] == 0.5
    assert record_of(more)["eval/heldout/source/gsm8k/pass@2"] == 0.4
    once = record_of(structs.replace(result, samples=1))
    assert not [name for name in once if "pass@" in name]
    assert once["eval/heldout/source/gsm8k/accuracy"] == 0.25
