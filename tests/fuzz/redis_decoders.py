"""Decoders of what is kept in Redis, and of what its scripts answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from decoder import Decoder, round_trip, text
from examples import (
    CONFIG,
    KEYS,
    RECORDS,
    ROW,
    an_evaluated_sample,
)
from frames import (
    flipped,
    mutated_json,
    mutated_msgpack,
    mutated_yaml,
)
from msgspec import structs
from socket_decoders import mutated_frame

from tandem.common import sockets, wire
from tandem.common.config import read_config
from tandem.common.errors import StoreError
from tandem.common.plain import read_object
from tandem.common.records import Problem
from tandem.common.weights import protocol
from tandem.launch.board.facts import Activity
from tandem.launch.callbacks.caller import read_answer
from tandem.launch.run.processes.idle import IdleShares
from tandem.replay import answers, callback_requests, hosts, ledger, members, problems, store
from tandem.replay.evaluating import evaluations


def read_report(data: bytes) -> Any:
    """A report as the supervisor and ``tandem status`` add it up."""
    found = store.read_report(data, "a report")
    shares, activity = IdleShares(), Activity()
    shares.add({"rollout-0": found})
    activity.add({"rollout-0": found})
    return shares.shares(), activity.seconds("rollout-0")


@dataclass(frozen=True)
class _Entry:
    member: str
    info: Any


def read_learner(data: bytes) -> Any:
    """The learner's address, as a worker finds it in the registry."""
    member = members.read_member(b"learner", data, 5)
    found = protocol.newest_learner([_Entry(member.member, member.info)])
    if found is not None:
        sockets.check_address(found.member, found.endpoint, found.public_key)
        # What was let through, libzmq must take.
        context = zmq.Context.instance()
        sockets.connect_dealer(
            context,
            found.endpoint,
            identity="fuzz",
            server_public=found.public_key or None,
            client=KEYS,
        ).close(0)
    return found


def check_row(found: Any) -> str:
    """A row gives itself again."""
    return "" if ledger.Row.from_dict(found.to_dict()) == found else "it isn't the same again"


