"""GSM8K: ``question``, and ``answer`` with a rationale and the gold answer after ``####``.

The rationale is a response to learn from, without the calculator's annotations (``<<48/2=24>>``). The
data set is that of Cobbe et al., "Training Verifiers to Solve Math Word Problems" (arXiv 2110.14168).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import SOURCES, Content, RowError, needed, one_question, others, question, text

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


def read(row: Mapping[str, Any]) -> Content:
    answer = text(row, "answer")
    rationale, mark, gold = answer.rpartition("####")
    gold = gold.strip().replace(",", "")
    if not mark or not gold:
        raise RowError(
            "answer", answer[-40:], "has no ####", "end it with #### and the gold answer"
        )
    return Content(
        prompt=question(text(row, "question")),
        gold=gold,
        target=_ANNOTATION.sub("", f"{rationale}{mark} {gold}") if rationale.strip() else None,
        data_source="gsm8k",
        extra=others(row, ("question", "answer")),
    )


def _claims(row: Mapping[str, Any]) -> bool:
    answer = row["answer"]
    # Texts of several parts have #### as well, before a heading.
    return (
        isinstance(answer, str)
        and "####" in answer
        and "\n" not in answer.rpartition("####")[2].strip()
    )


def write(content: Content) -> dict[str, Any]:
    gold = needed(content.gold, "gold", "gsm8k")
    rationale = (content.target or "").rstrip()
    if not rationale.endswith(f"#### {gold}"):
        rationale = f"{rationale}\n#### {gold}".lstrip()
    question_ = one_question(content, "gsm8k")
    return {**content.extra, "question": question_, "answer": rationale}


FORM = Form(
    name="gsm8k",
    about="GSM8K",
    columns=(("question", "answer"),),
    also=SOURCES,
    read=read,
    write=write,
    claims=_claims,
)
