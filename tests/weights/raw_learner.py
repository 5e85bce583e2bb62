"""A learner that says whatever a test wants, in whatever order, over the real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from weight_processes import model, specs_of

from tandem.common.records import Version
from tandem.common.sockets import Authenticator, bind_router, new_keys
from tandem.common.weights.manifest import WeightManifest, plan
from tandem.common.weights.protocol import ROLE, Ask, LearnerAddress, Offer, pack, unpack
from tandem.common.weights.staging import StagingSlot
from tandem.replay.members import Members
from tandem.replay.store import RunStore


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
        Members(run.store).register(ROLE, "learner-0", msgspec.structs.asdict(address))
        self._slots: list[StagingSlot] = []
        self._worker = b""

    def ask(self, seconds: float = 60.0) -> Ask:
        """The worker's next Ask."""
        assert self._router.poll(int(seconds * 1000)), f"no Ask in {seconds:.0f} s"
        self._worker, *frames = self._router.recv_multipart()
        message = unpack(frames)
        assert isinstance(message, Ask), message
        return message

    def until(self, name: str, wanted: Callable[[Ask], bool], seconds: float = 60.0) -> Ask:
        """The worker's next Ask about a round that is as wanted."""
        end = time.monotonic() + seconds
        while True:
            ask = self.ask(max(0.0, end - time.monotonic()))
            if ask.round == name and wanted(ask):
                return ask

    def refusal(self, name: str) -> Ask:
        """The worker's next Ask that says why it gave a round up."""
        ask = self.until(name, lambda ask: not ask.busy)
        assert ask.problem, ask
        return ask

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
        slot = StagingSlot(plan(specs_of(named), 1 << 20))
        self._slots.append(slot)
        for index, (_, tensor) in enumerate(named):
            slot.put(index, tensor)
        whole = WeightManifest(
            run_id=self.run_id,
            version=version,
            layout=slot.layout,
            checksums=slot.checksums(),
            base="",
            scored=None,
        )
        manifest = msgspec.structs.replace(whole, **(changes or {}))
        self.send(Offer(round=name, manifest=manifest, way=way, place=slot.staged.path))

    def close(self) -> None:
        """Closes sockets and removes segments."""
        self._router.close(linger=0)
        self._authenticator.stop()
        self._context.term()
        for slot in self._slots:
            slot.close()
