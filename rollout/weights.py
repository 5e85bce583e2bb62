"""Receives new weights while the engine goes on generating: stage, verify, commit.

Three threads beside the engine's: *control* talks to the learner, *stager* owns the channel
and the buffer, *finder* looks the learner up in the registry. States and rules are in
:mod:`tandem.common.weights.states`.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import torch
import zmq

from ..common.config import Config
from ..common.errors import DeadlineError, StoreError, TandemError, WeightsError, WireError
from ..common.records import Version
from ..common.sockets import CurveKeys, check_address, connect_dealer
from ..common.weights.buffer import StagedTensors
from ..common.weights.directory import ROLE, LearnerAddress, Registry, newest_learner
from ..common.weights.mailbox import Mailbox
from ..common.weights.manifest import (
    WeightManifest,
    check_manifest,
    first_difference,
)
from ..common.weights.protocol import (
    Abort,
    Ack,
    Commit,
    Committed,
    Have,
    Message,
    Open,
    Prepare,
    Refused,
    Staged,
    pack,
    unpack,
)
from ..common.weights.scored_rows import ScoredRows
from ..common.weights.segment import (
    remove_left_behind,
    shared_memory_name,
)
from ..common.weights.states import ReceiverState, RoundState, refusal
from ..common.weights.transport import (
    PULLED,
    Meeting,
    Transport,
    device_name,
    make_transport,
    offered_transports,
)
from ..common.weights.waiting import Wait
from .arrivals import Arrivals, DamagedError

if TYPE_CHECKING:
    from ..replay.connection import Store

log = logging.getLogger("tandem.rollout.weights")

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
HAVE_SECONDS = 1.0
"""Between two HAVEs; the learner takes a member for dead after ten."""
LOOK_SECONDS = 0.5
"""Between two looks into the registry."""
EXIT_HALF_LOADED = 70
"""Exit status of a process whose engine may hold half of two versions (EX_SOFTWARE)."""

CommitFunction = Callable[[StagedTensors, Version], float]
CheckFunction = Callable[[Version, ScoredRows | None], bool]


def _exit(message: str) -> None:
    """Ends the process at once: half-loaded weights must not sample another token."""
    log.critical(message)
    logging.shutdown()
    os._exit(EXIT_HALF_LOADED)


class WeightReceiver:
    """Keeps one engine on the learner's newest version.

    Args:
        store: the run's store; the registry, the client key and the term are read through it.
        member: member id of this worker.
        specs: what the engine can load: (name, shape, dtype), or records with those fields.
        commit: ``commit(tensors, version)`` loads verified tensors between two token steps and
            returns when the engine serves them, with the seconds in which it sampled nothing on
            their account. The tensors are views to be read, which hold until it returns. An
            **empty list** is a re-stamp: the weights held already have a new version. Called
            from the stager's thread. ``WeightsError`` says that nothing was changed. If it raises
            anything else or outlasts ``weights.commit_seconds``, the process exits with status 70.
        config: the run's.
        device: where buckets of NCCL arrive; all else arrives in the host's memory.
        on_host: hold a version in the host's memory, wherever it arrives: an engine in another
            process loads it from there.
        registry: in place of the store's.
        client: the run's client keys, in place of the store's.
        current_term: newest term begun, in place of the ledger's; asked before every commit.
        fatal: what ends the process.
        transports: makes a transport by name and interface.
        check: ``check(version, scored)`` is called when the engine serves a version that was loaded,
            with what the learner says that it makes of some rows. False: the version is fetched and
            loaded anew. Called from the stager's thread; meanwhile nothing else is committed.
    """

    def __init__(
        self,
        store: Store | None,
        member: str,
        specs: Sequence[Any],
        commit: CommitFunction,
        *,
        config: Config,
        run_id: str | None = None,
        device: torch.device | str = "cpu",
        on_host: bool = True,
        registry: Registry | None = None,
        client: CurveKeys | None = None,
        current_term: Callable[[], int] | None = None,
        fatal: Callable[[str], None] = _exit,
        transports: Callable[[str, str], Transport] = make_transport,
        check: CheckFunction | None = None,
    ) -> None:
        self._run_id = run_id if run_id is not None else cast("Store", store).run_id
        self._member = member
        self._incarnation = secrets.token_hex(4)
        self._specs: list[tuple[str, tuple[int, ...], str]] = [
            (s.name, tuple(s.shape), s.dtype) if hasattr(s, "name") else (s[0], tuple(s[1]), s[2])
            for s in specs
        ]
        self._commit = commit
        self._settings = config.weights
        self._device = torch.device(device)
        self._registry = registry if registry is not None else _registry_of(store)
        self._client = client if client is not None else _client_of(store)
        self._current_term = current_term if current_term is not None else _term_of(store, member)
        self._fatal = fatal
        self._transports = transports
        self._check = check
        self._on_host = on_host or self._device.type == "cpu"
        self._offered = offered_transports(self._device)
        self._device_name = device_name(self._device)

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[tuple[Any, ...]] = Mailbox()
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        # Guards the states between control and stager: who fails a round and who begins to
        # commit it must see one order.
        self._lock = threading.Lock()
        self._states = RoundState()
        self._version: Version | None = None
        self._content = ""
        self._term = 0
        self._counts = {
            "committed": 0,
            "restamped": 0,
            "reloaded": 0,
            "refused": 0,
            "failed": 0,
            "bytes": 0,
        }
        self._seconds = {"stage": 0.0, "commit": 0.0, "pause": 0.0, "paused": 0.0}

        # Owned by the control thread.
        self._address: LearnerAddress | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._greeted = False
        self._next_have = 0.0
        self._stager: _Stager | None = None
        self._offer: Prepare | None = None
        # STAGED, until its COMMIT has come.
        self._told: Staged | None = None
        self._fitting = ""
        self._wait: Wait | None = None
        self._threads: list[threading.Thread] = []

    # Public.

    @property
    def version(self) -> Version | None:
        """What the engine serves; None before the first commit."""
        return self._version

    def start(self) -> None:
        """Starts looking for the learner."""
        remove_left_behind()
        for name, target in (("weights-control", self._control), ("weights-finder", self._find)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait_version(self, at_least: Version | None = None, deadline: float = 60.0) -> Version:
        """Waits until a version (not older than ``at_least``) is served; returns it.

        Raises:
            DeadlineError: not within ``deadline`` seconds; names the learner.
        """
        end = time.monotonic() + deadline
        told = False
        with self._changed:
            while True:
                held = self._version
                if held is not None and (at_least is None or held >= at_least):
                    return held
                left = end - time.monotonic()
                who = self._address.member if self._address else "a learner to be announced"
                if left <= 0 or self._stopping.is_set():
                    raise DeadlineError(
                        f"{self._member} waited {deadline:.0f} s for version {at_least or 'any'} "
                        f"from {who} and holds {held or 'none'}"
                    )
                if not told and left <= deadline / 2:
                    told = True
                    log.warning(f"waiting for weights {at_least or ''} from {who}; held: {held}")
                self._changed.wait(min(left, deadline / 2))

    def stats(self) -> dict[str, Any]:
        """Counters and the last times, for the member's report.

        ``pause_seconds`` is the last update's, ``paused_seconds`` that of all.
        """
        held = self._version
        return {
            "version": [held.term, held.step] if held else None,
            "state": str(self._states.state),
            "learner": self._address.member if self._address else None,
            **self._counts,
            "stage_seconds": self._seconds["stage"],
            "commit_seconds": self._seconds["commit"],
            "pause_seconds": self._seconds["pause"],
            "paused_seconds": self._seconds["paused"],
        }

    def close(self) -> None:
        """Stops; a commit under way is let finish, within its deadline."""
        if self._stopping.is_set():
            return
        end = time.monotonic() + self._settings.commit_seconds
        with self._changed:
            while self._states.state is ReceiverState.COMMITTING and time.monotonic() < end:
                self._changed.wait(max(0.0, end - time.monotonic()))
        self._stopping.set()
        self._mailbox.post(("stop",))
        for thread in self._threads:
            thread.join(timeout=5.0)
        if not any(thread.is_alive() for thread in self._threads):
            self._mailbox.close()
            self._context.term()

    # Finder.

    def _find(self) -> None:
        failing = False
        while not self._stopping.is_set():
            try:
                address = newest_learner(self._registry.live(ROLE))
                if address is not None:
                    check_address(address.member, address.endpoint, address.public_key)
            except (StoreError, WeightsError, WireError) as error:
                if not failing:
                    log.warning(f"the registry can't be read, looking again: {error}")
                failing = True
            else:
                failing = False
                if address is not None and address != self._address:
                    self._mailbox.post(("learner", address))
            self._stopping.wait(LOOK_SECONDS)

    # Control.

    def _control(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        finally:
            if self._stager is not None:
                self._stager.leave()
            if self._dealer is not None:
                self._dealer.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox.fd, POLLIN)
        now = time.monotonic()
        times = [now + HAVE_SECONDS]
        if self._dealer is not None:
            # Until the first HAVE is out, the socket's becoming writable is the connection.
            poller.register(self._dealer, POLLIN | (0 if self._greeted else POLLOUT))
            if self._greeted:
                times.append(self._next_have)
        if (wait := self._wait) is not None:
            times.append(wait.next_look)
        ready = dict(poller.poll(max(0, int((min(times) - now) * 1000) + 1)))
        for item in self._mailbox.take() if self._mailbox.fd in ready else ():
            getattr(self, f"_on_{item[0]}")(*item[1:])
        if self._dealer is not None:
            self._read(self._dealer)
            if (not self._greeted and ready.get(self._dealer, 0) & POLLOUT) or (
                self._greeted and time.monotonic() >= self._next_have
            ):
                self._greet()
        wait = self._wait
        if wait is not None and wait.expired(log):
            if self._states.state is ReceiverState.COMMITTING:
                self._fatal(
                    f"{wait}: the engine may hold half of {self._states.offered}, so this "
                    f"process ends"
                )
            self._give_up("wait", str(wait), drop_channel=True)

    def _read(self, dealer: zmq.Socket[bytes]) -> None:
        while self._dealer is dealer:
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = unpack(frames)
            except WireError as error:
                log.warning(str(error))
                continue
            if isinstance(message, Prepare):
                self._on_prepare(message)
            elif isinstance(message, Open):
                self._on_open(message)
            elif isinstance(message, Commit):
                self._on_commit(message)
            elif isinstance(message, Abort):
                self._on_abort(message)
            else:
                log.warning(f"the learner sent a {type(message).__name__}, which only workers send")

    def _send(self, message: Message) -> bool:
        if self._dealer is None:
            return False
        try:
            self._dealer.send_multipart(pack(message), zmq.NOBLOCK)
        except zmq.Again:
            # Not connected: the next connection begins with a HAVE.
            self._greeted = False
            return False
        return True

    def _greet(self) -> None:
        sent = self._send(
            Have(
                run_id=self._run_id,
                member=self._member,
                incarnation=self._incarnation,
                version=self._version,
                content=self._content,
                state=str(self._states.state),
                round=self._offer.round if self._offer else "",
                transports=self._offered,
                device=self._device_name,
                memory=shared_memory_name(),
            )
        )
        if sent:
            self._greeted = True
            self._next_have = time.monotonic() + HAVE_SECONDS
            if self._states.state is ReceiverState.STAGED and self._told is not None:
                # Connections break while a learner stands still, and what was under way is lost.
                self._send(self._told)

    def _on_stop(self) -> None:
        pass

    def _on_learner(self, address: LearnerAddress) -> None:
        if address == self._address or (self._address and address.term < self._address.term):
            return
        if self._states.state is ReceiverState.COMMITTING:
            # The finder posts it again: `_address` is still the old one.
            return
        if self._address is not None:
            self._give_up("prepare", f"term {address.term} has begun", drop_channel=True)
            log.info(
                f"{address.member} (term {address.term}) takes the place of {self._address.member}"
            )
        if self._dealer is not None:
            self._dealer.close()
        self._leave_stager()
        self._term = max(self._term, address.term)
        self._dealer = connect_dealer(
            self._context,
            address.endpoint,
            identity=f"{self._member}/{self._incarnation}",
            server_public=address.public_key or None,
            client=self._client,
        )
        self._greeted = False
        self._address = address

    def _on_prepare(self, message: Prepare) -> None:
        manifest = message.manifest
        if self._states.state is not ReceiverState.IDLE:
            if self._states.state is ReceiverState.COMMITTING:
                self._send(Refused(round=message.round, stage="prepare", reason="committing"))
                return
            # The learner has given the earlier round up; its ABORT may have been lost.
            self._give_up("prepare", f"superseded by round {message.round}", drop_channel=True)
        self._offer = message
        reason = refusal(
            run_id=self._run_id,
            term=self._term,
            held=self._version,
            offered_run=manifest.run_id,
            offered=manifest.version,
        )
        if reason is None:
            try:
                check_manifest(manifest)
                if manifest.layout != self._fitting:
                    reason = first_difference(self._specs, manifest.params)
                    if reason is None:
                        self._fitting = manifest.layout
            except WeightsError as error:
                reason = str(error)
        if reason is None and manifest.is_outline and message.transport != "shared_memory":
            reason = f"a manifest without checksums, which don't come by {message.transport}"
        if reason is None and message.counted_from >= 0 and not manifest.is_outline:
            reason = "a manifest with checksums of bytes that aren't all there yet"
        if reason is None and not message.bytes_follow and manifest.content != self._content:
            reason = "a re-stamp of weights that this worker doesn't hold"
        if reason is not None:
            self._refuse(message.round, "prepare", reason)
            return
        self._term = max(self._term, manifest.version.term)
        self._states.prepare(message.round, manifest.version)
        if not message.bytes_follow:
            self._states.step(ReceiverState.STAGED)
            if self._stager is None:
                self._stager = _Stager(self)
            self._send(Ack(round=message.round, channel=""))
            self._on_staged(message.round)
            return
        if message.transport in PULLED:
            if self._stager is None:
                self._stager = _Stager(self)
            self._states.step(ReceiverState.STAGING)
            what = f"be done with fetching version {manifest.version}"
            self._wait = Wait("the stager", what, self._settings.stage_seconds)
            # At the ACK the learner takes its checksums, at the same time as the stager.
            self._send(Ack(round=message.round, channel=""))
            self._stager.jobs.put(("fetch", message.round, message))
            return
        stager = self._stager
        warm = stager is not None and stager.channel and stager.transport == message.transport
        if stager is not None and warm:
            self._states.step(ReceiverState.STAGING)
            self._expect(f"send version {manifest.version}", self._settings.stage_seconds)
            stager.jobs.put(("receive", message.round, manifest))
            self._send(Ack(round=message.round, channel=stager.channel))
        else:
            self._expect("open a weight channel", self._settings.open_seconds)
            self._send(Ack(round=message.round, channel=""))

    def _on_open(self, message: Open) -> None:
        if self._offer is None or not self._current(message.round, ReceiverState.PREPARED):
            return
        self._leave_stager()
        self._stager = _Stager(self)
        self._stager.jobs.put(("open", message.round, message))
        self._stager.jobs.put(("receive", message.round, self._offer.manifest))

    def _on_opened(self, stager: _Stager, round_id: str) -> None:
        if stager is self._stager and self._current(round_id, ReceiverState.PREPARED):
            self._states.step(ReceiverState.STAGING)
            self._expect(f"send version {self._states.offered}", self._settings.stage_seconds)

    def _on_received(self, stager: _Stager, round_id: str) -> None:
        if stager is self._stager and self._current(round_id, ReceiverState.STAGING):
            self._states.step(ReceiverState.STAGED)
            self._on_staged(round_id)

    def _on_fetched(
        self,
        stager: _Stager,
        round_id: str,
        manifest: WeightManifest,
        checksums: tuple[int, ...],
    ) -> None:
        if stager is self._stager and self._current(round_id, ReceiverState.STAGING):
            assert self._offer is not None
            # What an outline's weights are is known only now: they may be those that are served.
            known = manifest.content == self._content
            self._offer = replace(self._offer, manifest=manifest, bytes_follow=not known)
            self._states.step(ReceiverState.STAGED)
            self._on_staged(round_id, checksums)

    def _on_staged(self, round_id: str, checksums: tuple[int, ...] = ()) -> None:
        assert self._offer is not None
        self._expect(f"commit version {self._states.offered}", self._settings.commit_seconds)
        digest = self._offer.manifest.digest
        self._told = Staged(round=round_id, digest=digest, checksums=checksums)
        self._send(self._told)

    def _on_failed(self, stager: _Stager, round_id: str, stage: str, reason: str) -> None:
        if stager is self._stager and round_id == self._states.round:
            self._give_up(stage, reason, drop_channel=stage != "commit")

    def _on_commit(self, message: Commit) -> None:
        if not self._current(message.round, ReceiverState.STAGED) or self._offer is None:
            return
        if self._told is None:
            # It came before; this one answers a STAGED that was repeated.
            return
        if (message.run_id, message.version) != (self._run_id, self._states.offered):
            self._give_up(
                "commit",
                f"COMMIT names {message.version} of run {message.run_id}, staged is "
                f"{self._states.offered} of run {self._run_id}",
                drop_channel=False,
            )
            return
        assert self._stager is not None
        self._told = None
        self._wait = Wait("the ledger", "say which term has begun", self._settings.commit_seconds)
        self._stager.jobs.put(("commit", message.round, self._offer))

    def _on_committed(self, round_id: str, seconds: float) -> None:
        # The stager has set the version already; this only tells the learner.
        assert self._version is not None
        self._wait = None
        self._send(
            Committed(
                round=round_id,
                version=self._version,
                seconds=seconds,
                paused=self._seconds["pause"],
            )
        )
        self._next_have = time.monotonic() + HAVE_SECONDS

    def _on_disowned(self) -> None:
        # The learner is to hear of it at once; it offers its newest version again.
        self._next_have = 0.0

    def _on_abort(self, message: Abort) -> None:
        if message.round == self._states.round:
            log.info(f"the learner gave round {message.round} up: {message.reason}")
            self._fail_round(drop_channel=True)

    # Rounds.

    def _current(self, round_id: str, state: ReceiverState) -> bool:
        return self._states.round == round_id and self._states.state is state

    def _expect(self, what: str, seconds: float) -> None:
        who = self._address.member if self._address else "the learner"
        self._wait = Wait(who, what, seconds)

    def _refuse(self, round_id: str, stage: str, reason: str) -> None:
        self._counts["refused"] += 1
        log.warning(f"refused round {round_id} at {stage}: {reason}; still on {self._version}")
        self._send(Refused(round=round_id, stage=stage, reason=reason[:1000]))

    def _give_up(self, stage: str, reason: str, *, drop_channel: bool) -> None:
        """Fails the round under way, if there is one, and tells the learner."""
        if self._states.state is ReceiverState.IDLE:
            return
        round_id = self._states.round
        if self._fail_round(drop_channel=drop_channel):
            self._refuse(round_id, stage, reason)

    def _fail_round(self, *, drop_channel: bool) -> bool:
        with self._lock:
            if self._states.state is ReceiverState.IDLE or not self._states.fail():
                return False
        self._wait = None
        self._counts["failed"] += 1
        if drop_channel:
            self._leave_stager()
        return True

    def _leave_stager(self) -> None:
        if self._stager is not None:
            self._stager.leave()
            self._stager = None

    # Called by the stager.

    def _begin_commit(self, stager: _Stager, round_id: str) -> bool:
        """STAGED → COMMITTING, unless the round was given up meanwhile."""
        with self._lock:
            if stager is not self._stager or not self._current(round_id, ReceiverState.STAGED):
                return False
            self._states.step(ReceiverState.COMMITTING)
        self._wait = Wait(
            "the engine", f"load {self._states.offered}", self._settings.commit_seconds
        )
        return True

    def _not_committed(self) -> None:
        """COMMITTING → STAGED: the engine refused and changed nothing."""
        with self._lock:
            self._states.refused()

    def _end_commit(self, offer: Prepare, seconds: float, paused: float) -> None:
        with self._changed:
            with self._lock:
                self._states.done()
                self._version = offer.manifest.version
                self._content = offer.manifest.content
            self._seconds["commit"] = seconds
            self._seconds["pause"] = paused
            self._seconds["paused"] += paused
            self._counts["committed" if offer.bytes_follow else "restamped"] += 1
            self._changed.notify_all()
        self._mailbox.post(("committed", offer.round, seconds))

    def _disown(self) -> None:
        """What the engine serves isn't the version that it is called: the worker has none."""
        with self._changed, self._lock:
            self._version = None
            self._content = ""
            self._counts["reloaded"] += 1
        self._mailbox.post(("disowned",))


