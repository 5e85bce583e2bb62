"""Commits new weights: loads them into the engine, and checks what the engine then computes.

The receiver's thread calls, and the loop does the work. A version that fails its check is fetched and
loaded once more; if it fails again, the worker has to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...common.config.weights import LOADS_BY
from ...common.errors import TandemError
from ...common.records import Version
from ..engine import Engine, Holder
from .commit_check import CommitCheck

if TYPE_CHECKING:
    from ...common.weights.manifest import ScoredRows
    from ...common.weights.shared_memory import StagedTensors

log = logging.getLogger("tandem.rollout")


class Committer:
    """Commits versions into one engine.

    Args:
        engine: loads the weights.
        check: compares what the engine then computes with the learner's results.
        loop: the worker's loop, in which both work.
        seconds: deadline of a commit (``weights.commit_seconds``).
        update_wait: how long new weights wait for running samples to end, in seconds.
        on_change: called in the loop when a version waits for the running samples, when the engine serves
            it or couldn't load it, and when a check has ended.
        spoil: called in the loop when a check has failed; discards everything that is under way.
    """

    def __init__(
        self,
        engine: Engine,
        check: CommitCheck,
        *,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        update_wait: float,
        on_change: Callable[[], None],
        spoil: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._check = check
        self._loop = loop
        self._seconds = seconds
        self._update_wait = update_wait
        if update_wait and not isinstance(engine, Holder):
            log.warning(
                f"new weights don't wait for running samples: {type(engine).__name__} has no method "
                f"`hold` (see tandem.rollout.engine.Holder)"
            )
        self._on_change = on_change
        self._spoil = spoil
        self.steady = asyncio.Lock()
        """Whoever holds it keeps the engine's weights from changing."""
        self.hopeless = ""
        """Why the worker has to end: a version failed its check twice. Empty otherwise."""
        self.coming: Version | None = None
        """The version that is loaded as soon as the running samples have ended, if one waits for them: no
        other group begins before it."""

    def load(self, staged: StagedTensors | None, version: Version) -> float:
        """Loads a version and returns when the engine serves it; called from the receiver's thread.

        Args:
            staged: the new weights; None if only the version's name is new.
            version: the version's name.

        Returns:
            Seconds during which the engine sampled nothing because of the load.

        Raises:
            TimeoutError: the engine took longer than ``seconds``.
            TandemError: the engine couldn't load them.
        """
        done = asyncio.run_coroutine_threadsafe(self._load(staged, version), self._loop)
        return done.result(self._seconds)

    async def _load(self, staged: StagedTensors | None, version: Version) -> float:
        still = False
        before, began = self._engine.stats().load_seconds, time.monotonic()
        try:
            # An evaluation should use a single version, but the deadline matters more.
            async with asyncio.timeout(self._seconds / 2):
                await self.steady.acquire()
            still = True
        except TimeoutError:
            log.warning(f"version {version} is committed into a long evaluation")
        try:
            if staged is not None:
                # Whatever an evaluation took of the time, the load has the rest to itself.
                left = LOADS_BY * self._seconds - (time.monotonic() - began)
                wait = min(self._update_wait, left)
                if wait > 0 and isinstance(self._engine, Holder):
                    self.coming = version
                    self._on_change()
                    await self._engine.hold(wait)
                if self._check.is_on:
                    await self._check.begin(version)
                await self._engine.load(staged, version)
            else:
                await self._engine.restamp(version)
        except BaseException:
            self._check.end(passed=None)
            raise
        finally:
            self.coming = None
            if still:
                self.steady.release()
            self._on_change()
        return self._engine.stats().load_seconds - before

    def examine(self, version: Version, scored: ScoredRows | None) -> bool:
        """Checks a version that the engine serves; called from the receiver's thread.

        Every request to the engine has its own deadline (``seconds``).

        Returns:
            False if the version must be fetched and loaded once more.
        """
        done = asyncio.run_coroutine_threadsafe(self._examine(version, scored), self._loop)
        return done.result()

    async def _examine(self, version: Version, scored: ScoredRows | None) -> bool:
        try:
            differences = await self._check.examine(version, scored)
            failed = [str(difference) for difference in differences if not difference.passes]
        except TandemError as error:
            failed = [str(error)]
        except Exception as error:
            # Groups wait for the end of the check, whatever its result.
            log.exception(f"version {version} couldn't be checked")
            failed = [f"it couldn't be checked: {type(error).__name__}: {error}"]
        self._check.end(passed=not failed)
        self._on_change()
        if not failed:
            return True
        # Done before anything that has waited goes on.
        self._spoil()
        if getattr(self._engine, "broken", ""):
            # It says nothing about the weights, and the worker ends for it.
            return True
        alarm = f"version {version} isn't what the learner published ({'; '.join(failed)})"
        self._check.counts.alarm = alarm
        if self._check.in_a_row == 1:
            log.error(f"{alarm}: what it sampled is discarded, and it is fetched again")
            return False
        self.hopeless = (
            f"{alarm}, loaded {self._check.in_a_row} times. If it is the engine's own rounding, raise "
            f"weights.check_bound (0: no check)"
        )
        return True
