"""Small data in Redis that the run shares: config, problems, traces, evaluations, reports, state."""

from __future__ import annotations

import json
import math
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from ..common import wire
from ..common.errors import DataError, StoreError
from ..common.plain import damaged, read_json, read_object
from ..common.records import ExpertTrace, Problem
from ..common.sockets import CurveKeys, new_keys
from . import problems as stored
from .answers import text as read_text
from .connection import DEADLINE
from .evaluating.evaluations import JOB, EvaluationStore
from .ledger_records import WAY_OUT

RunState = Literal["running", "draining", "finished", "failed"]

STATES: tuple[RunState, ...] = ("running", "draining", "finished", "failed")
PUT_BYTES = 4 << 20
"""Bytes per round trip while problems are put."""
PUT_ENTRIES = 1000
"""Entries of hashes per round trip, and at most per command, for which Redis is busy for about a millisecond."""

Entry = tuple[str, str, bytes]
"""A hash by its last name, the entry's name, and its data."""


class RunStore(EvaluationStore):
    """Run-wide data that every role may read. Every method may be repeated safely."""

    # -- config and keys -------------------------------------------------------------------

    def put_config(self, yaml: str) -> None:
        """Stores the resolved config, which every role reads from here."""
        self.store.put("config", yaml)

    def config_yaml(self) -> str:
        """The resolved config.

        Raises:
            StoreError: there is none, so this Redis doesn't hold the run.
        """
        text = self.store.call("get", self.store.key("config"))
        if text is None:
            raise StoreError(
                f"Redis at {self.store.address} holds no config of run {self.store.run_id}: "
                f"is this the join file of a run that was started there?"
            )
        return read_text(text, "the config in Redis")

    def curve_client(self) -> CurveKeys:
        """The key pair with which the run's clients are admitted; made on the first call."""

        def fresh() -> str:
            keys = new_keys()
            return json.dumps([keys.public, keys.secret])

        return read_keys(self._made_once("curve_client", fresh))

    def endpoint_key(self) -> str:
        """The key with which the workers' endpoints are asked outside of sessions; made on the first call."""
        key = self._made_once("endpoint_key", lambda: secrets.token_urlsafe(24))
        return read_text(key, "the endpoint's key in Redis")

    def _made_once(self, name: str, make: Callable[[], str]) -> bytes:
        """A value that whoever asks first makes. A full Redis refuses to set even one that is there, so it is only read then."""
        key = self.store.key(name)
        held = self.store.call("get", key)
        if held is None:
            self.store.call("set", key, make(), nx=True)
            held = self.store.call("get", key)
        return bytes(held)

    def state(self, deadline: float = DEADLINE) -> RunState:
        """running, draining, finished or failed; waits for Redis up to ``deadline`` seconds."""
        raw = self.store.call("hget", self.store.key("meta"), "state", deadline=deadline)
        return read_state(raw) if raw else "running"

    def set_state(self, state: RunState) -> None:
        """Sets the state and notifies every process (hint ``state``)."""
        if state not in STATES:
            raise ValueError(f"{state!r} is not one of {', '.join(STATES)}")
        self.store.script("set_state", state)

    # -- problems and traces ---------------------------------------------------------------

    def put_problems(self, problems: Iterable[Problem]) -> None:
        """Stores problems. Ids are ``<source>/<row>``; a source's order is that of its rows."""

        rows: dict[str, array[int]] = {}

        def entries() -> Iterable[Entry]:
            for problem in problems:
                source, row = stored.split_id(problem.problem_id)
                yield "problems", problem.problem_id, stored.encode(problem)
                rows.setdefault(source, array("L")).append(row)

        self._put(entries())
        stored.put_rows(self.store, rows)

    def problems(self, ids: Sequence[str]) -> list[Problem]:
        """Problems in the order of ``ids``."""
        found = self._get("problems", ids)
        return [stored.decode(name, data) for name, data in zip(ids, found, strict=True)]

    def put_traces(self, traces: Iterable[ExpertTrace]) -> None:
        """Stores graded expert traces, and their rewards by themselves, for the cut of a row."""

        def entries() -> Iterable[Entry]:
            for trace in traces:
                if trace.reward is not None and math.isfinite(trace.reward):
                    reward = repr(float(trace.reward)).encode()
                    yield "trace_rewards", trace.trace_id, reward
                yield "traces", trace.trace_id, wire.encode(trace)

        self._put(entries())

    def traces(self, ids: Sequence[str]) -> list[ExpertTrace]:
        """Traces in the order of ``ids``."""
        return [wire.decode(data, ExpertTrace) for data in self._get("traces", ids)]

    def all_trace_ids(self) -> list[str]:
        """Ids of all traces, in ledger order: by source, row and number."""
        names = [name.decode() for name in self.store.call("hkeys", self.store.key("traces"))]
        return sorted(names, key=_trace_order)

    def put_eval_set(self, name: str, problems: Iterable[Problem]) -> None:
        """Stores a held-out set, replacing one with the same name; a job's isn't among the run's own."""
        key = self.store.key(f"eval:{name}")
        fresh = self.store.key(f"eval_new:{name}")
        encoded = [wire.encode(problem) for problem in problems]
        if not encoded:
            raise StoreError(f"held-out set {name!r} is empty")

        # One transaction, so that a repeat after a lost answer doesn't append twice.
        def put() -> None:
            pipeline = self.store.redis.pipeline(transaction=True)
            pipeline.delete(fresh)
            for start in range(0, len(encoded), 256):
                pipeline.rpush(fresh, *encoded[start : start + 256])
            pipeline.rename(fresh, key)
            if not name.startswith(JOB):
                pipeline.sadd(self.store.key("eval_sets"), name)
            pipeline.execute()

        self.store.persist(f"held-out set {name}", put)

    def eval_set(self, name: str, limit: int | None = None) -> list[Problem]:
        """The first ``limit`` problems of a held-out set, or all of them without a limit.

        Raises:
            DataError: there is no set with this name.
        """
        last = -1 if limit is None else limit - 1
        raw = self.store.call("lrange", self.store.key(f"eval:{name}"), 0, last)
        if not raw:
            raise DataError(f"there is no held-out set {name!r}; there are {self.eval_set_names()}")
        return [wire.decode(data, Problem) for data in raw]

    def eval_set_names(self) -> list[str]:
        """Names of the held-out sets, sorted."""
        return sorted(n.decode() for n in self.store.call("smembers", self.store.key("eval_sets")))

    # -- reports ---------------------------------------------------------------------------

    def report(self, member: str, stats: Mapping[str, Any]) -> None:
        """Stores a process's newest figures."""
        self.store.put("reports", json.dumps(stats), member)

    def reports(self) -> dict[str, dict[str, Any]]:
        """The newest figures of every process that was heard of in the last hour, by member."""
        raw = self.store.call("hgetall", self.store.key("reports"))
        return {
            read_text(member, "a member's name"): read_report(report, f"the report of {member!r}")
            for member, report in sorted(raw.items())
        }

    def count_restart(self, name: str, detail: str) -> None:
        """Records that a process (or a grader) was restarted."""
        entry = {"name": name, "detail": detail, "time": time.time()}
        self.store.script("append", "restarts", json.dumps(entry), 10_000)

    def restart_count(self) -> int:
        """Number of recorded restarts."""
        return int(self.store.call("llen", self.store.key("restarts")))

    def restarts(self) -> list[dict[str, Any]]:
        """Restarts, oldest first: name, detail, time."""
        raw = self.store.call("lrange", self.store.key("restarts"), 0, -1)
        return [read_object(entry, "a restart in the list", StoreError, WAY_OUT) for entry in raw]

    def _put(self, entries: Iterable[Entry]) -> None:
        """Sets entries of hashes, many by one command."""
        fields: dict[str, list[str | bytes]] = {}
        count = total = 0

        def send() -> None:
            self.store.answers(
                [("HSET", self.store.key(kind), *flat) for kind, flat in fields.items()]
            )

        for kind, name, data in entries:
            fields.setdefault(kind, []).extend((name, data))
            count += 1
            total += len(data)
            if total > PUT_BYTES or count >= PUT_ENTRIES:
                send()
                fields, count, total = {}, 0, 0
        send()

    def _get(self, kind: str, ids: Sequence[str]) -> list[bytes]:
        if not ids:
            return []
        raw = self.store.call("hmget", self.store.key(kind), list(ids))
        missing = [name for name, data in zip(ids, raw, strict=True) if data is None]
        if missing:
            raise StoreError(f"{len(missing)} {kind} aren't in Redis: {', '.join(missing[:5])}")
        return list(raw)