class _Stager:
    """The thread that owns one channel and its buffer: opens, receives, verifies, commits.

    When a round fails while this thread is inside the transport, the receiver leaves it
    behind and starts another: gloo's waits end only at their deadline or with the connection.
    """

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self.jobs: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self.channel = ""
        self.transport = ""
        self._left = False
        self._open: Transport | None = None
        self._arrivals = Arrivals(receiver._device, on_host=receiver._on_host)
        self._thread = threading.Thread(target=self._run, name="weights-stager", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Lets the thread end as soon as it can."""
        self._left = True
        self.channel = ""
        transport = self._open
        if transport is not None:
            transport.abort()
        self.jobs.put(None)

    def _run(self) -> None:
        post = self._receiver._mailbox.post
        while (job := self.jobs.get()) is not None and not self._left:
            kind, round_id, content = job
            try:
                if kind == "open":
                    self._enter(content)
                    post(("opened", self, round_id))
                elif kind == "receive":
                    self._receive(content)
                    post(("received", self, round_id))
                elif kind == "fetch":
                    post(("fetched", self, round_id, *self._fetch(content)))
                else:
                    self._load(round_id, content)
            except (TandemError, RuntimeError) as error:
                self._arrivals.forget()
                post(("failed", self, round_id, _stage_of(kind, error), str(error)))
                if kind in ("open", "receive"):
                    break
        self.channel = ""
        if self._open is not None:
            self._open.close()
            self._open = None
        self._arrivals.close()

    def _enter(self, message: Open) -> None:
        settings = self._receiver._settings
        transport = self._receiver._transports(message.transport, settings.interface)
        self._open = transport
        transport.open(
            Meeting(
                host=message.host,
                port=message.port,
                channel=message.channel,
                rank=message.rank,
                world_size=message.world_size,
            ),
            settings.open_seconds,
        )
        self.transport = message.transport
        self.channel = message.channel

    def _receive(self, manifest: WeightManifest) -> None:
        if self._open is None:
            raise WeightsError("the weight channel isn't open")
        start = time.perf_counter()
        self._arrivals.receive(self._open, manifest, self._receiver._settings.stage_seconds)
        self._count(manifest, start)

    def _fetch(self, offer: Prepare) -> tuple[WeightManifest, tuple[int, ...]]:
        start = time.perf_counter()
        seconds = self._receiver._settings.stage_seconds
        found = self._arrivals.fetch(offer, seconds, lambda: self._left)
        self._count(offer.manifest, start)
        return found

    def _count(self, manifest: WeightManifest, start: float) -> None:
        self._receiver._counts["bytes"] += manifest.total_bytes
        self._receiver._seconds["stage"] = time.perf_counter() - start

    def _load(self, round_id: str, offer: Prepare) -> None:
        receiver = self._receiver
        version = offer.manifest.version
        term = receiver._current_term()
        if version.term < term:
            raise WeightsError(
                f"version {version} is of term {version.term}, which is over: term {term} has begun"
            )
        tensors = self._arrivals.held(offer.manifest) if offer.bytes_follow else StagedTensors()
        if not receiver._begin_commit(self, round_id):
            return
        start = time.perf_counter()
        try:
            paused = receiver._commit(tensors, version)
        except WeightsError:
            receiver._not_committed()
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine may be half-loaded
            receiver._fatal(
                f"version {version} couldn't be loaded ({type(error).__name__}: {error}); the engine "
                f"may hold half of it, so this process ends"
            )
            return
        receiver._end_commit(offer, time.perf_counter() - start, paused)
        check, scored = receiver._check, offer.manifest.scored
        if tensors and check is not None and not check(version, scored):
            receiver._disown()


def _stage_of(kind: str, error: Exception) -> str:
    return "verify" if isinstance(error, DamagedError) else kind


def _registry_of(store: Store | None) -> Registry:
    from ..replay.members import Members

    return Members(cast("Store", store))


def _client_of(store: Store | None) -> CurveKeys:
    from ..replay.store import RunStore

    return RunStore(cast("Store", store)).curve_client()


def _term_of(store: Store | None, member: str) -> Callable[[], int]:
    from ..replay.ledger import Ledger

    return Ledger(cast("Store", store), member).term
