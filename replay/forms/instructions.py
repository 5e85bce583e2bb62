"""An instruction to follow, without a right answer: AlpacaEval, SimpleSafetyTests.

``instruction`` or ``prompts_final`` is what is asked. AlpacaEval's ``output``, a reference's response, stays in
``extra``; ``dataset`` says where an instruction is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import (
    SOURCES,
    Content,
    first_of,
    one_question,
    others,
    present,
    question,
    source_of,
    text,
)

ASKED = ("instruction", "prompts_final")


def read(row: Mapping[str, Any]) -> Content:
    asked = first_of(row, ASKED) or ASKED[0]
    return Content(
        prompt=question(text(row, asked)),
        data_source=source_of(row),
        extra=others(row, (*ASKED, *SOURCES)),
    )


def write(content: Content) -> dict[str, Any]:
    return {
        **content.extra,
        **present(
            instruction=one_question(content, "instructions"), data_source=content.data_source
        ),
    }


FORM = Form(
    name="instructions",
    about="AlpacaEval, SimpleSafetyTests: an instruction without a right answer",
    columns=tuple((asked,) for asked in ASKED),
    read=read,
    write=write,
)
