"""The ledger as plain Python values, moved by ``tandem.replay.rules.leases`` and nothing else.

What the scripts do is said here a second time, without Redis: each method is one script, changes
the state as that script should, and returns what it should answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.replay.rules import cutting
from tandem.replay.rules import leases as rules
from tandem.replay.rules.leases import Limits, Release
from tandem.replay.rules.mixing import mix

Row = dict[str, Any]
Answer = Any


class Refused(Exception):
    """The script refuses; the text is a part of its message."""


class Fenced(Refused):
    """A newer learner has taken over."""


@dataclass(slots=True, kw_only=True)
class Live:
    """One group that is leased, admitted (again) or graded."""

    place: float
    """Where it stands among live groups: at its own number, unless it was put back."""
    state: str = "leased"
    attempt: int | None = None
    """None where Redis has lost what it knew of it."""
    failures: int = 0
    worker: str = ""
    holder: str = ""
    held: int = 0
    """Step of the version that the worker held."""
    leased_ms: int = 0
    deadline: int | None = None
    """While leased."""
    cap: int = 0
    moved: bool = False
    """Deadlines have moved on since it was leased or renewed."""
    released: str = ""
    digest: str = ""
    oldest: int | None = None
    """Step of its oldest own token, once graded."""
    traces: tuple[str, ...] = ()
    correct: int = 0
    own_rows: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    nbytes: int = 0


@dataclass(slots=True, kw_only=True)
class LedgerModel:
    """The whole state of a ledger, and of its server where deadlines hang on it."""

    limits: Limits
    pass_length: int
    now: int
    offline: bool = False
    state: str = "running"
    ended: str | None = None
    term: int = 0
    journalled: int = 0
    cursor: int = 0
    trimmed: int = 0
    live: dict[int, Live] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    """Serial -> step."""
    final: dict[int, tuple[str, int, int, str]] = field(default_factory=dict)
    """Serial -> letter (T, D, R), step, attempt, reason."""
    rows: dict[int, Row] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)
    dead: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    """Serial -> attempt, failures, reason."""
    payloads: dict[tuple[str, int, str], bool] = field(default_factory=dict)
    """Id, attempt, digest -> whether a commit has kept it."""
    heard: int | None = None
    """When any member was last heard of."""
    new_life: bool = False
    """The server was restarted since deadlines were last judged."""
    waiting: int | None = None
    """Whom the last take waited for."""
    left_out: int = 0
    """Groups without a signal since the last row."""
    trace_rewards: dict[str, float] = field(default_factory=dict)

    # -- sets ------------------------------------------------------------------------------

    def of(self, state: str) -> dict[int, Live]:
        """Live groups in a state, in their order."""
        groups = sorted(self.live.items(), key=lambda item: item[1].place)
        return {serial: group for serial, group in groups if group.state == state}

    def places(self) -> list[float]:
        """Of all live groups."""
        return [group.place for group in self.live.values()]

    def id_of(self, serial: int) -> str:
        return f"{serial // self.pass_length}-{serial % self.pass_length}"

    def serial_of(self, group_id: str) -> int:
        pass_, _, position = group_id.partition("-")
        return int(pass_) * self.pass_length + int(position)

    # -- moves that several scripts make ---------------------------------------------------

    def _reject(self, serial: int, reason: str, step: int) -> None:
        group = self.live.pop(serial)
        self.payloads.pop((self.id_of(serial), group.attempt or 0, group.digest), None)
        self.final[serial] = ("R", step, group.attempt or 0, reason)

    def _release(self, serial: int, why: Release, text: str | None = None) -> None:
        group = self.live[serial]
        text = why.value if text is None else text
        group.state, group.deadline, group.released = "admitted", None, text
        if rules.counts_as_failed(why, moved=group.moved):
            group.failures += 1
            if rules.is_given_up(group.failures, self.limits.max_attempts):
                self.dead[serial] = (group.attempt or 0, group.failures, text)
                self._reject(serial, "attempts", 0)

    def _move_on(self) -> bool:
        """Before a deadline is judged: time in which nobody could renew is given back."""
        silence = self.now - (self.now if self.heard is None else self.heard)
        by = rules.moved_on_by(
            new_life=self.new_life, silence_ms=silence, lease_ms=self.limits.lease_ms
        )
        self.new_life = False
        if silence >= rules.SILENCE_MS:
            self.heard = self.now
        for group in self.of("leased").values():
            assert group.deadline is not None
            group.deadline += by
            group.cap += by
            group.moved = group.moved or by > 0
        return by > 0

    def _due(self) -> list[int]:
        return sorted(
            serial
            for serial, group in self.of("leased").items()
            if rules.is_expired(group.deadline or 0, self.now)
        )

    def _expire(self) -> None:
        if self._due():
            self._move_on()
        for serial in self._due():
            self._release(serial, Release.EXPIRED)

    def _fence(self, term: int) -> None:
        if rules.is_fenced(self.term, term):
            raise Fenced

    # -- the run ---------------------------------------------------------------------------

    def create(self, limits: Limits) -> bool:
        self.limits = limits
        if self.ended is not None and rules.goes_on(limits, self.journalled, self.cursor):
            self.ended = None
        return False

    def set_state(self, state: str) -> None:
        self.state = state

    def beat(self) -> None:
        silence = self.now - (self.now if self.heard is None else self.heard)
        if silence >= rules.SILENCE_MS:
            life, self.new_life = self.new_life, False  # a beat judges no life
            self._move_on()
            self.new_life = life
        self.heard = self.now

    def server_started(self) -> None:
        """The first call in a new life of the server, ahead of any script."""
        heard, self.heard = self.heard, None
        if self.new_life:
            self._move_on()
        self.heard = heard

    def end(self, reason: str, term: int) -> int:
        self._fence(term)
        rejected = sorted(self.live)
        for serial in rejected:
            self._reject(serial, "run_ended", self.journalled)
        self.ended = reason
        return len(rejected)

    # -- workers ---------------------------------------------------------------------------

    def lease(
        self, worker: str, holder: str, held: int, count: int, used: int = 0, maxmemory: int = 0
    ) -> tuple[list[tuple[int, int, int]], str]:
        if self.ended is not None:
            return [], "run ended"
        if self.state != "running":
            return [], f"run is {self.state}"
        if self.offline:
            return [], "ledger: training is offline"
        self._expire()
        leases: list[tuple[int, int, int]] = []
        while len(leases) < count:
            returned = {serial: group.place for serial, group in self.of("admitted").items()}
            serial = rules.next_to_lease(returned, self.cursor)
            place = returned.get(serial, serial)
            wait = rules.why_not_leased(
                self.limits,
                serial=serial,
                is_new=serial == self.cursor,
                rank=rules.rank(place, self.places()),
                leased=len(self.of("leased")),
                journalled=self.journalled,
                held_step=held,
                used=used,
                maxmemory=maxmemory,
            )
            if wait:
                return leases, wait
            self.cursor = max(self.cursor, serial + 1)
            group = self.live.setdefault(serial, Live(place=place))
            group.state, group.attempt = "leased", (group.attempt or 0) + 1
            group.worker, group.holder, group.held = worker, holder, held
            group.leased_ms, group.moved = self.now, False
            group.deadline, group.cap = rules.first_times(self.now, self.limits)
            leases.append((serial, group.attempt, group.cap))
        return leases, ""

    def _held(self, serial: int, holder: str) -> Live | None:
        group = self.live.get(serial)
        return group if group and group.state == "leased" and group.holder == holder else None

    def renew(self, holder: str, serials: list[int]) -> list[int]:
        def deadline_of(group: Live) -> int | None:
            return rules.renewed(self.now, group.cap, self.limits.lease_ms)

        lost = []
        held = [group for serial in serials if (group := self._held(serial, holder))]
        if any(deadline_of(group) is None for group in held):
            self._move_on()
        for serial in serials:
            group = self._held(serial, holder)
            if group is None:
                lost.append(serial)
                continue
            deadline = deadline_of(group)
            if deadline is None:
                self._release(serial, Release.PAST_DEADLINE)
                lost.append(serial)
            else:
                group.deadline, group.moved = deadline, False
        return lost

    def give_back(
        self, holder: str, serial: int, attempt: int, reason: str, *, failed: bool
    ) -> bool:
        group = self._held(serial, holder)
        if group is None or group.attempt != attempt:
            return False
        self._release(serial, Release.FAILED if failed else Release.RETURNED, reason)
        return True

    def reclaim(self, worker: str, keeps: str) -> list[int]:
        found = [
            serial
            for serial, group in self.of("leased").items()
            if group.worker == worker and group.holder != keeps
        ]
        if found:
            self._move_on()
        for serial in found:
            self._release(serial, Release.WORKER_DIED)
        return found

    def commit(
        self,
        serial: int,
        attempt: int,
        *,
        digest: str,
        nbytes: int,
        oldest: int | None,
        verdicts: int,
        traces: tuple[str, ...] = (),
        correct: int = 0,
        own_rows: tuple[int, ...] = (),
        rewards: tuple[float, ...] = (),
        payload: Literal["inline", "put", "none"],
    ) -> tuple[str, str]:
        name = (self.id_of(serial), attempt, digest)
        if payload == "put":
            self.payloads.setdefault(name, False)
        group, final = self.live.get(serial), self.final.get(serial)
        verdict, why = rules.commit_verdict(
            attempt,
            live=None if group is None else (group.state, group.attempt),
            final=None if final is None else (final[0], final[2], final[3]),
            verdicts=verdicts,
            least_verdicts=self.limits.least_verdicts,
            payload_is_there=payload == "inline" or name in self.payloads,
        )
        if group is not None and verdict == "rejected":
            self._reject(serial, why, 0)
        elif group is not None and verdict == "committed":
            self.payloads[name] = True
            group.state, group.deadline = "graded", None
            group.digest, group.nbytes, group.oldest = digest, nbytes, oldest
            group.traces, group.correct, group.rewards = traces, correct, rewards
            group.own_rows = own_rows if self.limits.traces_when == "all_failed" else ()
        return verdict, why

    # -- the learner -----------------------------------------------------------------------

    def new_term(self, journal: int) -> int:
        self.term = rules.next_term(self.term, journal)
        return self.term

    def take(self, step: int, term: int) -> tuple[str, Any]:
        """``("row", (row, quarantined))``, ``("waiting", (serial, why))`` or ``("ended", None)``."""
        self._fence(term)
        asked = cutting.asked_for(step, self.journalled)
        if asked == "refused":
            raise Refused("can not be taken")
        if asked == "again":
            if step not in self.rows:
                raise Refused("before the oldest checkpoint kept")
            return "row", (self.rows[step], self.quarantined.get(step, ""))
        over = cutting.has_no_more_rows(step, self.limits.steps, self.ended is not None)
        if not over:
            self._expire()
        done = cutting.cut(
            self.limits,
            step=step,
            graded={s: g.oldest for s, g in self.of("graded").items()},
            leased={s: g.held for s, g in self.of("leased").items()},
            returned=self.of("admitted").keys(),
            cursor=self.cursor,
            places={s: g.place for s, g in self.live.items()},
            ended=self.ended is not None,
            no_signal=[s for s, group in self.of("graded").items() if self._has_no_signal(group)],
            left_out=self.left_out,
        )
        for serial in done.stale:
            self._reject(serial, "stale", step)
        for serial in done.no_signal:
            self._reject(serial, "no_signal", step)
        self.left_out += len(done.no_signal)
        if done.ended:
            self.ended = self.ended if over else "all its groups are in rows or rejected"
            return "ended", None
        if not done.row:
            return "waiting", (done.waits_for, done.held_by)
        for serial in done.revoked:
            self._release(serial, Release.REVOKED)
            group = self.live[serial]
            group.attempt = (group.attempt or 0) + 1  # its late commit is superseded
        row: Row = {"step": step, "short": done.short, "groups": []}
        for serial in done.row:
            group = self.live.pop(serial)
            assert group.attempt is not None
            traces, replaced = mix(
                group.traces,
                when=self.limits.traces_when,
                correct=group.correct,
                own_rows=group.own_rows,
                group_size=self.limits.group_size,
                seed=self.limits.seed,
                step=step,
                group_id=self.id_of(serial),
            )
            row["groups"].append(
                {
                    "id": self.id_of(serial),
                    "attempt": group.attempt,
                    "digest": group.digest,
                    "bytes": group.nbytes,
                    "traces": list(traces),
                }
                | ({"replaced": list(replaced)} if replaced else {})
            )
            self.final[serial] = ("T", step, group.attempt, "")
            self.taken[serial] = step
        if self.left_out:
            row["left_out"], self.left_out = self.left_out, 0
        self.rows[step] = row
        self.journalled = step
        return "row", (row, "")

    def _has_no_signal(self, group: Live) -> bool:
        when = self.limits.traces_when
        enter = group.traces if when == "always" or not group.correct else ()
        return cutting.has_no_signal(
            group.rewards,
            [self.trace_rewards.get(name) for name in enter],
            self.limits.mean_rewards,
        )

    def _open(self, step: int) -> list[int]:
        return [serial for serial, at in self.taken.items() if at == step]

    def confirm(self, step: int, term: int) -> int:
        self._fence(term)
        if step > self.journalled:
            raise Refused("can not be confirmed")
        serials = self._open(step)
        for serial in serials:
            del self.taken[serial]
            self.final[serial] = ("D", step, self.final[serial][2], "")
        return len(serials)

    def quarantine(self, step: int, term: int, reason: str, checkpoint: int) -> int:
        self._fence(term)
        if step > self.journalled:
            raise Refused("can not be quarantined")
        if step in self.quarantined:
            return 0
        if not self._open(step) and (step <= checkpoint or step not in self.rows):
            raise Refused("it is trained")
        serials = [self.serial_of(entry["id"]) for entry in self.rows[step]["groups"]]
        for serial in serials:
            self.taken.pop(serial, None)
            self.final[serial] = ("R", step, self.final[serial][2], "quarantined")
        self.quarantined[step] = reason
        return len(serials)

    def durable(self, step: int, term: int) -> int:
        self._fence(term)
        why = rules.why_not_durable(step, self.journalled, set(self.taken.values()))
        if why:
            raise Refused(why)
        for number in rules.rows_let_go(self.trimmed, step, set(self.quarantined)):
            for entry in self.rows.pop(number)["groups"]:
                self.payloads.pop((entry["id"], entry["attempt"], entry["digest"]), None)
        self.trimmed = max(self.trimmed, step)
        return self.trimmed

    def reassert(self, rows: list[Row], term: int) -> int:
        self._fence(term)
        last, seen, lost = self.journalled, set[int](), []
        for row in rows:
            serials = {self.serial_of(entry["id"]) for entry in row["groups"]}
            held = self.rows.get(row["step"])
            known = rules.reasserted(
                row["step"],
                last,
                same=held is None or _ids(held) == _ids(row),
                elsewhere=any(serial in seen or self._in_a_row(serial) for serial in serials),
            )
            if known in ("gap", "another history"):
                raise Refused(known.replace("another history", "different histories"))
            if known == "lost":
                last, seen = row["step"], seen | serials
                lost.append(row)
        for row in lost:
            self._write_again(row)
        return len(lost)

    def _in_a_row(self, serial: int) -> bool:
        letter, _, _, reason = self.final.get(serial, ("", 0, 0, ""))
        return letter in ("T", "D") or reason == "quarantined"

    def _write_again(self, row: Row) -> None:
        for entry, name in zip(row["groups"], _ids(row), strict=True):
            serial = self.serial_of(entry["id"])
            held = self.live.pop(serial, None)
            if held and held.digest and (held.attempt, held.digest) != name[1:]:
                del self.payloads[self.id_of(serial), held.attempt or 0, held.digest]
            if name in self.payloads:
                self.payloads[name] = True
            self.dead.pop(serial, None)
            for new in rules.skipped(self.cursor, serial):
                self.live[new] = Live(place=new, state="admitted", released="lost by Redis")
            self.cursor = max(self.cursor, serial + 1)
            self.final[serial] = ("T", row["step"], entry["attempt"], "")
            self.taken[serial] = row["step"]
        self.rows[row["step"]] = row
        self.journalled = row["step"]
        self.left_out = 0

    # -- people ----------------------------------------------------------------------------

    def retry(self, serials: list[int]) -> list[int]:
        last = self.rows.get(self.journalled)
        more = self.cursor < self.limits.total_groups or self.live
        why = rules.why_not_retried(
            ended=self.ended,
            steps=self.limits.steps,
            journalled=self.journalled,
            last_is_short=last is not None and last["short"] and not more,
        )
        if why:
            raise Refused("takes no more groups")
        back = [serial for serial in serials if self.dead.pop(serial, None)]
        for serial in back:
            _, _, attempt, _ = self.final.pop(serial)
            self.live[serial] = Live(
                place=rules.place_behind(self.cursor, self.places()),
                state="admitted",
                attempt=attempt + 1,
                released="put back by `tandem retry`",
            )
        return back

    # -- looking ---------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        found = {state: len(self.of(state)) for state in ("admitted", "leased", "graded")}
        found["taken"] = len(self.taken)
        found["trained"] = sum(letter == "D" for letter, *_ in self.final.values())
        for reason in ("stale", "no_signal", "quarantined", "attempts", "ungraded", "run_ended"):
            found[f"rejected:{reason}"] = sum(
                letter == "R" and why == reason for letter, _, _, why in self.final.values()
            )
        return found


def _ids(row: Row) -> list[tuple[str, int, str]]:
    return [(entry["id"], entry["attempt"], entry["digest"]) for entry in row["groups"]]
