"""The meeting point of weight channels: a TCPStore that listens on one address only."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from ..errors import WeightsError
from .transport import Meeting


class MeetingPoint:
    """The learner's store, through which the ranks of a channel find each other.

    Left to itself TCPStore listens on every address, so it is handed a socket that is bound
    already. It has no credentials; its address and the channels' random names are told only
    over CURVE, after an ACK.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
        self.host = host
        self.port: int = listener.getsockname()[1]
        # The store owns the descriptor from here on.
        self._store = TCPStore(
            host,
            self.port,
            None,
            is_master=True,
            timeout=timedelta(seconds=10),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def enter(meeting: Meeting, seconds: float) -> PrefixStore:
    """A connection to a channel's part of the store.

    Each channel has a connection of its own: a client that waits for a dead member's key
    holds its connection until the deadline.

    Raises:
        WeightsError: the meeting point couldn't be reached in time.
    """
    start = time.monotonic()
    try:
        store = TCPStore(
            meeting.host,
            meeting.port,
            None,
            is_master=False,
            timeout=timedelta(seconds=max(0.1, seconds)),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise WeightsError(
            f"the weight channel's meeting point {meeting.host}:{meeting.port} couldn't be reached "
            f"within {time.monotonic() - start:.1f} s: {first_line(error)}"
        ) from None
    return PrefixStore(f"weights/{meeting.channel}", store)


def first_line(error: BaseException) -> str:
    """The first line of a message: torch appends C++ stack traces."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
