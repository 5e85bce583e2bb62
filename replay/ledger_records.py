"""What goes into the ledger and comes out of it: settings, leases, rows, receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ..common.config import Config
from ..common.config.groups import group_bytes
from ..common.errors import StoreError
from ..common.plain import Count, Record, read_record
from ..common.records import CommitResult
from .rules.order import LAST_SERIAL, SORTED_UP_TO, Order

WAY_OUT = "do all processes run one version of Tandem, and does nobody else write to this Redis?"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """What a ledger is created with; the frozen settings never change during a run."""

    sources: tuple[tuple[str, int, int], ...]
    """Frozen. ``(name, problems, weight)`` of each source."""
    seed: int
    """Frozen. Seed of the order of problems."""
    data_digest: str
    """Frozen. Digest of the problems and traces as ingested."""
    group_size: int
    """Frozen. G, the number of rows of a group."""
    groups_per_step: int
    """Frozen. B, the number of groups of a row."""
    max_staleness: int
    """Frozen. η, the greatest age in steps."""
    window: int = 1
    """Frozen. Steps within which groups may be taken out of order; 1 = strict order."""
    late: str = "wait"
    """Frozen. ``wait`` or ``drop``: what a cut does with a lease that would become stale."""
    max_attempts: int = 5
    """Frozen. Failed attempts after which a group is rejected and listed."""
    least_verdicts: int = 2
    """Frozen. Own samples with a verdict that a group needs: the objective's
    (:attr:`~tandem.common.config.ObjectiveConfig.least_verdicts`), and 2 in ledgers that were created
    before this was a setting."""
    traces_when: str = "always"
    """Frozen. ``always`` or ``all_failed``: when traces are rows of their groups, see
    :func:`~tandem.replay.rules.mixing.mix`; ``always`` in ledgers that were created before."""
    sorted_up_to: int = SORTED_UP_TO
    """Frozen. Problems of the largest source that is permuted by sorting (:class:`~tandem.replay.rules.order.Order`);
    without a limit in ledgers that were created before this was a setting."""
    steps: int | None = None
    """Number of rows of the run; None if ``passes`` ends it."""
    passes: int | None = None
    """Number of passes over the data; the last row may be short."""
    lease_seconds: float = 120.0
    """A lease that isn't renewed for this long goes to the next worker."""
    group_deadline_seconds: float = 1800.0
    """Limit of one lease, renewals included."""
    max_inflight: int = 4096
    """Greatest number of leases at a time."""
    group_bytes: int = 0
    """Worst case of one group's payload in bytes, for stopping leases before Redis is full."""
    dynamic_sampling: int = 0
    """Groups without a signal that a row may leave out, see :func:`~tandem.replay.rules.cutting.cut`."""
    mean_rewards: tuple[float, float] | None = None
    """Bounds of a group's mean reward; a group beyond them counts as one without a signal."""
    offline: bool = False
    """Whether training doesn't use the ledger: nothing is leased, and a reply says why."""

    @classmethod
    def of(
        cls,
        config: Config,
        sources: Sequence[tuple[str, int, int]],
        data_digest: str,
        problem_bytes: int = 0,
    ) -> LedgerSettings:
        """Settings from a run's config and what was ingested: sources, each ``(name, problems, weight)``, the
        digest, and bytes of the largest problem."""
        replay, rollout = config.replay, config.rollout
        return cls(
            sources=tuple((name, size, weight) for name, size, weight in sources),
            seed=config.run.seed,
            data_digest=data_digest,
            group_size=rollout.group_size,
            groups_per_step=replay.groups_per_step,
            max_staleness=replay.max_staleness,
            window=replay.window,
            late=replay.late,
            max_attempts=replay.max_attempts,
            least_verdicts=config.learner.objective.least_verdicts,
            traces_when=config.expert.when,
            steps=config.run.steps,
            passes=config.run.passes,
            lease_seconds=replay.lease_seconds,
            group_deadline_seconds=replay.group_deadline_seconds,
            max_inflight=replay.max_inflight,
            group_bytes=group_bytes(config, problem_bytes),
            dynamic_sampling=replay.dynamic_sampling,
            mean_rewards=replay.dynamic_sampling_means,
            offline=config.learner.source == "offline",
        )

    def order(self) -> Order:
        return Order(self.sources, self.seed, self.sorted_up_to)

    def frozen_fields(self) -> dict[str, str]:
        """The frozen settings as stored in Redis."""
        return {
            "sources": json.dumps([list(s) for s in self.sources]),
            "seed": str(self.seed),
            "data_digest": self.data_digest,
            "group_size": str(self.group_size),
            "groups_per_step": str(self.groups_per_step),
            "max_staleness": str(self.max_staleness),
            "window": str(self.window),
            "late": self.late,
            "max_attempts": str(self.max_attempts),
            "least_verdicts": str(self.least_verdicts),
            "traces_when": self.traces_when,
            "sorted_up_to": str(self.sorted_up_to),
            "pass_length": str(self.order().pass_length),
        }

    def changeable_fields(self) -> dict[str, str]:
        """The changeable settings as stored in Redis."""
        length = self.order().pass_length
        least, greatest = map(repr, self.mean_rewards) if self.mean_rewards else ("", "")
        return {
            "steps": str(self.steps or 0),
            "passes": str(self.passes or 0),
            "total_groups": str((self.passes or 0) * length),
            "lease_ms": str(int(self.lease_seconds * 1000)),
            "group_deadline_ms": str(int(self.group_deadline_seconds * 1000)),
            "max_inflight": str(self.max_inflight),
            "group_bytes": str(self.group_bytes),
            "dynamic_sampling": str(self.dynamic_sampling),
            "least_mean": least,
            "greatest_mean": greatest,
            "offline": str(int(self.offline)),
        }

    @classmethod
    def from_fields(cls, stored: Mapping[str, str]) -> LedgerSettings:
        """The inverse of the two methods above."""
        means = [stored.get(name, "") for name in ("least_mean", "greatest_mean")]
        return cls(
            sources=tuple((n, s, w) for n, s, w in json.loads(stored["sources"])),
            seed=int(stored["seed"]),
            data_digest=stored["data_digest"],
            group_size=int(stored["group_size"]),
            groups_per_step=int(stored["groups_per_step"]),
            max_staleness=int(stored["max_staleness"]),
            window=int(stored["window"]),
            late=stored["late"],
            max_attempts=int(stored["max_attempts"]),
            least_verdicts=int(stored.get("least_verdicts", "2")),
            traces_when=stored.get("traces_when", "always"),
            sorted_up_to=int(stored.get("sorted_up_to", LAST_SERIAL)),
            steps=int(stored["steps"]) or None,
            passes=int(stored["passes"]) or None,
            lease_seconds=int(stored["lease_ms"]) / 1000,
            group_deadline_seconds=int(stored["group_deadline_ms"]) / 1000,
            max_inflight=int(stored["max_inflight"]),
            group_bytes=int(stored["group_bytes"]),
            dynamic_sampling=int(stored.get("dynamic_sampling", "0")),
            mean_rewards=(float(means[0]), float(means[1])) if all(means) else None,
            offline=bool(int(stored["offline"])),
        )

    def check(self) -> None:
        """Raises ``StoreError`` for values that don't go together."""
        if (not self.steps) == (not self.passes):
            raise StoreError("a ledger ends after steps or after passes: set exactly one of them")
        if self.window > self.max_staleness + 1:
            raise StoreError(
                f"window={self.window} is over max_staleness + 1 = {self.max_staleness + 1}"
            )
        if self.late not in ("wait", "drop"):
            raise StoreError(f"late={self.late!r} is neither 'wait' nor 'drop'")
        if self.traces_when not in ("always", "all_failed"):
            raise StoreError(
                f"traces_when={self.traces_when!r} is neither 'always' nor 'all_failed'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One group to generate."""

    group_id: str
    """``<pass>-<position>``."""
    attempt: int
    """Number of the group's lease, from 1."""
    problem_id: str
    """The problem at that position."""
    deadline_ms: int
    """The group's deadline by Redis ``TIME``; when it passes, the finished samples are committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReply:
    """The ledger's answer to a worker that asks for work."""

    leases: tuple[Lease, ...]
    """At most as many as were asked for."""
    state: str
    """State of the run: running, draining, finished or failed."""
    wait: str
    """Why there were no more leases; empty if there were."""
    journalled: int
    """J: number of rows journalled."""
    now_ms: int
    """Redis ``TIME``, ms."""
    lease_seconds: float
    """How long a lease lasts; renew it after about a third of this."""


class RowEntry(
    Record,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=False,
    omit_defaults=True,
    rename={"group_id": "id", "nbytes": "bytes", "trace_ids": "traces"},
):
    """One group of a row."""

    group_id: str
    """``<pass>-<position>``."""
    attempt: Count
    """Number of the lease that was committed."""
    digest: str
    """xxh3-64 of the payload, hexadecimal."""
    nbytes: Count
    """Length of the payload."""
    trace_ids: tuple[str, ...]
    """Expert traces that complete the group."""
    replaced: tuple[Count, ...] = ()
    """Indices of the own samples that the traces replace; older rows lack this field."""


class Row(Record, frozen=True, kw_only=True, forbid_unknown_fields=False, rename={"ids": "groups"}):
    """The batch of one step, as Redis and the journal hold it."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    """Number of the step, n."""
    short: bool
    """Whether it has fewer than B groups; only the last row of a run set in passes may."""
    ids: tuple[RowEntry, ...]
    """Groups of the row, ascending by position."""
    left_out: Count = 0
    """Groups without a signal that gave way to later ones; a row without them lacks this field."""
    quarantined: str = ""
    """Why it was not trained on; empty unless its loss or gradient wasn't finite."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the journal, the same as Redis holds."""
        # Goes through JSON, so that sequences are lists as in Redis and the journal.
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        plain.pop("quarantined")
        if not self.left_out:
            plain.pop("left_out")
        return plain

    @classmethod
    def from_dict(cls, plain: Any) -> Row:
        """The inverse of :meth:`to_dict`.

        Raises:
            StoreError: it isn't a row.
        """
        step = plain.get("step") if isinstance(plain, Mapping) else None
        return read_record(cls, plain, f"row {str(step)[:20]} of the ledger", StoreError, WAY_OUT)


class Waiting(Record, frozen=True, kw_only=True):
    """The answer if there is no row yet."""

    group_id: str
    """The first group that is missing."""
    state: str
    """State of that group: ``admitted`` or ``leased``."""
    worker: str
    """The worker that holds it, or held it last."""
    reason: str
    """One clause for a person."""
    run_state: str = "running"
    """State of the run."""
    ended: bool = False
    """Whether no row will ever come, because the run has taken all its rows."""

    def __str__(self) -> str:
        if self.ended:
            return "the run has taken all its rows"
        holder = f" ({self.worker})" if self.worker else ""
        return f"waiting for group {self.group_id}, {self.state}{holder}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The ledger's final word on a commit."""

    result: CommitResult
    """Committed, duplicate, superseded or rejected."""
    detail: str = ""
    """Why it was rejected, if it was."""
