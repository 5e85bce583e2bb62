"""Known answers that a grader must get right before it may judge anything.

A grader that is broken in one piece (a parser that doesn't load, a signal that can't be set in a
thread) tends to fail silently: every right answer scores zero. So the pool grades these through
the real path at start, sees known-right ones score and known-wrong ones not, and else refuses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One answer of which the verdict is known."""

    answer: str
    """As it would stand in a box."""
    gold: str
    """The gold answer."""
    correct: bool
    """Whether it must score."""


CANARY: tuple[Known, ...] = (
    Known(answer="42", gold="42", correct=True),
    Known(answer="41", gold="42", correct=False),
    Known(answer="\\frac{3}{4}", gold="0.75", correct=True),
    Known(answer="2(x+1)", gold="2x+2", correct=True),
    Known(answer="2(x-1)", gold="2x+2", correct=False),
    Known(answer="\\sqrt{12}", gold="2\\sqrt{3}", correct=True),
    Known(answer="\\sqrt{13}", gold="2\\sqrt{3}", correct=False),
    Known(answer="\\{3, 1, 2\\}", gold="\\{1, 2, 3\\}", correct=True),
    Known(
        answer="\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
        gold="\\begin{bmatrix}1\\\\2\\end{bmatrix}",
        correct=True,
    ),
    Known(answer="(-\\infty, 2)", gold="(-\\infty, 2]", correct=False),
)
"""Some are settled by the fast path, the others reach math-verify in a grader process."""
