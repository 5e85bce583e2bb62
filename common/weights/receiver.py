"""A worker's end: asks for the newest version, answers offers, and has versions loaded into the engine.

The *control* thread talks to the learner and owns the worker's state; a *finder* looks the learner up
in the registry; each version that is accepted is a :class:`Job` with a thread of its own.

If a version fails before the engine begins to load it, the old one stays in place. If the load itself
fails, the engine may hold parts of both, so the process exits with status 70 and is restarted.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, assert_never

import msgspec
import torch
import zmq

from ..config import Config
from ..errors import StoreError, WeightsError, WireError
from ..mailbox import Mailbox
from ..records import Version
from ..sockets import check_address, connect_dealer
from ..waiting import Wait
from .gloo import Channel
from .manifest import ScoredRows, WeightManifest, base_difference, first_difference
from .protocol import (
    RENAME,
    ROLE,
    Ask,
    LearnerAddress,
    Meeting,
    Membership,
    Message,
    Offer,
    Open,
    Withdraw,
    newest_learner,
    pack,
    refusal,
    unpack,
)
from .shared_memory import (
    Memory,
    StagedTensors,
    checksum,
    remove_left_behind,
    shared_memory_name,
)
from .ways import WAYS, device_name

log = logging.getLogger("tandem.rollout.weights")

ASK_SECONDS = 1.0
"""Interval between Asks; the learner gives up a silent worker after ten."""
LOOK_MS = 100
"""Longest time between two looks at what is due, in milliseconds."""
FIND_SECONDS = 0.5
"""Interval between reads of the registry."""
EXIT_HALF_LOADED = 70
"""Exit status of a process whose engine may hold half of two versions (EX_SOFTWARE)."""
ENGINE = "the engine"
"""Whom a job waits for once its version may be partly loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The engine, as far as new weights are concerned. Its functions are called from a job's thread."""

    specs: Sequence[tuple[str, tuple[int, ...], str]]
    """Name, shape and dtype of every parameter."""
    load: Callable[[StagedTensors | None, Version], float]
    """Loads verified tensors between two token steps. Returns once the engine serves them, with the
    seconds in which it sampled nothing because of them. The tensors are read-only views, valid until
    it returns. **None** is a re-stamp: the weights already held get a new version.
    ``WeightsError`` means that nothing was changed. If it raises anything else or takes longer than
    ``weights.commit_seconds``, the process exits with status 70."""
    check: Callable[[Version, ScoredRows | None], bool] | None = None
    """Called once the engine serves a newly loaded version, with the learner's log-probs of some rows.
    If it returns False, the version is fetched and loaded anew. No other is loaded meanwhile."""
    base: str = ""
    """Digest of the model that the tensors adapt; see :attr:`.manifest.WeightManifest.base`."""
    device: torch.device | str = "cpu"
    """A GPU through which buckets may pass on their way to the host's memory."""


def end_half_loaded(message: str) -> NoReturn:
    """Ends the process at once, since half-loaded weights must not sample another token."""
    log.critical(message)
    logging.shutdown()
    os._exit(EXIT_HALF_LOADED)


class DamagedError(WeightsError):
    """A bucket whose checksum is wrong."""


