"""A prompt with a response to learn from, and perhaps a gold answer.

===================================================  ==================================================
column (the first that isn't blank)                  meaning
===================================================  ==================================================
``prompt``, ``instruction``, ``query``               the question: text, or a list of messages
``input``, ``context``                               with ``instruction``: what it is about; may be blank
``system``                                           the system message, unless the prompt has one; may be blank
``history``                                          earlier turns, ``[question, answer]`` each; may be empty
``response``, ``completion``, ``output``             the answer: text, or one assistant message
``gold``, ``ground_truth``, ``expected_answer``      the gold answer; may be absent
``data_source``, ``dataset``, …                      where the row is from (``row.SOURCES``); may be absent
``ability``                                          what it exercises; ``math`` without it
===================================================  ==================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import (
    GOLDS,
    SOURCES,
    Content,
    RowError,
    ability,
    as_prompt,
    first_of,
    gold_of,
    instruction,
    needed,
    others,
    present,
    prompt,
    response,
    source_of,
    unread,
    with_history,
)

PROMPTS = ("prompt", "instruction", "query")
RESPONSES = ("response", "completion", "output")


def read(row: Mapping[str, Any]) -> Content:
    asked = first_of(row, PROMPTS)
    answered = first_of(row, RESPONSES)
    # Without an instruction a context is a column like any other.
    used = ("input", "context") if asked == "instruction" else ("input",)
    if asked is None:
        raise RowError("prompt", None, "is missing", "give the row a prompt")
    if answered is None:
        raise RowError("response", None, "is missing", "give the row a response")
    last = instruction(row) if asked == "instruction" else prompt(row, asked)
    whole, before = with_history(row, asked, last)
    return Content(
        prompt=whole,
        gold=gold_of(row),
        target=response(row, answered),
        data_source=source_of(row),
        ability=ability(row),
        extra=others(row, (*PROMPTS, *RESPONSES, *GOLDS, *SOURCES, *used, *before, "ability")),
        unread=unread(row, answered),
    )


def write(content: Content) -> dict[str, Any]:
    return {
        **content.extra,
        **present(
            prompt=as_prompt(content),
            response=needed(content.target, "response", "prompt_response"),
            gold=content.gold,
            data_source=content.data_source,
            ability=content.ability,
        ),
    }


FORM = Form(
    name="prompt_response",
    about="prompt/response, prompt/completion, instruction/output",
    columns=tuple((asked, answered) for asked in PROMPTS for answered in RESPONSES),
    also=(*GOLDS, *SOURCES, "ability"),
    read=read,
    write=write,
)
