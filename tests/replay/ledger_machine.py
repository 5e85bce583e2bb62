"""The real ledger and its model side by side: called together, compared after each step.

Time goes on only where the machine says so (see ``with_clock`` in ``ledger_state.py``), so that
deadlines are met to the millisecond.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant
from ledger_model import Fenced, LedgerModel, Refused
from ledger_state import Recording, expected, observe

from tandem.common.errors import FencedError, StoreError
from tandem.common.run_folder import JoinInfo
from tandem.replay import connection, payloads
from tandem.replay.connection import Command
from tandem.replay.ledger import REJECTIONS, Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.members import Members
from tandem.replay.rules.leases import Limits

START_MS = 1_700_000_000_000
INLINE_BYTES = payloads.INLINE_BYTES
WORKERS = ("rollout-0", "rollout-1", "rollout-2")


@dataclass(frozen=True, slots=True)
class Handed:
    """A lease as a worker was given it."""

    serial: int
    attempt: int
    worker: int
    holder: str
    held: int


KEPT: dict[str, tuple[Any, ...]] = {
    "commit": (
        "duplicate",
        "superseded",
        "resend",
        "rejected unknown: this group was never leased",
        *(f"rejected {reason}" for reason in REJECTIONS),  # it had been
    ),
    "confirm": (0,),
    "create": (),
    "end": (),
    "give_back": (0,),
    "new_term": (),
    "quarantine": (0,),
    "reassert": (0,),
    "reclaim": ([],),
    "retry": (),
    "set_state": (),
}
"""Scripts that keep the answer for a repeat, and answers of theirs that say that nothing changed; of a
commit, words of its answer."""


def changed_something(name: str, answer: Any) -> bool:
    """Whether it is an answer that the script keeps."""
    if name == "commit":
        return not set(json.loads(answer)["words"]) <= set(KEPT[name])
    return name in KEPT and answer not in KEPT[name]


KINDS: dict[str, dict[str, Any]] = {
    "strict": {"max_staleness": 0, "window": 1, "steps": 1000},
    "ahead": {"max_staleness": 1, "window": 1, "steps": 1000},
    "window": {"max_staleness": 1, "window": 2, "steps": 1000},
    "wide": {"max_staleness": 3, "window": 2, "steps": 1000},
    "widest": {"max_staleness": 3, "window": 4, "steps": 1000},
    "steps": {"max_staleness": 1, "window": 1, "steps": 2},
    "passes": {"max_staleness": 1, "window": 1, "passes": 2},
    "wide passes": {"max_staleness": 3, "window": 3, "passes": 3},
}
"""Settings that a history has; the others are chosen."""


TRACES: tuple[tuple[str, ...], ...] = (
    (),
    ("a/1#0",),
    ("a/2#0", "a/2#1"),
    ("a/1#0", "a/2#0"),
    ("a/1#0", "a/2#1"),
)
"""Of a group, by its flavour."""
TRACE_REWARDS = {"a/1#0": 0.0, "a/2#0": 0.5}
"""Of "a/2#1" no reward is known."""


@st.composite
def run_settings(draw: st.DrawFn) -> dict[str, Any]:
    """The settings that ``KINDS`` leave open, and the first position that workers come to."""
    return {
        "sources": (("a", draw(st.sampled_from([3, 5])), 1),),
        "seed": 7,
        "data_digest": "d",
        "group_size": 2,
        "groups_per_step": draw(st.sampled_from([2, 1, 3])),
        "late": draw(st.sampled_from(["wait", "drop"])),
        "max_attempts": draw(st.sampled_from([2, 1, 3])),
        "least_verdicts": draw(st.sampled_from([2, 1])),
        "traces_when": draw(st.sampled_from(["always", "all_failed"])),
        "lease_seconds": 10.0,
        "group_deadline_seconds": draw(st.sampled_from([4.0, 25.0])),
        "max_inflight": draw(st.sampled_from([100] * 5 + [2])),
        "dynamic_sampling": draw(st.sampled_from([0, 1, 3])),
        "mean_rewards": draw(st.sampled_from([None, (0.1, 1.0), (0.25, 0.3), (0.0, 0.2)])),
        "group_bytes": 100,
        # Fields of the final states are kept in buckets of 256.
        "cursor": draw(st.sampled_from([0, 0, 254])),
    }


class LedgerMachine(RuleBasedStateMachine):
    """One history. ``make``, ``join`` and ``kind`` are set by whoever runs it."""

    make: Any
    join: JoinInfo
    kind: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis(port=self.join.port, password=self.join.password)
        self.load_scripts()
        self.client.flushall()
        self.handed: list[Handed] = []
        self.journal: list[dict[str, Any]] = []
        self.last_term = 0
        self.scripts_gone = False
        self.saved: tuple[dict[bytes, tuple[bytes, int]], LedgerModel]
        self.lost = False
        self.lives = 0
        self.twice = False
        """Every call is sent twice, as if its answer were lost on the way."""
        self.acted: list[tuple[Command, Any]] = []
        """Calls that changed something, and so are told what they were told if they come again."""

    def teardown(self) -> None:
        payloads.INLINE_BYTES = INLINE_BYTES
        self.client.close()

    # -- means -----------------------------------------------------------------------------

    def store(self) -> Recording:
        return Recording(self.note, self.client, self.join)

    def load_scripts(self) -> None:
        """So that each history begins with the same server, whatever one did before it."""
        digests = map(connection.script_digest, connection.script_names())
        if not all(self.client.script_exists(*digests)):
            self.store()._load_scripts(self.client)

    def note(self, name: str, command: Command, answer: Any) -> None:
        if self.twice:
            self.repeat(command, answer)
        if changed_something(name, answer):
            self.acted.append((command, answer))
            del self.acted[:-8]

    def repeat(self, command: Command, answer: Any) -> None:
        """A repeat gets the first answer, and changes nothing (which the next comparison sees)."""
        again = self.client.execute_command(*command)
        assert again == answer, f"{answer}, and told {again} as it came again: {command[5:]}"

    def both(
        self, real: Callable[[], Any], model: Callable[[], Any], *, silent: bool = False
    ) -> Any:
        """Calls both; their answers (but if ``silent``), or what they refuse, must be the same."""
        if self.scripts_gone:
            self.scripts_gone = False
            self.model.server_started()
        refusal: Refused | None = None
        wanted = None
        try:
            wanted = model()
        except Refused as error:
            refusal = error
        try:
            answer = real()
        except FencedError:
            assert isinstance(refusal, Fenced), f"fenced; the model says {refusal or wanted}"
            return None
        except StoreError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert refusal is not None, f"refused, and the model says {wanted}: {said}"
            assert str(refusal) in said
            return None
        assert refusal is None, f"{answer}, and the model refuses: {refusal!r}"
        assert silent or answer == wanted, f"{answer}; the model says {wanted}"
        return answer

    def begin(self, settings: dict[str, Any]) -> None:
        cursor = settings.pop("cursor")
        # In half of the histories payloads come with their commit, in the others before it.
        payloads.INLINE_BYTES = 0 if settings["late"] == "drop" else INLINE_BYTES
        if "passes" in self.kind:
            cursor = 0  # else its groups would be used up
        self.settings = LedgerSettings(**settings | self.kind)
        self.learner = Ledger(self.store(), "learner-0")
        self.stores = [self.store() for _ in WORKERS]
        self.ledgers = [
            Ledger(store, name) for store, name in zip(self.stores, WORKERS, strict=True)
        ]
        self.fresh = set(range(len(WORKERS)))
        """Workers that have not leased in their present life."""
        self.members = Members(self.learner.store)
        key = self.learner.store.key
        self.client.set(key("clock"), START_MS)
        length = settings["sources"][0][1]
        self.client.set(key("problem_rows:a"), struct.pack(f"<{length}I", *range(length)))
        rewards = {name: repr(reward) for name, reward in TRACE_REWARDS.items()}
        self.client.hset(key("trace_rewards"), mapping=rewards)
        self.learner.create(self.settings)
        self.model = LedgerModel(
            limits=self.limits(),
            pass_length=length,
            now=START_MS,
            cursor=cursor,
            trace_rewards=TRACE_REWARDS,
        )
        self.first = cursor
        if cursor:
            self.client.hset(key("meta"), "cursor", cursor)

    def limits(self) -> Limits:
        s = self.settings
        return Limits(
            groups_per_step=s.groups_per_step,
            max_staleness=s.max_staleness,
            window=s.window,
            late=s.late,
            max_attempts=s.max_attempts,
            least_verdicts=s.least_verdicts,
            group_size=s.group_size,
            dynamic_sampling=s.dynamic_sampling,
            mean_rewards=s.mean_rewards,
            seed=s.seed,
            traces_when=s.traces_when,
            max_inflight=s.max_inflight,
            steps=s.steps or 0,
            total_groups=(s.passes or 0) * s.sources[0][1],
            lease_ms=int(s.lease_seconds * 1000),
            group_deadline_ms=int(s.group_deadline_seconds * 1000),
            group_bytes=s.group_bytes,
        )

    def holder(self, worker: int) -> str:
        return f"{WORKERS[worker]}@{self.stores[worker].incarnation}"

    def pick(self, place: int) -> Handed:
        """A lease handed out: first those that are held, ascending, then the newest."""
        held = self.held()
        others = [one for one in reversed(self.handed) if one not in held]
        known = held + others
        return known[place % len(known)]

    def held(self) -> list[Handed]:
        """Leases that the ledger and their worker both know of, ascending."""
        leased = self.model.of("leased")
        found = {
            one.serial: one
            for one in self.handed
            if one.serial in leased and leased[one.serial].attempt == one.attempt
        }
        return [found[serial] for serial in sorted(found)]

    @invariant()
    def states_are_the_same(self) -> None:
        found, wanted = observe(self.learner.store), expected(self.model)
        for name in wanted:
            assert found[name] == wanted[name], f"{name}: {found[name]} should be {wanted[name]}"

    @invariant()
    def every_group_is_in_one_state(self) -> None:
        live, final = set(self.model.live), set(self.model.final)
        assert not live & final
        assert live | final == set(range(self.first, self.model.cursor))
        ids = [entry["id"] for row in self.journal for entry in row["groups"]]
        assert len(ids) == len(set(ids)), "a group is in two rows"
