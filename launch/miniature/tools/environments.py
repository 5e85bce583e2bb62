"""The calculator as an environment, in TRL's class form, and what its controls put in its place.

None of these classes pays: the reward of an episode is the accuracy of its final answer, which the run's own
grader compares with the row's.
"""

from __future__ import annotations

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
    """A calculator whose results look right and never are: the control for what the results are worth."""

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
        # Another product of the same pair's neighbourhood: as many digits, but another number.
        return (a + 7) * (b + 3)


class NoCalculator:
    """An environment without a tool: the control for what the model can work out by itself."""

    def reset(self, **row: Any) -> None:
        """Begins an episode."""
