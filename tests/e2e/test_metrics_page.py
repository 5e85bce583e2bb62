"""docs/metrics.md names every metric that a real run writes, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tandem.common.records import Verdict
from tandem.common.telemetry import read_json_lines

EVERY = frozenset({"always", "every step"})
"""What the page says of metrics that each record has."""


@pytest.fixture(scope="module")
def page(root: Path) -> dict[str, str]:
    """Name to when it is written, as the page has them."""
    text = (root / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    found = {}
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 4, row
        assert all(cells), row
        found[cells[0].strip("`")] = cells[3]
    assert len(found) == len(rows), "a metric stands on the page twice"
    return found


@pytest.fixture(scope="module")
def written(finished_run: Path) -> list[dict]:
    return list(read_json_lines(finished_run / "metrics.jsonl"))


def documented(name: str, page: Iterable[str]) -> bool:
    """Whether a name stands on the page, or one of its patterns fits it."""
    patterns = {
        "eval/SET/": r"eval/[^/]+/",
        "source/NAME/": r"source/.+/",
        "pass@K": r"pass@\d+",
        "maj@K": r"maj(@\d+)?",
        "replay/staleness_share_AGE": r"replay/staleness_share_\d+",
        "weights/MEMBER/": r"weights/[a-z]+-[\w.-]+/",
        "environment/own/FIGURE": r"environment/own/.+",
        "reward/COMPONENT": r"reward/(format|tag_count|reasoning_steps|repetition)",
        "grading/verdict_NAME": f"grading/verdict_({'|'.join(verdict.value for verdict in Verdict)})",
        "reward/verdict_NAME": f"reward/verdict_({'|'.join(verdict.value for verdict in Verdict)})",
    }
    for entry in page:
        pattern = re.escape(entry)
        for placeholder, meant in patterns.items():
            pattern = pattern.replace(re.escape(placeholder), meant)
        if re.fullmatch(pattern, name):
            return True
    return False


def test_every_metric_of_a_real_run_is_on_the_page(
    page: dict[str, str], written: list[dict]
) -> None:
    names = {name for record in written for name in record}
    assert sorted(name for name in names if not documented(name, page)) == []


def test_what_is_said_to_be_in_every_record_is(page: dict[str, str], written: list[dict]) -> None:
    steps = [record for record in written if "eval/id" not in record]
    expected = {name for name, when in page.items() if when in EVERY}
    for record in steps:
        moved = bool(record["train/rows_active"])
        # Where no row can move the gradient there is no pass to tell of.
        assert {n for n in expected if moved or not n.startswith("train/")} <= set(record)
    for record in written:
        assert {name for name, when in page.items() if when == "always"} <= set(record)


def test_every_metric_on_the_page_is_written_by_the_run_or_stands_in_the_code(
    page: dict[str, str], written: list[dict], root: Path
) -> None:
    """Those of other objectives and settings are looked for where metrics are named."""
    names = {name for record in written for name in record}
    rooms = ("learner", "rollout/evaluate", "replay")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    unknown = []
    for entry in page:
        if any(documented(name, [entry]) for name in names):
            continue
        last = entry.rpartition("/")[2]
        literals = (f'"{entry}"', f'"{last}"', f'"{entry.removeprefix("time/")}"')
        stem = re.sub("(AGE|NAME|COMPONENT|FIGURE)$", "", entry)
        # `f"{name}/class_{k}"` writes several that the page names one by one.
        made = (f'f"{stem}{{', f"}}/{last.rpartition('_')[0]}_{{")
        made += (f'f"{last.replace("@K", "@{")}',) if "@K" in last else ()
        if not any(one in code for one in (*literals, *made)):
            unknown.append(entry)
    assert unknown == []


def test_every_activity_that_the_learner_times_is_on_the_page(
    page: dict[str, str], root: Path
) -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (root / "learner").rglob("*.py"))
    timed = set(re.findall(r'[.]doing\("([a-z/]+)"\)', code))
    assert "compute" in timed
    assert sorted(f"time/{name}" for name in timed if f"time/{name}" not in page) == []


def test_a_name_that_is_not_on_the_page_would_be_seen(page: dict[str, str]) -> None:
    assert documented("reward/verdict_timeout", page)
    assert documented("eval/amc/accuracy", page)
    assert documented("eval/amc/source/lab/math/pass@16", page)
    assert not documented("train/made_up", page)
    assert not documented("eval/amc/made_up", page)
