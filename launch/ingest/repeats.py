"""Rows of a held-out set that are there several times: so many samples of one problem.

LUFFY's files repeat a row in the place of sampling several times. Taken for problems of their own, equal rows
would make pass@k, majorities and every interval wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from ...common.records import ENVIRONMENT, REPEATS, Problem

Key = tuple[str, bytes, str]


def joined(problems: Sequence[Problem], repeated: bool | None = None) -> list[Problem]:
    """The distinct problems in the order of their first rows; repeated ones say how often they are there.

    Args:
        problems: a row each.
        repeated: whether equal rows are joined; None = those of a source in which every prompt is there
            equally often, and more than once.
    """
    if repeated is False:
        return list(problems)
    keys = [_key(problem) for problem in problems]
    counts = Counter(keys)
    often: dict[str, set[int]] = {}
    for (source, _, _), count in counts.items():
        often.setdefault(source, set()).add(count)
    found: dict[Key | str, Problem] = {}
    for problem, key in zip(problems, keys, strict=True):
        count = counts[key]
        if count == 1 or not (repeated or len(often[problem.data_source]) == 1):
            found[problem.problem_id] = problem
        elif key not in found:
            found[key] = replace(problem, extra={**problem.extra, REPEATS: count})
    return list(found.values())


def _key(problem: Problem) -> Key:
    # What is played tells episodes apart: many have no prompt of their own, and it has the row's other columns.
    played = json.dumps(problem.extra.get(ENVIRONMENT), sort_keys=True)
    what = (problem.prompt_tokens.tobytes() or problem.prompt_text.encode()) + played.encode()
    return problem.data_source, what, problem.gold
