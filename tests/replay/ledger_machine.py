"""The real ledger and its model side by side: each thing that can happen, done to both.

What happens, and when, is chosen in ``ledger_histories.py``.

Time goes on only where the machine says so (see ``with_clock`` in ``ledger_state.py``), so that
deadlines are met to the millisecond.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import xxhash
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant
from ledger_model import Fenced, LedgerModel, Refused
from ledger_state import Recording, expected, observe

from tandem.common import wire
from tandem.common.errors import FencedError, StoreError
from tandem.common.records import Verdict, Version
from tandem.common.run_folder import JoinInfo
from tandem.replay import connection
from tandem.replay.connection import Command
from tandem.replay.dead_letters import retry
from tandem.replay.ledger import Ledger, LedgerSettings, Row, Waiting
from tandem.replay.members import Members
from tandem.replay.rules import Limits

START_MS = 1_700_000_000_000
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
        b"duplicate",
        b"superseded",
        b"resend",
        b"rejected unknown: this group was never leased",
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
"""Scripts that keep the answer for a repeat, and answers of theirs that say that nothing changed."""


@st.composite
def run_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a ledger, and the first position that its workers come to."""
    staleness = draw(st.sampled_from([1, 0, 3]))
    in_passes = draw(st.sampled_from([False, False, True]))
    pass_length = draw(st.sampled_from([3, 5]))
    return {
        "sources": (("a", pass_length, 1),),
        "seed": 7,
        "data_digest": "d",
        "group_size": 2,
        "groups_per_step": draw(st.sampled_from([2, 1, 3])),
        "max_staleness": staleness,
        "window": draw(st.sampled_from(range(staleness + 1, 0, -1))),
        "late": draw(st.sampled_from(["wait", "drop"])),
        "max_attempts": draw(st.sampled_from([2, 1, 3])),
        "steps": None if in_passes else draw(st.sampled_from([1000, 1000, 2])),
        "passes": draw(st.integers(1, 3)) if in_passes else None,
        "lease_seconds": 10.0,
        "group_deadline_seconds": draw(st.sampled_from([4.0, 25.0])),
        "max_inflight": draw(st.sampled_from([100] * 5 + [2])),
        "group_bytes": 100,
        # Fields of the final states are kept in buckets of 256.
        "cursor": 0 if in_passes else draw(st.sampled_from([0, 0, 254])),
    }


