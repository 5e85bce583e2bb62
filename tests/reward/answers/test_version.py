"""A verdict that changes raises the graders' version: nobody may forget it.

Samples record the grader's name and version, and a re-grading takes those of older versions anew;
a verdict that changed under the same version would be taken for the newer one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tandem.reward.answers import comparison
from tandem.reward.reading import modes

RECORDED = (14, "32c910029bf05309")
"""The version, and the digest of what it reads and settles of the facts."""


def _facts() -> list[tuple[str, str]]:
    rows = []
    for path in sorted((Path(__file__).parent / "facts").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            text = row.get("response", f"<think>so</think> It is $\\boxed{{{row.get('answer')}}}$.")
            rows.append((text, row["gold"]))
    return rows


def _findings() -> Iterator[object]:
    """What each mode reads of the facts, and the verdicts on each answer beside three gold answers."""
    facts = _facts()
    for name, mode in sorted(modes.MODES.items()):
        for text, _ in facts:
            yield name, mode.read(text, "", False)
    boxed = modes.mode("boxed")
    answers = [boxed.read(text, "", False).answer for text, _ in facts]
    for place, answer in enumerate(answers):
        for other in (0, 1, 7):
            gold = facts[(place + other) % len(facts)][1]
            found = comparison.decide(answer, gold, boxed)
            yield found and found.verdict.value


def test_verdicts_are_those_that_were_recorded_with_the_version() -> None:
    digest = hashlib.sha256(repr(list(_findings())).encode()).hexdigest()[:16]
    now = (modes.GRADER_VERSION, digest)
    assert now == RECORDED, (
        f"some text is read or graded otherwise than before. If that is meant, raise GRADER_VERSION "
        f"in reward/reading/modes.py, say in CHANGELOG.md what changed, and write RECORDED = {now} here"
    )
