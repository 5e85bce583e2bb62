"""Ledgers in which every state is present, made by valid calls, kept in Redis and put back at will."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
from tandem.replay.connection import Store
from tandem.replay.evaluating.evaluations import (
    EVALUATION_FAILURES,
    EvaluationRequest,
    EvaluationResult,
)
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Lease, LedgerSettings
from tandem.replay.members import Members
from tandem.replay.store import RunStore

RESTORE = """
for _, name in ipairs(redis.call('keys', '*')) do
  if string.sub(name, 1, 5) ~= 'fuzz:' then redis.call('unlink', name) end
end
local flat = redis.call('hgetall', 'fuzz:world:' .. ARGV[1])
for i = 1, #flat, 2 do
  local ttl = 0
  if redis.call('sismember', 'fuzz:ttl:' .. ARGV[1], flat[i]) == 1 then ttl = 600000 end
  redis.call('restore', flat[i], ttl, flat[i + 1])
end
local prefix, t = KEYS[1], redis.call('time')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
-- Time goes on between two uses of a world; its leases have as long to go as when it was made.
for _, serial in ipairs(redis.call('zrange', prefix .. 'deadlines', 0, -1)) do
  local left = ARGV[2] == 'expired' and -1000 or ARGV[2] == 'half' and (serial % 2) * 1e6 - 5e5 or 1e6
  redis.call('zadd', prefix .. 'deadlines', now + left, serial)
  redis.call('hset', prefix .. 'group:' .. serial, 'leased_ms', now, 'cap', now + 2 * left)
end
if redis.call('exists', prefix .. 'meta') == 1 then
  redis.call('set', prefix .. 'heard', now - (ARGV[3] == 'silent' and 60000 or 0))
