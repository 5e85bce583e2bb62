"""The life of a transfer at the receiving end, as pure rules.

::

    IDLE ──prepare──► PREPARED ──bytes──► STAGING ──verified──► STAGED ──commit──► COMMITTING
     ▲                   │                   │                     │                   │
     └──── old version ──┴───────────────────┴─────────────────────┘                   │
     └──────────────────────────── new version ────────────────────────────────────────┘

A failure before COMMITTING leaves the old version in place. A failure during COMMITTING may
have left the engine with half of each, so the process ends itself with a non-zero status and
is started anew.
"""

from __future__ import annotations

from enum import StrEnum

from ..errors import WeightsError
from ..records import Version


class ReceiverState(StrEnum):
    """Where a receiver stands."""

    IDLE = "idle"
    PREPARED = "prepared"
    STAGING = "staging"
    STAGED = "staged"
    COMMITTING = "committing"


FORWARD: dict[ReceiverState, tuple[ReceiverState, ...]] = {
    ReceiverState.IDLE: (ReceiverState.PREPARED,),
    # A re-stamp carries no bytes and goes straight to STAGED.
    ReceiverState.PREPARED: (ReceiverState.STAGING, ReceiverState.STAGED),
    ReceiverState.STAGING: (ReceiverState.STAGED,),
    ReceiverState.STAGED: (ReceiverState.COMMITTING,),
    ReceiverState.COMMITTING: (),
}


class RoundState:
    """One receiver's state, and the round that it is in."""

    def __init__(self) -> None:
        self.state = ReceiverState.IDLE
        self.round = ""
        self.offered: Version | None = None

    def prepare(self, round_id: str, version: Version) -> None:
        """IDLE → PREPARED."""
        self.step(ReceiverState.PREPARED)
        self.round = round_id
        self.offered = version

    def step(self, state: ReceiverState) -> None:
        """Goes one state on.

        Raises:
            WeightsError: it doesn't follow the present one.
        """
        if state not in FORWARD[self.state]:
            raise WeightsError(f"round {self.round or '-'}: {self.state} can't become {state}")
        self.state = state

    def done(self) -> None:
        """COMMITTING → IDLE, with the new version."""
        if self.state is not ReceiverState.COMMITTING:
            raise WeightsError(f"round {self.round}: {self.state} can't be done")
        self.state = ReceiverState.IDLE
        self.offered = None

    def refused(self) -> None:
        """COMMITTING → STAGED: the engine took nothing, and said so."""
        if self.state is not ReceiverState.COMMITTING:
            raise WeightsError(f"round {self.round}: {self.state} can't be refused by the engine")
        self.state = ReceiverState.STAGED

    def fail(self) -> bool:
        """Any state → IDLE with the old version; False where that is no longer possible."""
        if self.state is ReceiverState.COMMITTING:
            return False
        self.state = ReceiverState.IDLE
        self.offered = None
        return True


def refusal(
    *, run_id: str, term: int, held: Version | None, offered_run: str, offered: Version
) -> str | None:
    """Why a version may not be taken up; None where it may.

    Versions only go up, compared as (term, step); a term that is over is refused, so that a
    learner that was stopped and goes on can't move anybody back.

    Args:
        run_id: the receiver's run.
        term: newest term that the receiver knows of.
        held: what it serves.
        offered_run: run of the offer.
        offered: version of the offer.
    """
    if offered_run != run_id:
        return f"version {offered} belongs to run {offered_run}, this worker to run {run_id}"
    if offered.term < term:
        return f"version {offered} is of term {offered.term}, which is over: term {term} has begun"
    if held is not None and offered <= held:
        return f"version {offered} is not newer than {held}, which is served"
    return None


class Backoff:
    """Pauses between attempts: doubling from ``first`` to ``most`` seconds.

    >>> pause = Backoff(first=0.1, most=0.3)
    >>> [round(pause.next(), 1) for _ in range(3)]
    [0.1, 0.2, 0.3]
    """

    def __init__(self, *, first: float = 0.1, most: float = 10.0) -> None:
        self._first = first
        self._most = most
        self._pause = first

    def next(self) -> float:
        """The pause before the next attempt, seconds."""
        pause = self._pause
        self._pause = min(self._most, pause * 2)
        return pause

    def reset(self) -> None:
        """After a success."""
        self._pause = self._first
