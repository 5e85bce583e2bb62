"""What may happen to a ledger, for hypothesis to make histories of."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from ledger_machine import WORKERS, Handed, LedgerMachine

from tandem.replay.rules import SILENCE_MS

workers = st.integers(0, len(WORKERS) - 1)
places = st.integers(0, 9)
"""Of a lease handed out, see ``pick``."""
lags = st.sampled_from([0, 1, 0, 2, 3, 4])
"""Steps by which a worker's version is behind J."""
rarely = st.sampled_from([False] * 7 + [True])
late_steps = st.sampled_from([0, 0, 0, -1, -2, 1])
"""Of a row, from J on."""
thens = st.sampled_from(["", "beat", "renew", "take", "lease"])
"""What is the first to happen at a chosen time."""


class Histories(LedgerMachine):
    """One history."""

    # -- a run as it should be -------------------------------------------------------------

    @rule(
        outcomes=st.lists(
            st.sampled_from(["confirm", "confirm", "quarantine", "durable", ""]),
            min_size=1,
            max_size=3,
        ),
        lag=st.sampled_from([0, 0, 0, 1]),
    )
    def steps(self, outcomes: list[str], lag: int) -> None:
        """Whole steps, so that histories come far."""
        for outcome in outcomes:
            if self.lost:
                return
            self.lease(0, lag)
            self.commit(self.held())
            step = self.next_step()
            if not self.take(step):
                return
            if outcome == "quarantine":
                self.quarantine(step)
            elif outcome:
                self.confirm(step)
            if outcome == "durable":
                self.durable(step)

    @rule(worker=workers, lag=lags, count=st.integers(1, 7))
    def a_worker_leases(self, worker: int, lag: int, count: int) -> None:
        self.lease(worker, lag, count)

    @rule(but=st.integers(0, 3), most=st.integers(1, 6))
    def what_is_leased_commits(self, but: int, most: int) -> None:
        """But for the lowest, which are late."""
        self.commit(self.held()[but:][:most])

    @rule(
        worker=workers,
        lag=lags,
        but=st.lists(st.integers(0, 3), max_size=2, unique=True),
        rows=st.integers(1, 2),
    )
    def rows_pass_over_the_late(self, worker: int, lag: int, but: list[int], rows: int) -> None:
        for _ in range(rows):
            self.lease(worker, lag)
            held = self.held()
            self.commit([one for place, one in enumerate(held) if place not in but])
            self.take(self.next_step())

    @rule(ahead=st.sampled_from([1] * 6 + [0, -1, -2, 2]), old=rarely)
    def a_row_is_taken(self, ahead: int, old: bool) -> None:
        self.take(self.next_step() - 1 + ahead, old)

    @rule(ahead=late_steps, old=rarely)
    def a_row_is_confirmed(self, ahead: int, old: bool) -> None:
        self.confirm(self.model.journalled + ahead, old)

    @rule(ahead=late_steps, old=rarely)
    def a_row_is_quarantined(self, ahead: int, old: bool) -> None:
        self.quarantine(self.model.journalled + ahead, old)

    @rule(ahead=late_steps, old=rarely)
    def a_checkpoint_is_durable(self, ahead: int, old: bool) -> None:
        self.durable(self.model.journalled + ahead, old)

    # -- workers and their mishaps ---------------------------------------------------------

    @rule(worker=workers, used=st.sampled_from([450, 0, 451, 550, 650, 751]))
    def a_worker_leases_when_redis_is_nearly_full(self, worker: int, used: int) -> None:
        self.lease(worker, 0, 3, (used, 1000))

    @precondition(lambda self: self.handed)
    @rule(
        places=st.lists(places, min_size=1, max_size=3, unique=True),
        oldest=st.sampled_from(["held", "held", "newer", "older", "none"]),
        verdicts=st.sampled_from([2, 2, 2, 1, 0]),
        shift=st.sampled_from([0, 0, 0, 1, -1]),
        flavour=st.integers(1, 2),
    )
    def groups_are_committed(
        self, places: list[int], oldest: str, verdicts: int, shift: int, flavour: int
    ) -> None:
        """Late, twice, by attempts that were never given, or with tokens older than they may be."""
        chosen = list(dict.fromkeys(self.pick(place) for place in places))
        self.commit(chosen, oldest, verdicts, shift, flavour)

    @rule(ahead=st.integers(0, 9))
    def a_group_is_committed_that_was_never_leased(self, ahead: int) -> None:
        self.commit([Handed(self.model.cursor + ahead, 1, 0, "", 0)])

    @precondition(lambda self: self.handed)
    @rule(place=places, flavour=st.integers(1, 2))
    def a_group_is_committed_without_its_payload(self, place: int, flavour: int) -> None:
        self.commit_without_payload(self.pick(place), flavour)

    @precondition(lambda self: self.handed)
    @rule(worker=workers, places=st.lists(places, min_size=1, max_size=4, unique=True))
    def a_worker_renews(self, worker: int, places: list[int]) -> None:
        self.renew(worker, list(dict.fromkeys(self.pick(place).serial for place in places)))

    @precondition(lambda self: self.handed)
    @rule(
        place=places,
        failed=st.booleans(),
        shift=st.sampled_from([0, 0, 0, 1, -1]),
        by=st.one_of(st.none(), workers),
    )
    def a_lease_is_given_back(self, place: int, failed: bool, shift: int, by: int | None) -> None:
        one = self.pick(place)
        worker = one.worker if by is None else by
        self.give_back(worker, one.serial, one.attempt + shift, failed=failed)

    @precondition(lambda self: self.held())
    @rule(place=st.integers(0, 2), worker=workers, lag=lags)
    def a_lease_goes_to_another_worker(self, place: int, worker: int, lag: int) -> None:
        held = self.held()
        one = held[place % len(held)]
        self.give_back(one.worker, one.serial, one.attempt, failed=False)
        self.lease(worker, lag, 1)

    @rule(worker=workers, leases=st.booleans())
    def a_worker_starts_again(self, worker: int, leases: bool) -> None:
        self.restart_worker(worker)
        if leases:
            self.lease(worker, 0, 2)

    @rule(worker=workers)
    def a_worker_is_seen_dead(self, worker: int) -> None:
        self.reclaim(self.learner, worker)

    @rule(worker=workers)
    def a_worker_reclaims(self, worker: int) -> None:
        self.reclaim(self.ledgers[worker], worker, self.holder(worker))

    @rule()
    def a_member_is_heard_of(self) -> None:
        self.beat()

    @precondition(lambda self: self.acted)
    @rule(place=places)
    def an_earlier_call_comes_again(self, place: int) -> None:
        """Others have gone on from what it did."""
        if not self.scripts_gone:
            self.repeat(*self.acted[-1 - place % len(self.acted)])

    # -- time ------------------------------------------------------------------------------

    def first_then(self, then: str) -> None:
        if then == "beat":
            self.beat()
        elif then == "renew":
            self.renew_all()
        elif then == "take":
            self.take(self.next_step())
        elif then == "lease":
            self.lease(1, 0, 2)

    def go_on(self, ms: int, *, heard: bool) -> None:
        while heard and ms >= SILENCE_MS:
            self.pass_time(SILENCE_MS - 1)
            ms -= SILENCE_MS - 1
            self.beat()
        self.pass_time(ms)

    @rule(ms=st.sampled_from([1, 1000, 4000, 10_000, 40_000]), heard=st.booleans())
    def time_goes_by(self, ms: int, heard: bool) -> None:
        self.go_on(ms, heard=heard)

    @precondition(lambda self: self.model.of("leased"))
    @rule(cap=st.booleans(), heard=st.booleans(), off=st.sampled_from([0, -1]), then=thens)
    def time_goes_by_to_a_deadline(self, cap: bool, heard: bool, off: int, then: str) -> None:
        """To the next one of a lease, or to where the first one can be renewed no more."""
        grace = self.model.limits.lease_ms
        leases = self.model.of("leased").values()
        ends = [(one.cap + grace if cap else one.deadline or 0) + off for one in leases]
        ahead = [end for end in ends if end > self.model.now]
        if ahead:
            self.go_on(min(ahead) - self.model.now, heard=heard)
            self.first_then(then)

    @rule(off=st.sampled_from([0, -1]), then=thens)
    def nobody_is_heard_of(self, off: int, then: str) -> None:
        self.beat()
        self.pass_time(SILENCE_MS + off)
        self.first_then(then)

    # -- the server, the learner and the run -----------------------------------------------

    @rule(forgets=st.booleans())
    def the_server_starts_again(self, forgets: bool) -> None:
        self.new_life(forgets=forgets)

    @rule()
    def the_state_is_on_disk(self) -> None:
        self.save()

    @rule()
    def the_host_crashes(self) -> None:
        self.crash()

    @rule(lose=rarely)
    def a_learner_starts(self, lose: bool) -> None:
        """``lose``: its last life was killed between a row in Redis and the row in the journal."""
        if lose and len(self.journal) in self.model.taken.values():
            self.journal.pop()
        self.new_learner()

    @precondition(lambda self: self.journal)
    @rule(gap=st.booleans(), old=rarely)
    def a_learner_comes_with_another_journal(self, gap: bool, old: bool) -> None:
        row = copy_of(self.journal[-1])
        if gap:
            row["step"] = self.model.journalled + 2
        elif row["step"] > self.model.journalled:
            return
        else:
            row["groups"][-1]["digest"] = "f" * 16
        self.reassert([row], old)

    @rule(sure=rarely, old=rarely)
    def the_run_is_ended(self, sure: bool, old: bool) -> None:
        if sure or old:
            self.end(old)

    @rule(
        more=st.integers(0, 2),
        lease_seconds=st.sampled_from([10.0, 5.0]),
        max_inflight=st.sampled_from([100, 3]),
    )
    def the_run_is_resumed(self, more: int, lease_seconds: float, max_inflight: int) -> None:
        ends = "steps" if self.settings.steps else "passes"
        self.create(
            lease_seconds=lease_seconds,
            max_inflight=max_inflight,
            **{ends: (getattr(self.settings, ends) or 0) + more},
        )

    @rule(state=st.sampled_from(["running", "running", "draining"]))
    def the_run_is_told(self, state: str) -> None:
        self.set_state(state)


def copy_of(row: dict) -> dict:
    return {**row, "groups": [dict(entry) for entry in row["groups"]]}
