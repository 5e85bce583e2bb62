"""The auditor is audited: a right run passes, and each planted breach is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from audit import Evidence, digest_of, examine, tampered
from msgspec.structs import replace

from tandem.common import wire
from tandem.common.records import (
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Verdict,
    VersionSpan,
)

ROWS = {1: ["0-0", "0-1"], 2: ["0-2", "0-3"], 3: ["0-4"]}
"""A pass of five groups, two a step; the last row is short."""


def payload(group_id: str, step: int, age: int = 0, samples: int = 2) -> bytes:
    """An encoded group whose tokens are so many steps old in the row of that step."""
    span = VersionSpan(term=1, step=step - 1 - age, start=0, end=3)
    sample = Sample(
        tokens=np.arange(3, dtype=np.int32),
        source=np.zeros(3, np.uint8),
        logprobs=np.full(3, -0.1, np.float32),
        spans=(span,),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        text="",
        reward=None,
        verdict=None,
        components={},
        extracted=None,
        grader=None,
    )
    return wire.encode(
        Group(
            group_id=group_id,
            attempt=1,
            worker="rollout-0",
            problem_id="a/0",
            prompt_tokens=np.arange(2, dtype=np.int32),
            prompt_text="",
            gold="",
            data_source="",
            samples=(sample,) * samples,
            trace_ids=(),
            extra={},
        )
    )


@pytest.fixture
def right() -> Evidence:
    """A run with η = 0 whose learner was killed at step 2 and resumed from step 1."""
    journal: list[dict[str, Any]] = []
    rows: dict[int, dict[str, Any]] = {}
    payloads = {}
    for step, ids in ROWS.items():
        entries = []
        for name in ids:
            data = payload(name, step)
            digest = xxhash.xxh3_64_hexdigest(data)
            payloads[f"{name}:1:{digest}"] = data
            entries.append(
                {"id": name, "attempt": 1, "digest": digest, "bytes": len(data), "traces": []}
            )
        rows[step] = {"step": step, "short": step == 3, "groups": entries}

    def note(kind: str, term: int, step: int) -> None:
        record: dict[str, Any] = {"kind": kind, "term": term, "step": step}
        if kind == "row":
            record["row"] = rows[step]
        if kind != "resumed":
            record["digest"] = digest_of(rows[step])
        journal.append(record)

    for kind, term, step in (
        *(("row", 1, 1), ("applied", 1, 1), ("row", 1, 2), ("applied", 1, 2)),
        *(("resumed", 2, 1), ("applied", 2, 2), ("row", 2, 3), ("applied", 2, 3)),
    ):
        note(kind, term, step)
    return Evidence(
        config={
            "run": {"passes": 1},
            "data": {"evaluate": [{"name": "held"}]},
            "evaluate": {"every": 2, "at_start": True, "at_end": True},
            "replay": {"groups_per_step": 2, "max_staleness": 0},
            "rollout": {"group_size": 2},
            "learner": {"minibatches": 1, "objective": {"name": "grpo"}},
        },
        sources=[("a", 5, 1)],
        journal=journal,
        samples={
            step: {
                name: [{"versions": [f"1.{step - 1}"], "reward": float(i)} for i in range(2)]
                for name in ids
            }
            for step, ids in ROWS.items()
        },
        checkpoint={"term": 2, "step": 3},
        optimizer_steps=3,
        meta={"journalled": "3"},
        live={name: [] for name in ("leased", "returned", "graded", "taken", "groups")},
        final={int(n[2:]): f"D:{step}:1" for step, ids in ROWS.items() for n in ids},
        rows=rows,
        payloads=payloads,
        told=[evaluation(step) for step in (0, 2, 3)],
        evaluations={"asked": [f"held@{step}" for step in (0, 2, 3)], "open": [], "claimed": []},
        results={f"held@{step}": {"step": step, "accuracy": 0.5} for step in (0, 2, 3)},
    )


def evaluation(step: int) -> dict[str, Any]:
    """A record of one, as the metrics have it."""
    return {
        "eval/id": f"held@{step}",
        "step": step,
        "eval/version": f"1.{step}",
        "eval/held/accuracy": 0.5,
    }


def told(evidence: Evidence) -> str:
    return "\n".join(examine(evidence).breaches)


def record(evidence: Evidence, kind: str, step: int) -> dict[str, Any]:
    return next(r for r in evidence.journal if (r["kind"], r["step"]) == (kind, step))


def rewrite(evidence: Evidence, step: int) -> None:
    """Makes digests fit a row that was changed: its other flaws are to be found."""
    row = record(evidence, "row", step)["row"]
    evidence.rows[step] = row
    for one in evidence.journal:
        if one["step"] == step and "digest" in one:
            one["digest"] = digest_of(row)


def test_a_right_run_has_no_breach(right: Evidence) -> None:
    found = examine(tampered(right))
    assert found.breaches == []
    assert found.figures["groups trained"] == found.figures["groups of the run"] == 5
    assert found.figures["steps trained again after a kill"] == 1


def test_a_row_that_stands_twice(right: Evidence) -> None:
    right.journal.append(tampered(right).journal[0])
    assert "step 1 has two rows in the journal" in told(right)


def test_the_groups_of_a_row_in_another_row(right: Evidence) -> None:
    record(right, "row", 2)["row"]["groups"] = record(right, "row", 1)["row"]["groups"]
    rewrite(right, 2)
    assert "group 0-0 stands in row 1 and in row 2" in told(right)


def test_an_id_that_is_dropped(right: Evidence) -> None:
    del right.final[3]
    assert "group 0-3 is neither trained nor rejected: no final state" in told(right)


def test_an_id_that_redis_says_is_trained_and_no_row_has(right: Evidence) -> None:
    record(right, "row", 2)["row"]["groups"].pop()
    rewrite(right, 2)
    said = told(right)
    assert "group 0-3: Redis has it trained in (2, 1), the journal: None" in said
    assert "row 2 has 1 groups and should have 2" in said


def test_a_short_row_before_the_last(right: Evidence) -> None:
    record(right, "row", 2)["row"]["short"] = True
    rewrite(right, 2)
    assert "row 2 is marked short and isn't the last one" in told(right)


def test_a_stale_group_by_the_learners_record(right: Evidence) -> None:
    right.samples[2]["0-2"][1]["versions"] = ["1.0"]
    assert "tokens of version step 0 in row 2: age 1, and the bound is 0" in told(right)


def test_a_stale_group_by_its_payload(right: Evidence) -> None:
    entry = record(right, "row", 2)["row"]["groups"][0]
    data = payload("0-2", 2, age=1)
    entry["digest"] = xxhash.xxh3_64_hexdigest(data)
    right.payloads[f"0-2:1:{entry['digest']}"] = data
    rewrite(right, 2)
    assert "age 1, and the bound is 0" in told(right)


def test_a_group_from_the_future(right: Evidence) -> None:
    right.samples[1]["0-0"][0]["versions"] = ["1.1"]
    assert "age -1" in told(right)


def test_a_row_that_is_applied_twice_on_one_line_of_history(right: Evidence) -> None:
    right.journal.append(dict(record(right, "applied", 2)))
    assert "row 2 is applied 2 times" in told(right)


def test_a_row_that_is_never_applied(right: Evidence) -> None:
    right.journal.pop()
    assert "row 3 is applied 0 times" in told(right)


def test_an_optimizer_that_has_moved_too_often(right: Evidence) -> None:
    right.optimizer_steps = 4
    assert "the optimizer has made 4 steps, and the mini-batches that can move it are 3" in told(
        right
    )


def test_a_step_without_a_gradient_does_not_move_the_optimizer(right: Evidence) -> None:
    for rows in right.samples[2].values():
        for row in rows:
            row["reward"] = 1.0
    right.optimizer_steps = 2
    assert examine(right).breaches == []


def test_a_checkpoint_behind_the_journal(right: Evidence) -> None:
    right.checkpoint["step"] = 2
    assert "the final checkpoint is at step 2, the journal ends at 3" in told(right)


@pytest.mark.parametrize("name", ["leased", "returned", "taken"])
def test_a_group_that_is_on_its_way_for_ever(right: Evidence, name: str) -> None:
    right.live[name] = ["4"]
    assert f"1 left in {name} at the end" in told(right)


def test_groups_that_kills_have_cost(right: Evidence) -> None:
    record(right, "row", 3)["row"]["groups"].clear()
    rewrite(right, 3)
    right.final[4] = "R:0:5:attempts"
    said = told(right)
    assert "1 of 5 groups are rejected, more than 2%" in said
    assert "1 group(s) are rejected for attempts, which kills must not cause" in said


def test_a_group_that_lost_a_sample(right: Evidence) -> None:
    entry = record(right, "row", 1)["row"]["groups"][0]
    data = payload("0-0", 1, samples=1)
    entry["digest"] = xxhash.xxh3_64_hexdigest(data)
    right.payloads[f"0-0:1:{entry['digest']}"] = data
    rewrite(right, 1)
    assert "group 0-0 has 1 samples and should have 2" in told(right)


def test_a_payload_that_was_changed(right: Evidence) -> None:
    name = next(iter(right.payloads))
    right.payloads[name] = right.payloads[name][:-1] + b"?"
    assert f"the payload {name} isn't what its digest says" in told(right)


def test_a_row_of_redis_that_is_another_one(right: Evidence) -> None:
    right.rows = tampered(right).rows
    right.rows[1]["groups"][0]["attempt"] = 7
    assert "row 1 in Redis isn't the journal's" in told(right)


def test_an_older_learner_that_writes_after_a_newer_one(right: Evidence) -> None:
    right.journal[-1]["term"] = 1
    assert "term 1 wrote to the journal after term 2" in told(right)


def test_an_evaluation_that_is_told_nowhere(right: Evidence) -> None:
    del right.told[1]
    assert "evaluation held@2 was due and is told nowhere" in told(right)


def test_an_evaluation_that_is_told_twice(right: Evidence) -> None:
    right.told.append(evaluation(2))
    assert "evaluation held@2 is told 2 times" in told(right)


def test_an_evaluation_that_is_still_open_or_was_not_due(right: Evidence) -> None:
    right.evaluations["open"].append("held@3")
    right.told.append(evaluation(1))
    found = told(right)
    assert "1 evaluation(s) left that are open: ['held@3']" in found
    assert "evaluation held@1 is told and was not due" in found


def test_an_evaluation_that_names_weights_that_it_can_not_have_measured(right: Evidence) -> None:
    right.told[1] = evaluation(2) | {"eval/version": "1.1"}
    assert "evaluation held@2 of step 2 measured '1.1'" in told(right)


def test_an_evaluation_that_is_told_with_other_figures(right: Evidence) -> None:
    right.told[1]["eval/held/accuracy"] = 0.75
    assert "evaluation held@2 is told with other figures than Redis has" in told(right)


def after_grading(right: Evidence, verdicts: str, traces: list[str], gone: list[int]) -> Evidence:
    """The run with traces after grading, whose first group has such samples and such an entry."""
    right.config["expert"] = {"when": "all_failed"}
    row = record(right, "row", 1)["row"]
    entry = row["groups"][0]
    old = right.payloads.pop(f"{entry['id']}:1:{entry['digest']}")
    group = wire.decode(old, Group)
    of = {"c": Verdict.CORRECT, "w": Verdict.WRONG, "-": Verdict.CRASHED}
    samples = tuple(
        replace(sample, verdict=of[one], reward=0.0)
        for sample, one in zip(group.samples, verdicts, strict=True)
    )
    data = wire.encode(replace(group, samples=samples, trace_ids=("a/0#0",)))
    entry |= {"digest": xxhash.xxh3_64_hexdigest(data), "traces": traces, "bytes": len(data)}
    if gone:
        entry["replaced"] = gone
    right.payloads[f"{entry['id']}:1:{entry['digest']}"] = data
    rewrite(right, 1)
    return right


@pytest.mark.parametrize(
    ("verdicts", "traces", "gone", "breach"),
    [
        ("ww", ["a/0#0"], [1], ""),
        ("w-", ["a/0#0"], [], ""),
        ("cw", [], [], ""),
        ("cw", ["a/0#0"], [1], "group 0-0 has the traces ('a/0#0',)"),
        ("ww", [], [], "group 0-0 has the traces ()"),
        ("ww", ["a/0#0"], [], "in group 0-0 the samples [] of [0, 1] gave way"),
        ("w-", ["a/0#0"], [1], "in group 0-0 the samples [1] of [0] gave way"),
    ],
)
def test_traces_that_entered_after_grading(
    right: Evidence, verdicts: str, traces: list[str], gone: list[int], breach: str
) -> None:
    said = told(after_grading(right, verdicts, traces, gone))
    assert breach in said if breach else "gave way" not in said and "the traces" not in said


def test_a_final_checkpoint_of_an_older_learner_than_the_one_that_trained_last(
    right: Evidence,
) -> None:
    right.checkpoint["term"] = 1
    assert "the final checkpoint is of term 1, not 2" in told(right)


def test_a_learner_that_dies_after_its_last_checkpoint(right: Evidence) -> None:
    right.journal.append({"kind": "resumed", "term": 3, "step": 3})
    assert examine(right).breaches == []
