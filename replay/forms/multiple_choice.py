"""A question with options: ARC, GPQA, MMLU and MMLU-Pro. The gold answer is the right option's letter.

===========  =====================================================================================
data set     columns
===========  =====================================================================================
ARC          ``question``, ``choices`` as {text, label}, ``answerKey``, a label (A to E, or 1 to 5)
MMLU-Pro     ``question``, ``options``, ``answer``, a letter
MMLU         ``question``, ``choices``, ``answer``, an index from 0
GPQA         ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` to ``3``
===========  =====================================================================================

The prompt is the question and a line for each option, ``A) …``, as in LUFFY's evaluation files. GPQA's options have
no order of their own: they get one by a digest of the question, the same for everybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from .form import Form
from .row import (
    SOURCES,
    Content,
    RowError,
    first_of,
    needed,
    one_question,
    others,
    present,
    question,
    source_of,
    text,
)

RIGHT = "Correct Answer"
WRONG = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))
OPTIONS = ("choices", "options")
ANSWERS = ("answerKey", "answer")
NOT_TO_TELL = ("answer_index", "cot_content", "Explanation")
"""Columns that hold the answer, or the way to it."""


def read(row: Mapping[str, Any]) -> Content:
    if RIGHT in row:
        return _gpqa(row)
    column = first_of(row, OPTIONS) or OPTIONS[0]
    labels, options = _options(row, column)
    asked = first_of(row, ANSWERS) or ANSWERS[0]
    right = row.get(asked)
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(options):
        gold = ascii_uppercase[right]
    elif isinstance(right, str) and right.strip() in labels:
        gold = ascii_uppercase[labels.index(right.strip())]
    else:
        raise RowError(asked, right, "isn't one of the options", f"name one of {', '.join(labels)}")
    return Content(
        prompt=question(ask(text(row, "question"), options)),
        gold=gold,
        data_source=source_of(row),
        extra=others(row, ("question", *OPTIONS, *ANSWERS, *NOT_TO_TELL, *SOURCES)),
    )


def _options(row: Mapping[str, Any], column: str) -> tuple[list[str], list[str]]:
    """Labels and texts."""
    given = row.get(column)
    labels: Any = None
    if isinstance(given, Mapping):
        labels, given = given.get("label"), given.get("text")
    if not isinstance(given, list) or not 2 <= len(given) <= len(ascii_uppercase):
        raise RowError(column, given, "isn't a list of options", "store two or more texts")
    if not all(isinstance(option, str) and option.strip() for option in given):
        raise RowError(column, given, "has an option that isn't text", "store texts")
    if labels is None:
        labels = list(ascii_uppercase[: len(given)])
    if not isinstance(labels, list) or len(labels) != len(given):
        raise RowError(column, labels, "hasn't a label for each option", "store one for each")
    return list(map(str, labels)), given


def _gpqa(row: Mapping[str, Any]) -> Content:
    asked = text(row, "Question")
    options = [text(row, column).strip() for column in (RIGHT, *WRONG)]
    order = sorted(options, key=lambda option: _digest(asked, option))
    return Content(
        prompt=question(ask(asked, order)),
        gold=ascii_uppercase[order.index(options[0])],
        data_source=source_of(row),
        # The row's many other columns are what its reviewers wrote.
        extra=others({name: row.get(name) for name in ("Record ID", "Subdomain")}, ()),
    )


def _digest(asked: str, option: str) -> bytes:
    return hashlib.blake2b(f"{asked}\n{option}".encode(), digest_size=8).digest()


def ask(asked: str, options: Sequence[str]) -> str:
    """The question and its options.

    >>> ask("2 + 2?", ["3", "4"])
    '2 + 2?\\nA) 3\\nB) 4'
    """
    lines = (
        f"{letter}) {option}" for letter, option in zip(ascii_uppercase, options, strict=False)
    )
    return "\n".join([asked.rstrip(), *lines])


def write(content: Content) -> dict[str, Any]:
    lines = one_question(content, "multiple_choice").split("\n")
    # The options are the last lines; an option may itself have several.
    starts: list[int] = []
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("A) "):
            starts = [index]
            break
    if not starts:
        raise RowError("prompt", lines[-1], "has no options", "the form multiple_choice needs them")
    for index in range(starts[0] + 1, len(lines)):
        if lines[index].startswith(f"{ascii_uppercase[len(starts)]}) "):
            starts.append(index)
    options = [
        "\n".join(lines[start:end])[3:]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]
    return {
        **content.extra,
        **present(
            question="\n".join(lines[: starts[0]]),
            options=options,
            answer=needed(content.gold, "answer", "multiple_choice"),
            data_source=content.data_source,
        ),
    }


FORM = Form(
    name="multiple_choice",
    about="ARC, GPQA, MMLU, MMLU-Pro: a question with options",
    columns=(
        *(("question", options, answer) for options in OPTIONS for answer in ANSWERS),
        ("Question", RIGHT, *WRONG),
    ),
    also=SOURCES,
    read=read,
    write=write,
)
