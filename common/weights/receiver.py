"""The worker's end of the control socket: asks for the newest version and answers offers.

The *control* thread talks to the learner and owns the worker's state; a *finder* looks the learner up
in the registry; each version that is accepted is a :class:`~.job.Job` with a thread of its own.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import torch
import zmq

from ..config import Config
from ..errors import StoreError, WeightsError, WireError
from ..mailbox import Mailbox
from ..records import Version
from ..sockets import check_address, connect_dealer
from .job import ENGINE, Checked, Failed, Job, Landing, Report, Serving, Target, end_half_loaded
from .manifest import Layout, base_difference, check_manifest, first_difference
from .protocol import (
    RENAME,
    ROLE,
    Ask,
    LearnerAddress,
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
from .shared_memory import remove_left_behind, shared_memory_name
from .ways import WAYS, device_name

log = logging.getLogger("tandem.rollout.weights")

ASK_SECONDS = 1.0
"""Interval between Asks; the learner gives up a silent worker after ten."""
LOOK_MS = 100
"""Longest time between two looks at what is due, in milliseconds."""
FIND_SECONDS = 0.5
"""Interval between reads of the registry."""


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
        self._settings = config.weights
        self._target = target
        self._current_term = current_term
        self._device = torch.device(target.device)
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
        self._version: Version | None = None
        self._content = ""
        self._round = ""
        self._problem = ""
        self._fetched = self._paused = 0.0
        self._job: Job | None = None
        self._is_checking = False
        self._landing = Landing(self._settings, self._device)
        self._fitting: Layout | None = None

    # Public.

    @property
    def version(self) -> Version | None:
        """The version that the engine serves; None before the first load."""
        return self._version

    def start(self) -> None:
        """Starts looking for the learner."""
        remove_left_behind()
        for name, target in (("weights-control", self._control), ("weights-finder", self._find)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stats(self) -> dict[str, Any]:
        """Counters and the state, for the member's report."""
        held, job = self._version, self._job
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
            self._landing.close()

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
        wait = self._job.wait if self._job is not None else None
        if wait is not None and wait.expired(log.warning):
            if wait.who == ENGINE:
                end_half_loaded(f"{wait} and may hold half of it, so this process ends")
            self._give_up("wait", str(wait))

    def _on_learner(self, address: LearnerAddress) -> None:
        known = self._address
        if address == known or (known is not None and address.term < known.term):
            return
        if self._job is not None and self._job.is_loading:
            # The finder posts it again, since `_address` is still the old one.
            return
        if known is not None:
            self._give_up("wait", f"term {address.term} has begun")
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
                    job.begin(meeting)
            case Withdraw(round=name, reason=reason):
                if job is not None and job.offer.round == name:
                    log.info(f"the learner gave up round {name}: {reason}")
                    self._drop()
            case Ask():
                log.warning("the learner sent an Ask: only workers do")
            case _:
                assert_never(message)

    def _ask(self) -> None:
        """Tells the learner all that matters to it. Until there is a connection nothing is sent, and the
        next turn tries again."""
        if self._dealer is None:
            return
        ask = Ask(
            run_id=self._membership.run_id,
            member=self._membership.member,
            version=self._version,
            content=self._content,
            round=self._round,
            busy=self._job is not None or self._is_checking,
            problem=self._problem,
            fetched=self._fetched,
            paused=self._paused,
            device=device_name(self._device),
            memory=shared_memory_name(),
        )
        try:
            self._dealer.send_multipart(pack(ask), zmq.NOBLOCK)
            self._next_ask = time.monotonic() + ASK_SECONDS
        except zmq.Again:
            self._next_ask = 0.0

    # One version.

    def _on_offer(self, offer: Offer) -> None:
        # If there is a job, the learner has given it up; its message may have been lost.
        if self._is_checking or (self._job is not None and not self._drop()):
            # The learner sees by the next Asks that this worker doesn't know of the round.
            return
        self._round = offer.round
        self._problem = ""
        self._fetched = self._paused = 0.0
        objection = self._objection(offer)
        if objection is not None:
            self._refuse("offer", objection)
            return
        self._term = max(self._term, offer.manifest.version.term)
        self._job = Job(
            offer,
            self._address.member if self._address else "the learner",
            self._settings,
            self._target,
            self._landing,
            self._current_term,
            lambda job, report: self._mailbox.post(partial(self._on_report, job, report)),
        )
        if offer.way == RENAME or not WAYS[offer.way].is_channel:
            self._job.begin(offer.place)
            # Small models are loaded by then, and one Ask says both.
            self._next_ask = min(self._next_ask, time.monotonic() + LOOK_MS / 1e3)
        else:
            self._ask()

    def _objection(self, offer: Offer) -> str | None:
        """Why an offer must be refused; None if it may be accepted."""
        manifest = offer.manifest
        reason = refusal(
            run_id=self._membership.run_id,
            term=self._term,
            held=self._version,
            offered_run=manifest.run_id,
            offered=manifest.version,
        )
        if reason is not None:
            return reason
        if offer.way == RENAME:
            same = manifest.content == self._content
            return None if same else "a re-stamp of weights that this worker doesn't hold"
        if offer.way not in WAYS:
            return f"this worker doesn't know the way {offer.way!r}"
        try:
            check_manifest(manifest)
        except WeightsError as error:
            return str(error)
        reason = base_difference(self._target.base, manifest.base)
        if reason is None and manifest.layout != self._fitting:
            reason = first_difference(self._target.specs, manifest.layout.tensors)
        if reason is None:
            self._fitting = manifest.layout
        return reason

    def _on_report(self, job: Job, report: Report) -> None:
        match report:
            case Serving():
                manifest, renamed = job.offer.manifest, job.offer.way == RENAME
                self._version, self._content = job.version, manifest.content
                self._fetched, self._paused = report.fetched, report.paused
                self._is_checking = report.is_checked
                self._job = None
                self._counts["restamped" if renamed else "committed"] += 1
                self._counts["bytes"] += 0 if renamed else manifest.layout.total_bytes
                self._ask()
            case Checked(passed):
                self._is_checking = False
                if not passed:
                    # The engine's weights aren't those of its version, so the worker disowns it
                    # and is offered the newest again.
                    self._version, self._content = None, ""
                    self._problem = "check: the engine computes something else than the learner"
                    self._counts["reloaded"] += 1
                self._ask()
            case Failed(stage, reason):
                if job is self._job:
                    self._give_up(stage, reason)
            case _:
                assert_never(report)

    def _refuse(self, stage: str, reason: str) -> None:
        log.warning(f"refused round {self._round} at {stage}: {reason}; still on {self._version}")
        self._problem = f"{stage}: {reason}"[:1000]
        self._ask()

    def _give_up(self, stage: str, reason: str) -> None:
        """Ends the current job as failed, if possible, and tells the learner."""
        if self._drop(keep_landing=stage == "load"):
            self._refuse(stage, reason)

    def _drop(self, *, keep_landing: bool = False) -> bool:
        """Ends the current job; returns False if there is none or the engine is already loading it."""
        if self._job is None or not self._job.drop():
            return False
        self._job = None
        self._counts["failed"] += 1
        if not keep_landing:
            # The job's thread may still be in a channel whose bytes arrive in the old buffer.
            self._landing.close()
            self._landing = Landing(self._settings, self._device)
        return True
