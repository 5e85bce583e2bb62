"""What a problem keeps of its row for the run's reward: the row's columns, and the prompt's messages.

Most rewards ask for neither, and then a problem has what its form keeps. A function of the user's own may
name any column of the data set, also one that the form reads itself (``solution``, ``answer``), and is then
given it as it is in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...common import prompts
from ...common.config import DataConfig
from ...common.records import PROMPT_MESSAGES
from ...replay.forms import DataRow
from ...replay.forms.row import plain
from ...reward.grading import Grader

MAX_COLUMN = 20_000
"""Longest column that is kept for functions, in characters of its JSON."""
OWN_TO_TRAINING = frozenset(("prompt", "completion", "completion_ids", "messages", "conversations"))
"""Columns that functions get in another form, as ``prompts`` and ``completions``, or don't get, as in TRL."""
DEEPEST = 6
"""Levels of nesting of a column that is kept; a record may have eight."""


def extra_of(row: DataRow, grader: Grader, data: DataConfig) -> Mapping[str, Any]:
    """The problem's ``extra``: other columns as plain values, and what the reward asks for."""
    content = row.content
    extra: dict[str, Any] = {}
    if grader.wants_columns:
        extra |= _columns(row.raw)
    extra |= content.extra
    if grader.wants_messages:
        messages = [{"role": m.role, "content": m.content} for m in content.prompt]
        extra[PROMPT_MESSAGES] = prompts.conversation(messages, data)
    return extra


def _columns(raw: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in raw.items():
        if str(name) in OWN_TO_TRAINING or value is None:
            continue
        simple = plain(value)
        size = len(simple if isinstance(simple, str) else json.dumps(simple))
        if size <= MAX_COLUMN and _depth(simple) <= DEEPEST:
            kept[str(name)] = simple
    return kept


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)
