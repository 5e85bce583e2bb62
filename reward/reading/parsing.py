"""What a text answers, as plain functions: an option's letter (MMLU), a last number (GSM8K).

The readers behind them are those of the grader's modes ``choice`` and ``last_number``, so no rule
stands here. It isn't in :mod:`tandem.reward.reading.options`, the rules for letters, on which modes are built.
"""

from __future__ import annotations

from .modes import mode


def option_of(text: str, options: int = 4) -> str | None:
    """The option that a text chooses, ``A`` to the letter of that many options; else None.

    The last box, then the last "answer is" or "answer:", then a text that is nothing but an option.

    >>> option_of("The correct answer is B. There is only one.")
    'B'
    """
    found = mode("choice").read(text, "", False).answer
    letters = {chr(ord("A") + number) for number in range(options)}
    return found if found in letters else None


def last_number_of(text: str) -> str | None:
    """The last plain number of a text, without ``$`` and thousands' commas; None where there is none.

    >>> last_number_of("Natalia sold 48/2 = 24 clips in May, 72 altogether.")
    '72'
    """
    found = mode("last_number").read(text, "", False).answer
    return None if found is None else found.lstrip("\\$").replace(",", "")
