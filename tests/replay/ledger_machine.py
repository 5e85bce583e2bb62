"""Drives the real ledger and its model side by side; hypothesis chooses what happens next.

Time goes on only where the machine says so (see ``with_clock`` in ``ledger_state.py``), so that
deadlines are met to the millisecond.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis
import xxhash
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_model import Fenced, LedgerModel, Refused
from ledger_state import Recording, expected, observe

from tandem.common import wire
from tandem.common.errors import FencedError, StoreError
from tandem.common.records import Verdict, Version
from tandem.common.run_folder import JoinInfo
from tandem.replay.connection import Command
from tandem.replay.ledger import Ledger, LedgerSettings, Row, Waiting
from tandem.replay.members import Members
from tandem.replay.rules import SILENCE_MS, Limits

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
    "set_state": (),
}
"""Scripts that keep the answer for a repeat, and answers of theirs that say that nothing changed."""


@st.composite
def run_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a ledger, and the first position that its workers come to."""
    staleness = draw(st.sampled_from([0, 1, 3]))
    in_passes = draw(st.booleans())
    pass_length = draw(st.sampled_from([3, 5]))
    return {
        "sources": (("a", pass_length, 1),),
        "seed": 7,
        "data_digest": "d",
        "group_size": 2,
        "groups_per_step": draw(st.integers(1, 3)),
        "max_staleness": staleness,
        "window": draw(st.integers(1, staleness + 1)),
        "late": draw(st.sampled_from(["wait", "drop"])),
        "max_attempts": draw(st.integers(1, 3)),
        "steps": None if in_passes else draw(st.sampled_from([1000, 1000, 2])),
        "passes": draw(st.integers(1, 3)) if in_passes else None,
        "lease_seconds": 10.0,
        "group_deadline_seconds": draw(st.sampled_from([4.0, 25.0])),
        "max_inflight": draw(st.sampled_from([100, 100, 2])),
        "group_bytes": 100,
        # Fields of the final states are kept in buckets of 256.
        "cursor": 0 if in_passes else draw(st.sampled_from([0, 0, 254])),
    }


steps = st.integers(-3, 2)
"""Of a step, from J on."""
workers = st.integers(0, len(WORKERS) - 1)
picks = st.integers(0, 9)
"""Of a lease handed out: 0 is the newest."""
rarely = st.sampled_from([False] * 7 + [True])


