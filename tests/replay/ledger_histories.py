"""What may happen to a ledger, for hypothesis to make histories of."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from ledger_machine import WORKERS, Handed, run_settings
from ledger_moves import Moves

from tandem.replay.rules.leases import SILENCE_MS

workers = st.integers(0, len(WORKERS) - 1)
places = st.sampled_from([0, 1, 0, 2, 0, 1, 3, 5])
"""Of a lease handed out, see ``pick``."""
slacks = st.sampled_from([9, 0, 9, 1, -1])
"""Steps by which a worker's version may be older still, if what it leases is taken next."""
rarely = st.sampled_from([False] * 7 + [True])
thens = st.sampled_from(["", "beat", "renew", "take", "lease"])
"""What is the first to happen at a chosen time."""


class Histories(Moves):
    """One history."""

    # -- a run as it should be -------------------------------------------------------------

    @initialize(
        settings=run_settings(),
        twice=st.booleans(),
        steps=st.integers(0, 4),
        leases=st.integers(0, 4),
    )
    def a_run(self, settings: dict[str, Any], twice: bool, steps: int, leases: int) -> None:
        """That has come so far."""
        self.begin(settings)
        self.new_learner()
        self.twice = twice
        self.steps(["confirm"] * steps, 0)
        if leases:
            self.lease(0, 0, leases)
            self.lease(1, 1, leases)
        self.save()

    @rule(
        outcomes=st.lists(
            st.sampled_from(["confirm", "confirm", "quarantine", "durable", ""]),
            min_size=1,
            max_size=3,
        ),
        lag=st.sampled_from([0, 0, 0, 1]),
    )
    def all_goes_well(self, outcomes: list[str], lag: int) -> None:
        """Whole steps, so that histories come far."""
        self.steps(outcomes, lag)

    def steps(self, outcomes: list[str], lag: int) -> None:
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

    @rule(worker=workers, slack=slacks, count=st.integers(1, 7))
    def a_worker_leases(self, worker: int, slack: int, count: int) -> None:
        self.lease(worker, self.lag(slack), count)

    def lag(self, slack: int) -> int:
        return max(0, self.settings.max_staleness - slack)

    @rule(
        but=st.integers(0, 3),
        most=st.integers(1, 6),
        oldest=st.sampled_from(["held", "held", "older"]),
    )
    def what_is_leased_commits(self, but: int, most: int, oldest: str) -> None:
        """But for the lowest, which are late; maybe with tokens too old by a step."""
        self.commit(self.held()[but:][:most], oldest)

    @rule(
        worker=workers,
        lag=st.sampled_from([0, 0, 0, 1]),
        but=st.sampled_from([[0, 1], [0], [0, 1, 2], [1], [0, 2], [0, 1, 2, 3]]),
        rows=st.sampled_from([3, 2, 4]),
        first=st.sampled_from(["", "back", "moved"]),
    )
    def rows_pass_over_the_late(
        self, worker: int, lag: int, but: list[int], rows: int, first: str
    ) -> None:
        """The first of the late has come ``back``, or has ``moved`` to another worker."""
        for _ in range(rows):
            self.lease(worker, lag)
            held = self.held()
            if first and len(held) > but[0]:
                one = held[but[0]]
                self.give_back(one.worker, one.serial, one.attempt, failed=False)
                if first == "moved":
                    self.lease(1, 0, 1)
            self.commit([one for place, one in enumerate(held) if place not in but])
            self.take(self.next_step())

    @rule(ahead=st.sampled_from([1] * 6 + [0, -1, -2, 2]), old=rarely)
    def a_row_is_taken(self, ahead: int, old: bool) -> None:
        self.take(self.next_step() - 1 + ahead, old)

    @rule(
        how=st.sampled_from(["confirm", "quarantine", "durable"]),
        ahead=st.sampled_from([0, 0, 0, -1, -2, 1]),
        old=rarely,
        back=st.integers(0, 2),
    )
    def a_row_is_settled(self, how: str, ahead: int, old: bool, back: int) -> None:
        step = self.model.journalled + ahead
        if how == "confirm":
            self.confirm(step, old)
        elif how == "quarantine":
            self.quarantine(step, old, back)
        else:
            self.durable(step, old)

    # -- workers and their mishaps ---------------------------------------------------------

    @rule(worker=workers, used=st.sampled_from([450, 0, 451, 550, 650, 751]))
    def a_worker_leases_when_redis_is_nearly_full(self, worker: int, used: int) -> None:
        self.lease(worker, 0, 3, (used, 1000))

    @precondition(lambda self: self.handed)
    @rule(
        places=st.lists(places, min_size=1, max_size=3),
        oldest=st.sampled_from(["held", "held", "newer", "older", "none"]),
        verdicts=st.sampled_from([2, 2, 2, 1, 0]),
        shift=st.sampled_from([0, 0, 0, 1, -1]),
        flavour=st.integers(0, 4),
    )
    def groups_are_committed(
        self, places: list[int], oldest: str, verdicts: int, shift: int, flavour: int
    ) -> None:
        """Late, twice, by attempts that were never given, or with tokens older than they may be."""
        chosen = list(dict.fromkeys(self.pick(place) for place in places))
        self.commit(chosen, oldest, verdicts, shift, flavour)

    @rule(place=places, flavour=st.integers(0, 2))
    def an_odd_commit(self, place: int, flavour: int) -> None:
        """Of a group that was never leased, or without its payload."""
        if flavour == 0 or not self.handed:
            self.commit([Handed(self.model.cursor + place, 1, 0, "", 0)])
        else:
            self.commit_without_payload(self.pick(place), flavour)

    @precondition(lambda self: self.handed)
    @rule(worker=workers, places=st.lists(places, min_size=1, max_size=4))
    def a_worker_renews(self, worker: int, places: list[int]) -> None:
        self.renew(worker, list(dict.fromkeys(self.pick(place).serial for place in places)))

    @precondition(lambda self: self.handed)
    @rule(
        place=places,
        failed=st.booleans(),
        shift=st.sampled_from([0, 0, 0, 1, -1]),
        by=st.sampled_from([None, None, 0, 1, 2]),
        commits=st.booleans(),
    )
    def a_lease_is_given_back(
        self, place: int, failed: bool, shift: int, by: int | None, commits: bool
    ) -> None:
        """And ``commits`` all the same, before anybody else has it."""
        one = self.pick(place)
        worker = one.worker if by is None else by
        self.give_back(worker, one.serial, one.attempt + shift, failed=failed)
        if commits:
            self.commit([one])

    @precondition(lambda self: self.held())
    @rule(place=st.integers(0, 2), worker=workers, slack=slacks)
    def a_lease_goes_to_another_worker(self, place: int, worker: int, slack: int) -> None:
        held = self.held()
        one = held[place % len(held)]
        self.give_back(one.worker, one.serial, one.attempt, failed=False)
        self.lease(worker, self.lag(slack), 1)

    @rule(worker=workers, how=st.sampled_from(["starts", "starts, leases", "reclaims"]))
    def a_worker_dies(self, worker: int, how: str) -> None:
        if how == "reclaims":
            self.reclaim(worker)
        else:
            self.restart_worker(worker)
            if how == "starts, leases":
                self.lease(worker, 0, 2)

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
    @rule(heard=st.booleans(), off=st.sampled_from([0, -1]), then=thens)
    def time_goes_by_to_a_deadline(self, heard: bool, off: int, then: str) -> None:
        leases = self.model.of("leased").values()
        self.go_on_to([(one.deadline or 0) + off for one in leases], heard=heard)
        self.first_then(then)

    @precondition(lambda self: self.model.of("leased"))
    @rule(heard=st.booleans(), off=st.sampled_from([0, -1]))
    def time_goes_by_to_a_cap(self, heard: bool, off: int) -> None:
        """To where the first lease can be renewed no more."""
        grace = self.model.limits.lease_ms
        leases = self.model.of("leased").values()
        self.go_on_to([one.cap + grace + off for one in leases], heard=heard)
        self.renew_all()

    def go_on_to(self, ends: list[int], *, heard: bool) -> None:
        ahead = [end for end in ends if end > self.model.now]
        if ahead:
            self.go_on(min(ahead) - self.model.now, heard=heard)

    @rule(off=st.sampled_from([0, -1]), then=thens)
    def nobody_is_heard_of(self, off: int, then: str) -> None:
        self.beat()
        self.pass_time(SILENCE_MS + off)
        self.first_then(then)

    # -- the server, the learner and the run -----------------------------------------------

    @rule(what=st.sampled_from(["restart", "restart, scripts kept", "saved", "crash"]))
    def the_server(self, what: str) -> None:
        if what == "saved":
            self.save()
        elif what == "crash":
            self.crash()
        else:
            self.new_life(forgets=what == "restart")

    @rule(
        most=st.integers(0, 6),
        leases=st.booleans(),
        verdicts=st.sampled_from([2, 1]),
        flavour=st.integers(1, 2),
    )
    def the_host_crashes(self, most: int, leases: bool, verdicts: int, flavour: int) -> None:
        """Workers commit what Redis no longer knows of, or do it again, ahead of the learner."""
        self.crash()
        if most:
            self.commit(list({one.serial: one for one in self.handed}.values())[-most:])
        if leases:
            self.lease(0)
            self.commit(self.held()[:most], "held", verdicts, 0, flavour)
        self.new_learner()

    @rule(lose=rarely)
    def a_learner_starts(self, lose: bool) -> None:
        """``lose``: its last life was killed between a row in Redis and the row in the journal."""
        if lose and len(self.journal) in self.model.taken.values():
            self.journal.pop()
        self.new_learner()

    @rule(finishes=st.booleans())
    def a_group_is_given_up(self, finishes: bool) -> None:
        """The first one that is leased; ``finishes``: rows are made of the others."""
        self.lease(0, 0, 1)
        first = self.held()[:1]
        for _ in range(self.settings.max_attempts):
            for one in self.held():
                if first and one.serial == first[0].serial:
                    self.give_back(one.worker, one.serial, one.attempt, failed=True)
            self.lease(0, 0, 1)
        if finishes:
            self.steps(["confirm"] * 3, 0)

    @precondition(lambda self: self.model.dead)
    @rule(most=st.integers(1, 3), other=st.booleans(), leased=st.booleans())
    def dead_letters_are_put_back(self, most: int, other: bool, leased: bool) -> None:
        """``other``: together with a group that is none."""
        serials = sorted(self.model.dead)[:most]
        self.retry(serials + [s for s in self.model.live if other][:1])
        if leased:
            self.lease(0)

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

    @rule(
        what=st.sampled_from(["", "", "draining", "ended", "ended", "ended for good"]),
        old=rarely,
        more=st.integers(0, 2),
        lease_seconds=st.sampled_from([10.0, 5.0]),
        max_inflight=st.sampled_from([100, 3]),
    )
    def the_run_is_resumed(
        self, what: str, old: bool, more: int, lease_seconds: float, max_inflight: int
    ) -> None:
        """After it was drained or ended, or just so."""
        if what == "draining":
            self.set_state(what)
        elif what:
            self.end(old)
        if what:
            self.lease(0, 0, 2)
            self.take(self.next_step())
        if what == "ended for good":
            return
        ends = "steps" if self.settings.steps else "passes"
        self.create(
            lease_seconds=lease_seconds,
            max_inflight=max_inflight,
            **{ends: (getattr(self.settings, ends) or 0) + more},
        )
        self.set_state("running")


def copy_of(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "groups": [dict(entry) for entry in row["groups"]]}
