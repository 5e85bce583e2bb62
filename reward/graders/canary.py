"""Known answers that a grader must get right before it may judge anything.

A grader that is broken in one piece (a parser that doesn't load, a signal that can't be set in a
thread) tends to fail silently: every right answer scores zero. So the pool grades these through
the real path at start, sees known-right ones score and known-wrong ones not, and else refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...common.errors import TandemError
from ...common.records import Verdict
from ..answers.comparison import decide
from ..answers.texts import read_gold
from ..reading import modes
from .grader_processes import GraderProcesses
from .requests import Outcome

TRIES = 3
"""How often a known answer whose grader was too slow is asked before the pool refuses to start."""


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


def check(
    known: Sequence[Known],
    processes: GraderProcesses,
    *,
    working: Callable[[], bool],
    wait: Callable[[Callable[[], bool]], None],
) -> None:
    """Grades known answers through the real path.

    Args:
        known: the answers.
        processes: the graders.
        working: whether everything else that has to work does.
        wait: pumps until what it is given is true.

    Raises:
        TandemError: a known-right answer doesn't score, or a known-wrong one does.
    """
    found: dict[int, Verdict] = {}
    asked: dict[int, list[str]] = {}

    def into(index: int) -> Callable[[Outcome], None]:
        def finish(outcome: Outcome) -> None:
            found[index] = outcome.verdict

        return finish

    boxed = modes.mode("boxed")
    for index, item in enumerate(known):
        # As a response would have it: what is tested is the whole way of an answer.
        answer = boxed.read(f"</think> \\boxed{{{item.answer}}}", "", False).answer
        settled = decide(answer, item.gold, boxed)
        by_value = settled is not None and settled.how == "value"
        if settled is None or (by_value and _is_right(settled.verdict, item)):
            # A process is asked about what its value settles, too: both ways must be right.
            asked[index] = [answer or "", read_gold(item.gold).text]
        else:
            found[index] = settled.verdict
    # One always goes to a process, so that these are known to work too.
    asked[-1] = [known[0].answer, known[0].gold]
    for _ in range(TRIES):
        # A machine that is busy with starting other processes makes the first ones late.
        late = [i for i in asked if found.get(i, Verdict.TIMEOUT) is Verdict.TIMEOUT]
        for index in late:
            found.pop(index, None)
            processes.submit("compare", asked[index], into(index))
        wait(lambda: len(found) == len(known) + 1 and working())
    for index, item in enumerate(known):
        if not _is_right(found[index], item):
            should = "score" if item.correct else "not score"
            raise TandemError(
                f"the grader is broken: the answer {item.answer!r} to gold {item.gold!r} "
                f"should {should}, and its verdict is {found[index]}; nothing is graded. "
                f"Check the installed math-verify (0.9) and reward.memory_mb="
                f"{processes.memory_mb}, reward.deadline_seconds={processes.deadline}"
            )


def _is_right(verdict: Verdict, item: Known) -> bool:
    return (verdict is Verdict.CORRECT) == item.correct