end
return 1
"""


@dataclass(slots=True, kw_only=True)
class World:
    """One ledger, and what a caller may know of it."""

    name: str
    """Of its dump."""
    length: int = 10
    """Positions of a pass."""
    size: int = 2
    """Groups of a step."""
    term: int = 0
    """The newest."""
    journalled: int = 0
    """J."""
    cursor: int = 0
    """First serial never leased."""
    leases: list[tuple[int, int, str]] = field(default_factory=list)
    """Serial, attempt and holder of each lease."""
    payloads: list[tuple[int, int, str]] = field(default_factory=list)
    """Serial, attempt and digest of each payload that is there."""
    unclaimed: list[tuple[int, int, str]] = field(default_factory=list)
    """The same of those that were put for a commit that never came."""
    dead: list[int] = field(default_factory=list)
    """Serials of dead letters."""
    rows: list[str] = field(default_factory=list)
    """Rows as written."""
    frozen: dict[str, str] = field(default_factory=dict)
    """As ``create`` takes them."""
    changeable: dict[str, str] = field(default_factory=dict)
    """As ``create`` takes them."""


SETTINGS: dict[str, dict[str, Any]] = {
    "strict": {
        "groups_per_step": 2,
        "max_staleness": 2,
        "window": 1,
        "late": "wait",
        "steps": 1000,
    },
    "window": {
        "groups_per_step": 2,
        "max_staleness": 3,
        "window": 3,
        "late": "drop",
        "steps": 1000,
    },
    "waits": {
        "groups_per_step": 2,
        "max_staleness": 1,
        "window": 2,
        "late": "wait",
        "steps": 1000,
        "least_verdicts": 1,
        "traces_when": "all_failed",
    },
    "passes": {"groups_per_step": 3, "max_staleness": 3, "window": 1, "late": "wait", "passes": 3},
    "last": {"groups_per_step": 2, "max_staleness": 2, "window": 1, "late": "wait", "steps": 6},
}
"""Ledgers with groups in every state."""
OTHERS = ("ended", "draining", "fresh", "offline", "none")
"""Further ones, mostly empty."""


def a_group(lease: Lease, step: int | None, chance: random.Random, **changes: Any) -> Group:
    """A graded group of two samples."""

    def sample(reward: float, verdict: Verdict) -> Sample:
        length = chance.randrange(1, 6)
        return Sample(
            tokens=np.arange(length, dtype=np.int32),
            source=np.zeros(length, np.uint8),
            logprobs=np.full(length, -0.5, np.float32),
            spans=() if step is None else (VersionSpan(term=1, step=step, start=0, end=length),),
            finish_reason=FinishReason.STOP,
            sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
            text="2",
            reward=reward,
            verdict=verdict,
            components={},
            extracted=None,
            grader=None,
        )

    values: dict[str, Any] = {
        "group_id": lease.group_id,
        "attempt": lease.attempt,
        "worker": "rollout-0",
        "problem_id": lease.problem_id,
        "prompt_tokens": np.arange(3, dtype=np.int32),
        "prompt_text": "1+1=?",
        "gold": "2",
        "data_source": "miniature",
        "samples": (sample(1.0, Verdict.CORRECT), sample(0.0, Verdict.WRONG)),
        "trace_ids": ("a/0#0",) if chance.random() < 0.3 else (),
        "extra": {},
    }
    return Group(**{**values, **changes})


class Builder:
    """Makes the worlds of one run id on a server and keeps their dumps there."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.restore = store.redis.script_load(RESTORE)
        self.worlds: dict[str, World] = {}

    def build(self) -> dict[str, World]:
        """All of them."""
        for name in SETTINGS:
            self._keep(name, self._full(name))
        self.put("strict")
        ledger = Ledger(self.store, "rollout-0")
        ledger.end("a test", ledger.term())
        self._keep("ended", self._know("ended", ledger))
        self.put("strict")
        RunStore(self.store).set_state("draining")
        self._keep("draining", self._know("draining", ledger))
        self._clear()
        self._keep("fresh", self._know("fresh", self._created(SETTINGS["window"])))
        self._clear()
        made = self._created({**SETTINGS["strict"], "offline": True})
        self._keep("offline", self._know("offline", made))
        self._clear()
        none = World(name="none", frozen=self.worlds["fresh"].frozen)
        none.changeable = self.worlds["fresh"].changeable
        self._keep("none", none)
        return self.worlds

    def put(self, name: str, leases: str = "alive", silence: str = "heard") -> None:
        """Puts a world back in place of what is there."""
        self.store.redis.evalsha(self.restore, 1, self.store.key(""), name, leases, silence)

    def _clear(self) -> None:
        for key in self.store.redis.scan_iter("tandem:*"):
            self.store.redis.unlink(key)

    def _keep(self, name: str, world: World) -> None:
        redis = self.store.redis
        place = f"fuzz:world:{name}"
        redis.delete(place, f"fuzz:ttl:{name}")
        for key in redis.keys("tandem:*"):
            if b":answers:" not in key:
                redis.hset(place, key, redis.dump(key))
                if redis.ttl(key) > 0:
                    redis.sadd(f"fuzz:ttl:{name}", key)
        self.worlds[name] = world

    def _created(self, settings: dict[str, Any]) -> Ledger:
        values: dict[str, Any] = {
            "sources": (("a", 7, 1), ("b", 3, 1)),
            "seed": 7,
            "data_digest": "d",
            "group_size": 2,
            "max_attempts": 2,
            "lease_seconds": 120.0,
            **settings,
        }
        run = RunStore(self.store)
        for source, size, _ in values["sources"]:
            run.put_problems(
                Problem(
                    problem_id=f"{source}/{row}",
                    prompt_text="p",
                    prompt_tokens=np.arange(3, dtype=np.int32),
                    gold="2",
                    data_source="miniature",
                    ability="math",
                    trace_ids=(),
                    extra={},
                )
                for row in range(size)
            )
        ledger = Ledger(self.store, "rollout-0")
        ledger.create(LedgerSettings(**values))
        ledger.new_term()
        return ledger

    def _full(self, name: str) -> World:
        self._clear()
        ledger = self._created(SETTINGS[name])
        size = SETTINGS[name]["groups_per_step"]
        term = ledger.new_term()
        other = Ledger(self.store, "rollout-1")

        def lease(held: int, count: int, by: Ledger = ledger) -> list[Lease]:
            return list(by.lease(Version(term=term, step=held), count).leases)

        def commit(leases: list[Lease], step: int | None, **changes: Any) -> None:
            ledger.commit_many([a_group(one, step, self.chance, **changes) for one in leases])

        for step in range(1, 5):
            (first,) = lease(step - 1, 1)
            if step == 2:  # fails until it is given up
                for _ in range(2):
                    ledger.give_back(first.group_id, first.attempt, reason="broke", failed=True)
                    again = lease(step - 1, 1)
                    first = again[0] if again else first
                commit([first], step - 1)
            elif step == 3:
                commit([first], None, samples=())  # ungraded
            else:
                commit([first], step - 1)
            while ledger.counts()["graded"] < size:
                commit(lease(step - 1, 1), step - 1)
            ledger.take(step, term)
            if step == 3:
                ledger.quarantine(step, term, "its loss isn't finite: é", 0)
            elif step < 4:
                ledger.confirm(step, term)
        ledger.durable(1, term)
        # Step 4 is taken and neither trained nor quarantined.
        made = lease(4, 3) + lease(4, 2, other)
        commit(made[1:2], 4)
        commit(made[2:3], None)
        if name in ("waits", "last"):  # ready to be cut
            commit(made[:1], 4)
        else:
            ledger.give_back(made[0].group_id, made[0].attempt, reason="drained")
        if name == "window":
            lease(4, 4)
            lease(4, 1, other)
        runs, members = RunStore(self.store), Members(self.store)
        for member in ("learner", "rollout-0", "rollout-1"):
            members.register(member.partition("-")[0], member, {"pid": 1, "term": term})
        for number in range(4):
            runs.request_evaluation(
                EvaluationRequest(id=f"heldout@{number}", set_name="heldout", step=number), term
            )
        for _ in range(EVALUATION_FAILURES):  # given up; its last claim is fresh each time
            runs.claim_evaluation("rollout-1", Version(term=term, step=0))
            self.store.redis.hset(self.store.key("evaluation_claims"), "heldout@0", "9 rollout-1")
            runs.give_back_evaluation("heldout@0", "rollout-1", reason="broke: é", failed=True)
        runs.claim_evaluation("rollout-0", Version(term=term, step=1))
        runs.finish_evaluation("heldout@3", a_result("heldout@3", 3))
        runs.count_restart("rollout-1", "killed")
        world = self._know(name, ledger)
        for serial, attempt, _ in world.leases:
            digest = f"{self.chance.getrandbits(64):016x}"
            key = self.store.key(f"payload:{ledger.order.id_of(serial)}:{attempt}:{digest}")
            self.store.redis.set(key, b"p", ex=600)
            world.unclaimed.append((serial, attempt, digest))
        return world

    def _know(self, name: str, ledger: Ledger) -> World:
        redis, key = self.store.redis, self.store.key
        meta = {k.decode(): v.decode() for k, v in redis.hgetall(key("meta")).items()}
        settings = LedgerSettings.from_fields(meta)
        world = World(
            name=name,
            length=settings.order().pass_length,
            size=settings.groups_per_step,
            term=int(meta["term"]),
            journalled=int(meta["journalled"]),
            cursor=int(meta["cursor"]),
            frozen=settings.frozen_fields(),
            changeable=settings.changeable_fields(),
        )
        for serial in map(int, redis.zrange(key("leased"), 0, -1)):
            attempt, holder = redis.hmget(key(f"group:{serial}"), "attempt", "holder")
            world.leases.append((serial, int(attempt), holder.decode()))
        for name_ in redis.keys(key("payload:*")):
            id_, attempt, digest = name_.decode().split(":")[-3:]
            world.payloads.append((ledger.order.serial(id_), int(attempt), digest))
        world.dead = [int(serial) for serial in redis.hkeys(key("dead"))]
        rows = redis.hgetall(key("rows"))
        world.rows = [rows[step].decode() for step in sorted(rows, key=int)]
        return world


def a_result(id_: str, step: int) -> EvaluationResult:
    """A result of an evaluation."""
    return EvaluationResult(
        id=id_,
        set_name="heldout",
        step=step,
        accuracy=0.5,
        problems=3,
        format_share=1.0,
        mean_length=4.0,
        seconds=1.0,
        member="rollout-0",
    )


def row_text(step: int, groups: list[dict[str, Any]], short: bool = False) -> str:
    """A row as the journal holds it."""
    return json.dumps({"step": step, "short": short, "groups": groups})
