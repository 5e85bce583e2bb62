"""The ledger: every group is in one state, and each move between states is one script.

::

    admitted -> leased -> graded -> taken(n) -> trained
       ^          |          |          |
       +----------+          +----------+--> rejected(reason)
        expired, returned, revoked

The rules are in :mod:`tandem.replay.rules.leases`, the scripts in ``scripts/``, one a transition, each
with what must hold before and what holds after.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from redis.exceptions import OutOfMemoryError

from ..common.errors import StoreError, WireError
from ..common.records import CommitResult, Group, Version
from .answers import (
    read_committed,
    read_created,
    read_dead_letters,
    read_final,
    read_leases,
    read_settings,
    read_take,
    read_waiting,
)
from .connection import DEADLINE, Command, Store, readable_error
from .ledger_records import Lease, LeaseReply, LedgerSettings, Receipt, Row, Waiting
from .payloads import Payload, bare, chunks, group_of, payload_name
from .problems import ProblemIds
from .rules.leases import leases_stop
from .rules.order import Order

log = logging.getLogger("tandem.replay")

PAYLOAD_SECONDS = 600
"""Life of a payload that no commit has kept."""
COMMITS_PER_CALL = 64
"""Groups of one ``commit.lua``, which takes no more."""
TRIM_BUDGET = 2000
"""Payloads deleted by one call, about 2 ms of the server's time."""
MEMORY_SECONDS = 1.0
"""A worker asks Redis how full it is when its last answer is older than this."""

UNFIT = "REFUSED commit: "
"""Beginning of the error for a commit whose own content is wrong."""

REJECTIONS = ("stale", "no_signal", "quarantined", "attempts", "ungraded", "run_ended")
"""Every reason for which a group is rejected."""


