"""One version on its way into the engine: fetched, checked and loaded, in a thread of its own.

A failure before the engine begins to load leaves the old version in place. One while it loads may
have left the engine with half of each, so the process ends itself with status 70 and is started anew.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

import torch

from ..errors import TandemError, WeightsError
from ..records import Version
from .channel import Meeting, Way
from .manifest import ScoredRows
from .protocol import RENAME, Loaded, Offer
from .staging import DamagedError, Landing, StagedTensors

log = logging.getLogger("tandem.rollout.weights")

EXIT_HALF_LOADED = 70
"""Exit status of a process whose engine may hold half of two versions (EX_SOFTWARE)."""


def end_half_loaded(message: str) -> NoReturn:
    """Ends the process at once: half-loaded weights must not sample another token."""
    log.critical(message)
    logging.shutdown()
    os._exit(EXIT_HALF_LOADED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The engine, as far as new weights go. Its functions are called from a job's thread."""

    specs: Sequence[tuple[str, tuple[int, ...], str]]
    """What it can load: name, shape and dtype of every parameter."""
    load: Callable[[StagedTensors, Version], float]
    """Loads verified tensors between two token steps, and returns when the engine serves them, with
    the seconds in which it sampled nothing on their account. The tensors are views to be read, which
    hold until it returns. An **empty list** is a re-stamp: the weights held already have a new
    version. ``WeightsError`` says that nothing was changed. If it raises anything else or outlasts
    ``weights.commit_seconds``, the process exits with status 70."""
    check: Callable[[Version, ScoredRows | None], bool] | None = None
    """Called when the engine serves a version that was loaded, with what the learner says that it
    makes of some rows. False: the version is fetched and loaded anew. Meanwhile no other is."""
    device: torch.device | str = "cpu"
    """A GPU through which buckets may pass on their way to the host's memory."""


# What a job tells of itself.


@dataclass(frozen=True, slots=True)
class Fetched:
    """Every checksum is right, so many seconds after the offer."""

    job: Job
    seconds: float


@dataclass(frozen=True, slots=True)
class Loading:
    """The engine has begun."""

    job: Job


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine serves it; where it ``is_checked``, Checked follows."""

    job: Job
    loaded: Loaded
    is_checked: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """What the engine serves is what the learner published, or it isn't."""

    passed: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The old version stays."""

    job: Job
    stage: str
    reason: str


Progress = Fetched | Loading | Serving | Checked | Failed


class _Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    DROPPED = "dropped"


class Job:
    """One version that a worker has taken up. Its thread begins to load it, or the control thread
    drops it: whoever comes first.

    Args:
        offer: the learner's.
        target: the engine.
        current_term: newest term that has begun, asked just before the load.
        post: takes what the job tells of itself.
    """

    def __init__(
        self,
        offer: Offer,
        target: Target,
        current_term: Callable[[], int],
        post: Callable[[Progress], None],
    ) -> None:
        self.offer = offer
        self.version = offer.manifest.version
        self._target = target
        self._current_term = current_term
        self._post = post
        self._begun = time.perf_counter()
        self._lock = threading.Lock()
        self._phase = _Phase.WAITING
        self._way: Way | None = None

    @property
    def is_loading(self) -> bool:
        """Whether the engine has begun to load it."""
        return self._phase is _Phase.LOADING

    def drop(self) -> bool:
        """Ends it; False where the engine loads it already."""
        dropped = self._go(_Phase.DROPPED)
        if dropped and self._way is not None:
            self._way.abort()
        return dropped

    def begin(self, landing: Landing, way: Way | None, at: Meeting | str, seconds: float) -> None:
        """Starts the thread.

        Args:
            landing: where the bytes arrive.
            way: by which they come; None where there are none to come.
            at: where, see :meth:`Way.fetch`.
            seconds: deadline for the bytes.
        """
        self._way = way
        arguments = (landing, way, at, seconds)
        threading.Thread(target=self._run, args=arguments, name="weights-job", daemon=True).start()

    def _go(self, phase: _Phase) -> bool:
        with self._lock:
            if self._phase is _Phase.WAITING:
                self._phase = phase
            return self._phase is phase

    def _run(self, landing: Landing, way: Way | None, at: Meeting | str, seconds: float) -> None:
        stage = "fetch"
        try:
            tensors = StagedTensors()
            if way is not None:
                try:
                    tensors = landing.fetch(way, self.offer.manifest, at, seconds)
                finally:
                    way.close()
            fetched = time.perf_counter()
            self._post(Fetched(self, fetched - self._begun))
            stage = "load"
            self._load(tensors, fetched)
        except (TandemError, RuntimeError) as error:
            stage = "verify" if isinstance(error, DamagedError) else stage
            self._post(Failed(self, stage, str(error)))

    def _load(self, tensors: StagedTensors, fetched: float) -> None:
        version = self.version
        # A learner that was stopped and goes on doesn't know that its term is over: Redis does.
        term = self._current_term()
        if version.term < term:
            raise WeightsError(
                f"version {version} is of term {version.term}, which is over: term {term} has begun"
            )
        if not self._go(_Phase.LOADING):
            return
        self._post(Loading(self))
        try:
            paused = self._target.load(tensors, version)
        except WeightsError:
            self._phase = _Phase.WAITING
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine may be half-loaded
            end_half_loaded(
                f"version {version} couldn't be loaded ({type(error).__name__}: {error}); the engine "
                f"may hold half of it, so this process ends"
            )
        loaded = Loaded(
            round=self.offer.round,
            version=version,
            fetched=fetched - self._begun,
            seconds=time.perf_counter() - fetched,
            paused=paused,
        )
        check = self._target.check if self.offer.way != RENAME else None
        self._post(Serving(self, loaded, check is not None))
        if check is not None:
            self._post(Checked(check(version, self.offer.manifest.scored)))
