"""Held-out sets whose rows are repeated in place of sampling several times."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.common.records import REPEATS, Problem
from tandem.launch.ingest.repeats import joined


def problems(*rows: tuple[str, int]) -> list[Problem]:
    return [
        Problem(
            problem_id=f"set/{place}",
            prompt_text=f"{number}?",
            prompt_tokens=np.array([number], np.int32),
            gold="7",
            data_source=source,
            ability="math",
            trace_ids=(),
            extra={},
        )
        for place, (source, number) in enumerate(rows)
    ]


def test_a_source_whose_prompts_are_all_repeated_is_joined() -> None:
    found = joined(problems(("aime", 1), ("math", 1), ("aime", 2), ("aime", 1), ("aime", 2)))
    assert [p.problem_id for p in found] == ["set/0", "set/1", "set/2"]
    assert [p.extra.get(REPEATS) for p in found] == [2, None, 2]


def test_a_few_equal_rows_are_problems_like_others() -> None:
    rows = problems(("mmlu", 1), ("mmlu", 2), ("mmlu", 1))
    assert joined(rows) == rows
    assert [p.extra.get(REPEATS) for p in joined(rows, repeated=True)] == [2, None]


def test_what_is_told_to_be_no_repeat_stays() -> None:
    rows = problems(("aime", 1), ("aime", 1))
    assert joined(rows, repeated=False) == rows


@pytest.mark.parametrize("gold", ["7", "8"])
def test_rows_with_other_gold_answers_are_other_problems(gold: str) -> None:
    from msgspec.structs import replace

    first, second = problems(("a", 1), ("a", 1))
    assert len(joined([first, replace(second, gold=gold)])) == (1 if gold == "7" else 2)
