"""The calculator as an environment, in TRL's class form, and what its controls put in its place.

None of these classes pays: the reward of an episode is the accuracy of its final answer, which the run's own
grader compares with the row's.
"""

from __future__ import annotations

from random import Random
from typing import Any


class Calculator:
    """A calculator that multiplies."""

    def reset(self, **row: Any) -> None:
        """Begins an episode; there is nothing to show beside the row's own prompt."""

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two whole numbers.

        Args:
            a: The first factor.
            b: The second factor.

        Returns:
            Their product.
        """
        return a * b


class FalseCalculator:
    """A calculator whose results look right and never are: the control for what the results are worth.

    The same question always gets the same result, which has nothing to do with it.
    """

    def reset(self, **row: Any) -> None:
        """Begins an episode."""

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two whole numbers.

        Args:
            a: The first factor.
            b: The second factor.

        Returns:
            Their product.
        """
        # Not the product of numbers nearby, since a model could learn to ask for those.
        drawn = Random(f"{a}*{b}").randrange(10_000, 1_000_000)
        return drawn if drawn != a * b else drawn + 1


class NoCalculator:
    """An environment without a tool: the control for what the model can work out by itself."""

    def reset(self, **row: Any) -> None:
        """Begins an episode."""
