"""Every function of the project that reads bytes of another process: valid frames and what it is
to make of mutated ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
import zmq
from frames import (
    Mutator,
    flipped,
    mutated_json,
    mutated_lines,
    mutated_msgpack,
    spliced,
)

from tandem.common import run_folder, sockets, telemetry, wire
from tandem.common.config import read_config
from tandem.common.errors import StoreError
from tandem.common.plain import read_object
from tandem.common.records import (
    CommitResult,
    ExpertTrace,
    FinishReason,
    Group,
    GroupReceipt,
    GroupSubmission,
    Problem,
    Sample,
    SamplingParams,
    Verdict,
    Version,
    VersionSpan,
)
from tandem.common.weights import directory, manifest, protocol
from tandem.launch import folder_lock
from tandem.launch.board import history, look
from tandem.launch.board.facts import Activity
from tandem.launch.estimate.sizes import count_parameters
from tandem.launch.idle import IdleShares
from tandem.launch.progress import MetricsTail
from tandem.launch.trackers.following import Sent
from tandem.learner import journal, orders
from tandem.replay import answers, dead_letters, ledger, members, store
from tandem.reward import pipes

KEYS = sockets.new_keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One function under test."""

    name: str
    """In the table."""
    corpus: Sequence[bytes]
    """Valid frames."""
    decode: Callable[[bytes], Any]
    """Reads one; raises the project's own errors alone."""
    mutate: Mutator
    """Makes invalid ones of valid ones."""
    check: Callable[[Any], str] = field(default=lambda record: "")
    """What is wrong with a record that came out; empty where nothing is."""
    imports: str = ""
    """A module that takes long to import, which no frame is to be blamed for."""


def same(one: Any, other: Any) -> bool:
    """Whether two records are equal; NaN equals NaN."""
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind == "f"
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


# -- valid records --------------------------------------------------------------------------------


def a_sample(length: int = 5, **changes: Any) -> Sample:
    """With spans, a verdict and components."""
    values: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "source": np.array([1, 0, 2] * length, np.uint8)[:length],
        "logprobs": np.full(length, -0.25, np.float32),
        "spans": (
            VersionSpan(term=1, step=2, start=0, end=length // 2),
            VersionSpan(term=1, step=3, start=length // 2, end=length),
        ),
        "finish_reason": FinishReason.LENGTH,
        "sampling": SamplingParams(temperature=0.6),
        "text": "été ∑ 字",
        "reward": 0.25,
        "verdict": Verdict.WRONG,
        "components": {"accuracy": 0.0, "format": None},
        "extracted": "4",
        "grader": "boxed@1",
    }
    return Sample(**{**values, **changes})


def a_group(**changes: Any) -> Group:
    """With samples, traces and the values of a problem with pictures."""
    values: dict[str, Any] = {
        "group_id": "0-1",
        "attempt": 2,
        "worker": "rollout-0",
        "problem_id": "a/1",
        "prompt_tokens": np.arange(3, dtype=np.int32),
        "prompt_text": "p",
        "gold": "4",
        "data_source": "d",
        "samples": (a_sample(), a_sample(0, spans=()), a_sample(70, reward=None, verdict=None)),
        "trace_ids": ("a/1#0",),
        "extra": {
            "index": 3,
            "images": [{"path": "x.png", "size": [64, 48]}, {"path": "y.png", "size": None}],
            "nested": {"list": [1, "x", None, True, 0.5]},
        },
    }
    return Group(**{**values, **changes})


def a_manifest(step: int = 3) -> manifest.WeightManifest:
    """Of four tensors in three buckets."""
    layout = manifest.plan(
        [
            ("model.a", (3, 5), "float32"),
            ("model.b", (2,), "bfloat16"),
            ("c", (), "float32"),
            ("d", (100, 2), "float16"),
        ],
        512,
    )
    sums = [2**63 + 5 * i for i in range(len(layout.ranges))]
    return manifest.make_manifest("run", Version(term=1, step=step), layout, sums, "xxh3")


RECORDS: list[Any] = [
    Version(term=3, step=70),
    VersionSpan(term=1, step=2, start=3, end=4),
    SamplingParams(temperature=0.6, top_k=5, max_new_tokens=7),
    a_sample(),
    Problem(
        problem_id="a/1",
        prompt_text="p",
        prompt_tokens=np.arange(3, dtype=np.int32),
        gold="4",
        data_source="d",
        trace_ids=("a/1#0", "a/1#1"),
        extra={"images": [{"path": "x.png"}]},
    ),
    ExpertTrace(
        trace_id="a/1#0",
        problem_id="a/1",
        tokens=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, np.float32),
        text="t",
        tokenizer_digest="x",
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={"accuracy": 1.0},
    ),
    a_group(),
    GroupSubmission(request_id=9, group=a_group()),
    GroupReceipt(request_id=9, group_id="0-1", attempt=1, result=CommitResult.SUPERSEDED),
    a_manifest(),
]
MESSAGES: list[Any] = [
    protocol.Have(
        run_id="run",
        member="rollout-0",
        incarnation="x",
        version=Version(term=1, step=2),
        content="c",
        state="idle",
        round="r",
        transports=("nccl", "gloo"),
        device="cpu",
    ),
    protocol.Prepare(round="r", manifest=a_manifest(), transport="gloo", bytes_follow=True),
    protocol.Ack(round="r", channel="c"),
    protocol.Open(
        round="r", channel="c", transport="gloo", host="127.0.0.1", port=5, rank=1, world_size=2
    ),
    protocol.Staged(round="r", digest="d"),
    protocol.Commit(round="r", run_id="run", version=Version(term=1, step=2)),
    protocol.Committed(round="r", version=Version(term=1, step=2), seconds=0.5),
    protocol.Refused(round="r", stage="open", reason="é"),
    protocol.Abort(round="r", reason="x"),
]


