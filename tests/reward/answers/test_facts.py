"""Answers of which the right verdict is known: of other projects' graders, and of our own.

``facts/upstream.jsonl`` holds facts from the tests of Math-Verify, MATH, TRL, verifiers, AReaL and
Qwen2.5-Math (longer texts cut down to the answer); ``ours`` and ``why`` where the verdict isn't
theirs (docs/grading.md). ``facts/neighbours.jsonl`` holds answers of the same kinds and their
verdict by mathematical sense, ``facts/responses.jsonl`` whole responses.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from tandem.common.records import Verdict
from tandem.reward.answers import comparison
from tandem.reward.grading import GradeItem, Grader
from tandem.reward.reading import modes

BOXED = modes.mode("boxed")
SHARE = 8
"""One in so many of the facts that need a grader process is looked at in every run."""


def _load(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name("facts") / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _upstream() -> list[dict[str, Any]]:
    return [{**row, "right": row.get("ours", row["upstream"])} for row in _load("upstream")]


def _neighbours() -> list[dict[str, Any]]:
    return [
        {**row, "response": f"<think>so</think> It is $\\boxed{{{row['answer']}}}$."}
        for row in _load("neighbours")
    ]


def _decided(row: dict[str, Any]) -> comparison.Decision | None:
    answer = BOXED.read(row["response"], "", False).answer
    return comparison.decide(answer, row["gold"], BOXED)


def _sampled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if zlib.crc32(f"{r['response']}|{r['gold']}".encode()) % SHARE == 0]


def _check(grader: Grader, rows: list[dict[str, Any]]) -> None:
    grades = grader.grade_texts([GradeItem(text=r["response"], gold=r["gold"]) for r in rows])
    found = [
        f"{row['response']!r} to {row['gold']!r} should {'' if row['right'] else 'not '}be right: "
        f"{grade.verdict}"
        for row, grade in zip(rows, grades, strict=True)
        if (grade.verdict is Verdict.CORRECT) is not row["right"]
        or grade.verdict in (Verdict.CRASHED, Verdict.MEMORY)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rows", [_upstream(), _neighbours(), _load("responses")])
def test_what_the_fast_path_decides_is_right(rows: list[dict[str, Any]]) -> None:
    found = []
    for row in rows:
        decision = _decided(row)
        if decision is not None and (decision.verdict is Verdict.CORRECT) is not row["right"]:
            found.append((row["response"], row["gold"], decision))
    assert not found


def test_a_share_of_the_facts_through_grader_processes(grader: Grader) -> None:
    rows = [*_upstream(), *_neighbours(), *_load("responses")]
    _check(grader, [row for row in _sampled(rows) if _decided(row) is None])


@pytest.mark.byhand
def test_every_fact_through_grader_processes(grader: Grader) -> None:
    _check(grader, [*_upstream(), *_neighbours(), *_load("responses")])


def test_no_disagreement_with_another_project_is_left_without_its_reason() -> None:
    for row in _load("upstream"):
        assert ("ours" in row) == ("why" in row)


def test_nearly_all_boxed_facts_of_other_projects_hold() -> None:
    facts = [r for r in _load("upstream") if r["kind"] == "fact" and "boxed" in r["response"]]
    agreed = sum("ours" not in row for row in facts)
    assert agreed / len(facts) >= 0.97


def test_the_page_about_grading_counts_the_facts_of_other_projects() -> None:
    page = (Path(__file__).parents[3] / "docs" / "grading.md").read_text("utf-8")
    assert f" hold {len(_load('upstream'))} answers " in page
