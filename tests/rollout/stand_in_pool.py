"""A reward pool for tests: a real ROUTER with CURVE that answers as it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from tandem.common import wire
from tandem.common.records import CommitResult, Group, GroupReceipt, GroupSubmission
from tandem.common.sockets import Authenticator, CurveKeys, bind_router, new_keys
from tandem.rollout.submission import PoolAddress

Judge = Callable[[Group], tuple[CommitResult, str] | None]


class StandInPool:
    """Answers every submission by ``judge``; None leaves it unanswered."""

    def __init__(self, client: CurveKeys, judge: Judge, member: str = "reward-0") -> None:
        self.received: list[GroupSubmission] = []
        self.arrived = threading.Condition()
        self._judge = judge
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, client.public)
        keys = new_keys()
        self._router, endpoint = bind_router(self._context, "127.0.0.1", keys)
        self.address = PoolAddress(member=member, endpoint=endpoint, public_key=keys.public)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(20):
                continue
            sender, *_, data = self._router.recv_multipart()
            submission = wire.decode(data, GroupSubmission)
            with self.arrived:
                self.received.append(submission)
                self.arrived.notify_all()
            group = submission.group
            answer = self._judge(group)
            if answer is not None:
                receipt = GroupReceipt(
                    request_id=submission.request_id,
                    group_id=group.group_id,
                    attempt=group.attempt,
                    result=answer[0],
                    detail=answer[1],
                )
                self._router.send_multipart([sender, wire.encode(receipt)])

    def wait_received(self, count: int, timeout: float = 10.0) -> bool:
        """Waits for so many submissions."""
        with self.arrived:
            return self.arrived.wait_for(lambda: len(self.received) >= count, timeout)

    def die(self) -> None:
        """Breaks all connections."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(5)
        self._router.close(linger=0)
        self._authenticator.stop()
        self._context.term()


def commits(group: Group) -> tuple[CommitResult, str]:
    """Every group is committed."""
    return CommitResult.COMMITTED, ""


def is_silent(group: Group) -> None:
    """No group is answered."""
    return
