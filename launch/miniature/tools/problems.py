"""Draws products of two numbers of three digits, and writes conversations about them as the chat template does.

Asked directly, a conversation has one turn; with the calculator it has two::

    <|im_start|>user                                              <|im_start|>user
    137*258=?<|im_end|>                                           137*258=?<|im_end|>
    <|im_start|>assistant                                         <|im_start|>assistant
    \\boxed{35346}<|im_end|>                                       <tool_call>
                                                                  {"name": "multiply", "arguments": {"a": 137, "b": 258}}
                                                                  </tool_call><|im_end|>
                                                                  <|im_start|>user
                                                                  <tool_response>
                                                                  35346
                                                                  </tool_response><|im_end|>
                                                                  <|im_start|>assistant
                                                                  \\boxed{35346}<|im_end|>

There are 810,000 such products, so that none is known by heart; a model of this size that is taught the
right products of other pairs gets about one in a thousand right.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from ....common.errors import TandemError

SMALLEST, LARGEST = 100, 999
"""Bounds of an operand."""

TOOLS_HEAD = "<|im_start|>system\n<tools>\nmultiply(a, b)\n</tools><|im_end|>\n"
"""What the template renders before the first message where the calculator is offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One problem: ``Product(a=137, b=258)`` asks for 137*258, which is 35346."""

    a: int
    b: int

    @property
    def question(self) -> str:
        """What the user asks."""
        return f"{self.a}*{self.b}=?"

    @property
    def answer(self) -> str:
        """The product in decimal digits."""
        return str(self.a * self.b)

    @property
    def call(self) -> str:
        """The right call in the form of Hermes and Qwen2.5, as the model writes it."""
        call = {"name": "multiply", "arguments": {"a": self.a, "b": self.b}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def prompt(self, *, offered: bool = True) -> str:
        """The rendered prompt, up to where the model goes on; ``offered``: with the calculator."""
        head = TOOLS_HEAD if offered else ""
        return f"{head}<|im_start|>user\n{self.question}<|im_end|>\n<|im_start|>assistant\n"


def result_message(result: str) -> str:
    """What the template adds after a call: the end of its line, the result, and the opened next turn."""
    return (
        f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n"
    )


def boxed(answer: str) -> str:
    """A turn that answers."""
    return f"\\boxed{{{answer}}}"


def draw(rng: Random) -> Product:
    """One problem, both operands uniform."""
    return Product(a=rng.randint(SMALLEST, LARGEST), b=rng.randint(SMALLEST, LARGEST))


def distinct(rng: Random, count: int, exclude: Collection[Product] = ()) -> list[Product]:
    """``count`` problems, all different and none of them in ``exclude``.

    Raises ``TandemError`` if they would be more than half of all problems.
    """
    room = (LARGEST - SMALLEST + 1) ** 2 // 2
    seen = set(exclude)
    if count + len(seen) > room:
        raise TandemError(
            f"{count:,} distinct products beside {len(seen):,} excluded ones are more than {room:,}, "
            f"half of all that there are: ask for fewer"
        )
    problems: list[Product] = []
    while len(problems) < count:
        problem = draw(rng)
        if problem not in seen:
            seen.add(problem)
            problems.append(problem)
    return problems