def read_keys(raw: bytes) -> CurveKeys:
    """The clients' key pair as Redis holds it.

    Raises:
        StoreError: it isn't a pair of keys; the message shows neither.
    """
    pair = read_json(raw, "the clients' key pair in Redis", StoreError, WAY_OUT)
    if not (
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(one, str) and len(one) == 40 and one.isascii() for one in pair)
    ):
        raise damaged(
            "the clients' key pair in Redis", "isn't two keys of 40 characters", StoreError, WAY_OUT
        )
    return CurveKeys(public=pair[0], secret=pair[1])


def read_report(raw: bytes, what: str) -> dict[str, Any]:
    """A process's figures; those that are summed over processes must be numbers.

    Raises:
        StoreError: it isn't an object, or its time or its seconds aren't numbers.
    """
    report = read_object(raw, what, StoreError, WAY_OUT)
    figures = {name: report.get(name) for name in ("clock", "seconds", "shares")}
    numbers: list[Any] = [report.get("time") or 0.0]
    for name, value in figures.items():
        if value is not None and not isinstance(value, int | float | dict):
            raise damaged(what, f"has {name}={str(value)[:40]!r}", StoreError, WAY_OUT)
        numbers += value.values() if isinstance(value, dict) else [value or 0.0]
    if isinstance(figures["clock"], dict) and "total" not in figures["clock"]:
        raise damaged(what, "has a clock without its total", StoreError, WAY_OUT)
    for value in numbers:
        # Beyond 2^53, float() could fail.
        if not (isinstance(value, int | float) and abs(value) < 2**53):
            raise damaged(what, f"has {str(value)[:40]!r} for seconds", StoreError, WAY_OUT)
    return report


def read_state(raw: bytes) -> RunState:
    """The run's state.

    Raises:
        StoreError: it isn't one of :data:`STATES`.
    """
    for state in STATES:
        if raw == state.encode():
            return state
    raise damaged(
        "the run's state in Redis",
        f"is {raw[:40]!r}, not one of {', '.join(STATES)}",
        StoreError,
        WAY_OUT,
    )


def _trace_order(trace_id: str) -> tuple[str, int, str, int, str]:
    problem, _, number = trace_id.rpartition("#")
    source, _, row = problem.rpartition("/")
    return (
        source,
        int(row) if row.isdecimal() else -1,
        row,
        int(number) if number.isdecimal() else -1,
        trace_id,
    )