class LedgerMachine(RuleBasedStateMachine):
    """One history. ``make`` and ``join`` are set by whoever runs it."""

    make: Any
    join: JoinInfo

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
        self.client.close()

    # -- means -----------------------------------------------------------------------------

    def store(self) -> Recording:
        return Recording(self.note, self.client, self.join)

    def load_scripts(self) -> None:
        """So that each history begins with the same server, whatever one did before it."""
        digests = map(connection.script_digest, connection.script_names())
        if not all(self.client.script_exists(*digests)):
            self.store()._load_scripts()

    def note(self, name: str, command: Command, answer: Any) -> None:
        if self.twice:
            self.repeat(command, answer)
        if name in KEPT and answer not in KEPT[name]:
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
        self.settings = LedgerSettings(**settings)
        self.learner = Ledger(self.store(), "learner-0")
        self.stores = [self.store() for _ in WORKERS]
        self.ledgers = [
            Ledger(store, name) for store, name in zip(self.stores, WORKERS, strict=True)
        ]
        self.fresh = set(range(len(WORKERS)))
        self.members = Members(self.learner.store)
        key = self.learner.store.key
        self.client.set(key("clock"), START_MS)
        length = settings["sources"][0][1]
        self.client.zadd(key("problem_ids:a"), {f"a/{i}": i for i in range(length)})
        self.learner.create(self.settings)
        self.model = LedgerModel(
            limits=self.limits(), pass_length=length, now=START_MS, cursor=cursor
        )
        self.first = cursor
        if cursor:
            self.client.hset(key("meta"), "cursor", cursor)
        self.new_learner()

    def limits(self) -> Limits:
        s = self.settings
        return Limits(
            groups_per_step=s.groups_per_step,
            max_staleness=s.max_staleness,
            window=s.window,
            late=s.late,
            max_attempts=s.max_attempts,
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

    # -- workers ---------------------------------------------------------------------------

    def lease(
        self, worker: int, lag: int = 0, count: int = 9, memory: tuple[int, int] = (0, 0)
    ) -> None:
        held = max(0, self.model.journalled - lag)
        ledger, name, holder = self.ledgers[worker], WORKERS[worker], self.holder(worker)
        ledger._memory = (float("inf"), *memory)

        def model() -> Any:
            if worker in self.fresh:
                self.model.reclaim(name, holder)
            return self.model.lease(name, holder, held, count, *memory)

        def real() -> Any:
            reply = ledger.lease(Version(term=self.model.term, step=held), count)
            assert reply.now_ms == self.model.now
            assert (reply.state, reply.journalled) == (self.model.state, self.model.journalled)
            leases = [
                (ledger.order.serial(one.group_id), one.attempt, one.deadline_ms)
                for one in reply.leases
            ]
            return leases, reply.wait

        leases, _ = self.both(real, model)
        self.fresh.discard(worker)
        self.handed += [Handed(s, attempt, worker, holder, held) for s, attempt, _ in leases]

    def commit(
        self,
        chosen: list[Handed],
        oldest: str = "held",
        verdicts: int = 2,
        shift: int = 0,
        flavour: int = 1,
    ) -> None:
        if not chosen:
            return
        groups, asked = [], []
        for one in chosen:
            step = {"held": one.held, "newer": self.model.journalled, "older": one.held - 1}.get(
                oldest
            )
            if step is not None and step < 0:
                step = 0
            group = self.group(one.serial, one.attempt + shift, step, verdicts, flavour)
            groups.append(group)
            payload = wire.encode(group)
            asked.append((one, group, payload, step))

        def model() -> list[tuple[str, str]]:
            return [
                self.model.commit(
                    one.serial,
                    group.attempt,
                    digest=xxhash.xxh3_64_hexdigest(payload),
                    nbytes=len(payload),
                    oldest=step,
                    verdicts=verdicts,
                    traces=group.trace_ids,
                )
                for one, group, payload, step in asked
            ]

        def real() -> list[tuple[str, str]]:
            return [
                (receipt.result.value, receipt.detail.partition(":")[0])
                for receipt in self.learner.commit_many(groups)
            ]

        self.both(real, model)

    def group(
        self, serial: int, attempt: int, step: int | None, verdicts: int, flavour: int
    ) -> Any:
        sample = self.make.sample
        samples = [sample(step, reward=0.25 * flavour)] * verdicts
        samples += [sample(step, reward=None, verdict=Verdict.CRASHED)] * (2 - verdicts)

        class Of:
            group_id = self.model.id_of(serial)
            problem_id = "a/0"

        Of.attempt = max(1, attempt)  # type: ignore[attr-defined]
        traces = (f"a/{flavour}#0",) if flavour == 2 else ()
        return self.make.graded(Of, step, samples=tuple(samples), trace_ids=traces)

    def commit_without_payload(self, one: Handed, flavour: int) -> None:
        group = self.group(one.serial, one.attempt, one.held, 2, flavour)
        payload, _, args = self.learner._prepare(group)
        self.both(
            lambda: self.learner.store.script("commit", *args).decode().partition(" ")[0],
            lambda: self.model.commit(
                one.serial,
                one.attempt,
                digest=xxhash.xxh3_64_hexdigest(payload),
                nbytes=len(payload),
                oldest=one.held,
                verdicts=2,
                traces=group.trace_ids,
                put=False,
            )[0],
        )

    def renew(self, worker: int, serials: Sequence[int]) -> None:
        ledger = self.ledgers[worker]
        self.both(
            lambda: [
                ledger.order.serial(name) for name in ledger.renew(map(self.model.id_of, serials))
            ],
            lambda: self.model.renew(self.holder(worker), list(serials)),
        )

    def renew_all(self) -> None:
        """Each worker renews what it holds."""
        for worker in range(len(WORKERS)):
            holder = self.holder(worker)
            serials = [s for s, group in self.model.of("leased").items() if group.holder == holder]
            if serials:
                self.renew(worker, serials)

    def give_back(self, worker: int, serial: int, attempt: int, *, failed: bool) -> None:
        self.both(
            lambda: self.ledgers[worker].give_back(
                self.model.id_of(serial), attempt, reason="drain", failed=failed
            ),
            lambda: self.model.give_back(
                self.holder(worker), serial, attempt, "drain", failed=failed
            ),
        )

    def restart_worker(self, worker: int) -> None:
        self.stores[worker] = self.store()
        self.ledgers[worker] = Ledger(self.stores[worker], WORKERS[worker])
        self.fresh.add(worker)

    def reclaim(self, ledger: Ledger, worker: int, keeps: str = "") -> None:
        of = None if keeps else WORKERS[worker]
        self.both(
            lambda: [ledger.order.serial(name) for name in ledger.reclaim(of)],
            lambda: self.model.reclaim(WORKERS[worker], keeps),
        )

    def beat(self) -> None:
        self.both(lambda: self.members.register("rollout", "rollout-0", {}), self.model.beat)

    # -- time, the server and its host -----------------------------------------------------

    def pass_time(self, ms: int) -> None:
        self.model.now += ms
        self.client.set(self.learner.store.key("clock"), self.model.now)

    def new_life(self, *, forgets: bool) -> None:
        """The server starts again. Unless it ``forgets`` its scripts, nobody notices at once."""
        self.lives += 1
        self.model.new_life = True
        self.client.set(self.learner.store.key("server"), f"life {self.lives}")
        if forgets:
            self.scripts_gone = True
            self.client.script_flush()

    def save(self) -> None:
        """What is in Redis now is on disk: of the rest, a crash of the host leaves nothing."""
        names = self.client.keys("*")
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.dump(name).pttl(name)
        found = pipe.execute()
        kept = {n: (found[2 * i], max(0, found[2 * i + 1])) for i, n in enumerate(names)}
        self.saved = (kept, copy.deepcopy(self.model))

    def crash(self) -> None:
        """The host crashes."""
        kept, model = self.saved
        now = self.model.now
        pipe = self.client.pipeline(transaction=False)
        pipe.flushall()
        for name, (data, ttl) in kept.items():
            pipe.restore(name, ttl, data)
        pipe.execute()
        self.model = copy.deepcopy(model)
        self.new_life(forgets=True)
        self.forget_after_crash(now)

    def forget_after_crash(self, now: int) -> None:
        self.pass_time(now - self.model.now)
        self.lost = True
        self.acted.clear()

    # -- the learner -----------------------------------------------------------------------

    def new_learner(self) -> None:
        """A new term, then the journal's rows that Redis lacks, then those that the journal lacks."""
        ledger, before = self.learner, self.last_term
        self.last_term = self.both(
            lambda: ledger.new_term(before), lambda: self.model.new_term(before)
        )
        self.reassert([row for row in self.journal if row["step"] > self.model.trimmed])
        self.lost = False
        assert ledger.counts() == self.model.counts()
        for step in range(len(self.journal) + 1, self.model.journalled + 1):
            self.take(step)

    def reassert(self, rows: list[dict[str, Any]], old: bool = False) -> None:
        term = self.term(old)
        self.both(
            lambda: self.learner.reassert(map(Row.from_dict, rows), term),
            lambda: self.model.reassert(rows, term),
        )

    def term(self, old: bool) -> int:
        return self.last_term - 1 if old else self.last_term

    def next_step(self) -> int:
        """What the learner would take next. Where Redis lost rows, it goes by what it trained."""
        return (len(self.journal) if self.lost else self.model.journalled) + 1

    def take(self, step: int, old: bool = False) -> bool:
        """Whether there is a row."""
        step, term = max(0, step), self.term(old)
        if self.lost and self.model.journalled < step <= len(self.journal):
            return False  # it is in the journal: a learner that starts writes it again first

        def real() -> tuple[str, Any]:
            found = self.learner.take(step, term)
            if isinstance(found, Row):
                return "row", (found.to_dict(), found.quarantined)
            if found.ended:
                return "ended", None
            return "waiting", self._waited_for(found)

        answer = self.both(real, lambda: self.model.take(step, term))
        if answer is None or answer[0] != "row":
            return False
        row = answer[1][0]
        if step == len(self.journal) + 1:
            self.journal.append(row)
        assert self.journal[step - 1] == row, (self.journal, row)
        return True

    def _waited_for(self, found: Waiting) -> tuple[int, str]:
        serial = self.model.serial_of(found.group_id)
        group = self.model.live.get(serial)
        assert found.state == ("admitted" if group is None else group.state)
        assert found.worker == ("" if group is None else group.worker)
        why = {
            "strict order or the window holds": "window",
            "the cut would make it too stale": "staleness",
        }
        return serial, why.get(found.reason.partition(";")[0], "groups")

    def _after(self, name: str, *args: Any, old: bool) -> None:
        step_or_reason = max(0, args[0]) if isinstance(args[0], int) else args[0]
        args = (step_or_reason, self.term(old), *args[1:])
        self.both(
            lambda: getattr(self.learner, name)(*args),
            lambda: getattr(self.model, name)(*args),
            silent=True,
        )

    def confirm(self, step: int, old: bool = False) -> None:
        self._after("confirm", step, old=old)

    def quarantine(self, step: int, old: bool = False) -> None:
        self._after("quarantine", step, "loss is nan", old=old)

    def durable(self, step: int, old: bool = False) -> None:
        self._after("durable", step, old=old)

    def end(self, old: bool = False) -> None:
        self._after("end", "done", old=old)

    def retry(self, serials: list[int]) -> None:
        names = list(map(self.model.id_of, serials))
        self.both(
            lambda: [self.model.serial_of(name) for name in retry(self.learner, names).returned],
            lambda: self.model.retry(serials),
        )

    def create(self, **changes: Any) -> None:
        """The run is resumed with other settings."""
        fields = {name: getattr(self.settings, name) for name in self.settings.__slots__}
        self.settings = LedgerSettings(**{**fields, **changes})
        self.both(
            lambda: self.learner.create(self.settings), lambda: self.model.create(self.limits())
        )

    def set_state(self, state: str) -> None:
        store = self.learner.store
        self.both(
            lambda: store.script("set_state", state),
            lambda: self.model.set_state(state),
            silent=True,
        )
