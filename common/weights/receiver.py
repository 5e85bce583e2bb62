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
from dataclasses import dataclass
from typing import Any, assert_never

import torch
import zmq

from ..config import Config
from ..errors import StoreError, WeightsError, WireError
from ..mailbox import Mailbox
from ..records import Version
from ..sockets import check_address, connect_dealer
from .channel import Way
from .job import (
    ENGINE,
    Checked,
    Ended,
    Failed,
    Job,
    Landing,
    Serving,
    Target,
    end_half_loaded,
)
from .manifest import Layout, check_manifest, first_difference
from .protocol import (
    RENAME,
    ROLE,
    Ask,
    LearnerAddress,
    Loaded,
    Membership,
    Message,
    Offer,
    Open,
    Refused,
    Withdraw,
    newest_learner,
    pack,
    refusal,
    unpack,
)
from .shared_memory import remove_left_behind, shared_memory_name
from .ways import WAYS, MakeWay, device_name, make_way, offered_ways

log = logging.getLogger("tandem.rollout.weights")

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
ASK_SECONDS = 1.0
"""Interval between Asks; the learner gives up a silent worker after ten."""
LOOK_SECONDS = 0.5
"""Interval between reads of the registry."""


@dataclass(frozen=True, slots=True)
class Found:
    """The registry names this learner."""

    address: LearnerAddress


@dataclass(frozen=True, slots=True)
class Stop:
    """The receiver is being closed."""


