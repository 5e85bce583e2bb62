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

from ..config import WeightsConfig
from ..errors import TandemError, WeightsError
from ..records import Version
from ..waiting import Wait
from .channel import Way
from .manifest import Layout, ScoredRows, SegmentPlace, WeightManifest
from .protocol import RENAME, Loaded, Meeting, Offer
from .shared_memory import Segment
from .staging import checksum, flat_buffer, views

log = logging.getLogger("tandem.rollout.weights")

EXIT_HALF_LOADED = 70
"""Exit status of a process whose engine may hold half of two versions (EX_SOFTWARE)."""
ENGINE = "the engine"
"""For what a job waits once its version may be loaded in part."""


def end_half_loaded(message: str) -> NoReturn:
    """Ends the process at once: half-loaded weights must not sample another token."""
    log.critical(message)
    logging.shutdown()
    os._exit(EXIT_HALF_LOADED)


class StagedTensors(list[tuple[str, torch.Tensor]]):
    """(name, view) of a version's tensors, and where other processes can map their buffer.

    Args:
        items: The tensors, in the manifest's order.
        place: None where other processes can't see them.
    """

    def __init__(
        self, items: Sequence[tuple[str, torch.Tensor]] = (), place: SegmentPlace | None = None
    ) -> None:
        super().__init__(items)
        self.place = place


class DamagedError(WeightsError):
    """A bucket whose checksum is wrong."""


class Landing:
    """Where versions arrive and wait, checked, until they are loaded; each overwrites the one before.

    One thread at a time uses it: the next job's has another one where a thread is left behind.
    """

    def __init__(self) -> None:
        self._own: torch.Tensor | None = None
        self._segment: Segment | None = None
        self._views: dict[int, tuple[torch.Tensor, Layout, StagedTensors]] = {}

    def fetch(self, way: Way, manifest: WeightManifest, at: Meeting | str) -> StagedTensors:
        """A version, every bucket of it checked; see :meth:`Way.fetch`.

        Raises:
            DamagedError: a checksum is wrong.
            WeightsError: it isn't to be had.
        """
        arrival = way.fetch(manifest, at, self._own_buffer)
        buckets = manifest.layout.buckets
        for index in arrival.full:
            bucket, expected = buckets[index], manifest.checksums[index]
            found = checksum(arrival.buffer[bucket])
            if found != expected:
                raise DamagedError(
                    f"bucket {index} of version {manifest.version} (bytes {bucket.start:,} to "
                    f"{bucket.stop:,}) was damaged: its checksum is {found:016x}, the manifest's is "
                    f"{expected:016x}"
                )
        return self._tensors(arrival.buffer, arrival.segment, manifest.layout)

    def close(self) -> None:
        """Removes the file of the own buffer."""
        if self._segment is not None:
            self._segment.close()

    def _own_buffer(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """This worker's own buffer, in shared memory where there is room: an engine in another
        process loads it from there."""
        if self._own is None or self._own.numel() != nbytes:
            self.close()
            self._segment = None
            try:
                self._segment = Segment(nbytes)
                self._own = self._segment.buffer
            except (WeightsError, OSError) as error:
                log.info(f"weights are staged in memory that isn't shared: {error}")
                self._own = flat_buffer(nbytes)
        return self._own, str(self._segment.path) if self._segment is not None else ""

    def _tensors(self, buffer: torch.Tensor, segment: str, layout: Layout) -> StagedTensors:
        """Views of a buffer, which are kept for its next version."""
        known = self._views.get(id(buffer))
        if known is None or known[0] is not buffer or known[1] != layout:
            place = SegmentPlace(path=segment, nbytes=buffer.numel(), layout=layout.text)
            tensors = StagedTensors(views(buffer, layout), place if segment else None)
            if len(self._views) >= 4:
                # Views hold their memory: those of buffers that are no longer in use go.
                self._views.clear()
            known = self._views[id(buffer)] = (buffer, layout, tensors)
        return known[2]


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


# What a job says of itself.


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine serves the version; where it ``is_checked``, Checked follows."""

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


Ended = Serving | Checked | Failed


class _Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    DROPPED = "dropped"


class Job:
    """One version that a worker has taken up. Its thread begins to load it, or the control thread
    drops it: whoever comes first.

    Args:
        learner: member id of the learner.
        current_term: newest term that has begun, asked just before the load.
        post: takes what the job says of itself.
    """

    def __init__(
        self,
        offer: Offer,
        learner: str,
        settings: WeightsConfig,
        target: Target,
        current_term: Callable[[], int],
        post: Callable[[Ended], None],
    ) -> None:
        self.offer = offer
        self.version = offer.manifest.version
        self.is_begun = False
        """The thread has been started."""
        self.wait = Wait(learner, "open a weight channel", settings.open_seconds)
        """What has to happen next; the job's thread sets it as it goes."""
        self._settings = settings
        self._target = target
        self._current_term = current_term
        self._post = post
        self._offered = time.perf_counter()
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

    def begin(self, landing: Landing, way: Way | None, at: Meeting | str) -> None:
        """Starts the thread.

        Args:
            landing: where the bytes arrive.
            way: by which they come; None where there are none to come.
            at: where, see :meth:`Way.fetch`.
        """
        self.is_begun = True
        self._way = way
        seconds = self._settings.stage_seconds
        if isinstance(at, Meeting):
            seconds += self._settings.open_seconds
        self.wait = Wait(self.wait.who, f"send version {self.version}", seconds)
        arguments = (landing, way, at)
        threading.Thread(target=self._run, args=arguments, name="weights-job", daemon=True).start()

    def _go(self, phase: _Phase) -> bool:
        with self._lock:
            if self._phase is _Phase.WAITING:
                self._phase = phase
            return self._phase is phase

    def _run(self, landing: Landing, way: Way | None, at: Meeting | str) -> None:
        stage = "fetch"
        try:
            tensors = StagedTensors()
            if way is not None:
                try:
                    tensors = landing.fetch(way, self.offer.manifest, at)
                finally:
                    way.close()
            stage = "load"
            self._load(tensors, time.perf_counter())
        except (TandemError, RuntimeError) as error:
            stage = "verify" if isinstance(error, DamagedError) else stage
            self._post(Failed(self, stage, str(error)))

    def _load(self, tensors: StagedTensors, fetched: float) -> None:
        version, seconds = self.version, self._settings.commit_seconds
        # A learner that was stopped and goes on doesn't know that its term is over: Redis does.
        self.wait = Wait("the ledger", "say which term has begun", seconds)
        term = self._current_term()
        if version.term < term:
            raise WeightsError(
                f"version {version} is of term {version.term}, which is over: term {term} has begun"
            )
        # Before it begins: whoever finds this wait's deadline past finds the engine half-loaded.
        self.wait = Wait(ENGINE, f"load {version}", seconds)
        if not self._go(_Phase.LOADING):
            return
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
            fetched=fetched - self._offered,
            seconds=time.perf_counter() - fetched,
            paused=paused,
        )
        check = self._target.check if self.offer.way != RENAME else None
        self._post(Serving(self, loaded, check is not None))
        if check is not None:
            self._post(Checked(check(version, self.offer.manifest.scored)))