class LedgerMachine(RuleBasedStateMachine):
    """One history. ``make`` and ``join`` are set by whoever runs it."""

    make: Any
    join: JoinInfo

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis(port=self.join.port, password=self.join.password)
        self.client.flushall()
        self.handed: list[Handed] = []
        self.journal: list[dict[str, Any]] = []
        self.last_term = 0
        self.scripts_gone = False
        self.saved: tuple[dict[bytes, tuple[bytes, int]], LedgerModel] | None = None
        self.lost = False
        self.lives = 0
        self.last: tuple[Command, Any] | None = None
        """The newest call, and its answer."""
        self.acted: list[tuple[Command, Any]] = []
        """Calls that changed something, and so are told what they were told if they come again."""

    def teardown(self) -> None:
        self.client.close()

    # -- means -----------------------------------------------------------------------------

    def store(self) -> Recording:
        return Recording(self.note, self.client, self.join)

    def note(self, name: str, command: Command, answer: Any) -> None:
        self.last = (command, answer)
        if name in KEPT and answer not in KEPT[name]:
            self.acted.append((command, answer))
            del self.acted[:-8]

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

    @initialize(settings=run_settings())
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
        self.learner_starts(lose=False)

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
        return self.handed[-1 - place % len(self.handed)]

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

    def _lease(self, worker: int, lag: int, count: int, memory: tuple[int, int] = (0, 0)) -> None:
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

    @rule(worker=workers, lag=st.integers(0, 4), count=st.integers(1, 7))
    def lease(self, worker: int, lag: int, count: int) -> None:
        self._lease(worker, lag, count)

    @rule(worker=workers, used=st.sampled_from([0, 450, 451, 550, 650, 751]))
    def lease_when_nearly_full(self, worker: int, used: int) -> None:
        self._lease(worker, 0, 3, (used, 1000))

    @precondition(lambda self: self.handed)
    @rule(
        places=st.lists(picks, min_size=1, max_size=3, unique=True),
        oldest=st.sampled_from(["held"] * 4 + ["newer", "older", "none"]),
        verdicts=st.sampled_from([2, 2, 2, 2, 1, 0]),
        shift=st.sampled_from([0] * 6 + [1, -1]),
        flavour=st.integers(1, 2),
    )
    def commit(
        self, places: list[int], oldest: str, verdicts: int, shift: int, flavour: int
    ) -> None:
        chosen = list(dict.fromkeys(self.pick(place) for place in places))
        self._commit(chosen, oldest, verdicts, shift, flavour)

    def _commit(
        self,
        chosen: list[Handed],
        oldest: str = "held",
        verdicts: int = 2,
        shift: int = 0,
        flavour: int = 1,
    ) -> None:
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

    @rule(serial=st.integers(0, 9))
    def commit_what_was_never_leased(self, serial: int) -> None:
        self._commit([Handed(self.model.cursor + serial, 1, 0, "", 0)])

    @precondition(lambda self: self.handed)
    @rule(place=picks, flavour=st.integers(1, 2))
    def commit_without_a_payload(self, place: int, flavour: int) -> None:
        one = self.pick(place)
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

    @rule(most=st.integers(1, 6), skip=st.integers(0, 2))
    def commit_what_is_leased(self, most: int, skip: int) -> None:
        leased = self.model.of("leased")
        chosen = [h for h in self.handed if h.serial in leased][skip:]
        chosen = [h for h in chosen if leased[h.serial].attempt == h.attempt][:most]
        if chosen:
            self._commit(list({h.serial: h for h in chosen}.values()))

    @precondition(lambda self: self.handed)
    @rule(worker=workers, places=st.lists(picks, min_size=1, max_size=4))
    def renew(self, worker: int, places: list[int]) -> None:
        serials = list(dict.fromkeys(self.pick(place).serial for place in places))
        self._renew(worker, serials)

    def _renew(self, worker: int, serials: list[int]) -> None:
        ledger = self.ledgers[worker]
        self.both(
            lambda: [
                ledger.order.serial(name) for name in ledger.renew(map(self.model.id_of, serials))
            ],
            lambda: self.model.renew(self.holder(worker), serials),
        )

    @rule(worker=workers)
    def renew_all(self, worker: int) -> None:
        holder = self.holder(worker)
        serials = [s for s, group in self.model.of("leased").items() if group.holder == holder]
        if serials:
            self._renew(worker, serials)

    @precondition(lambda self: self.handed)
    @rule(
        place=picks,
        failed=st.booleans(),
        shift=st.sampled_from([0, 0, 0, 1]),
        by=st.one_of(st.none(), workers),
    )
    def give_back(self, place: int, failed: bool, shift: int, by: int | None) -> None:
        one = self.pick(place)
        worker = one.worker if by is None else by
        self.both(
            lambda: self.ledgers[worker].give_back(
                self.model.id_of(one.serial), one.attempt + shift, reason="drain", failed=failed
            ),
            lambda: self.model.give_back(
                self.holder(worker), one.serial, one.attempt + shift, "drain", failed=failed
            ),
        )

    @rule(worker=workers)
    def a_worker_starts_again(self, worker: int) -> None:
        self.stores[worker] = self.store()
        self.ledgers[worker] = Ledger(self.stores[worker], WORKERS[worker])
        self.fresh.add(worker)

    @rule(worker=workers)
    def a_worker_is_seen_dead(self, worker: int) -> None:
        ledger = self.learner
        self.both(
            lambda: [ledger.order.serial(name) for name in ledger.reclaim(WORKERS[worker])],
            lambda: self.model.reclaim(WORKERS[worker], ""),
        )

    @rule()
    def a_member_is_heard_of(self) -> None:
        self.both(lambda: self.members.register("rollout", "rollout-0", {}), self.model.beat)

    # -- time and the server ---------------------------------------------------------------

    def _pass_time(self, ms: int) -> None:
        self.model.now += ms
        self.last = None
        self.client.set(self.learner.store.key("clock"), self.model.now)

    @rule(ms=st.sampled_from([1, 1000, 4000, SILENCE_MS - 1, SILENCE_MS, 10_000, 40_000]))
    def time_goes_by(self, ms: int) -> None:
        self._pass_time(ms)

    @rule(heard=st.booleans(), off=st.sampled_from([-1, 0, 0]))
    def time_goes_by_to_a_deadline(self, heard: bool, off: int) -> None:
        """To the next one; members are heard of on the way or not."""
        due = [g.deadline for g in self.model.of("leased").values() if g.deadline is not None]
        ahead = min((d for d in due if d + off > self.model.now), default=None)
        if ahead is None:
            return
        ms = ahead + off - self.model.now
        self._go(ms, heard)

    @rule(heard=st.booleans(), off=st.sampled_from([-1, 0, 0]), all_renewed=st.booleans())
    def time_goes_by_to_a_cap(self, heard: bool, off: int, all_renewed: bool) -> None:
        """To where the first lease can be renewed no more."""
        grace = self.model.limits.lease_ms
        caps = [group.cap + grace + off for group in self.model.of("leased").values()]
        ahead = min((cap for cap in caps if cap > self.model.now), default=None)
        if ahead is None:
            return
        self._go(ahead - self.model.now, heard)
        if all_renewed:
            for worker in range(len(WORKERS)):
                self.renew_all(worker)

    def _go(self, ms: int, heard: bool) -> None:
        while heard and ms >= SILENCE_MS:
            self._pass_time(SILENCE_MS - 1)
            ms -= SILENCE_MS - 1
            self.a_member_is_heard_of()
        self._pass_time(ms)

    @rule(forgets=st.booleans())
    def the_server_starts_again(self, forgets: bool) -> None:
        self.new_life(forgets)

    def new_life(self, forgets: bool) -> None:
        """``forgets`` its scripts: else it is found out when a deadline is judged."""
        self.lives += 1
        self.last = None
        self.model.new_life = True
        self.client.set(self.learner.store.key("server"), f"life {self.lives}")
        if forgets:
            self.scripts_gone = True
            self.client.script_flush()

    @rule()
    def the_state_is_on_disk(self) -> None:
        """From here on, what is written may be lost when the host crashes."""
        names = self.client.keys("*")
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.dump(name).pttl(name)
        found = pipe.execute()
        kept = {n: (found[2 * i], max(0, found[2 * i + 1])) for i, n in enumerate(names)}
        self.saved = (kept, copy.deepcopy(self.model))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def the_host_crashes(self) -> None:
        assert self.saved is not None
        kept, model = self.saved
        now = self.model.now
        pipe = self.client.pipeline(transaction=False)
        pipe.flushall()
        for name, (data, ttl) in kept.items():
            pipe.restore(name, ttl, data)
        pipe.execute()
        self.model = copy.deepcopy(model)
        self.model.now = now
        self.client.set(self.learner.store.key("clock"), now)
        self.lost = True
        self.acted.clear()
        self.new_life(forgets=True)

    # -- the learner -----------------------------------------------------------------------

    @rule(lose=rarely)
    def learner_starts(self, lose: bool) -> None:
        """A new term, and the journal's rows are written again where Redis lacks them.

        ``lose``: its last life was killed between a row in Redis and the row in the journal.
        """
        if lose and len(self.journal) in self.model.taken.values():
            self.journal.pop()
        ledger = self.learner
        term = self.both(
            lambda: ledger.new_term(self.last_term), lambda: self.model.new_term(self.last_term)
        )
        self.last_term = term
        rows = [row for row in self.journal if row["step"] > self.model.trimmed]
        self.both(
            lambda: ledger.reassert(map(Row.from_dict, rows), term),
            lambda: self.model.reassert(rows, term),
        )
        self.lost = False
        assert ledger.counts() == self.model.counts()
        for step in range(len(self.journal) + 1, self.model.journalled + 1):
            self._take(step, term)

    def term(self, old: bool) -> int:
        return self.last_term - 1 if old else self.last_term

    @rule(ahead=st.sampled_from([1] * 6 + [0, -1, -2, 2]), old=rarely)
    def take(self, ahead: int, old: bool) -> None:
        step = (len(self.journal) if self.lost else self.model.journalled) + ahead
        self._take(step, self.term(old))

    def _take(self, step: int, term: int) -> None:
        def real() -> tuple[str, Any]:
            found = self.learner.take(step, term)
            if isinstance(found, Row):
                return "row", (found.to_dict(), found.quarantined)
            if found.ended:
                return "ended", None
            return "waiting", self._waited_for(found)

        answer = self.both(real, lambda: self.model.take(step, term))
        if answer is not None and answer[0] == "row":
            row = answer[1][0]
            if step == len(self.journal) + 1:
                self.journal.append(row)
            assert self.journal[step - 1] == row

    def _waited_for(self, found: Waiting) -> tuple[int, str]:
        serial = self.model.serial_of(found.group_id)
        group = self.model.live.get(serial)
        assert found.state == ("admitted" if group is None else group.state)
        assert found.worker == ("" if group is None else group.worker)
        why = {"strict order or the window holds": "window"} | {
            "the cut would make it too stale": "staleness"
        }
        return serial, why.get(found.reason.partition(";")[0], "groups")

    @rule(ahead=steps, old=rarely)
    def confirm(self, ahead: int, old: bool) -> None:
        step, term = self.model.journalled + ahead, self.term(old)
        self.both(
            lambda: self.learner.confirm(step, term),
            lambda: self.model.confirm(step, term),
            silent=True,
        )

    @rule(ahead=steps, old=rarely)
    def quarantine(self, ahead: int, old: bool) -> None:
        step, term = self.model.journalled + ahead, self.term(old)
        self.both(
            lambda: self.learner.quarantine(step, term, "loss is nan"),
            lambda: self.model.quarantine(step, term, "loss is nan"),
            silent=True,
        )

    @rule(ahead=steps, old=rarely)
    def durable(self, ahead: int, old: bool) -> None:
        step, term = self.model.journalled + ahead, self.term(old)
        self.both(
            lambda: self.learner.durable(step, term),
            lambda: self.model.durable(step, term),
            silent=True,
        )

    @rule(steps=st.integers(1, 3))
    def all_goes_well(self, steps: int) -> None:
        """Steps without any mishap, so that histories come far."""
        for _ in range(steps):
            if self.lost:
                return
            self._lease(0, 0, 9)
            self.commit_what_is_leased(9, 0)
            self.take(1, False)
            self.confirm(0, False)

    @rule(old=rarely)
    def end(self, old: bool) -> None:
        term = self.term(old)
        self.both(lambda: self.learner.end("done", term), lambda: self.model.end("done", term))

    @rule(more=st.integers(0, 3), lease_seconds=st.sampled_from([10.0, 5.0]))
    def the_run_is_resumed_with_other_settings(self, more: int, lease_seconds: float) -> None:
        changed = {name: getattr(self.settings, name) for name in self.settings.__slots__}
        changed["lease_seconds"] = lease_seconds
        changed["max_inflight"] = 100 - self.settings.max_inflight + 3
        for name in ("steps", "passes"):
            if changed[name]:
                changed[name] += more
        self.settings = LedgerSettings(**changed)
        self.both(
            lambda: self.learner.create(self.settings), lambda: self.model.create(self.limits())
        )

    @rule(state=st.sampled_from(["running", "running", "draining"]))
    def the_state_of_the_run_is_set(self, state: str) -> None:
        store = self.learner.store
        self.both(
            lambda: store.script("set_state", state),
            lambda: self.model.set_state(state),
            silent=True,
        )

    # -- the way between -------------------------------------------------------------------

    def _is_repeated(self, command: Command, answer: Any) -> None:
        """Its answer was lost on the way: a repeat gets the first answer and changes nothing."""
        assert self.client.execute_command(*command) == answer, command[5:]

    @rule()
    def the_last_call_is_repeated(self) -> None:
        if self.last is not None and not self.scripts_gone:
            self._is_repeated(*self.last)

    @precondition(lambda self: self.acted)
    @rule(place=st.integers(0, 7))
    def an_earlier_call_is_repeated(self, place: int) -> None:
        """It comes late: others have gone on from what it did."""
        if not self.scripts_gone:
            self._is_repeated(*self.acted[-1 - place % len(self.acted)])
