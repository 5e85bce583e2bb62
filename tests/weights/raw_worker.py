"""A worker that says whatever a test wants, and holds no engine, over the real sockets."""

from __future__ import annotations

from typing import Any

import zmq

from tandem.common.sockets import CurveKeys, connect_dealer
from tandem.common.weights.protocol import ROLE, Ask, Message, newest_learner, pack, unpack
from tandem.replay.members import Members
from tandem.replay.store import RunStore


class RawWorker:
    """A worker that gets weights over gloo alone.

    Args:
        keys: its own, if it isn't to have those of the run.
    """

    def __init__(self, run: Any, member: str = "rollout-0", keys: CurveKeys | None = None) -> None:
        address = newest_learner(Members(run.store).live(ROLE))
        assert address is not None
        self.member = member
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = connect_dealer(
            self._context,
            address.endpoint,
            identity=f"{member}/raw",
            server_public=address.public_key,
            client=keys or RunStore(run.store).curve_client(),
        )

    def ask(self, name: str = "", *, busy: bool = False, seconds: float = 2.0) -> bool:
        """Asks, having accepted a round if ``busy``; returns whether it is connected."""
        message = Ask(
            member=self.member,
            version=None,
            content="",
            round=name,
            busy=busy,
            problem="",
            fetched=0.0,
            paused=0.0,
            device="cpu",
            memory="",
        )
        if not self._dealer.poll(int(seconds * 1000), zmq.POLLOUT):
            return False
        self._dealer.send_multipart(pack(message))
        return True

    def heard(self, seconds: float) -> Message | None:
        """What the learner says next; None if nothing in that time."""
        if not self._dealer.poll(int(seconds * 1000)):
            return None
        return unpack(self._dealer.recv_multipart())

    def close(self) -> None:
        """Closes the socket."""
        self._dealer.close(linger=0)
        self._context.term()
