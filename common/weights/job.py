"""One version on its way into the engine: fetched, checked and loaded in a thread of its own.

If that fails before the engine begins to load, the old version stays in place. If the load itself
fails, the engine may hold parts of both, so the process exits with status 70 and is started anew.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ..config import WeightsConfig
from ..errors import WeightsError
from ..records import Version
from ..waiting import Wait
from .channel import Arrival, Way
from .manifest import Layout, ScoredRows, SegmentPlace
from .protocol import RENAME, Meeting, Offer
from .shared_memory import Segment, flat_buffer
from .staging import checksum, views
from .ways import WAYS

log = logging.getLogger("tandem.rollout.weights")

EXIT_HALF_LOADED = 70
"""Exit status of a process whose engine may hold half of two versions (EX_SOFTWARE)."""
ENGINE = "the engine"
"""Whom a job waits for once its version may be partly loaded."""


def end_half_loaded(message: str) -> NoReturn:
    """Ends the process at once, since half-loaded weights must not sample another token."""
    log.critical(message)
    logging.shutdown()
    os._exit(EXIT_HALF_LOADED)


class StagedTensors(list[tuple[str, torch.Tensor]]):
    """(name, view) of a version's tensors, and the place where other processes can map them.

    Args:
        items: the tensors, in the manifest's order.
        place: None if other processes can't see them.
    """

    def __init__(
        self, items: Sequence[tuple[str, torch.Tensor]] = (), place: SegmentPlace | None = None
    ) -> None:
        super().__init__(items)
        self.place = place


def staged(arrival: Arrival, layout: Layout) -> StagedTensors:
    """The tensors of a version that has arrived."""
    place = None
    if arrival.segment:
        place = SegmentPlace(path=arrival.segment, nbytes=layout.total_bytes, layout=layout.text)
    return StagedTensors(views(arrival.buffer, layout), place)


class DamagedError(WeightsError):
    """A bucket whose checksum is wrong."""


class Landing:
    """Where versions arrive and are checked before they are loaded; each overwrites the last one.

    Only one thread at a time uses it: if one is left behind, the next job gets another landing.
    """

    def __init__(self, settings: WeightsConfig, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._ways: dict[str, Way] = {}
        self._own: torch.Tensor | None = None
        self._segment: Segment | None = None

    def way(self, name: str) -> Way:
        """This end of a way: a new one for each channel, otherwise the one of the version before."""
        way = self._ways.get(name) or WAYS[name](self._settings, self._device)
        if not way.is_channel:
            self._ways[name] = way
        return way

    def fetch(self, way: Way, offer: Offer, at: Meeting | str) -> Arrival:
        """Fetches a version and checks every bucket; see :meth:`Way.fetch`.

        Raises:
            DamagedError: a checksum is wrong.
            WeightsError: the version couldn't be fetched.
        """
        manifest, layout = offer.manifest, offer.manifest.layout
        arrival = way.fetch(manifest, at, self._own_buffer)
        for index in arrival.full:
            bucket, expected = layout.buckets[index], manifest.checksums[index]
            found = checksum(arrival.buffer[bucket])
            if found != expected:
                raise DamagedError(
                    f"bucket {index} of version {manifest.version} (bytes {bucket.start:,} to "
                    f"{bucket.stop:,}) was damaged: its checksum is {found:016x}, the manifest's is "
                    f"{expected:016x}"
                )
        return arrival

    def close(self) -> None:
        """Removes the file of its own buffer."""
        if self._segment is not None:
            self._segment.close()

    def _own_buffer(self, nbytes: int) -> tuple[torch.Tensor, str]:
        """This worker's own buffer, in shared memory if there is room, so that an engine in another
        process can load it from there."""
        if self._own is None or self._own.numel() != nbytes:
            self.close()
            self._own, self._segment = flat_buffer(nbytes)
        return self._own, str(self._segment.path) if self._segment is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The engine, as far as new weights are concerned. Its functions are called from a job's thread."""

    specs: Sequence[tuple[str, tuple[int, ...], str]]
    """Name, shape and dtype of every parameter."""
    load: Callable[[StagedTensors, Version], float]
    """Loads verified tensors between two token steps. Returns once the engine serves them, with the
    seconds in which it sampled nothing because of them. The tensors are read-only views, valid until
    it returns. An **empty list** is a re-stamp: the weights already held get a new version.
    ``WeightsError`` means that nothing was changed. If it raises anything else or takes longer than
    ``weights.commit_seconds``, the process exits with status 70."""
    check: Callable[[Version, ScoredRows | None], bool] | None = None
    """Called once the engine serves a newly loaded version, with the learner's log-probs of some rows.
    If it returns False, the version is fetched and loaded anew. No other is loaded meanwhile."""
    base: str = ""
    """Digest of the model that the tensors adapt; see :attr:`.manifest.WeightManifest.base`."""
    device: torch.device | str = "cpu"
    """A GPU through which buckets may pass on their way to the host's memory."""


