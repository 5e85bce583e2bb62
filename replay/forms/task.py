"""Tasks of environments that have no prompt: the environment shows what there is to see.

The column ``task`` holds what the environment is given; the column ``environment`` may name it. Rows with a prompt
keep the form that they have, and name their environment in the same column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import (
    DEEPEST,
    Content,
    RowError,
    ability,
    gold_of,
    is_deeper,
    others,
    plain,
    present,
    source_of,
)

USED = ("task", "environment", "gold", "data_source", "ability")


def _read(row: Mapping[str, Any]) -> Content:
    task = row["task"]
    if not isinstance(task, Mapping) or not task:
        raise RowError("task", task, "isn't an object", "store what the environment is given")
    if is_deeper(task):
        raise RowError("task", task, f"has over {DEEPEST} levels", "store deep values as JSON text")
    return Content(
        prompt=(),
        gold=gold_of(row),
        data_source=source_of(row),
        ability=ability(row),
        extra={"task": plain(task), **others(row, USED)},
        kept_whole=("task",),
    )


def _write(content: Content) -> dict[str, Any]:
    extra = dict(content.extra)
    task = extra.pop("task", None)
    if not isinstance(task, Mapping) or content.prompt:
        raise RowError(
            "task", task, "isn't an object", "the form task holds tasks without a prompt"
        )
    known = present(gold=content.gold, data_source=content.data_source, ability=content.ability)
    return {**extra, "task": dict(task), **known}


FORM = Form(
    name="task",
    about="tasks of environments, without a prompt",
    columns=(("task",),),
    also=("environment",),
    read=_read,
    write=_write,
    of_extra=("task",),
    claims=lambda row: isinstance(row["task"], Mapping),
)
