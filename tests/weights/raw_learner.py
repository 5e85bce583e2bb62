"""A learner that says whatever a test wants, in whatever order, over the real sockets."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec
import zmq
from weight_processes import model, specs_of

from tandem.common.records import Version
from tandem.common.sockets import Authenticator, bind_router, new_keys
from tandem.common.weights.manifest import plan
from tandem.common.weights.protocol import ROLE, LearnerAddress, Offer, pack, unpack
from tandem.common.weights.staging import StagingSlot
from tandem.replay.members import Members
from tandem.replay.store import RunStore

T = TypeVar("T")


class RawLearner:
    """The learner of a new term; sends weights through shared memory."""

    def __init__(self, run: Any) -> None:
        self.run_id: str = run.join.run_id
        self.term: int = run.new_term()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = new_keys()
        self._authenticator = Authenticator(
            self._context, RunStore(run.store).curve_client().public
        )
        self._router, endpoint = bind_router(self._context, "127.0.0.1", keys)
        address = LearnerAddress(
            member="learner-0", term=self.term, endpoint=endpoint, public_key=keys.public
        )
        Members(run.store).register(ROLE, "learner-0", address.info())
        self._slots: list[StagingSlot] = []
        self._worker = b""

    def expect(self, kind: type[T], seconds: float = 60.0) -> T:
        """The worker's next message of a kind; its Asks in between are passed over."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            assert left > 0, f"no {kind.__name__} in {seconds:.0f} s"
            assert self._router.poll(int(left * 1000)), f"no {kind.__name__} in {seconds:.0f} s"
            self._worker, *frames = self._router.recv_multipart()
            message = unpack(frames)
            if isinstance(message, kind):
                return message
            assert type(message).__name__ == "Ask", message

    def send(self, message: Any) -> None:
        """To the worker that spoke last."""
        self._router.send_multipart([self._worker, *pack(message)])

    def offer(
        self,
        name: str,
        version: Version,
        changes: dict[str, Any] | None = None,
        way: str = "shared_memory",
    ) -> None:
        """Offers ``model(step)`` as a version, with changes of the manifest."""
        named = model(version.step, big=True)
        slot = StagingSlot(self.run_id, plan(specs_of(named), 1 << 20))
        self._slots.append(slot)
        for index, (_, tensor) in enumerate(named):
            slot.put(index, tensor)
        parcel = slot.parcel(version)
        manifest = msgspec.structs.replace(parcel.manifest, **(changes or {}))
        self.send(Offer(round=name, manifest=manifest, way=way, place=parcel.segment))

    def close(self) -> None:
        """Closes sockets and removes segments."""
        self._router.close(linger=0)
        self._authenticator.stop()
        self._context.term()
        for slot in self._slots:
            slot.close()
