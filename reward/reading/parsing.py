"""Reads a text's answer with plain functions: an option's letter (MMLU), a last number (GSM8K).

They use the readers of the modes ``choice`` and ``last_number`` and have no rules of their own. They
can't be in :mod:`tandem.reward.reading.options`, since the modes import that module.
"""

from __future__ import annotations

from .modes import mode


def option_of(text: str, options: int = 4) -> str | None:
    """The option that a text chooses, ``A`` to the last of ``options`` letters; else None.

    Read from the last box, then the last "answer is" or "answer:", then a text that is only an option.

    >>> option_of("The correct answer is B. There is only one.")
    'B'
    """
    letter = mode("choice").read(text, "", False).answer
    letters = {chr(ord("A") + number) for number in range(options)}
    return letter if letter in letters else None


def last_number_of(text: str) -> str | None:
    """The last plain number of a text, without ``$`` and thousands separators; None if there is none.

    >>> last_number_of("Natalia sold 48/2 = 24 clips in May, 72 altogether.")
    '72'
    """
    number = mode("last_number").read(text, "", False).answer
    return None if number is None else number.lstrip("\\$").replace(",", "")