Event = Found | Stop | Ended


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
        *,
        make_way: MakeWay = make_way,
    ) -> None:
        self._membership = membership
        self._settings = config.weights
        self._target = target
        self._current_term = current_term
        self._make_way = make_way
        self._device = torch.device(target.device)
        self._identity = f"{membership.member}/{secrets.token_hex(4)}"

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[Event] = Mailbox()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._counts = dict.fromkeys(
            ("committed", "restamped", "reloaded", "refused", "failed", "bytes"), 0
        )
        self._seconds = dict.fromkeys(("stage", "commit", "pause", "paused"), 0.0)

        # Owned by the control thread.
        self._address: LearnerAddress | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._greeted = False
        self._next_ask = 0.0
        self._term = 0
        self._version: Version | None = None
        self._content = ""
        self._round = ""
        self._job: Job | None = None
        self._is_checking = False
        self._landing = Landing()
        self._ways: dict[str, Way] = {}
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
        """Counters and the last update's times, for the member's report.

        ``pause_seconds`` is of the last update, ``paused_seconds`` the sum over all.
        """
        held, job = self._version, self._job
        return {
            "version": [held.term, held.step] if held else None,
            "state": "idle" if job is None else "loading" if job.is_loading else "fetching",
            "learner": self._address.member if self._address else None,
            **self._counts,
            **{f"{name}_seconds": seconds for name, seconds in self._seconds.items()},
        }

    def close(self) -> None:
        """Stops; a load that has begun may finish within its deadline."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._mailbox.post(Stop())
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
                    self._mailbox.post(Found(address))
            self._stopping.wait(LOOK_SECONDS)

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
        poller.register(self._mailbox.fd, POLLIN)
        now = time.monotonic()
        times = [now + ASK_SECONDS]
        if self._dealer is not None:
            # Until the first Ask is sent, a writable socket is the sign of a connection.
            poller.register(self._dealer, POLLIN | (0 if self._greeted else POLLOUT))
            if self._greeted:
                times.append(self._next_ask)
        if self._job is not None:
            times.append(self._job.wait.next_look)
        ready = dict(poller.poll(max(0, int((min(times) - now) * 1000) + 1)))
        for event in self._mailbox.take() if self._mailbox.fd in ready else ():
            self._on_event(event)
        if self._dealer is not None:
            self._read(self._dealer)
            if (not self._greeted and ready.get(self._dealer, 0) & POLLOUT) or (
                self._greeted and time.monotonic() >= self._next_ask
            ):
                self._ask()
        wait = self._job.wait if self._job is not None else None
        if wait is not None and wait.expired(log.warning):
            if wait.who == ENGINE:
                end_half_loaded(f"{wait} and may hold half of it, so this process ends")
            self._give_up("wait", str(wait))

    def _on_event(self, event: Event) -> None:
        match event:
            case Found(address):
                self._on_learner(address)
            case Stop():
                pass
            case Serving():
                self._on_serving(event)
            case Checked(passed):
                self._is_checking = False
                if not passed:
                    # The engine's weights aren't those of its version, so the worker disowns it
                    # and is offered the newest again.
                    self._version, self._content = None, ""
                    self._counts["reloaded"] += 1
                self._ask()
            case Failed(job, stage, reason):
                if job is self._job:
                    self._give_up(stage, reason)
            case _:
                assert_never(event)

    def _on_serving(self, event: Serving) -> None:
        offer, message = event.job.offer, event.loaded
        self._version = message.version
        self._content = offer.manifest.content
        self._job = None
        self._is_checking = event.is_checked
        if offer.way != RENAME:
            self._counts["bytes"] += offer.manifest.total_bytes
            self._seconds["stage"] = message.fetched
        self._seconds |= {"commit": message.seconds, "pause": message.paused}
        self._seconds["paused"] += message.paused
        self._counts["restamped" if offer.way == RENAME else "committed"] += 1
        self._send(message)
        self._ask()

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
        self._greeted = False
        self._address = address

    def _read(self, dealer: zmq.Socket[bytes]) -> None:
        while self._dealer is dealer:
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(unpack(frames))
            except WireError as error:
                log.warning(str(error))

    def _on_message(self, message: Message) -> None:
        match message:
            case Offer():
                self._on_offer(message)
            case Open():
                self._on_open(message)
            case Withdraw(round=round_id, reason=reason):
                if self._job is not None and self._job.offer.round == round_id:
                    log.info(f"the learner gave up round {round_id}: {reason}")
                    self._drop()
            case Ask() | Loaded() | Refused():
                log.warning(f"the learner sent a {type(message).__name__}: only workers do")
            case _:
                assert_never(message)

    def _send(self, message: Message) -> bool:
        if self._dealer is None:
            return False
        try:
            self._dealer.send_multipart(pack(message), zmq.NOBLOCK)
        except zmq.Again:
            # Not connected: the next connection begins with an Ask.
            self._greeted = False
            return False
        return True

    def _ask(self) -> None:
        sent = self._send(
            Ask(
                run_id=self._membership.run_id,
                member=self._membership.member,
                version=self._version,
                content=self._content,
                round=self._round,
                busy=self._job is not None or self._is_checking,
                ways=offered_ways(self._device),
                device=device_name(self._device),
                memory=shared_memory_name(),
            )
        )
        if sent:
            self._greeted = True
            self._next_ask = time.monotonic() + ASK_SECONDS

    # One version.

    def _on_offer(self, offer: Offer) -> None:
        if self._is_checking or (self._job is not None and self._job.is_loading):
            self._refuse(offer.round, "offer", "an earlier version is being loaded")
            return
        # The learner has given up the earlier round; its message may have been lost.
        self._give_up("wait", f"superseded by round {offer.round}")
        self._round = offer.round
        objection = self._objection(offer)
        if objection is not None:
            self._refuse(offer.round, "offer", objection)
            self._ask()
            return
        self._term = max(self._term, offer.manifest.version.term)
        job = self._job = Job(
            offer,
            self._address.member if self._address else "the learner",
            self._settings,
            self._target,
            self._current_term,
            self._mailbox.post,
        )
        if offer.way == RENAME:
            job.begin(self._landing, None, "")
        elif not WAYS[offer.way].is_channel:
            if offer.way not in self._ways:
                self._ways[offer.way] = self._made(offer.way)
            job.begin(self._landing, self._ways[offer.way], offer.place)
        self._ask()

    def _made(self, name: str) -> Way:
        return self._make_way(name, self._settings, self._device)

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
            if manifest.layout != self._fitting:
                reason = first_difference(self._target.specs, manifest.layout.tensors)
        except WeightsError as error:
            return str(error)
        if reason is None:
            self._fitting = manifest.layout
        return reason

    def _on_open(self, message: Open) -> None:
        job = self._job
        if job is not None and job.offer.round == message.round and not job.is_begun:
            job.begin(self._landing, self._made(job.offer.way), message.meeting)

    def _refuse(self, round_id: str, stage: str, reason: str) -> None:
        self._counts["refused"] += 1
        log.warning(f"refused round {round_id} at {stage}: {reason}; still on {self._version}")
        self._send(Refused(round=round_id, stage=stage, reason=reason[:1000]))

    def _give_up(self, stage: str, reason: str) -> None:
        """Ends the current job as failed, if possible, and tells the learner."""
        job = self._job
        if job is not None and self._drop(keep_landing=stage == "load"):
            self._refuse(job.offer.round, stage, reason)
            self._ask()

    def _drop(self, *, keep_landing: bool = False) -> bool:
        """Ends the current job; returns False if there is none or the engine is already loading it."""
        if self._job is None or not self._job.drop():
            return False
        self._job = None
        self._counts["failed"] += 1
        if not keep_landing:
            # The job's thread may still be in a channel whose bytes arrive in the old buffer.
            self._landing.close()
            self._landing = Landing()
            self._ways = {}
        return True