def _check(manifest: WeightManifest, staged: StagedTensors, index: int) -> None:
    bucket, expected = manifest.layout.buckets[index], manifest.checksums[index]
    found = checksum(staged.buffer[bucket])
    if found != expected:
        raise DamagedError(
            f"bucket {index} of version {manifest.version} (bytes {bucket.start:,} to "
            f"{bucket.stop:,}) was damaged: its checksum is {found:016x}, the manifest's is "
            f"{expected:016x}"
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One version that a worker has accepted. Either its thread begins to load it or the control thread
    drops it: whichever is the first to acquire the claim."""

    offer: Offer
    channel: Channel | None
    """This end of the channel that carries the bytes; None if none does."""
    memory: Memory
    """Where the bytes arrive."""
    wait: Wait
    """What has to happen next; the job's thread updates it."""
    is_begun: bool = False
    """Whether the thread has been started."""
    since: float = field(default_factory=time.perf_counter)
    """``perf_counter`` at the offer."""
    claim: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_loading(self) -> bool:
        """Whether the engine has begun to load it, so that it can't be dropped any more."""
        return self.claim.locked()

    def drop(self) -> bool:
        """Ends it; returns False if the engine is already loading it."""
        dropped = self.claim.acquire(blocking=False)
        if dropped and self.channel is not None:
            self.channel.abort()
        return dropped


class WeightReceiver:
    """Keeps one engine on the learner's newest version.

    Args:
        current_term: returns the ledger's newest term; called before every load.
    """

    def __init__(
        self,
        membership: Membership,
        config: Config,
        target: Target,
        current_term: Callable[[], int],
    ) -> None:
        self._membership = membership
        self._settings = config.weights_bound
        self._target = target
        self._current_term = current_term
        self._identity = f"{membership.member}/{secrets.token_hex(4)}"

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._counts = dict.fromkeys(("committed", "restamped", "reloaded", "failed", "bytes"), 0)

        # Owned by the control thread.
        self._address: LearnerAddress | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._next_ask = 0.0
        self._term = 0
        self._state = Ask(
            member=membership.member,
            version=None,
            content="",
            round="",
            busy=False,
            problem="",
            fetched=0.0,
            paused=0.0,
            device=device_name(torch.device(target.device)),
            memory=shared_memory_name(),
        )
        self._job: Job | None = None
        self._is_checking = False
        self._memory = Memory()

    # Public.

    @property
    def version(self) -> Version | None:
        """The version that the engine serves; None before the first load."""
        return self._state.version

    def start(self) -> None:
        """Starts looking for the learner."""
        remove_left_behind()
        for name, target in (("weights-control", self._control), ("weights-finder", self._find)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stats(self) -> dict[str, Any]:
        """Counters and the state, for the member's report."""
        held, job = self.version, self._job
        return {
            "version": [held.term, held.step] if held else None,
            "state": "idle" if job is None else "loading" if job.is_loading else "fetching",
            "learner": self._address.member if self._address else None,
            **self._counts,
        }

    def close(self) -> None:
        """Stops; a load that has begun may finish within its deadline."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=5.0 + self._settings.commit_seconds)
        if not any(thread.is_alive() for thread in self._threads):
            self._mailbox.close()
            self._context.term()

    # The finder.

    def _find(self) -> None:
        failing = False
        while not self._stopping.is_set():
            try:
                address = newest_learner(self._membership.registry.live(ROLE))
                if address is not None:
                    check_address(address.member, address.endpoint, address.public_key)
            except (StoreError, WeightsError, WireError) as error:
                if not failing:
                    log.warning(f"the registry can't be read, looking again: {error}")
                failing = True
            else:
                failing = False
                if address is not None and address != self._address:
                    self._mailbox.post(partial(self._on_learner, address))
            self._stopping.wait(FIND_SECONDS)

    # The control thread.

    def _control(self) -> None:
        try:
            while not (self._stopping.is_set() and (self._job is None or self._job.drop())):
                self._turn()
        finally:
            if self._dealer is not None:
                self._dealer.close()
            self._memory.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox.fd, zmq.POLLIN)
        if self._dealer is not None:
            poller.register(self._dealer, zmq.POLLIN)
        poller.poll(LOOK_MS)
        for call in self._mailbox.take():
            call()
        self._read()
        if time.monotonic() >= self._next_ask:
            self._ask()
        job = self._job
        if job is not None and (wait := job.wait).expired(log.warning):
            if wait.who == ENGINE:
                end_half_loaded(f"{wait} and may hold half of it, so this process ends")
            self._give_up(job, "wait", str(wait))

    def _on_learner(self, address: LearnerAddress) -> None:
        known = self._address
        if address == known or (known is not None and address.term < known.term):
            return
        if self._job is not None and self._job.is_loading:
            # The finder posts it again, since `_address` is still the old one.
            return
        if known is not None:
            self._give_up(self._job, "wait", f"term {address.term} has begun")
            log.info(f"{address.member} (term {address.term}) takes the place of {known.member}")
        if self._dealer is not None:
            self._dealer.close()
        self._term = max(self._term, address.term)
        self._dealer = connect_dealer(
            self._context,
            address.endpoint,
            identity=self._identity,
            server_public=address.public_key or None,
            client=self._membership.client,
        )
        self._next_ask = 0.0
        self._address = address

    def _read(self) -> None:
        while self._dealer is not None:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(unpack(frames))
            except WireError as error:
                log.warning(str(error))

    def _on_message(self, message: Message) -> None:
        job = self._job
        match message:
            case Offer():
                self._on_offer(message)
            case Open(round=name, meeting=meeting):
                if job is not None and job.offer.round == name and not job.is_begun:
                    self._begin(job, meeting)
            case Withdraw(round=name, reason=reason):
                if job is not None and job.offer.round == name:
                    log.info(f"the learner gave up round {name}: {reason}")
                    self._drop()
            case Ask():
                log.warning("the learner sent an Ask: only workers do")
            case _:
                assert_never(message)

    def _ask(self, **changes: Any) -> None:
        """Tells the learner all that matters to it, after these changes of the state. Until there is a
        connection nothing is sent, and the next turn tries again."""
        busy = self._job is not None or self._is_checking
        self._state = msgspec.structs.replace(self._state, busy=busy, **changes)
        if self._dealer is None:
            return
        try:
            self._dealer.send_multipart(pack(self._state), zmq.NOBLOCK)
            self._next_ask = time.monotonic() + ASK_SECONDS
        except zmq.Again:
            self._next_ask = 0.0

    # One version.

    def _on_offer(self, offer: Offer) -> None:
        # If there is a job, the learner has given it up; its message may have been lost.
        if self._is_checking or (self._job is not None and not self._drop()):
            # The learner sees by the next Asks that this worker doesn't know of the round.
            return
        self._state = msgspec.structs.replace(
            self._state, round=offer.round, problem="", fetched=0.0, paused=0.0
        )
        objection = self._objection(offer)
        if objection is not None:
            self._refuse("offer", objection)
            return
        self._term = max(self._term, offer.manifest.version.term)
        channel = None
        if offer.way != RENAME and (kind := WAYS[offer.way].channel) is not None:
            channel = kind(self._settings, torch.device(self._target.device))
        who = self._address.member if self._address else "the learner"
        wait = Wait(who, "open a weight channel", self._settings.open_seconds)
        self._job = Job(offer=offer, channel=channel, memory=self._memory, wait=wait)
        if channel is not None:
            self._ask()
        else:
            self._begin(self._job)
            # Small models are loaded by then, and one Ask says both.
            self._next_ask = min(self._next_ask, time.monotonic() + LOOK_MS / 1e3)

    def _objection(self, offer: Offer) -> str | None:
        """Why an offer must be refused; None if it may be accepted."""
        manifest = offer.manifest
        reason = refusal(
            manifest, run_id=self._membership.run_id, term=self._term, held=self.version
        )
        if reason is not None:
            return reason
        if offer.way == RENAME:
            same = manifest.content == self._state.content
            return None if same else "a re-stamp of weights that this worker doesn't hold"
        if offer.way not in WAYS:
            return f"this worker doesn't know the way {offer.way!r}"
        reason = base_difference(self._target.base, manifest.base)
        return reason or first_difference(self._target.specs, manifest.layout.tensors)

    def _on_loaded(self, job: Job, fetched: float, paused: float) -> None:
        manifest, renamed = job.offer.manifest, job.offer.way == RENAME
        self._job = None
        self._is_checking = self._target.check is not None and not renamed
        self._counts["restamped" if renamed else "committed"] += 1
        self._counts["bytes"] += 0 if renamed else manifest.layout.total_bytes
        self._ask(
            version=manifest.version, content=manifest.content, fetched=fetched, paused=paused
        )

    def _on_checked(self, passed: bool) -> None:
        self._is_checking = False
        self._counts["reloaded"] += not passed
        problem = "check: the engine computes something other than the learner"
        # The engine's weights aren't those of its version, so the worker disowns it and is offered the
        # newest again.
        self._ask(**({} if passed else {"version": None, "content": "", "problem": problem}))

    def _refuse(self, stage: str, reason: str) -> None:
        held, name = self._state.version, self._state.round
        log.warning(f"refused round {name} at {stage}: {reason}; still on {held}")
        self._ask(problem=f"{stage}: {reason}"[:1000])

    def _give_up(self, job: Job | None, stage: str, reason: str) -> None:
        """Ends a job as failed, unless it has ended or can't be, and tells the learner."""
        if job is self._job and self._drop(keep_memory=stage == "load"):
            self._refuse(stage, reason)

    def _drop(self, *, keep_memory: bool = False) -> bool:
        """Ends the current job; returns False if there is none or the engine is already loading it."""
        if self._job is None or not self._job.drop():
            return False
        self._job = None
        self._counts["failed"] += 1
        if not keep_memory:
            # The job's thread may still be in a channel whose bytes arrive in the old buffer.
            self._memory.close()
            self._memory = Memory()
        return True

    # A job's thread. It reads nothing that the control thread owns, and posts what it has to tell.

    def _begin(self, job: Job, at: Meeting | None = None) -> None:
        """Starts the thread; a channel is entered at a meeting point."""
        job.is_begun = True
        seconds = self._settings.stage_seconds
        if at is not None:
            seconds += self._settings.open_seconds
        job.wait = Wait(job.wait.who, f"send version {job.offer.manifest.version}", seconds)
        threading.Thread(target=self._run, args=(job, at), name="weights-job", daemon=True).start()

    def _run(self, job: Job, at: Meeting | None) -> None:
        stage = "fetch"
        try:
            staged = self._fetch(job, at) if job.offer.way != RENAME else None
            stage = "load"
            self._load(job, staged, time.perf_counter() - job.since)
        except Exception as error:  # noqa: BLE001 - whatever it is, the learner must hear of it
            stage = "verify" if isinstance(error, DamagedError) else stage
            reason = str(error) or type(error).__name__
            self._mailbox.post(partial(self._give_up, job, stage, reason))

    def _fetch(self, job: Job, at: Meeting | None) -> StagedTensors:
        """Fetches a version and checks every bucket.

        Raises:
            DamagedError: a checksum is wrong.
            WeightsError: the version couldn't be fetched.
        """
        manifest, fetch = job.offer.manifest, WAYS[job.offer.way].fetch
        if fetch is not None:
            staged = fetch(manifest, job.offer.place, job.memory)
            for index in range(len(manifest.checksums)):
                _check(manifest, staged, index)
        else:
            assert job.channel is not None
            assert at is not None
            staged = job.memory.own(manifest.layout)
            # Each bucket is checked while the next ones arrive.
            job.channel.receive(staged, at, partial(_check, manifest, staged))
        return staged

    def _load(self, job: Job, staged: StagedTensors | None, fetched: float) -> None:
        version, seconds = job.offer.manifest.version, self._settings.commit_seconds
        # A learner that was stopped and resumed doesn't know that its term is over, but Redis does.
        job.wait = Wait("the ledger", "say which term has begun", seconds)
        term = self._current_term()
        if version.term < term:
            raise WeightsError(
                f"version {version} is of term {version.term}, which is over: term {term} has begun"
            )
        # Set before it begins: once this wait's deadline is past, the engine may be half-loaded.
        job.wait = Wait(ENGINE, f"load {version}", seconds)
        if not job.claim.acquire(blocking=False):
            return
        try:
            paused = self._target.load(staged, version)
        except WeightsError:
            # Nothing was changed, so it may be dropped.
            job.claim.release()
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine may be half-loaded
            end_half_loaded(
                f"version {version} couldn't be loaded ({type(error).__name__}: {error}); the engine "
                f"may hold half of it, so this process ends"
            )
        self._mailbox.post(partial(self._on_loaded, job, fetched, paused))
        if self._target.check is not None and staged is not None:
            passed = self._target.check(version, job.offer.manifest.scored)
            self._mailbox.post(partial(self._on_checked, passed))
