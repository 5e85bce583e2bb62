"""Countdown: ``nums`` (or ``numbers``) and ``target``, from which the question is made.

The reward component ``equation`` checks the answer by the columns ``nums`` and ``target``, which every
row's ``extra`` holds. The task is TinyZero's (github.com/Jiayi-Pan/TinyZero).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .form import Form
from .row import Content, RowError, first_of, has_64_bits, needed, question

NUMBERS = ("nums", "numbers")
MADE = ("nums", "target")
"""The columns that the reward component reads."""


def read(row: Mapping[str, Any]) -> Content:
    column = first_of(row, NUMBERS) or NUMBERS[0]
    numbers, target = row.get(column), row.get("target")
    if not isinstance(numbers, list) or not numbers or not all(map(_is_whole, numbers)):
        raise RowError(column, numbers, "isn't a list of whole numbers of 64 bits", "store one")
    if not _is_whole(target):
        raise RowError("target", target, "isn't a whole number of 64 bits", "store one")
    return Content(
        prompt=question(ask(numbers, int(target))),  # type: ignore[arg-type]
        gold=str(target),
        data_source="countdown",
        extra={"nums": [int(number) for number in numbers], "target": int(target)},  # type: ignore[arg-type]
        kept_whole=MADE,
    )


def ask(numbers: list[int], target: int) -> str:
    """The question.

    >>> ask([3, 5], 15)[:62]
    'Write an expression that has the value 15. It must contain eac'
    """
    listed = ", ".join(map(str, numbers))
    return (
        f"Write an expression that has the value {target}. It must contain each of the numbers "
        f"{listed} exactly once and no other number, joined by +, -, * and / and brackets. Give "
        f"the expression inside <answer> </answer>, for example <answer> (1 + 2) / 3 </answer>."
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and has_64_bits(value)


def write(content: Content) -> dict[str, Any]:
    return {name: needed(content.extra.get(name), name, "countdown") for name in MADE}


FORM = Form(
    name="countdown",
    about="Countdown: numbers and a target",
    columns=tuple((column, "target") for column in NUMBERS),
    read=read,
    write=write,
    of_extra=MADE,
)
