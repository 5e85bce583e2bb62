"""Each thing that can happen to a ledger, done to the real one and to its model.

What happens, and when, is chosen in ``ledger_histories.py``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from ledger_machine import TRACES, WORKERS, Handed, LedgerMachine

from tandem.common.records import Verdict, Version
from tandem.replay.dead_letters import retry
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings, Row, Waiting
from tandem.replay.payloads import Payload


def of_samples(group: Any) -> dict[str, Any]:
    """What a commit says of the samples' verdicts."""
    verdicts = [sample.verdict for sample in group.samples]
    return {
        "correct": verdicts.count(Verdict.CORRECT),
        "own_rows": tuple(i for i, v in enumerate(verdicts) if v is not Verdict.CRASHED),
        "rewards": tuple(s.reward for s in group.samples if s.reward is not None),
    }


class Moves(LedgerMachine):
    """What can be done."""

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
        flavour: int | None = None,
    ) -> None:
        """Without a flavour groups have one by their number."""
        if not chosen:
            return
        groups, asked = [], []
        for one in chosen:
            step = {"held": one.held, "newer": self.model.journalled, "older": one.held - 1}.get(
                oldest
            )
            if step is not None and step < 0:
                step = 0
            kind = one.serial % len(TRACES) if flavour is None else flavour
            group = self.group(one.serial, one.attempt + shift, step, verdicts, kind)
            groups.append(group)
            payload = Payload.of(group, one.serial)
            asked.append((one, group, payload, step))

        def model() -> list[tuple[str, str]]:
            return [
                self.model.commit(
                    one.serial,
                    group.attempt,
                    digest=payload.digest,
                    nbytes=len(payload.data),
                    oldest=step,
                    verdicts=verdicts,
                    traces=group.trace_ids,
                    **of_samples(group),
                    payload="inline" if payload.is_inline else "put",
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
        """Of flavour 0 and 2 a sample is correct, of the others all failed."""
        sample = self.make.sample
        wrong = sample(step, reward=0.0, verdict=Verdict.WRONG)
        crashed = sample(step, reward=None, verdict=Verdict.CRASHED)
        samples = [crashed] * (2 - verdicts) + [wrong] * verdicts
        if flavour in (0, 2) and verdicts:
            samples[-1] = sample(step, reward=0.5)

        class Of:
            group_id = self.model.id_of(serial)
            problem_id = "a/0"

        Of.attempt = max(1, attempt)  # type: ignore[attr-defined]
        return self.make.graded(Of, step, samples=tuple(samples), trace_ids=TRACES[flavour])

    def commit_without_payload(self, one: Handed, flavour: int) -> None:
        group = self.group(one.serial, one.attempt, one.held, 2, flavour)
        payload = Payload.of(group, one.serial)

        def real() -> str:
            told = self.learner.store.script("commit", *payload.figures, b"")
            return str(json.loads(told)["words"][0].partition(" ")[0])

        self.both(
            real,
            lambda: self.model.commit(
                one.serial,
                one.attempt,
                digest=payload.digest,
                nbytes=len(payload.data),
                oldest=one.held,
                verdicts=2,
                traces=group.trace_ids,
                **of_samples(group),
                payload="none",
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

    def reclaim(self, worker: int) -> None:
        ledger = self.ledgers[worker]
        self.both(
            lambda: [ledger.order.serial(name) for name in ledger.reclaim()],
            lambda: self.model.reclaim(WORKERS[worker], self.holder(worker)),
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

    def quarantine(self, step: int, old: bool = False, back: int = 0) -> None:
        """``back``: how many steps before it the newest checkpoint is."""
        self._after("quarantine", step, "loss is nan", max(0, step - back), old=old)

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
