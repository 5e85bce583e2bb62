"""Valid records, messages and files, of which mutated ones are made."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tandem.common import sockets
from tandem.common.records import (
    CommitResult,
    Episode,
    ExpertTrace,
    FinishReason,
    Group,
    GroupReceipt,
    GroupSubmission,
    Problem,
    Sample,
    SamplingParams,
    Turn,
    Verdict,
    Version,
    VersionSpan,
)
from tandem.common.weights import manifest, protocol
from tandem.common.weights.manifest import ScoredRows
from tandem.learner.resume import journal, journal_file
from tandem.replay.evaluating.evaluated import EvaluatedSample

KEYS = sockets.new_keys()


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
        "sampling": SamplingParams(temperature=0.6, top_p=1.0, top_k=0, max_new_tokens=1024),
        "text": "été ∑ 字",
        "reward": 0.25,
        "verdict": Verdict.WRONG,
        "components": {"accuracy": 0.0, "format": None},
        "extracted": "4",
        "grader": "boxed@1",
    }
    return Sample(**{**values, **changes})


def an_evaluated_sample(**changes: Any) -> EvaluatedSample:
    """With every field."""
    values: dict[str, Any] = {
        "problem_id": "h/1",
        "place": 1,
        "sample": 2,
        "source": "a",
        "prompt": "é?",
        "response": "∑",
        "gold": "4",
        "finish_reason": FinishReason.STOP,
        "verdict": Verdict.WRONG,
        "answer": Verdict.WRONG,
        "components": {"format": None},
        "reward": 0.0,
        "grader": "boxed@5",
        "tokens": 3,
        "logprob": -1.5,
        "version": "1.2",
        "extracted": "5",
        "answer_class": 0,
        "subject": "s",
        "question": "q",
        "level": "5",
        "second": Verdict.CORRECT,
        "token_ids": [1, 2, 3],
    }
    return EvaluatedSample(**{**values, **changes})


def an_episode(length: int = 5, **changes: Any) -> Episode:
    """Two turns, of which the second has a call that can't be parsed."""
    values: dict[str, Any] = {
        "environment": "sums",
        "reward": 0.75,
        "failure": None,
        "detail": "solved",
        "turns": (
            Turn(start=0, end=length // 2, reward=0.25, malformed=False),
            Turn(start=length // 2, end=length, reward=None, malformed=True),
        ),
        "metrics": {"tool_calls": 2.0, "environment_seconds": 0.5},
    }
    return Episode(**{**values, **changes})


def a_late_sample() -> Sample:
    """Cut at its group's deadline."""
    return a_sample(3, finish_reason=FinishReason.DEADLINE)


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
        "samples": (
            a_sample(),
            a_sample(0, spans=()),
            a_sample(70, reward=None, verdict=None),
            a_late_sample(),
            a_sample(4, episode=an_episode(4, failure=Verdict.ENV_TIMEOUT)),
        ),
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
    sums = [2**63 + 5 * i for i in range(layout.bucket_count)]
    scored = ScoredRows(rows=((3, 1, 2), (5, 6)), logprobs=((-0.5, -2.0), (-7.25,)))
    return manifest.WeightManifest(
        run_id="run",
        version=Version(term=1, step=step),
        layout=layout,
        checksums=tuple(sums),
        base="",
        scored=scored,
    )


RECORDS: list[Any] = [
    Version(term=3, step=70),
    VersionSpan(term=1, step=2, start=3, end=4),
    SamplingParams(temperature=0.6, top_k=5, max_new_tokens=7, top_p=1.0),
    a_sample(),
    an_episode(5),
    a_sample(5, episode=an_episode(5)),
    Problem(
        problem_id="a/1",
        prompt_text="p",
        prompt_tokens=np.arange(3, dtype=np.int32),
        gold="4",
        data_source="d",
        trace_ids=("a/1#0", "a/1#1"),
        extra={"images": [{"path": "x.png"}]},
        ability="math",
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
        grader=None,
        source=np.array([1, 2, 1], np.uint8),
    ),
    a_group(),
    GroupSubmission(request_id=9, group=a_group()),
    GroupReceipt(
        request_id=9, group_id="0-1", attempt=1, result=CommitResult.SUPERSEDED, detail=""
    ),
    a_manifest(),
]
MESSAGES: list[Any] = [
    protocol.Ask(
        member="rollout-0",
        version=Version(term=1, step=2),
        content="c",
        round="r",
        busy=False,
        problem="offer: é",
        fetched=0.25,
        paused=0.125,
        device="cpu",
        memory="m",
    ),
    protocol.Offer(round="r", manifest=a_manifest(), way="gloo", place=""),
    protocol.Open(
        round="r",
        meeting=protocol.Meeting(channel="c", host="127.0.0.1", port=5, rank=1, world_size=2),
    ),
    protocol.Withdraw(round="r", reason="x"),
]

ROW = {
    "step": 1,
    "short": False,
    "groups": [
        {"id": "0-0", "attempt": 1, "digest": "a" * 16, "bytes": 700, "traces": []},
        {
            "id": "0-1",
            "attempt": 2,
            "digest": "b" * 16,
            "bytes": 701,
            "traces": ["a/0#0"],
            "replaced": [1],
        },
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


def summed(lines: bytes) -> bytes:
    """The same with a digest on each line, in the order of the journal's own records."""
    order = ("kind", "term", "step", "digest", "time", "row")
    records = [json.loads(line) for line in lines.splitlines()]
    ordered = [{name: r[name] for name in order if name in r} for r in records]
    return b"".join(journal_file.encoded(record) for record in ordered)


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