# -- wire -----------------------------------------------------------------------------------------


def framed(body: bytes) -> bytes:
    """A body in a frame whose checksum is right."""
    head = wire.HEADER.pack(wire.MAGIC, wire.SCHEMA_VERSION, xxhash.xxh3_64_intdigest(body))
    return head + body


def mutated_frame(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A frame of the wire: seldom its checksum is wrong, for that alone is soon found."""
    if c.random() < 0.15:
        return flipped(data, c) if c.random() < 0.7 else spliced(data, c.choice(corpus), c)
    bodies = [one[wire.HEADER.size :] for one in corpus]
    return framed(mutated_msgpack(data[wire.HEADER.size :], bodies, c))


def of_wire(record: Any) -> Decoder:
    """One kind of record."""
    kind = type(record)
    others = [wire.encode(one) for one in RECORDS + MESSAGES]

    def check(found: Any) -> str:
        again = wire.decode(wire.encode(found), kind)
        if not same(found, again):
            return f"it isn't the same when it is encoded and decoded again: {found!r:.300}"
        return unsound(found)

    return Decoder(
        name=f"wire.{kind.__name__}",
        corpus=[wire.encode(record)],
        decode=lambda data: wire.decode(data, kind),
        mutate=lambda data, _, c: mutated_frame(data, others, c),
        check=check,
    )


def unsound(record: Any) -> str:
    """Why a record can't be, by its own invariants; empty where it can."""
    found = ""
    if isinstance(record, GroupSubmission):
        return unsound(record.group)
    if isinstance(record, Group):
        found = next(filter(None, map(unsound, record.samples)), "")
    if isinstance(record, Sample):
        n = len(record.tokens)
        if not (len(record.source) == len(record.logprobs) == n):
            found = "its arrays differ in length"
        elif n and int(max(record.source)) > 2:
            found = "it has a token of an unknown source"
        elif any(not 0 <= s.start <= s.end <= n for s in record.spans):
            found = "it has a span outside its tokens"
    if isinstance(record, ExpertTrace) and record.logprobs is not None:
        found = "" if len(record.logprobs) == len(record.tokens) else "its arrays differ in length"
    if isinstance(record, Version) and min(record.term, record.step) < 0:
        found = "it is a negative version"
    return found


# -- weights --------------------------------------------------------------------------------------


def mutated_message(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """Both frames of a message, packed as a list so that they are one piece here."""
    frames = msgpack.unpackb(data)
    what = c.random()
    if what < 0.1:
        frames = frames[: c.randrange(2)]
    elif what < 0.2:
        frames[0] = flipped(frames[0], c)
    elif what < 0.25:
        frames.append(frames[0])
    elif what < 0.3:
        frames[0] = c.choice((b"", b"Have", b"Commit", b"\xff", frames[1][:50]))
    else:
        others = [msgpack.unpackb(one)[1] for one in corpus]
        frames[1] = mutated_frame(frames[1], others, c)
    return msgpack.packb(frames)


def mutated_manifest(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A manifest whose digests are right for what it says, so that the rest is looked at."""
    found = wire.decode(data, manifest.WeightManifest)
    layout, buckets, total = found.layout, list(found.buckets), found.total_bytes
    numbers = (0, 1, 255, 256, 257, 512, 2**31, 2**40, 2**63, total, total + 256, total - 256)
    for _ in range(c.choice((1, 1, 2))):
        what = c.random()
        if what < 0.55:
            raw = layout.encode()
            if c.random() < 0.5:
                lines = layout.splitlines(keepends=True) or ["float32 1 0 4 a\n"]
                words = c.choice(lines).split(" ")
                words[c.randrange(len(words))] = c.choice(
                    ("-", "-1", "1x2", "0", "٣", "1_0", " 5", "9" * 5000, "x".join(["9" * 14] * 8),
                     "x".join(["9"] * 9), "float99", "256", "4", "", "name\n", "1e3", "0x1", "+1")
                )  # fmt: skip
                lines[c.randrange(len(lines))] = " ".join(words)
                layout = "".join(lines)
            else:
                layout = flipped(raw, c).decode("utf-8", "replace")
        elif what < 0.85 and buckets:
            at = c.randrange(len(buckets))
            changes = {c.choice(("offset", "nbytes", "checksum")): c.choice(numbers)}
            buckets[at] = dataclasses.replace(buckets[at], **changes)
            if c.random() < 0.2:
                del buckets[at]
        else:
            total = c.choice(numbers)
    content = manifest.content_digest(layout, buckets, found.checksum)
    changed = dataclasses.replace(
        found,
        layout=layout,
        buckets=tuple(buckets),
        total_bytes=total,
        content=content,
        digest=manifest.manifest_digest(found.run_id, found.version, content),
    )
    return (
        mutated_frame(wire.encode(changed), corpus, c) if c.random() < 0.1 else wire.encode(changed)
    )


def read_manifest(data: bytes) -> manifest.WeightManifest:
    """As a receiver does: decoded, checked, compared with its engine."""
    found = wire.decode(data, manifest.WeightManifest)
    manifest.check_manifest(found)
    manifest.first_difference([("model.a", (3, 5), "float32")], found.params)
    return found


def check_manifest(found: manifest.WeightManifest) -> str:
    """Buckets and tensors lie side by side in the buffer, and need all of it."""
    ends = [b.offset + b.nbytes for b in found.buckets]
    if [b.offset for b in found.buckets] != [0, *ends[:-1]] or ends[-1:] != [found.total_bytes]:
        return "its buckets don't cover the buffer"
    need = sum(-(-p.nbytes // manifest.ALIGNMENT) * manifest.ALIGNMENT for p in found.params)
    if need != found.total_bytes:
        return f"its tensors need {need} bytes of {found.total_bytes}"
    return (
        "" if manifest.layout_text(found.params) == found.layout else "its layout isn't canonical"
    )


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
    found = directory.newest_learner([_Entry(member.member, member.info)])
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


# -- files ----------------------------------------------------------------------------------------


class Files:
    """A folder in memory where there is one, in which a decoder finds what was written for it."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self.made = tempfile.TemporaryDirectory(
            prefix="tandem-fuzz-", dir=memory if memory.is_dir() else None
        )
        self.path = Path(self.made.name)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.made.cleanup()

    def reading(self, name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
        """``read`` of a file with the frame's bytes."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)

        def decode(data: bytes) -> Any:
            path.write_bytes(data)
            return read(path)

        return decode


def open_journal(path: Path) -> Any:
    """Opens it as a resumed learner does, which cuts off a torn line; then all must be readable."""
    opened = journal.Journal(path)
    opened.close()
    again = journal.Journal(path)
    again.close()
    return opened.rows, opened.outcomes, again.rows, again.outcomes


def check_journal(found: Any) -> str:
    """Rows one after another, each with a whole row; the second look is the first."""
    rows, outcomes, *again = found
    if [rows, outcomes] != again:
        return "the second look differs"
    if sorted(rows) != list(range(1, len(rows) + 1)):
        return f"it has the rows {sorted(rows)}"
    return "" if outcomes.keys() <= rows.keys() else "it has an outcome without a row"


def write_json_line(path: Path) -> Any:
    """A file that is opened again after a crash takes a record that can be read."""
    lines = telemetry.JsonLines(path)
    lines.write({"step": 99})
    lines.close()
    return path.read_bytes()


def cut(path: Path) -> Any:
    """What ``cut_back`` leaves."""
    journal.cut_back(path, 2)
    return path.read_bytes()


def check_cut(data: bytes) -> str:
    """Objects alone, none above the step."""
    for line in data.split(b"\n")[:-1]:
        if json.loads(line).get("step", 0) > 2:
            return f"it kept {line!r:.100}"
    return ""


def metrics_of(path: Path) -> Any:
    """All that the live view asks of a history."""
    found = history.read(path)
    shares = found.staleness(), found.seconds_per_step(), found.per_second("train/rows")
    MetricsTail(path).read()
    return (
        found.evaluations,
        found.last("loss"),
        found.mean("loss"),
        shares,
        found.learner_seconds(),
    )


def lock_of(path: Path) -> Any:
    """Supervisor and Redis in a lock file."""
    with open(path, "rb") as file:
        content = folder_lock._read(file.fileno())
    return folder_lock._holder(content, "supervisor"), folder_lock._holder(content, "redis")


def known_of(path: Path) -> Any:
    """A run's folder as ``tandem status`` reads it, with these bytes as each of its files in turn."""
    folder = run_folder.RunFolder(path.parent)
    for file in (folder.config, folder.summary, folder.lock, folder.run_json):
        try:
            file.write_bytes(path.read_bytes())
            look.known_of(folder)
        finally:
            file.write_bytes(b"{}")


ROW = {
    "step": 1,
    "short": False,
    "groups": [
        {"id": "0-0", "attempt": 1, "digest": "a" * 16, "bytes": 700, "traces": []},
        {"id": "0-1", "attempt": 2, "digest": "b" * 16, "bytes": 701, "traces": ["a/0#0"]},
    ],
}


def a_journal() -> bytes:
    """Four rows: applied, quarantined, applied again after a resume, and one under way."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 5):
        row = {**ROW, "step": step}
        digest = journal.digest_of(row)
        head = {"term": 1, "step": step}
        lines.append({"kind": "row", **head, "row": row, "digest": digest, "time": 1.5})
        if step < 4:
            kind = "quarantined" if step == 2 else "applied"
            lines.append({"kind": kind, **head, "digest": digest, "time": 1.5})
        if step == 3:
            lines.append({"kind": "resumed", "term": 2, "step": 2, "time": 1.5})
            lines.append({"kind": "applied", "term": 2, "step": 3, "digest": digest, "time": 1.5})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


METRICS = b"".join(
    json.dumps(
        {
            "step": step, "term": 1, "time": 1.5 * step, "loss": 0.5, "train/rows": 16,
            "replay/staleness_share_0": 0.5, "replay/staleness_share_1": 0.5, "time/total": 2.0,
            "text": "a\u2028b",
        },
        ensure_ascii=False,
    ).encode()
    + b"\n"
    for step in range(1, 4)
) + b'{"step":2,"eval/heldout/accuracy":0.5,"eval/heldout/problems":9,"eval/id":"heldout@2"}\n'  # fmt: skip
SAFETENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [60, 64]},
}
CONFIG = b"""run:
  steps: 5
model: {path: m}
data:
  train:
  - path: a.parquet
    name: a
    weight: 2
rollout:
  group_size: 8
"""


def mutated_table(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A safetensors file: its length and its table of contents."""
    if c.random() < 0.2:
        return flipped(data, c)
    table = mutated_json(data[8:], [one[8:] for one in corpus], c)
    length = len(table) if c.random() < 0.9 else c.choice((0, 1, 2**20, 2**40, 2**63))
    return length.to_bytes(8, "little") + table


def mutated_yaml(data: bytes, corpus: Sequence[bytes], c: random.Random) -> bytes:
    """A config with lines changed, moved and cut."""
    if c.random() < 0.3:
        return flipped(data, c)
    lines = data.split(b"\n")
    at = c.randrange(len(lines))
    odd = (b"[" * 400, b"&a [*a]", b"!!python/object:os.system {}", b"- 1", b"? x", b"{a: b", b"%",
           b"2001-99-99", b"1e999", b"\xff", b"\x00", b".nan", b"-1", b"[]", b"{}", b"'", b"1:60:60")  # fmt: skip
    key = lines[at].partition(b":")[0]
    lines[at] = c.choice((key + b": " + c.choice(odd), c.choice(odd), b"  " + lines[at], b""))
    return b"\n".join(lines)


# -- all of them ----------------------------------------------------------------------------------


def packed(*messages: Any) -> list[bytes]:
    """Corpus of MessagePack."""
    return [msgpack.packb(message) for message in messages]


def text(*contents: Any) -> list[bytes]:
    """Corpus of JSON."""
    return [json.dumps(content).encode() for content in contents]


def round_trip(read: Callable[[bytes], Any]) -> Callable[[Any], str]:
    """A flat record must come out again of its own JSON."""

    def check(found: Any) -> str:
        again = read(json.dumps(dataclasses.asdict(found)).encode())
        return "" if same(found, again) else "it isn't the same when it is written and read again"

    return check


def check_row(found: Any) -> str:
    """A row gives itself again."""
    return "" if ledger.Row.from_dict(found.to_dict()) == found else "it isn't the same again"


def from_redis() -> Iterable[Decoder]:
    """What is kept in Redis, and what its scripts answer."""
    request = dataclasses.asdict(store.EvaluationRequest(id="h@1", set_name="h", step=1))
    result = {
        "id": "h@1", "set_name": "h", "step": 1, "accuracy": 0.5, "problems": 3,
        "format_share": 1.0, "mean_length": 4.0, "seconds": 1.0, "member": "rollout-0",
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
        return ledger.read_settings(
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
    yield json_of("replay.row", text(ROW), row_of, check=check_row)
    yield json_of("replay.take", text(*taken), ledger.read_take)
    yield json_of("replay.lease", text(leases), answers.lease_answer)
    yield json_of(
        "replay.retry",
        text({"back": [1, 4]}, {"over": "why"}, {"back": {}}),
        lambda data: dead_letters.read_answer(data, {1, 4}),
    )
    yield json_of("replay.waiting", text(told), ledger.read_waiting)
    yield json_of(
        "replay.dead_letters",
        text(letters),
        lambda data: ledger.read_dead_letters({b"7": data}, {b"3": data[:200]}),
    )
    yield json_of("replay.settings", text(fields), settings_of)
    yield json_of("replay.member", text(member), lambda data: members.read_member(b"m", data, 1))
    yield json_of(
        "replay.evaluation_request",
        text(request),
        store.read_request,
        check=round_trip(store.read_request),
    )
    yield json_of(
        "replay.evaluation_result",
        text(result),
        store.read_result,
        check=round_trip(store.read_result),
    )
    yield json_of("replay.report", text(report), read_report)
    yield json_of("replay.client_keys", text(["k" * 40, "s" * 40]), store.read_keys)
    yield Decoder(
        name="replay.final_place",
        corpus=[b"T:3:1", b"D:3:2", b"R:0:1:attempts"],
        decode=ledger.read_final,
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


def from_files(files: Files) -> Iterable[Decoder]:
    """What lies in a run's folder, or beside it."""
    join = {
        "run_id": "r", "host": "127.0.0.1", "port": 1, "db": 0, "username": None, "password": "p",
        "tls": False,
    }  # fmt: skip
    lock = {
        "host": "h",
        "supervisor": {"pid": 5, "started": 1.5},
        "redis": {"pid": 6, "started": 1.5},
    }
    run = {"run_id": "r", "preset": "p", "state": "running", "wall_seconds": 3.0, "began": 1.0}
    table = json.dumps(SAFETENSORS).encode()

    def one(
        name: str, file: str, corpus: list[bytes], read: Callable[[Path], Any], **more: Any
    ) -> Decoder:
        more = {"mutate": mutated_json, **more}
        return Decoder(name=name, corpus=corpus, decode=files.reading(file, read), **more)

    lines = {"mutate": mutated_lines}
    yield one(
        "journal", "j/journal.jsonl", [a_journal()], open_journal, check=check_journal, **lines
    )
    yield one("journal.cut_back", "c/metrics.jsonl", [METRICS], cut, check=check_cut, **lines)
    yield one(
        "telemetry.read_json_lines", "t/m.jsonl", [METRICS],
        lambda path: list(telemetry.read_json_lines(path)), **lines,
    )  # fmt: skip
    yield one("telemetry.JsonLines", "w/m.jsonl", [METRICS], write_json_line, **lines)
    yield one("board.history", "h/metrics.jsonl", [METRICS], metrics_of, **lines)
    yield one("run_folder.read_join", "join.json", text(join), run_folder.read_join)
    yield one(
        "run_folder.read_run", "r/run.json", text(run),
        lambda path: run_folder.RunFolder(path.parent).read_run(),
    )  # fmt: skip
    yield one("folder_lock", "lock", text(lock), lock_of)
    yield one(
        "board.known_of", "k/any", text(run, lock, {"run": {"steps": 3}}), known_of,
        mutate=lambda data, corpus, c: mutated_json(data, corpus, c)[:600],  # YAML is slow
    )  # fmt: skip
    yield one(
        "trackers.sent",
        "wandb.json",
        text({"rows": 3, "step": 2, "evaluations": ["h@1"]}),
        Sent.read,
    )
    yield one(
        "safetensors.header", "s/model.safetensors", [len(table).to_bytes(8, "little") + table],
        lambda path: count_parameters(path.parent), mutate=mutated_table,
    )  # fmt: skip
    state = {"term": 1, "step": 5, "ranks": 1, "state": {"x": 1}, "files": {}}
    yield one(
        "checkpoints.read",
        "p/state.json",
        text(state),
        lambda path: _checkpoint(path.parent),
        imports="tandem.learner.checkpoints",
    )


def _checkpoint(folder: Path) -> Any:
    from tandem.learner.checkpoints import read  # imports DeepSpeed

    return read(folder)


def all_decoders(files: Files) -> list[Decoder]:
    """Every one."""
    found = [of_wire(record) for record in RECORDS + MESSAGES]
    frames = [msgpack.packb(protocol.pack(message)) for message in MESSAGES]
    found.append(
        Decoder(
            name="weights.unpack",
            corpus=frames,
            decode=lambda data: protocol.unpack(msgpack.unpackb(data)),
            mutate=mutated_message,
            check=lambda r: (
                "" if same(r, protocol.unpack(protocol.pack(r))) else "not the same again"
            ),
        )
    )
    found.append(
        Decoder(
            name="weights.manifest",
            corpus=[wire.encode(a_manifest())],
            decode=read_manifest,
            mutate=mutated_manifest,
            check=check_manifest,
        )
    )
    traces = [wire.encode(RECORDS[5])]
    group = [wire.encode(a_group()), ["a/1#0"]]
    order = {"do": "train", "step": 3, "groups": [group], "traces": traces, "lr": 1e-6}
    for name, corpus, decode in (
        (
            "graders.request",
            packed(["compare", 2.5, b"x"], ["function", 3, None]),
            pipes.read_request,
        ),
        (
            "graders.payload",
            packed(["4", "4"], ["x+1", "\\frac{1}{2}"]),
            functools.partial(pipes.read_payload, "compare"),
        ),
        (
            "graders.reply",
            packed(["ready", None, 9], ["done", "wrong", 9], ["crash", "x", 0]),
            pipes.read_reply,
        ),
        (
            "graders.control",
            packed(
                ["spawn", 1], ["ready", 5, ["no network"]], ["exited", 1, 5, -9], ["failed", "x"]
            ),
            pipes.read_control,
        ),
        (
            "ranks.order",
            packed(order, {"do": "stop"}, {"do": "save", "folder": "x"}),
            orders.read_order,
        ),
    ):
        found.append(Decoder(name=name, corpus=corpus, decode=decode, mutate=mutated_msgpack))
    return [*found, *from_redis(), *from_files(files)]
