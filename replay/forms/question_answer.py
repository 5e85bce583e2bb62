"""A question with its gold answer and nothing to learn from: AIME, AMC, MATH-500, Minerva and the like.

``question`` (or ``problem``, or ``prompt``, which may be a list of messages) is the question. ``answer`` (or
``gold``, ``ground_truth``, or OlympiadBench's ``final_answer``) is the gold answer as text, as a number (142.0 is read as 142),
or as a solution that holds it in its last ``\\boxed{}``. Some sets have ``Problem`` and ``Answer``. A text in ``system`` is
the system message, unless the question has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import (
    SOURCES,
    SYSTEM,
    Content,
    as_prompt,
    first_of,
    gold,
    needed,
    others,
    present,
    prompt,
    source_of,
    with_system,
)

QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("answer", "gold", "ground_truth", "final_answer")
CAPITAL = ("Problem", "Answer")


def read(row: Mapping[str, Any]) -> Content:
    asked = first_of(row, QUESTIONS)
    answered = first_of(row, ANSWERS)
    capital = asked is None and CAPITAL[0] in row
    if capital:
        asked, answered = CAPITAL
    return Content(
        prompt=with_system(row, prompt(row, asked or QUESTIONS[0])),
        gold=gold(row.get(answered), answered) if answered else "",
        data_source=source_of(row),
        extra=others(row, (*(CAPITAL if capital else (*QUESTIONS, *ANSWERS)), *SOURCES, SYSTEM)),
    )


def write(content: Content) -> dict[str, Any]:
    return {
        **content.extra,
        **present(
            question=as_prompt(content),
            answer=needed(content.gold, "answer", "question_answer"),
            data_source=content.data_source,
        ),
    }


FORM = Form(
    name="question_answer",
    about="AIME, AMC, Minerva: a question and its gold answer",
    columns=(*((asked, answered) for asked in QUESTIONS for answered in ANSWERS), CAPITAL),
    also=SOURCES,
    read=read,
    write=write,
)
