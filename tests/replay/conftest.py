"""A fresh run for each test, and groups as a worker and a pool make them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.records import (
    FinishReason,
    Group,
    Problem,
    Sample,
    SamplingParams,
    Verdict,
    Version,
    VersionSpan,
)
from tandem.replay.connection import Store, connect
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Lease, LedgerSettings, Row
from tandem.replay.store import RunStore

# Makes the files beside the tests importable, whichever way pytest imports these.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(server: Any) -> Iterator[Store]:
    """A connection to a run that nobody has used."""
    made = connect(server.join(), name="test")
    yield made
    made.close()


def make_problem(problem_id: str = "a/0", **changes: Any) -> Problem:
    values: dict[str, Any] = {
        "problem_id": problem_id,
        "prompt_text": "1+1=?",
        "prompt_tokens": np.arange(5, dtype=np.int32),
        "gold": "2",
        "data_source": "miniature",
        "ability": "math",
        "trace_ids": (),
        "extra": {},
    }
    return Problem(**{**values, **changes})


def make_sample(step: int | None = 0, **changes: Any) -> Sample:
    tokens = np.arange(6, dtype=np.int32)
    values: dict[str, Any] = {
        "tokens": tokens,
        "source": np.zeros(6, np.uint8),
        "logprobs": np.full(6, -0.5, np.float32),
        "spans": () if step is None else (VersionSpan(term=1, step=step, start=0, end=6),),
        "finish_reason": FinishReason.STOP,
        "sampling": SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        "text": "2",
        "reward": 1.0,
        "verdict": Verdict.CORRECT,
        "components": {},
        "extracted": None,
        "grader": None,
    }
    return Sample(**{**values, **changes})


def graded(lease: Lease, step: int | None = 0, **changes: Any) -> Group:
    """A group as it comes out of the pool; ``step`` is the version that sampled it."""
    values: dict[str, Any] = {
        "group_id": lease.group_id,
        "attempt": lease.attempt,
        "worker": "rollout-0",
        "problem_id": lease.problem_id,
        "prompt_tokens": np.arange(5, dtype=np.int32),
        "prompt_text": "1+1=?",
        "gold": "2",
        "data_source": "miniature",
        "samples": (make_sample(step), make_sample(step, reward=0.0, verdict=Verdict.WRONG)),
        "trace_ids": (),
        "extra": {},
    }
    return Group(**{**values, **changes})


class World:
    """A created ledger with its problems, seen by a worker, a pool and a learner."""

    def __init__(self, store: Store, put: bool = True, **changes: Any) -> None:
        self.store = store
        values: dict[str, Any] = {
            "sources": (("a", 100, 1),),
            "seed": 7,
            "data_digest": "d",
            "group_size": 2,
            "groups_per_step": 2,
            "max_staleness": 1,
            "steps": 1000,
        }
        self.settings = LedgerSettings(**{**values, **changes})
        run = RunStore(store)
        for name, size, _ in self.settings.sources if put else ():
            run.put_problems(make_problem(f"{name}/{row}") for row in range(size))
        self.ledger = self.member("rollout-0")
        self.ledger.create(self.settings)
        self.term = self.ledger.new_term()

    def member(self, name: str) -> Ledger:
        return Ledger(self.store, name)

    def lease(self, held: int = 0, count: int = 1, ledger: Ledger | None = None) -> list[Lease]:
        reply = (ledger or self.ledger).lease(Version(term=self.term, step=held), count)
        return list(reply.leases)

    def wait(self, held: int = 0) -> str:
        return self.ledger.lease(Version(term=self.term, step=held), 1).wait

    def commit(self, leases: list[Lease], step: int | None = 0, **changes: Any) -> list[str]:
        receipts = self.ledger.commit_many([graded(lease, step, **changes) for lease in leases])
        return [receipt.result.value for receipt in receipts]

    def step(self, number: int) -> Row:
        """Leases, commits and takes all of a row, sampled by the version before it."""
        size = self.settings.groups_per_step
        self.commit(self.lease(number - 1, size), number - 1)
        row = self.ledger.take(number, self.term)
        assert isinstance(row, Row), row
        return row

    def expire(self, *leases: Lease) -> None:
        """Puts the deadlines of leases into the past: time goes by without anybody sleeping."""
        for lease in leases:
            serial = self.ledger.order.serial(lease.group_id)
            self.store.redis.zadd(self.store.key("deadlines"), {str(serial): 1}, xx=True)


@pytest.fixture
def world(store: Store) -> Callable[..., World]:
    """Makes a :class:`World` with changed settings."""
    return lambda **changes: World(store, **changes)


@pytest.fixture
def make() -> Any:
    """``make.problem``, ``make.sample``, ``make.graded`` and ``make.world(store, …)``."""

    class Make:
        problem = staticmethod(make_problem)
        sample = staticmethod(make_sample)
        graded = staticmethod(graded)
        world = World

    return Make
