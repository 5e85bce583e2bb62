"""The learner's end of a channel: a thread that waits where nobody else should."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from ..errors import TandemError
from .mailbox import Mailbox
from .staging import Pin
from .transport import Meeting, Transport


@dataclass(frozen=True, slots=True)
class Job:
    """Open a channel (``meeting``), or send a pinned slot over it (``pin``)."""

    round_id: str
    meeting: Meeting | None
    pin: Pin | None
    seconds: float


class Link:
    """The thread that waits inside a channel to one worker, or to several that get one broadcast.

    Left behind while it waits, it ends with its deadline or when the other side closes; until
    then it keeps its slot pinned.
    """

    def __init__(
        self,
        mailbox: Mailbox[tuple[Any, ...]],
        members: frozenset[bytes],
        transport: Transport,
    ) -> None:
        self.channel = secrets.token_hex(8)
        self.members = members
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._mailbox = mailbox
        self._transport = transport
        self._lock = threading.Lock()
        self._left = False
        threading.Thread(target=self._run, name="weights-link", daemon=True).start()

    def put(self, job: Job) -> None:
        """Queues a job; its pin is given up where the link has ended."""
        with self._lock:
            if not self._left:
                self._jobs.put(job)
                return
        self._drop(job, "its channel was closed")

    def leave(self) -> None:
        """Lets the thread end as soon as it can."""
        with self._lock:
            self._left = True
        self._transport.abort()
        self._jobs.put(None)

    def _drop(self, job: Job, reason: str) -> None:
        if job.pin is not None:
            job.pin.release()
        self._mailbox.post(("link_failed", self, job.round_id, reason))

    def _run(self) -> None:
        while not self._left and (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            except (TandemError, RuntimeError) as error:
                with self._lock:
                    self._left = True
                self._drop(job, str(error))
            else:
                if job.pin is not None:
                    job.pin.release()
        self._transport.close()
        while not self._jobs.empty():
            rest = self._jobs.get_nowait()
            if rest is not None:
                self._drop(rest, "its channel was closed")

    def _do(self, job: Job) -> None:
        if job.meeting is not None:
            self._transport.open(job.meeting, job.seconds)
            self._mailbox.post(("opened", self, job.round_id))
        elif job.pin is not None:
            pieces = job.pin.slot.pieces(on_host=self._transport.name == "gloo")
            self._transport.send(pieces, job.seconds)