# What a job reports.


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine serves the version; if ``is_checked``, Checked follows."""

    fetched: float
    """Seconds from the offer until every checksum was right."""
    paused: float
    """Seconds in which the engine sampled nothing because of the load."""
    is_checked: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether the engine's weights have passed the check against what the learner published."""

    passed: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The version wasn't loaded, and the old one stays."""

    stage: str
    reason: str


Report = Serving | Checked | Failed


class Job:
    """One version that a worker has accepted. Either its thread begins to load it or the control
    thread drops it: whichever is the first to acquire the claim.

    Args:
        learner: member id of the learner.
        current_term: returns the newest term that has begun; called just before the load.
        report: called from the job's thread.
    """

    def __init__(
        self,
        offer: Offer,
        learner: str,
        settings: WeightsConfig,
        target: Target,
        landing: Landing,
        current_term: Callable[[], int],
        report: Callable[[Job, Report], None],
    ) -> None:
        self.offer = offer
        self.version = offer.manifest.version
        self.is_begun = False
        """Whether the thread has been started."""
        self.wait = Wait(learner, "open a weight channel", settings.open_seconds)
        """What has to happen next; the job's thread updates it."""
        self._settings = settings
        self._target = target
        self._landing = landing
        self._current_term = current_term
        self._report = report
        self._offered = time.perf_counter()
        self._claim = threading.Lock()
        self._way: Way | None = None

    @property
    def is_loading(self) -> bool:
        """Whether the engine has begun to load it, so that it can't be dropped any more."""
        return self._claim.locked()

    def drop(self) -> bool:
        """Ends it; returns False if the engine is already loading it."""
        dropped = self._claim.acquire(blocking=False)
        if dropped and self._way is not None:
            self._way.abort()
        return dropped

    def begin(self, at: Meeting | str) -> None:
        """Starts the thread; ``at`` is where the way finds the bytes, see :meth:`Way.fetch`."""
        self.is_begun = True
        seconds = self._settings.stage_seconds
        if isinstance(at, Meeting):
            seconds += self._settings.open_seconds
        self.wait = Wait(self.wait.who, f"send version {self.version}", seconds)
        if self.offer.way != RENAME:
            self._way = self._landing.way(self.offer.way)
        threading.Thread(target=self._run, args=(at,), name="weights-job", daemon=True).start()

    def _run(self, at: Meeting | str) -> None:
        stage, way, arrival = "fetch", self._way, None
        try:
            if way is not None:
                try:
                    arrival = self._landing.fetch(way, self.offer, at)
                finally:
                    way.close()
            fetched = time.perf_counter() - self._offered
            stage = "load"
            layout = self.offer.manifest.layout
            self._load(staged(arrival, layout) if arrival else StagedTensors(), fetched)
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
            stage = "verify" if isinstance(error, DamagedError) else stage
            self._report(self, Failed(stage, str(error) or type(error).__name__))

    def _load(self, tensors: StagedTensors, fetched: float) -> None:
        version, seconds = self.version, self._settings.commit_seconds
        # A learner that was stopped and resumed doesn't know that its term is over, but Redis does.
        self.wait = Wait("the ledger", "say which term has begun", seconds)
        term = self._current_term()
        if version.term < term:
            raise WeightsError(
                f"version {version} is of term {version.term}, which is over: term {term} has begun"
            )
        # Set before it begins: once this wait's deadline is past, the engine may be half-loaded.
        self.wait = Wait(ENGINE, f"load {version}", seconds)
        if not self._claim.acquire(blocking=False):
            return
        try:
            paused = self._target.load(tensors, version)
        except WeightsError:
            # Nothing was changed, so it may be dropped.
            self._claim.release()
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine may be half-loaded
            end_half_loaded(
                f"version {version} couldn't be loaded ({type(error).__name__}: {error}); the engine "
                f"may hold half of it, so this process ends"
            )
        check = self._target.check if self.offer.way != RENAME else None
        self._report(self, Serving(fetched, paused, check is not None))
        if check is not None:
            self._report(self, Checked(check(version, self.offer.manifest.scored)))
