"""A problem with its solution: competition MATH, NuminaMath, NuminaMath-TIR, OpenMathReasoning, OlympiadBench.

=================================================  ====================================================
column (the first that isn't blank)                meaning
=================================================  ====================================================
``problem``                                        the question
``solution``, ``generated_solution``               the solution, which is a response to learn from: a
                                                   text, or the first one of a list (OlympiadBench);
                                                   may be blank where there is an answer
``expected_answer``, ``answer``                    the gold answer (OlympiadBench: a list of one in
                                                   ``final_answer``); without it the solution holds it,
                                                   in its last ``\\boxed{}``
``source``, ``problem_source``                     where the row is from; may be absent
=================================================  ====================================================

NuminaMath-1.5 writes ``proof`` or ``notfound`` for a problem without an answer, and OpenMathReasoning
``n/a``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import (
    SOURCES,
    Content,
    RowError,
    first_filled,
    first_of,
    gold,
    needed,
    one_question,
    others,
    present,
    question,
    source_of,
    text,
)

QUESTIONS = ("problem", "question")
SOLUTIONS = ("solution", "generated_solution")
ANSWERS = ("expected_answer", "answer")
FINAL = "final_answer"
"""OlympiadBench's answers, a list; its solutions are one, too."""
NO_ANSWER = ("proof", "notfound", "n/a")


def read(row: Mapping[str, Any]) -> Content:
    solution = _solution(row)
    answered = first_filled(row, ANSWERS)
    if answered is None and _is_one(row.get(FINAL)):
        answered = FINAL
    if answered is None:
        answer = solution if "\\boxed" in solution or "\\fbox" in solution else ""
    elif str(row[answered]).strip().lower() in NO_ANSWER:
        answer = ""
    else:
        answer = gold(row[answered], answered)
    if not solution and not answer:
        way_out = "give the row a solution or an answer"
        raise RowError(SOLUTIONS[0], row.get(SOLUTIONS[0]), "is missing", way_out)
    return Content(
        prompt=question(text(row, first_of(row, QUESTIONS) or QUESTIONS[0])),
        gold=answer,
        target=solution or None,
        data_source=source_of(row),
        extra=others(row, (*QUESTIONS, *SOLUTIONS, *ANSWERS, *SOURCES, "messages")),
    )


def _solution(row: Mapping[str, Any]) -> str:
    column = first_filled(row, SOLUTIONS)
    if column is not None and isinstance(row[column], list):
        row = {column: next(iter(row[column]), None)}
        column = first_filled(row, (column,))
    return text(row, column) if column is not None else ""


def _is_one(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def other_response(row: Mapping[str, Any], content: Content) -> bool:
    """Whether the solution is what a row is read for, and its ``messages`` end with another response, as OpenR1-Math's do."""
    solution, said = first_filled(row, SOLUTIONS), row.get("messages")
    if solution is None or content.target is None or content.target != row[solution]:
        return False
    last = said[-1] if isinstance(said, list) and said else None
    answer = last.get("content") if isinstance(last, Mapping) else None
    return isinstance(answer, str) and answer.strip() not in ("", content.target.strip())


def write(content: Content) -> dict[str, Any]:
    return {
        **content.extra,
        **present(
            problem=one_question(content, "problem_solution"),
            solution=needed(content.target, "solution", "problem_solution"),
            expected_answer=content.gold or NO_ANSWER[0],
            source=content.data_source,
        ),
    }


FORM = Form(
    name="problem_solution",
    about="competition MATH, NuminaMath, NuminaMath-TIR, OpenMathReasoning, OlympiadBench",
    columns=tuple((asked, solution) for asked in QUESTIONS for solution in SOLUTIONS),
    also=(*ANSWERS, FINAL, *SOURCES, "messages"),
    read=read,
    write=write,
)
