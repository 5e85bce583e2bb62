"""Anthropic's HH-RLHF: ``chosen`` and ``rejected``, each a dialogue in one text.

Kept are pairs of one exchange, ``\\n\\nHuman: …\\n\\nAssistant: …``, with the same question on both sides.
The data are those of Bai et al., "Training a Helpful and Harmless Assistant with Reinforcement
Learning from Human Feedback" (arXiv 2204.05862).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .form import Form
from .preference import check_pair
from .row import Content, RowError, needed, one_question, others, question, text

_TURN = re.compile(r"\n\n(Human|Assistant):")


def read(row: Mapping[str, Any]) -> Content:
    asked, chosen = _exchange(row, "chosen")
    also_asked, rejected = _exchange(row, "rejected")
    if asked != also_asked:
        raise RowError("rejected", also_asked, "asks another question", "leave the pair out")
    check_pair(chosen, rejected)
    return Content(
        prompt=question(asked),
        target=chosen,
        rejected=rejected,
        data_source="hh",
        ability="dialogue",
        extra=others(row, ("chosen", "rejected")),
    )


def _exchange(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    dialogue = text(row, column)
    parts = _TURN.split(dialogue)
    if parts[0].strip() or parts[1::2] != ["Human", "Assistant"]:
        raise RowError(column, dialogue, "isn't one exchange", "only single exchanges are read")
    return parts[2].strip(), parts[4].strip()


def _claims(row: Mapping[str, Any]) -> bool:
    sides = (row["chosen"], row["rejected"])
    return all(isinstance(side, str) and side.startswith("\n\nHuman:") for side in sides)


def write(content: Content) -> dict[str, Any]:
    asked = one_question(content, "hh")
    sides = {"chosen": content.target, "rejected": content.rejected}
    return {
        name: f"\n\nHuman: {asked}\n\nAssistant: {needed(side, name, 'hh')}"
        for name, side in sides.items()
    }


FORM = Form(
    name="hh",
    about="Anthropic's HH-RLHF, single exchanges",
    columns=(("chosen", "rejected"),),
    read=read,
    write=write,
    claims=_claims,
)
