"""Prompts alone, for rewards that need no gold answer: an environment's, a judge's, a function of the user's own.

The column ``prompt`` is text, or a list of messages; a text in ``system`` is its system message, unless it has one. A gold
answer (``row.GOLDS``), where the row is from (``row.SOURCES``) and ``ability`` may be there; other columns are kept for
rewards and environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import row as r
from .form import Form

OF_OTHERS = ("task", "messages", "conversations", "reward_model", "target", "chosen", "rejected")
"""Columns of rows that have another form, or would have it if none of its columns were missing."""


def _read(row: Mapping[str, Any]) -> r.Content:
    return r.Content(
        prompt=r.with_system(row, r.prompt(row, "prompt")),
        gold=r.gold_of(row),
        data_source=r.source_of(row),
        ability=r.ability(row),
        extra=r.others(row, ("prompt", *r.GOLDS, *r.SOURCES, r.SYSTEM, "ability")),
    )


def _write(content: r.Content) -> dict[str, Any]:
    return {
        **content.extra,
        **r.present(
            prompt=r.as_prompt(content),
            gold=content.gold,
            data_source=content.data_source,
            ability=content.ability,
        ),
    }


FORM = Form(
    name="prompt",
    about="prompts alone",
    columns=(("prompt",),),
    read=_read,
    write=_write,
    claims=lambda row: not any(name in row for name in OF_OTHERS),
)