class Ledger:
    """The ledger, as one member of the run uses it. Thread-safe.

    Example, with a worker's calls and then a learner's::

        reply = ledger.lease(held, 8)  # admitted -> leased
        ledger.commit(graded_group)  # leased -> graded
        row = ledger.take(step, term)  # graded -> taken(step)
        groups = ledger.fetch(row)
        ledger.confirm(step, term)  # taken -> trained
        ledger.durable(oldest_checkpoint, term)  # its payloads are deleted
    """

    def __init__(self, store: Store, member: str) -> None:
        self.store = store
        self.member = member
        self._settings: LedgerSettings | None = None
        self._order: Order | None = None
        self._ids: ProblemIds | None = None
        self._reclaimed = ""
        self._memory: tuple[float, int, int] = (-1e9, 0, 0)

    # -- the run ---------------------------------------------------------------------------

    def create(self, settings: LedgerSettings | Mapping[str, Any]) -> bool:
        """Creates the ledger, or joins it and updates the changeable settings.

        Returns:
            Whether it was created.

        Raises:
            StoreError: the ledger exists with other frozen settings; the message names them.
        """
        if not isinstance(settings, LedgerSettings):
            known = {f.name for f in fields(LedgerSettings)}
            unknown = sorted(settings.keys() - known)
            if unknown:
                raise StoreError(f"unknown ledger settings {unknown}; there are {sorted(known)}")
            settings = LedgerSettings(**settings)
        settings.check()
        frozen = settings.frozen_fields()
        raw = self.store.script(
            "create", json.dumps(frozen), json.dumps(settings.changeable_fields())
        )
        answer = read_created(raw)
        if answer.differ:
            differences = "; ".join(
                f"{name} is {held or 'unset'} there and {frozen[name]} here"
                for name, held in sorted(answer.differ.items())
            )
            raise StoreError(
                f"run {self.store.run_id} was begun with other settings: {differences}. Resume it "
                f"with those, or start over in another folder (`tandem start --fresh`)"
            )
        self._settings = None
        return answer.created

    @property
    def settings(self) -> LedgerSettings:
        """The settings as stored, read once.

        Raises:
            StoreError: this Redis holds no ledger of the run.
        """
        if self._settings is None:
            stored = self.store.call("hgetall", self.store.key("meta"))
            if b"created" not in stored:
                raise StoreError(
                    f"Redis at {self.store.address} holds no ledger of run {self.store.run_id}: "
                    f"start the run, or join with its own join file"
                )
            self._settings, self._order = read_settings(stored)
        return self._settings

    @property
    def order(self) -> Order:
        """The order of problems."""
        if self._order is None:
            self._order = self.settings.order()
        return self._order

    def problem_ids(self, group_ids: Sequence[str]) -> list[str]:
        """The problems of some groups."""
        return self._problems_at([Order.parse(group_id) for group_id in group_ids])

    def _problems_at(self, positions: Sequence[tuple[int, int]]) -> list[str]:
        """The problems at some positions of some passes."""
        places = [self.order.place(pass_, position) for pass_, position in positions]
        if self._ids is None:
            self._ids = ProblemIds(self.store, self.settings.sources)
        return self._ids.at(places)

    def end(self, reason: str, term: int) -> int:
        """Ends the run: leased, admitted and graded groups become ``rejected(run_ended)``."""
        return int(self.store.script("end", reason, term))

    # -- the worker's side -----------------------------------------------------------------

    def lease(self, held: Version, count: int) -> LeaseReply:
        """Asks for up to ``count`` groups; expired leases come before new positions.

        A process's first call reclaims what an earlier life of the same member held.
        """
        incarnation = self.store.incarnation
        if self._reclaimed != incarnation:
            self.reclaim()
            self._reclaimed = incarnation
        used, most = self._memory_use()
        raw = self.store.script(
            "lease", self.member, self._holder, held.term, held.step, count, used, most
        )
        answer = read_leases(raw)
        positions = [divmod(leased.serial, self.order.pass_length) for leased in answer.leases]
        leases = tuple(
            Lease(
                group_id=self.order.group_id(pass_, position),
                attempt=leased.attempt,
                problem_id=problem_id,
                deadline_ms=leased.deadline_ms,
            )
            for leased, (pass_, position), problem_id in zip(
                answer.leases, positions, self._problems_at(positions), strict=True
            )
        )
        return LeaseReply(
            leases=leases,
            state=answer.state,
            wait=answer.wait,
            journalled=answer.journalled,
            now_ms=answer.now,
            lease_seconds=answer.lease_ms / 1000,
        )

    def renew(self, group_ids: Iterable[str]) -> list[str]:
        """Extends the leases' deadlines; returns the groups that this worker has lost."""
        serials = [self.order.serial(group_id) for group_id in group_ids]
        if not serials:
            return []
        lost = self.store.script("renew", self._holder, *serials)
        return [self.order.id_of(int(serial)) for serial in lost]

    def give_back(
        self, group_id: str, attempt: int, *, reason: str = "returned", failed: bool = False
    ) -> bool:
        """Returns a lease. ``failed`` counts towards ``max_attempts``; a drain doesn't.

        Returns:
            False if the worker had lost it already.
        """
        return bool(
            self.store.script(
                "give_back",
                self._holder,
                self.order.serial(group_id),
                attempt,
                reason,
                int(failed),
            )
        )

    def reclaim(self) -> list[str]:
        """Takes back the leases of this member's earlier lives at once, as failed attempts, unless an outage
        may have ended those lives. Its present life keeps its own."""
        serials = self.store.script("reclaim", self.member, self._holder)
        return [self.order.id_of(int(serial)) for serial in serials]

    # -- the reward pool's side ------------------------------------------------------------

    def commit(self, group: Group) -> CommitResult:
        """Commits one graded group; see :meth:`commit_many`."""
        return self.commit_many([group])[0].result

    def commit_many(self, groups: Sequence[Group]) -> list[Receipt]:
        """Commits graded groups, in as few round trips as their bytes allow.

        A large payload travels in a plain ``SET`` before the script, which would block the server with
        it. Its key holds the digest of its bytes and is set only if it doesn't exist, so that a repeat
        can neither change nor expire what was committed.

        Returns:
            A final receipt for each; groups with too few own verdicts are rejected (ungraded), and so are those
            that grading has made unfit to be stored, say longer than a message may be.
        """
        receipts: dict[int, Receipt] = {}
        waiting: list[tuple[int, Payload]] = []
        unfit: dict[int, str] = {}
        for place, group in enumerate(groups):
            serial = self.order.serial(group.group_id)
            try:
                payload = Payload.of(group, serial)
            except WireError as error:
                log.warning(f"group {group.group_id} can't be stored as it was graded: {error}")
                unfit[place] = str(error)
                payload = Payload.of(bare(group), serial)
            waiting.append((place, payload))
        begun = time.monotonic()
        pause = 0.01
        while waiting:
            again = []
            for chunk in chunks(waiting, lambda item: len(item[1].data), COMMITS_PER_CALL):
                told = self._commit([payload for _, payload in chunk])
                for (place, payload), receipt in zip(chunk, told, strict=True):
                    if receipt is None:
                        again.append((place, payload))
                    else:
                        receipts[place] = receipt
            if again:
                if time.monotonic() - begun > DEADLINE:
                    raise StoreError(
                        f"Redis at {self.store.address} is full: {len(again)} groups could not be "
                        f"stored for {DEADLINE:.0f} s. Raise replay.maxmemory_mb, or let the "
                        f"learner catch up"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
            waiting = again
        for place, reason in unfit.items():
            if receipts[place].result is CommitResult.REJECTED:
                receipts[place] = Receipt(result=CommitResult.REJECTED, detail=reason)
        return [receipts[place] for place in range(len(groups))]

    def _commit(self, payloads: Sequence[Payload]) -> list[Receipt | None]:
        """One round trip; None for each group that has to be sent again, since Redis was full."""
        commands: list[Command] = [
            ("SET", self.store.key(payload.name), payload.data, "EX", PAYLOAD_SECONDS, "NX")
            for payload in payloads
            if not payload.is_inline
        ]
        commands.append(
            self.store.command("commit", *(a for payload in payloads for a in payload.arguments))
        )
        *puts, told = self.store.batch(commands)
        for put in puts:
            if isinstance(put, Exception) and not isinstance(put, OutOfMemoryError):
                raise readable_error(put, self.store.address)
        if isinstance(told, OutOfMemoryError):
            return [None] * len(payloads)
        if isinstance(told, Exception):
            if not str(told).startswith(UNFIT):
                raise readable_error(told, self.store.address)
            if len(payloads) > 1:  # one of them can never be stored; the others are
                return [self._commit([payload])[0] for payload in payloads]
            return [Receipt(result=CommitResult.REJECTED, detail=str(told)[len(UNFIT) :])]
        return read_committed(told, len(payloads))

    # -- the learner's side ----------------------------------------------------------------

    def new_term(self, at_least: int = 0) -> int:
        """Begins a term, greater than every one before and than ``at_least`` (the journal's)."""
        return int(self.store.script("new_term", at_least))

    def term(self) -> int:
        """The newest term; 0 before the first learner."""
        return int(self.store.call("hget", self.store.key("meta"), "term") or 0)

    def journalled(self) -> int:
        """J: rows written."""
        return int(self.store.call("hget", self.store.key("meta"), "journalled") or 0)

    def open_steps(self) -> list[int]:
        """Steps whose groups are taken and neither trained nor quarantined, ascending."""
        taken = self.store.call("zrange", self.store.key("taken"), 0, -1, withscores=True)
        return sorted({int(step) for _, step in taken})

    def take(self, step: int, term: int) -> Row | Waiting:
        """Row ``step`` as it was written, or else cut now if enough groups are graded.

        Raises:
            FencedError: a newer learner has taken over.
            StoreError: the row is neither written nor the next one, or was deleted.
        """
        return read_take(self.store.script("take", step, term))

    def fetch(self, row: Row) -> list[Group]:
        """The row's groups, in its order.

        Raises:
            DamagedError: a payload is gone or isn't the one that the row names.
        """
        groups: list[Group] = []
        for chunk in chunks(row.ids, lambda entry: entry.nbytes, len(row.ids)):
            names = [self.store.key(payload_name(e.group_id, e.attempt, e.digest)) for e in chunk]
            found = self.store.call("mget", names)
            groups += [group_of(e, row.step, data) for e, data in zip(chunk, found, strict=True)]
        return groups

    def confirm(self, step: int, term: int) -> None:
        """taken(step) → trained."""
        self.store.script("confirm", step, term)

    def quarantine(self, step: int, term: int, reason: str, checkpoint: int) -> None:
        """taken(step) → rejected(quarantined), since it changed nothing; above the checkpoint that the
        learner has gone back to, trained(step) as well.

        Args:
            step: the step's number.
            term: the learner's term.
            reason: why, for people.
            checkpoint: step of the newest checkpoint; 0 if there is none.

        Raises:
            FencedError: a newer learner has taken over.
            StoreError: the step has no row, or is trained and in a checkpoint.
        """
        self.store.script("quarantine", step, term, reason, checkpoint)

    def durable(self, step: int, term: int) -> None:
        """Deletes rows and payloads up to ``step``, where the oldest kept checkpoint is."""
        while int(self.store.script("durable", step, term, TRIM_BUDGET)) < step:
            pass

    def reassert(self, rows: Iterable[Row], term: int) -> int:
        """Writes those of the journal's rows that Redis lacks, say after a crash of the host.

        Args:
            rows: ascending by step, without gaps.

        Returns:
            The number that Redis had lost.
        """
        written = 0
        batch: list[str] = []
        for row in rows:
            batch.append(json.dumps(row.to_dict()))
            if len(batch) == 16:
                written += int(self.store.script("reassert", term, *batch))
                batch = []
        if batch:
            written += int(self.store.script("reassert", term, *batch))
        return written

    # -- looking ---------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """The number of groups in each state, with one entry ``rejected:<reason>`` per reason."""
        key = self.store.key
        bitmaps = ["trained", *(f"rejected:{reason}" for reason in REJECTIONS)]
        sets = {"admitted": "returned", "leased": "leased", "graded": "graded", "taken": "taken"}
        answers = self.store.answers(
            [("ZCARD", key(name)) for name in sets.values()]
            + [("BITCOUNT", key(name)) for name in bitmaps]
        )
        return dict(zip([*sets, *bitmaps], map(int, answers), strict=True))

    def state_of(self, group_id: str) -> str:
        """A group's state, as in the diagram; for people, audits and tests."""
        serial = self.order.serial(group_id)
        live = self.store.call("hget", self.store.key(f"group:{serial}"), "state")
        if live:
            return str(live.decode())
        bucket, field = divmod(serial, 256)
        final = self.store.call("hget", self.store.key(f"final:{bucket}"), field)
        if final is None:
            return "admitted"
        return read_final(final)

    def dead_letters(self) -> list[dict[str, Any]]:
        """Groups with too many failed attempts, by position, and quarantined rows, by step."""
        dead = self.store.call("hgetall", self.store.key("dead"))
        rows = self.store.call("hgetall", self.store.key("quarantined"))
        return read_dead_letters(dead, rows)

    def quarantined_steps(self) -> int:
        """Number of quarantined rows; Redis keeps their samples as long as the run is there."""
        return len(self.store.call("hkeys", self.store.key("quarantined")))

    def waiting_for(self, deadline: float = DEADLINE) -> str:
        """One line that says whom the next row waits for; Redis has ``deadline`` seconds to answer."""
        return read_waiting(self.store.script("waiting", deadline=deadline))

    def memory_share(self) -> float:
        """Used share of ``maxmemory``; 0 without a limit."""
        self._memory = (-1e9, 0, 0)
        used, most = self._memory_use()
        return used / most if most else 0.0

    def maxmemory(self) -> int:
        """Bytes that Redis may use, at most a second old; 0 without a limit."""
        return self._memory_use()[1]

    def is_full(self) -> bool:
        """Whether no lease is out and Redis is too full for one, so that only deletions help."""
        used, most = self._memory_use()
        if not leases_stop(used, 0, self.settings.group_bytes, most):
            return False
        return int(self.store.call("zcard", self.store.key("leased"))) == 0

    @property
    def _holder(self) -> str:
        return f"{self.member}@{self.store.incarnation}"

    def _memory_use(self) -> tuple[int, int]:
        asked, used, most = self._memory
        now = time.monotonic()
        if now - asked > MEMORY_SECONDS:
            info = self.store.call("info", "memory")
            used, most = int(info["used_memory"]), int(info.get("maxmemory", 0))
            self._memory = (now, used, most)
        return used, most
