"""How the learner reports alarms of the ratio check: in its log, and in its reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ...common.ratio_check import PREFIX, alarm_of

log = logging.getLogger("tandem.learner")

AGAIN_SECONDS = 60.0
"""Least time between two warnings of an alarm that goes on."""


class RatioAlarm:
    """Keeps the alarm of the ratio check from one start of the learner to the next."""

    def __init__(self) -> None:
        self.text = ""
        """The newest alarm, with its step and the number of alarms; empty if there was none."""
        self._count = 0
        self._warned = -AGAIN_SECONDS

    def take(self, step: int, metrics: Mapping[str, float], *, warn: bool = True) -> str:
        """The step's alarm; empty if it has none.

        Args:
            step: step of the run.
            metrics: metrics of its updates.
            warn: whether to log it; False if the end of the step reports it.
        """
        alarm = alarm_of(metrics)
        if not alarm:
            return ""
        self._count += 1
        others = (
            f" ({self._count:,} such steps since the learner started)" if self._count > 1 else ""
        )
        self.text = f"step {step}: {alarm}{others}"
        now = time.monotonic()
        if warn and now - self._warned >= AGAIN_SECONDS:
            self._warned = now
            log.warning(self.text)
        return alarm


def ratios_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The ``ratio/…`` metrics only."""
    return {name: value for name, value in metrics.items() if name.startswith(PREFIX)}
