"""The thread that keeps a worker alive for the others: heartbeats, renewals and groups' deadlines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..common.errors import StoreError
from ..common.records import Version
from ..replay.members import Members
from .leases import Leases

log = logging.getLogger("tandem.rollout")

BEAT_SECONDS = 2.0
"""Time between two heartbeats."""
LOOK_SECONDS = 1.0
"""Time between two checks of the groups' deadlines."""


class Keeper:
    """Does all this in one thread, so that a busy loop never costs a lease.

    Args:
        name: the worker's member id.
        members: gets the heartbeats.
        leases: are renewed.
        version: returns the version that the engine serves now.
        renew_evaluation: keeps a claimed evaluation; may raise StoreError.
    """

    def __init__(
        self,
        name: str,
        members: Members,
        leases: Leases,
        version: Callable[[], Version | None],
        renew_evaluation: Callable[[], None],
    ) -> None:
        self._name = name
        self._members = members
        self._leases = leases
        self._version = version
        self._renew_evaluation = renew_evaluation
        self._ended = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Sends a heartbeat at once, because a new version is served."""
        self._wake.set()

    def close(self) -> None:
        """Ends the thread; waits up to two seconds for it."""
        self._ended = True
        self._wake.set()
        self._thread.join(2.0)

    def _keep(self) -> None:
        next_beat = next_renewal = 0.0
        beaten: Version | None = None
        while not self._ended:
            now = time.monotonic()
            try:
                version = self._version()
                # A new version is reported at once, since people follow it in the run's status.
                if now >= next_beat or version != beaten:
                    next_beat, beaten = now + BEAT_SECONDS, version
                    held = [version.term, version.step] if version else None
                    self._members.beat(self._name, {"version": held})
                    self._renew_evaluation()
                if now >= next_renewal:
                    next_renewal = now + self._leases.seconds / 3
                    self._leases.renew()
                self._leases.end_late()
            except StoreError as error:
                log.warning(f"no heartbeat and no renewal: {error}")
            wait = min(next_beat, next_renewal) - time.monotonic()
            self._wake.wait(min(max(wait, 0.05), LOOK_SECONDS))
            self._wake.clear()
