"""Random histories of workers that lag, die and come late: the bound holds and the run goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tandem.common.records import Version
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Lease, Row
from tandem.replay.rules import cutting
from tandem.replay.rules import leases as rules

Worlds = Callable[..., Any]
STEPS = 10


class History:
    """Workers with versions of their own, a learner, and chance; every lease is checked."""

    def __init__(self, world: Any, seed: int) -> None:
        self.w = world
        self.chance = random.Random(seed)
        self.rows: list[Row] = []
        self.held = [0, 0, 0]
        self.out: list[tuple[Lease, int]] = []
        self.members = [Ledger(world.store, f"rollout-{i}") for i in range(3)]

    @property
    def step(self) -> int:
        return len(self.rows)

    def live(self, kind: str) -> set[int]:
        key = self.w.store.key(kind)
        return {int(s) for s in self.w.store.redis.zrange(key, 0, -1)}

    def lease(self) -> None:
        worker = self.chance.randrange(3)
        held = self.held[worker]
        before = self.live("leased") | self.live("graded") | self.live("returned")
        reply = self.members[worker].lease(
            Version(term=self.w.term, step=held), self.chance.randrange(1, 7)
        )
        settings = self.w.settings
        for lease in reply.leases:
            serial = self.w.ledger.order.serial(lease.group_id)
            rank = sum(1 for other in before if other < serial)
            assert rules.may_lease(
                self.step, rank, settings.groups_per_step, held, settings.max_staleness
            ), (lease, rank)
            before.add(serial)
            self.out.append((lease, held))
        if reply.wait == "admission: staleness":
            back = self.live("returned")
            serial = min(back) if back else max(before, default=-1) + 1
            rank = sum(1 for other in before if other < serial)
            assert not rules.may_lease(
                self.step, rank, settings.groups_per_step, held, settings.max_staleness
            )

    def commit(self) -> None:
        if self.out:
            lease, held = self.out.pop(self.chance.randrange(len(self.out)))
            # Weights may change while a group is sampled; its oldest token is of `held`.
            self.w.commit([lease], step=held)

    def lose(self) -> None:
        """A worker dies: its leases expire."""
        if self.out:
            lease, _ = self.out.pop(self.chance.randrange(len(self.out)))
            self.w.expire(lease)

    def stall(self) -> None:
        """A lease expires, and the worker commits it all the same, later."""
        if self.out:
            self.w.expire(self.chance.choice(self.out)[0])

    def publish(self) -> None:
        self.held[self.chance.randrange(3)] = self.step

    def take(self) -> None:
        answer = self.w.ledger.take(self.step + 1, self.w.term)
        if isinstance(answer, Row):
            self.rows.append(answer)
            for group in self.w.ledger.fetch(answer):
                assert group.oldest_step is not None
                assert cutting.age(answer.step, group.oldest_step) <= self.w.settings.max_staleness

    def run(self) -> None:
        actions = [self.lease] * 4 + [self.commit] * 8 + [self.take] * 3
        actions += [self.publish] * 3 + [self.lose]
        if self.w.settings.window == 1:
            # Out of order, what expired may be passed over until its late commit is too old.
            actions.append(self.stall)
        for _ in range(4000):
            if self.step == STEPS:
                return
            self.chance.choice(actions)()
            self.check_states()
        pytest.fail(f"the run stands still at step {self.step}: {self.w.ledger.waiting_for()}")

    def check_states(self) -> None:
        sets = [self.live(kind) for kind in ("leased", "returned", "graded", "taken")]
        assert sum(map(len, sets)) == len(set().union(*sets)), "a group is in two states"
        assert self.live("deadlines") == sets[0]
        cursor = int(self.w.store.redis.hget(self.w.store.key("meta"), "cursor"))
        counts = self.w.ledger.counts()
        assert sum(counts.values()) == cursor, "a group is in no state"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("staleness", "window", "late"),
    [
        (0, 1, "wait"),
        (1, 1, "wait"),
        (3, 1, "wait"),
        (1, 2, "wait"),
        (3, 3, "drop"),
        (3, 4, "wait"),
    ],
)
def test_the_bound_holds_without_a_sweep_and_without_a_wedge(
    world: Worlds, staleness: int, window: int, late: str, seed: int
):
    history = History(
        world(
            groups_per_step=3,
            max_staleness=staleness,
            window=window,
            late=late,
            max_attempts=1000,
        ),
        seed,
    )
    history.run()
    assert history.w.ledger.counts()["rejected:stale"] == 0
    ids = [entry.group_id for row in history.rows for entry in row.ids]
    assert Counter(ids).most_common(1)[0][1] == 1, "a group is in two rows"
    for row in history.rows:
        places = [history.w.ledger.order.serial(entry.group_id) for entry in row.ids]
        assert places == sorted(places)
    if window == 1:
        serials = [history.w.ledger.order.serial(i) for i in ids]
        assert serials == sorted(serials)