def from_redis() -> Iterable[Decoder]:
    """What is kept in Redis, and what its scripts answer."""
    request = structs.asdict(evaluations.EvaluationRequest(id="h@1", set_name="h", step=1))
    result = {
        "id": "h@1", "set_name": "h", "step": 1, "accuracy": 0.5, "problems": 3,
        "format_share": 1.0, "mean_length": 4.0, "seconds": 1.0, "member": "rollout-0",
        "version": "1.1", "samples": 4, "pass_rate": 0.75, "accuracy_by_source": {"a": 0.5, "b": 1.0},
        "pass_by_source": {"a": 0.75}, "problems_by_source": {"a": 2, "b": 1},
    }  # fmt: skip
    waiting = {
        "group_id": "0-1",
        "state": "leased",
        "worker": "w",
        "reason": "r",
        "run_state": "running",
    }
    settings = ledger.LedgerSettings(
        sources=(("a", 7, 1), ("b", 3, 1)), seed=7, data_digest="d", group_size=2,
        groups_per_step=2, max_staleness=1, steps=9,
    )  # fmt: skip
    fields = {**settings.frozen_fields(), **settings.changeable_fields()}
    report = {
        "time": 1.5, "role": "rollout", "clock": {"wait/batch": 1.0, "total": 2.0},
        "shares": {"wait/batch": 0.5}, "tokens_per_second": 9.0,
    }  # fmt: skip
    member = {
        "role": "learner",
        "info": {"term": 1, "endpoint": "tcp://127.0.0.1:1", "public_key": KEYS.public},
    }
    leases = {
        "leases": [[4, 1, 1700000000000], [5, 2, 1700000000000]], "wait": "", "state": "running",
        "journalled": 3, "now": 1700000000000, "lease_ms": 120000,
    }  # fmt: skip

    def json_of(
        name: str, corpus: list[bytes], decode: Callable[[bytes], Any], **more: Any
    ) -> Decoder:
        return Decoder(name=name, corpus=corpus, decode=decode, mutate=mutated_json, **more)

    def raw(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
        return flipped(data, c)

    def settings_of(data: bytes) -> Any:
        content = read_object(data, "the fields", StoreError)
        return answers.read_settings(
            {
                str(k).encode("utf-8", "replace"): str(v).encode("utf-8", "replace")
                for k, v in content.items()
            }
        )

    def row_of(data: bytes) -> Any:
        return ledger.Row.from_dict(read_object(data, "row", StoreError))

    taken = [{"row": ROW, "quarantined": ""}, {"waiting": waiting}, {"ended": True}]
    told = {**waiting, "journalled": 3, "graded": 1, "leased": 2, "returned": 0}
    letters = {"group_id": "0-1", "attempt": 2, "worker": "w", "reason": "r", "failures": 5}
    record = next(one for one in RECORDS if isinstance(one, Problem))
    kept = [problems.encode(record), wire.encode(record)]
    yield Decoder(
        name="replay.problem",
        corpus=kept,
        decode=lambda data: problems.decode(record.problem_id, data),
        mutate=lambda data, _, c: mutated_frame(data, kept, c),
    )
    yield Decoder(
        name="replay.problem_rows",
        corpus=[bytes(4), bytes(range(1, 41))],
        decode=lambda data: problems.read_rows(data, "a"),
        mutate=raw,
        check=lambda rows: "" if sorted({*rows}) == rows.tolist() else "it isn't ascending",
    )
    yield Decoder(
        name="replay.problem_id",
        corpus=[b"a/1", "é/7".encode()],
        decode=problems.read_id,
        mutate=raw,
    )
    yield json_of("replay.row", text(ROW), row_of, check=check_row)
    yield json_of("replay.take", text(*taken), answers.read_take)
    yield json_of("replay.lease", text(leases), answers.read_leases)
    yield json_of(
        "replay.retry",
        text({"back": [1, 4]}, {"over": "why"}, {"back": {}}),
        lambda data: answers.read_put_back(data, {1, 4}),
    )
    yield json_of("replay.waiting", text(told), answers.read_waiting)
    yield json_of(
        "replay.dead_letters",
        text(letters),
        lambda data: answers.read_dead_letters({b"7": data}, {b"3": data[:200]}),
    )
    yield json_of("replay.settings", text(fields), settings_of)
    yield json_of("replay.member", text(member), lambda data: members.read_member(b"m", data, 1))
    called = {"attempt": 2, "address": "10.0.0.1", "port": 5, "hosts": ["a-1", "b-2"], "ranks": 4}
    yield json_of("replay.meeting", text(called, {**called, "hosts": []}), hosts.read_meeting)
    died = {"attempt": 2, "process": "learner-3", "exit": -9, "log": "l", "lines": "  | x"}
    host = {"host": "b", "address": "10.0.0.2", "pid": 7, "role": "learner", "processes": 2}
    yield json_of(
        "replay.host",
        text(host, {**host, "network": "n", "attempt": 2, "failed": died, "leaving": True}),
        lambda data: hosts.read_state(data, "b"),
    )
    stop = {"callback": "m:f", "reason": "r", "step": 3}
    requested = {"stop": stop, "checkpoint": 2, "evaluate": 3, "values": {"a/b": [4, 0.5]}}
    yield json_of(
        "replay.callback_requests",
        text(requested, {"stop": None}),
        callback_requests.read_requested,
    )
    read_stop = callback_requests.read_stop
    yield json_of("replay.callback_stop", text(stop), read_stop, check=round_trip(read_stop))
    asked = {"stop": "r", "checkpoint": True, "evaluate": False, "values": {"a": 1.0}}
    yield json_of("callbacks.answer", text({"error": "", "asked": asked}), read_answer)
    yield json_of(
        "replay.evaluation_request",
        text(request),
        evaluations.read_request,
        check=round_trip(evaluations.read_request),
    )
    yield json_of(
        "replay.evaluation_result",
        text(result),
        evaluations.read_result,
        check=round_trip(evaluations.read_result),
    )
    yield Decoder(
        name="replay.job_samples",
        corpus=[msgspec.msgpack.encode([an_evaluated_sample()])],
        decode=evaluations.read_kept,
        mutate=mutated_msgpack,
    )
    yield json_of("replay.report", text(report), read_report)
    yield json_of("replay.client_keys", text(["k" * 40, "s" * 40]), store.read_keys)
    yield Decoder(
        name="replay.final_place",
        corpus=[b"T:3:1", b"D:3:2", b"R:0:1:attempts"],
        decode=answers.read_final,
        mutate=raw,
    )
    yield Decoder(
        name="replay.run_state", corpus=[b"running", b"failed"], decode=store.read_state, mutate=raw
    )
    yield json_of("weights.learner_address", text(member), read_learner)
    yield Decoder(
        name="config.read_config",
        corpus=[CONFIG],
        decode=lambda data: read_config(answers.text(data, "config")),
        mutate=mutated_yaml,
    )
