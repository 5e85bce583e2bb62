"""Keeps finished groups until a reward pool's receipt for them has come.

One thread owns a DEALER to every live pool (a single DEALER for several pools would queue to dead
ones). A group goes to the connected pool with the fewest groups outstanding. It is sent again when
its pool's connection breaks, when its pool leaves the registry, and when no receipt has come for a
long time; the ledger recognises repeats. Only a receipt ends this: a dead pool, a dead Redis or a
slow grader never loses a group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..common import wire
from ..common.errors import DeadlineError, StoreError, WireError
from ..common.mailbox import Mailbox
from ..common.records import CommitResult, Group, GroupReceipt, GroupSubmission
from ..common.sockets import CurveKeys, check_address, connect_dealer
from ..common.waiting import Wait
from ..replay.members import Members

log = logging.getLogger("tandem.rollout")

LOOK_SECONDS = 0.5
"""Time between two looks into the registry."""
RESEND_SECONDS = 30.0
"""First wait for a receipt from a pool that stays connected; it doubles up to the longest."""
LONGEST_RESEND_SECONDS = 480.0
"""Longest such wait, since slow graders shouldn't have to work twice."""
RELINK_SECONDS = 10.0
"""A registered pool that hasn't been connected for this long gets a new socket."""
TELL_SECONDS = 15.0
"""Time without any receipt, while groups wait, after which a line says who is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAddress:
    """Where a reward pool listens."""

    member: str
    """The pool's member id."""
    endpoint: str
    """``tcp://host:port``."""
    public_key: str | None
    """The pool's CURVE key; None if the run has no keys."""


@dataclass(slots=True)
class _Pending:
    """A group without a receipt."""

    group_id: str
    attempt: int
    message: bytes
    """The encoded submission."""
    since: float
    """When it was submitted (monotonic)."""
    pool: str | None = None
    """The pool that has it; None if it has to be sent."""
    sent: float = 0.0
    """When it was last sent."""
    sends: int = 0
    """How often it was sent."""
    patience: float = RESEND_SECONDS
    """Seconds until it is sent again."""


class _Link:
    """The DEALER to one pool, with its monitor."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: PoolAddress,
        member: str,
        client: CurveKeys | None,
    ) -> None:
        self.address = address
        self.socket = connect_dealer(
            context,
            address.endpoint,
            identity=member,
            server_public=address.public_key,
            client=client,
            connect=False,
        )
        self.socket.setsockopt(zmq.SNDHWM, 1000)
        # Before connecting: a handshake on loopback may be over by the next line, and a link whose
        # handshake was missed would count as unconnected forever.
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.socket.connect(address.endpoint)
        self.connected = False
        self.since = time.monotonic()
        self.outstanding: set[int] = set()

    def close(self) -> None:
        """Closes both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


def live_pools(members: Members) -> list[PoolAddress]:
    """The pools in the registry that can be connected to.

    Raises:
        StoreError: Redis is away.
    """
    addresses = []
    for member in members.live("reward"):
        if "endpoint" not in member.info:
            continue
        endpoint, key = member.info["endpoint"], member.info.get("public_key")
        try:
            check_address(member.member, endpoint, key)
        except WireError as error:
            log.warning(str(error))
            continue
        addresses.append(PoolAddress(member=member.member, endpoint=endpoint, public_key=key))
    return addresses


@dataclass(slots=True)
class SubmissionStats:
    """Counters of one worker's submissions."""

    submitted: int = 0
    """Groups that were submitted."""
    resent: int = 0
    """Number of sends beyond each group's first."""
    results: Counter[str] = field(default_factory=Counter)
    """Receipts by result."""
    outstanding: int = 0
    """Groups without a receipt."""
    pools: int = 0
    """Pools that are connected."""
    receipt_seconds: float = 0.0
    """Time from submission to receipt, summed over receipts."""


