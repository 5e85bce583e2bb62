"""What a person asks of a ledger, but no process needs: its oldest lease, ages, bytes by kind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..connection import Command, Store
from ..ledger import Ledger

T = TypeVar("T")

AGES = 9
"""Number of ages that are counted separately, from 0 on; the last one includes all older ones."""
PER_TRIP = 500
"""Commands or keys per round trip: about a millisecond of the server, between other clients' calls."""
SCAN_SECONDS = 2.0
"""Time after which the rest of the keys is estimated from those that were seen."""
SCAN_KEYS = 200_000
"""Number of keys after which the same is done."""
SAMPLES = 32
"""Fields that the server samples to estimate the size of a hash or a set."""

KINDS = (
    "payloads_waiting",
    "payloads_taken",
    "payloads_retained",
    "payloads_uncommitted",
    "problems",
    "traces",
    "evaluation_sets",
    "answers",
    "ledger",
    "other",
)
"""Kinds of a run's keys: samples of graded groups; of the batch that is trained on; of steps that a
checkpoint may be resumed from (and quarantined ones); and put but not committed; problems; expert
traces; held-out sets; answers kept for calls that are repeated; the ledger's own state; the rest."""

LEDGER_KEYS = frozenset(
    [
        *("meta", "leased", "deadlines", "returned", "graded", "ages", "taken", "trained"),
        *("rows", "quarantined", "server", "heard", "dead"),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestLease:
    """The oldest lease that is out."""

    group_id: str
    """``<pass>-<position>``."""
    worker: str
    attempt: int
    """Number of this lease among the group's leases, from 1."""
    seconds: float
    """Seconds since it was given, by Redis ``TIME``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingAges:
    """Graded groups by the age that they would have in the next row."""

    counts: tuple[int, ...]
    """Groups by age in steps, from 0 on; the ninth entry includes all older ones."""
    without_own_tokens: int
    """Groups that consist of expert traces only, which have no age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Where the memory of the run's Redis is."""

    used: int
    """``used_memory``, bytes: everything that the server holds."""
    limit: int
    """``maxmemory``, bytes; 0 = none."""
    kinds: dict[str, int]
    """Bytes by kind (:data:`KINDS`), from ``MEMORY USAGE``."""
    estimated: bool
    """Whether there were too many keys or too little time, so that the rest was estimated."""


def oldest_lease(ledger: Ledger) -> OldestLease | None:
    """The oldest lease; None if nothing is leased."""
    store = ledger.store
    serials = [int(s) for s in store.call("zrange", store.key("leased"), 0, -1)]
    oldest: tuple[int, int, Sequence[bytes]] | None = None
    for some in _parts(serials):
        commands: list[Command] = [
            ("HMGET", store.key(f"group:{serial}"), "leased_ms", "worker", "attempt")
            for serial in some
        ]
        for serial, answer in zip(some, store.answers(commands), strict=True):
            # It may have been committed in the meantime.
            if answer[0] and (oldest is None or int(answer[0]) < oldest[0]):
                oldest = int(answer[0]), serial, answer
    if oldest is None:
        return None
    leased_ms, serial, (_, worker, attempt) = oldest
    seconds, micros = store.call("time")
    return OldestLease(
        group_id=ledger.order.id_of(serial),
        worker=worker.decode(),
        attempt=int(attempt),
        seconds=round(max(0.0, seconds + micros / 1e6 - leased_ms / 1000), 1),
    )


def waiting_ages(ledger: Ledger) -> WaitingAges:
    store, journalled = ledger.store, ledger.journalled()
    ages = store.key("ages")
    commands: list[Command] = [
        ("ZCOUNT", ages, journalled - age, journalled - age) for age in range(AGES - 1)
    ]
    commands += [("ZCOUNT", ages, "-inf", journalled - AGES + 1)]
    commands += [("ZCARD", store.key("graded")), ("ZCARD", ages)]
    *counts, graded, aged = store.answers(commands)
    return WaitingAges(counts=tuple(counts), without_own_tokens=max(0, graded - aged))


def memory_use(
    ledger: Ledger, *, seconds: float = SCAN_SECONDS, most_keys: int = SCAN_KEYS
) -> MemoryUse:
    """Bytes by kind, asked for in many small steps so that no other client has to wait.

    Large single keys are asked for by name. The others are found by ``SCAN``, which returns keys in
    the order of their hashes, so those that were seen when time is up are a fair sample of the rest.
    """
    store = ledger.store
    end = time.monotonic() + seconds
    payloads = _Payloads(ledger)
    sizes = dict.fromkeys(KINDS, 0)
    prefix = store.key("")
    seen: set[str] = set()

    def add(names: Iterable[str]) -> None:
        # A scan may return a key twice.
        fresh = [name for name in dict.fromkeys(names) if name not in seen]
        seen.update(fresh)
        for name, size in zip(fresh, _usage(store, fresh), strict=True):
            sizes[payloads.kind(name) or _kind(name)] += size

    add(_single_keys(store))
    by_name = dict(sizes)
    cursor, passed, finished = 0, 0, False
    while not finished and time.monotonic() < end and passed < most_keys:
        cursor, raw = store.call("scan", cursor, match=f"{prefix}*", count=PER_TRIP)
        finished = cursor == 0
        # About so many keys, others' included, of which the run's own are returned.
        passed += max(PER_TRIP, len(raw))
        add(name.decode("utf-8", "replace").removeprefix(prefix) for name in raw)
    if not finished:
        factor = max(1.0, int(store.call("dbsize")) / max(1, passed))
        sizes = {k: by_name[k] + round(factor * (sizes[k] - by_name[k])) for k in KINDS}
    memory = store.call("info", "memory")
    return MemoryUse(
        used=int(memory["used_memory"]),
        limit=int(memory.get("maxmemory", 0)),
        kinds=sizes,
        estimated=not finished,
    )


class _Payloads:
    """Classifies payloads by the state of their group."""

    def __init__(self, ledger: Ledger) -> None:
        store = ledger.store
        self._order = ledger.order
        sets = ("graded", "taken", "leased", "returned")
        commands: list[Command] = [("ZRANGE", store.key(name), 0, -1) for name in sets]
        graded, taken, leased, returned = (set(map(int, s)) for s in store.answers(commands))
        self._kinds = (
            ("payloads_waiting", graded),
            ("payloads_taken", taken),
            ("payloads_uncommitted", leased | returned),
        )

    def kind(self, name: str) -> str | None:
        if not name.startswith("payload:"):
            return None
        try:
            serial = self._order.serial(name.split(":")[1])
        except ValueError:
            return None  # not a group of this run: somebody else's key
        return next((k for k, serials in self._kinds if serial in serials), "payloads_retained")


def _kind(name: str) -> str:
    first = name.partition(":")[0]
    if first in ("problems", "problem_rows", "problem_ids"):
        return "problems"
    if first in ("eval", "eval_sets", "eval_new"):
        return "evaluation_sets"
    if first in ("traces", "answers"):
        return first
    return "ledger" if first in LEDGER_KEYS or first in ("group", "final", "rejected") else "other"


def _single_keys(store: Store) -> list[str]:
    """Keys that exist once, or once per source: few and perhaps large."""
    sets = [name.decode() for name in store.call("smembers", store.key("eval_sets"))]
    return [*sorted(LEDGER_KEYS), "problems", "traces", *(f"eval:{name}" for name in sorted(sets))]


def _usage(store: Store, names: Sequence[str]) -> list[int]:
    """Sizes of keys in bytes; 0 for a key that is gone."""
    found: list[int] = []
    for some in _parts(names):
        commands: list[Command] = [
            ("MEMORY", "USAGE", store.key(name), "SAMPLES", SAMPLES) for name in some
        ]
        found += [int(size or 0) for size in store.answers(commands)]
    return found


def _parts(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[start : start + PER_TRIP] for start in range(0, len(items), PER_TRIP))
