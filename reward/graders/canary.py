"""Known answers that a grader must get right before it may judge anything.

A grader that is broken in one part (a parser that doesn't load, a signal that can't be set in a
thread) tends to fail silently: every right answer scores zero. So at its start the pool grades these
answers the way responses are graded, and refuses to run unless the right ones score and the wrong
ones don't.
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
"""How often a known answer is tried with a grader that is too slow, before the pool refuses to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """An answer whose verdict is known."""

    answer: str
    """The answer as it would be in a box."""
    gold: str
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
"""Some are settled in the dispatcher, the others reach math-verify in a grader process."""


def check(
    known: Sequence[Known],
    processes: GraderProcesses,
    *,
    working: Callable[[], bool],
    wait: Callable[[Callable[[], bool]], None],
) -> None:
    """Grades known answers the way responses are graded.

    Args:
        working: whether everything else that has to work does.
        wait: pumps until its argument returns True.

    Raises:
        TandemError: a known-right answer doesn't score, or a known-wrong one does.
    """
    verdicts: dict[int, Verdict] = {}
    questions: dict[int, list[str]] = {}

    def into(index: int) -> Callable[[Outcome], None]:
        def finish(outcome: Outcome) -> None:
            verdicts[index] = outcome.verdict

        return finish

    boxed = modes.mode("boxed")
    for index, item in enumerate(known):
        # Written as in a response, so that every step from text to verdict is tested.
        answer = boxed.read(f"</think> \\boxed{{{item.answer}}}", "", False).answer
        settled = decide(answer, item.gold, boxed)
        by_value = settled is not None and settled.how == "value"
        if settled is None or (by_value and _is_right(settled.verdict, item)):
            # What the engine of values settles is also asked of a process: both must be right.
            questions[index] = [answer or "", read_gold(item.gold).text]
        else:
            verdicts[index] = settled.verdict
    # One answer always goes to a process, so that the processes are known to work too.
    questions[-1] = [known[0].answer, known[0].gold]
    for _ in range(TRIES):
        # On a machine that is busy starting other processes, the first answers come late.
        late = [i for i in questions if verdicts.get(i, Verdict.TIMEOUT) is Verdict.TIMEOUT]
        for index in late:
            verdicts.pop(index, None)
            processes.submit("compare", questions[index], into(index))
        wait(lambda: len(verdicts) == len(known) + 1 and working())
    for index, item in enumerate(known):
        if not _is_right(verdicts[index], item):
            should = "score" if item.correct else "not score"
            raise TandemError(
                f"the grader is broken: the answer {item.answer!r} to gold {item.gold!r} "
                f"should {should}, and its verdict is {verdicts[index]}; nothing is graded. "
                f"Check the installed math-verify (0.9) and reward.memory_mb="
                f"{processes.memory_mb}, reward.deadline_seconds={processes.deadline}"
            )


def _is_right(verdict: Verdict, item: Known) -> bool:
    return (verdict is Verdict.CORRECT) == item.correct
