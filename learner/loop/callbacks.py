"""What the run's callbacks ask for, as the learner sees it between its steps.

The callbacks run elsewhere (:mod:`tandem.launch.callbacks`), and the learner never waits for them: it reads
one key of Redis at each step.
"""

from __future__ import annotations

import logging
import math
import time

from ...common.config import Config
from ...replay.callback_requests import CallbackRequests, Requested, Stop
from ...replay.connection import Store

log = logging.getLogger("tandem.learner")

LOOK_SECONDS = 0.25
"""Time between two looks while a batch is waited for."""


class Callbacks:
    """The requests of a run's callbacks; without ``run.callbacks`` there are none, and Redis isn't asked.

    Args:
        store: the run's Redis.
        config: the run's config.
        pairs: whether there are held-out pairs, which the learner itself compares.
    """

    def __init__(self, store: Store, config: Config, *, pairs: bool = False) -> None:
        self._requests = CallbackRequests(store)
        self._on = bool(config.run.callbacks)
        offline = config.learner.source == "offline"
        self.can_evaluate = bool(config.data.evaluate) and not (
            offline and not config.evaluate.every
        )
        """Whether somebody evaluates sets during the run."""
        self._tells = bool(config.data.evaluate) or not pairs
        self._served = self._requests.served() if self._on else 0
        self._written = self._served
        self._looked = -math.inf
        self._checkpoint = self._evaluate = False
        self.stop: Stop | None = None
        """The request to end the run, once it has been seen."""

    def look(self) -> dict[str, float]:
        """Takes up the requests that are new; returns what was logged, as metrics of the step."""
        found = self._read()
        values = {
            f"callback/{name}": value
            for name, (number, value) in found.values.items()
            if number > self._served and math.isfinite(value)
        }
        self._checkpoint |= found.checkpoint > self._served
        self._evaluate |= found.evaluate > self._served
        self._served = max(self._served, found.newest)
        return values

    def stops(self) -> bool:
        """Whether a callback wants the run to end; looks at most every :data:`LOOK_SECONDS`."""
        if self.stop is None and time.monotonic() - self._looked >= LOOK_SECONDS:
            self._read()
        return self.stop is not None

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        asked, self._checkpoint = self._checkpoint, False
        return asked

    def take_evaluation(self) -> bool:
        """Whether an evaluation was requested since the last call; tells if sets can't be evaluated."""
        asked, self._evaluate = self._evaluate, False
        if asked and self._tells and not self.can_evaluate:
            log.warning(
                "a callback requested an evaluation, and nobody evaluates sets: name a set in data.evaluate "
                "and, offline, set evaluate.every"
            )
        return asked

    def settle(self) -> None:
        """Records that everything that was looked at is served."""
        if self._served > self._written:
            self._requests.put_served(self._served)
            self._written = self._served

    def ended(self, stop: Stop, step: int) -> None:
        """Records that the run ends at this step because of a request."""
        log.info(f"stopped after step {step} by {stop.callback}: {stop.reason}")
        self._requests.put_stopped(stop)

    def _read(self) -> Requested:
        if not self._on:
            return Requested()
        self._looked = time.monotonic()
        found = self._requests.read()
        self.stop = self.stop or found.stop
        return found
