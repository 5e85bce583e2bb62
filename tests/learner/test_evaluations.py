"""Asking for evaluations, and what comes back, on a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tandem.common.records import Version
from tandem.learner import evaluations as module
from tandem.learner.evaluations import Evaluations
from tandem.replay.connection import Store, connect
from tandem.replay.members import Members
from tandem.replay.store import EvaluationRequest, EvaluationResult, RunStore


@pytest.fixture
def store(server: Any) -> Iterator[Store]:
    made = connect(server.join(), name="test")
    yield made
    made.close()


Make = Callable[..., Evaluations]


@pytest.fixture
def make(store: Store, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)

    def build(stopping: Callable[[], bool] = lambda: False, **evaluate: Any) -> Evaluations:
        config = made_up.config_of(
            evaluate={"every": 2, "limit": 10, "samples": 3} | evaluate,
            data={
                "evaluate": [
                    {"path": "x", "name": "heldout"},
                    {"path": "y", "name": "hard", "limit": 5},
                ]
            },
        )
        return Evaluations(RunStore(store), Members(store), config, stopping)

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


def test_first_and_last_use_the_whole_set_and_those_between_a_part(
    make: Make, store: Store
) -> None:
    found = {}
    evaluations = make()
    for step in range(5):
        for _ in evaluations.request(step, 4):
            request = claim(store, step)
            assert request is not None
            found[request.id] = (request.limit, request.samples, request.final)
            answer(store, request)
    assert found == {
        "heldout@0": (None, 3, False),
        "hard@0": (5, 3, False),
        "heldout@2": (10, 3, False),
        "hard@2": (5, 3, False),
        "heldout@4": (None, 3, True),
        "hard@4": (5, 3, True),
    }


def test_what_is_switched_off_is_not_asked_for(make: Make) -> None:
    evaluations = make(at_start=False, at_end=False, every=0)
    assert [evaluations.request(step, 4) for step in range(5)] == [[]] * 5


def test_each_result_arrives_once(make: Make, store: Store) -> None:
    evaluations = make()
    evaluations.request(2, 4)
    assert evaluations.arrived() == []
    request = claim(store, 2)
    assert request is not None
    answer(store, request)
    assert [result.id for result in evaluations.arrived()] == [request.id]
    assert evaluations.arrived() == []


def test_a_wait_ends_with_the_results(make: Make, store: Store) -> None:
    evaluations = make()
    ids = evaluations.request(2, 4)
    for _ in ids:
        request = claim(store, 2)
        assert request is not None
        answer(store, request)
    got: list[str] = []
    assert evaluations.wait(ids, lambda result: got.append(result.id))
    assert sorted(got) == ["hard@2", "heldout@2"]


def test_a_wait_ends_without_workers_at_the_deadline_and_in_a_drain(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations = make()
    ids = evaluations.request(2, 4)
    assert not evaluations.wait(ids, lambda result: None, deadline=0.05)
    assert "it was not done in 0 s" in caplog.text
    monkeypatch.setattr(module, "ABANDONED_SECONDS", 0.05)
    assert not evaluations.wait(ids, lambda result: None)
    assert "no rollout worker has been there" in caplog.text
    draining = make(lambda: True)
    assert not draining.wait(draining.request(2, 4), lambda result: None)