class Submitter:
    """Sends finished groups to the reward pools.

    Args:
        member: this worker's member id.
        pools: returns the live pools in the registry; called from a thread of its own. If it raises
            ``StoreError``, it is called again later.
        client: the run's client keys; None if the run has none.
        on_receipt: called from the sending thread with every group's single receipt.
        most: number of outstanding groups from which on :meth:`wait_room` waits.
        resend_seconds: see :data:`RESEND_SECONDS`.
        relink_seconds: see :data:`RELINK_SECONDS`.
    """

    def __init__(
        self,
        member: str,
        pools: Callable[[], Iterable[PoolAddress]],
        client: CurveKeys | None,
        on_receipt: Callable[[GroupReceipt], None],
        *,
        most: int = 64,
        resend_seconds: float = RESEND_SECONDS,
        relink_seconds: float = RELINK_SECONDS,
    ) -> None:
        self._member = member
        self._pools = pools
        self._client = client
        self._on_receipt = on_receipt
        self._most = most
        self._resend = resend_seconds
        self._relink_seconds = relink_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[tuple[int, _Pending] | list[PoolAddress] | None] = Mailbox()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._requests = 0
        self._stats = SubmissionStats()
        self._threads: list[threading.Thread] = []
        # Owned by the sending thread.
        self._links: dict[str, _Link] = {}
        self._pending: dict[int, _Pending] = {}
        self._last_receipt = time.monotonic()
        self._told = time.monotonic()

    def start(self) -> None:
        """Starts looking for pools and sending."""
        for name, target in (("submit", self._run), ("submit-finder", self._find)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, group: Group) -> None:
        """Takes over a finished group; returns at once.

        Raises:
            WireError: the group is too long to be sent at all.
        """
        with self._changed:
            self._requests += 1
            request = self._requests
        message = wire.encode(GroupSubmission(request_id=request, group=group))
        pending = _Pending(
            group.group_id, group.attempt, message, time.monotonic(), patience=self._resend
        )
        with self._changed:
            self._stats.outstanding += 1
            self._stats.submitted += 1
        self._mailbox.post((request, pending))

    @property
    def outstanding(self) -> int:
        """Number of groups without a receipt."""
        return self._stats.outstanding

    def wait_room(self, timeout: float) -> bool:
        """Waits until fewer than ``most`` groups are outstanding; False after ``timeout``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.outstanding < self._most, timeout)

    def drain(self, deadline: float) -> None:
        """Waits for the receipts of all submitted groups.

        Raises:
            DeadlineError: some are missing after ``deadline`` seconds; the message says how many, and
                who was waited for.
        """
        wait = Wait(self._whom(), "acknowledge the last finished groups", deadline)
        with self._changed:
            while not self._changed.wait_for(lambda: not self.outstanding, wait.pause):
                wait.who = self._whom()
                if wait.expired(log.warning):
                    raise DeadlineError(
                        f"{self.outstanding} finished groups had no receipt from {wait.who} after "
                        f"{deadline:.0f} s; their leases go to another worker when they expire"
                    )

    def stats(self) -> SubmissionStats:
        """A copy of the counters."""
        with self._changed:
            return replace(self._stats, results=Counter(self._stats.results))

    def close(self) -> None:
        """Stops; groups without a receipt are given up (their leases expire)."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._mailbox.post(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        if not any(thread.is_alive() for thread in self._threads):
            self._mailbox.close()
            self._context.term()

    # The finder.

    def _find(self) -> None:
        failing = False
        known: list[PoolAddress] | None = None
        while not self._stopping.is_set():
            try:
                pools = list(self._pools())
            except StoreError as error:
                if not failing:
                    log.warning(f"the registry can't be read, pools stay as they are: {error}")
                failing = True
            else:
                failing = False
                if pools != known:
                    known = pools
                    self._mailbox.post(pools)
            self._stopping.wait(LOOK_SECONDS)

    # The sending thread.

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except Exception:
                    # An error in one turn must not end the only thread that keeps groups.
                    log.exception("an unexpected error while submitting; going on")
                    self._stopping.wait(0.5)
        finally:
            for link in self._links.values():
                link.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox.fd, zmq.POLLIN)
        for link in self._links.values():
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        now = time.monotonic()
        due = min((p.sent + p.patience for p in self._pending.values() if p.pool), default=now + 5)
        ready = dict(poller.poll(max(1, int(min(due - now, 1.0) * 1000))))
        for item in self._mailbox.take() if self._mailbox.fd in ready else ():
            if isinstance(item, list):
                self._meet(item)
            elif item is not None:
                self._pending[item[0]] = item[1]
        for link in list(self._links.values()):
            if link.monitor in ready:
                self._listen(link)
            if link.socket in ready:
                self._receive(link)
        self._relink()
        self._send_all()
        self._tell()

    def _meet(self, addresses: list[PoolAddress]) -> None:
        """Opens links to new pools and closes those of pools that are gone or moved."""
        wanted = {address.member: address for address in addresses}
        for member, link in list(self._links.items()):
            if wanted.get(member) != link.address:
                self._lose(link, "left the registry" if member not in wanted else "moved")
                link.close()
                del self._links[member]
        for member, address in wanted.items():
            if member not in self._links:
                self._links[member] = _Link(self._context, address, self._member, self._client)
        self._count_pools()

    def _relink(self) -> None:
        """Replaces sockets that don't get through, in case the sockets themselves are stuck."""
        now = time.monotonic()
        for member, link in list(self._links.items()):
            if link.connected or now - link.since < self._relink_seconds:
                continue
            self._lose(link, "can't be reached")
            link.close()
            self._links[member] = _Link(self._context, link.address, self._member, self._client)

    def _listen(self, link: _Link) -> None:
        while link.monitor.poll(0):
            event = recv_monitor_message(link.monitor)["event"]
            link.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            link.since = time.monotonic()
            if event == zmq.EVENT_DISCONNECTED:
                self._lose(link, "broke the connection")
        self._count_pools()

    def _lose(self, link: _Link, how: str) -> None:
        """Marks a pool's groups to be sent again, since nobody knows whether it committed them."""
        link.connected = False
        if link.outstanding:
            log.warning(
                f"reward pool {link.address.member} {how} with {len(link.outstanding)} groups; "
                f"sending them again"
            )
        for request in link.outstanding:
            self._pending[request].pool = None
        link.outstanding.clear()

    def _receive(self, link: _Link) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                receipt = wire.decode(frames[-1], GroupReceipt)
            except WireError as error:
                log.warning(f"from reward pool {link.address.member}: {error}")
                continue
            self._settle(receipt)

    def _settle(self, receipt: GroupReceipt) -> None:
        pending = self._pending.get(receipt.request_id)
        if pending is None or (pending.group_id, pending.attempt) != (
            receipt.group_id,
            receipt.attempt,
        ):
            return  # A receipt of a repeat, after that of another send.
        del self._pending[receipt.request_id]
        for link in self._links.values():
            link.outstanding.discard(receipt.request_id)
        now = self._last_receipt = time.monotonic()
        line = f"group {receipt.group_id} attempt {receipt.attempt}: {receipt.result}"
        if receipt.detail:
            line += f" ({receipt.detail})"
        quiet = receipt.result is CommitResult.COMMITTED
        log.log(logging.DEBUG if quiet else logging.INFO, line)
        try:
            self._on_receipt(receipt)
        finally:
            with self._changed:
                self._stats.outstanding -= 1
                self._stats.results[str(receipt.result)] += 1
                self._stats.receipt_seconds += now - pending.since
                self._changed.notify_all()

    def _send_all(self) -> None:
        now = time.monotonic()
        for request, pending in self._pending.items():
            if pending.pool is not None:
                if now - pending.sent < pending.patience:
                    continue
                log.info(
                    f"no receipt for group {pending.group_id} from {pending.pool} for "
                    f"{now - pending.sent:.0f} s; sending it again"
                )
                pending.patience = min(2 * pending.patience, LONGEST_RESEND_SECONDS)
                self._links[pending.pool].outstanding.discard(request)
            if not self._send(request, pending, now):
                return

    def _send(self, request: int, pending: _Pending, now: float) -> bool:
        """Sends to the least busy pool, if possible not to the last one again; False if there is none."""
        last, pending.pool = pending.pool, None
        links = [link for link in self._links.values() if link.connected]
        links.sort(key=lambda link: (link.address.member == last, len(link.outstanding)))
        for link in links:
            try:
                link.socket.send(pending.message, zmq.NOBLOCK)
            except zmq.Again:
                continue
            link.outstanding.add(request)
            pending.pool, pending.sent = link.address.member, now
            pending.sends += 1
            if pending.sends > 1:
                with self._changed:
                    self._stats.resent += 1
            return True
        return False

    def _tell(self) -> None:
        now = time.monotonic()
        if not self._pending:
            self._told = now
            return
        quiet_since = max(self._last_receipt, min(p.since for p in self._pending.values()))
        if now - max(self._told, quiet_since) > TELL_SECONDS:
            self._told = now
            log.warning(
                f"{len(self._pending)} finished groups wait for a receipt for "
                f"{now - quiet_since:.0f} s, from {self._whom()}"
            )

    def _whom(self) -> str:
        links = list(self._links.values())
        if not links:
            return "a reward pool: none is registered"
        return ", ".join(
            f"{link.address.member} at {link.address.endpoint}"
            + ("" if link.connected else " (not connected)")
            for link in links
        )

    def _count_pools(self) -> None:
        with self._changed:
            self._stats.pools = sum(link.connected for link in self._links.values())
