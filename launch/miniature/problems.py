"""Draws the miniature's problems: chains of additions and subtractions modulo 100.

A problem of difficulty ``k`` is a start (0..99) and ``k`` signed operands (1..9). The prompt
states it and opens the reasoning; the response writes every running total, then answers::

    prompt    49-6+8-3=?<think>
    response  49-6=43+8=51-3=48</think> <answer> \\boxed{48} </answer>

Numbers above the operands are always two digits (``07``), so that all problems of one ``k`` have
the same length in tokens: ``2k + 5`` for the prompt, ``5k + 13`` for the response with its end
token (see ``tokenizer.py``). For k=8 that is 21 and 53.

A problem whose final total equals any earlier running total is rejected. Without this, a chain
that stops early would be right by luck 3 to 5 percent of the time, and "no reward reaches an
on-policy learner" would not be true.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from ...common.errors import TandemError

MODULUS = 100
LARGEST_OPERAND = 9

_RESPONSE = re.compile(r"[0-9+=-]+</think> <answer> \\boxed\{([0-9]{1,2})\} </answer>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One chain: ``Problem(start=49, operands=(-6, 8, -3))`` asks for 49-6+8-3, which is 48."""

    start: int
    """The first running total, 0..99."""
    operands: tuple[int, ...]
    """[k] Signed operands, each of magnitude 1..9."""

    @property
    def k(self) -> int:
        """Number of operations: the difficulty."""
        return len(self.operands)

    @property
    def totals(self) -> tuple[int, ...]:
        """[k + 1] Running totals modulo 100, from the start to the answer."""
        totals = [self.start]
        for operand in self.operands:
            totals.append((totals[-1] + operand) % MODULUS)
        return tuple(totals)

    @property
    def answer(self) -> str:
        """The final total as the box holds it: two digits."""
        return f"{self.totals[-1]:02d}"

    @property
    def prompt(self) -> str:
        """The question, ending in ``<think>``: a response continues it directly."""
        return f"{self.start:02d}{''.join(f'{o:+d}' for o in self.operands)}=?<think>"

    @property
    def response(self) -> str:
        """The full, right response, without the end token."""
        return self.response_after(self.k)

    def response_after(self, steps: int) -> str:
        """The response that stops after ``steps`` operations and answers with that total.

        ``steps < k`` is the bad habit of the base model: well-formed, and certainly wrong.
        """
        totals = self.totals
        chain = "".join(
            f"{o:+d}={t:02d}" for o, t in zip(self.operands[:steps], totals[1:], strict=False)
        )
        answer = f"{totals[steps]:02d}"
        return f"{self.start:02d}{chain}</think> <answer> \\boxed{{{answer}}} </answer>"


def is_well_formed(response: str) -> bool:
    """Whether the response has exactly the required form, whatever it answers."""
    return _RESPONSE.fullmatch(response) is not None


def is_right(problem: Problem, response: str) -> bool:
    """Whether the response has exactly the required form and its boxed integer is the answer."""
    match = _RESPONSE.fullmatch(response)
    return match is not None and int(match[1]) == problem.totals[-1]


def draw(rng: Random, k: int) -> Problem:
    """One problem of ``k`` operations whose answer equals no earlier running total."""
    if k < 1:
        raise TandemError(f"k={k}: a chain needs at least 1 operation")
    while True:
        start = rng.randrange(MODULUS)
        operands = []
        for _ in range(k):
            # 18 equally likely values: -9..-1 and 1..9.
            value = rng.randrange(2 * LARGEST_OPERAND)
            operands.append(
                value - LARGEST_OPERAND if value < LARGEST_OPERAND else value - LARGEST_OPERAND + 1
            )
        problem = Problem(start=start, operands=tuple(operands))
        *earlier, last = problem.totals
        if last not in earlier:
            return problem


def distinct(rng: Random, k: int, count: int, exclude: Collection[Problem] = ()) -> list[Problem]:
    """``count`` problems of ``k`` operations, all different and none of them in ``exclude``.

    Raises ``TandemError`` if this many different problems of this ``k`` may not exist.
    """
    seen = {problem.prompt for problem in exclude}
    # Rejection leaves more than half of the 100 * 18**k chains for every k up to 10; with a quarter
    # as the limit, the draw below never comes close to running out, where it would go on forever.
    room = MODULUS * (2 * LARGEST_OPERAND) ** k // 4
    if count + len(seen) > room:
        raise TandemError(
            f"{count:,} distinct problems of k={k} beside {len(seen):,} excluded ones are more "
            f"than the {room:,} that can be drawn: ask for fewer, or for a larger k"
        )
    problems: list[Problem] = []
    while len(problems) < count:
        problem = draw(rng, k)
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            problems.append(problem)
    return problems
